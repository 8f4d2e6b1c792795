from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from exactly_once.apps import require_installed


class TasksConfig(AppConfig):
    name = "inbox.contrib.tasks"
    label = "inbox_tasks"
    verbose_name = _("Tasks")
    default_auto_field = "django.db.models.BigAutoField"

    def import_models(self) -> None:
        require_installed(self, "inbox", "outbox")
        super().import_models()

    def ready(self) -> None:
        from inbox.contrib.tasks.models import Result
        from inbox.contrib.tasks.retention import OldResults
        from inbox.housekeeping import remains

        remains["task results"] = OldResults(model=Result, message="message_id", at="expires_at")
