from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class JoinsConfig(AppConfig):
    name = "inbox.joins"
    label = "inbox_joins"
    verbose_name = _("Joins")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from inbox.joins import checks  # noqa: F401 - importing it registers the checks
        from inbox.joins.store import delete_runs
        from inbox.operators.purging import deleted_together

        deleted_together.append(delete_runs)
