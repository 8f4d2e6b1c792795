from django.apps import AppConfig, apps
from django.core.exceptions import ImproperlyConfigured


class ExactlyOnceConfig(AppConfig):
    name = "exactly_once"
    verbose_name = "Exactly once"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from exactly_once import checks  # noqa: F401 - registers itself


def require_installed(app: AppConfig, *others: str) -> None:
    """Check that this app and the others are in INSTALLED_APPS, before the models of `app`, which need them, are imported.

    Raises:
        ImproperlyConfigured: one is not.
    """
    installed = [config.name for config in apps.get_app_configs()]
    if missing := [name for name in (ExactlyOnceConfig.name, *others) if name not in installed]:
        # Not what is there: Django refuses an app that is in the list twice.
        named = " and ".join(map(repr, missing))
        raise ImproperlyConfigured(f"{app.name!r} needs {named}: write INSTALLED_APPS += {missing!r}.")
