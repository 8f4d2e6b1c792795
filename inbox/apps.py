from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules


class InboxConfig(AppConfig):
    name = "inbox"
    verbose_name = "Inbox"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from inbox import checks  # noqa: F401 - importing it registers the checks
        from inbox.alerting import CONDITIONS
        from inbox.store import life
        from outbox.console.alerts import register_conditions
        from outbox.console.trail import register
        from outbox.kernel.logs import escape_log_lines

        escape_log_lines()
        register("inbox", life)
        register_conditions("inbox", CONDITIONS)

        autodiscover_modules("handlers")
