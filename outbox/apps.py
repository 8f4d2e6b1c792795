from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules


class OutboxConfig(AppConfig):
    name = "outbox"
    verbose_name = "Outbox"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from outbox import checks  # noqa: F401 - registers itself
        from outbox.console.trail import register
        from outbox.store import life

        register("outbox", life)

        autodiscover_modules("callbacks")
