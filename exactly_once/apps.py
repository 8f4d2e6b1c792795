from django.apps import AppConfig, apps
from django.core.exceptions import ImproperlyConfigured


class ExactlyOnceConfig(AppConfig):
    name = "exactly_once"
    verbose_name = "Exactly once"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from exactly_once import checks  # noqa: F401 - registers itself


def require_installed(app: AppConfig) -> None:
    """Check that this app is in INSTALLED_APPS, before the models of `app`, which need it, are imported.

    Raises:
        ImproperlyConfigured: it is not.
    """
    if not any(config.name == ExactlyOnceConfig.name for config in apps.get_app_configs()):
        raise ImproperlyConfigured(
            f"{app.name!r} needs the app 'exactly_once': write INSTALLED_APPS += ['exactly_once', {app.name!r}]."
        )
