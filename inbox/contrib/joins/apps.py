from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from exactly_once.apps import require_installed


class JoinsConfig(AppConfig):
    name = "inbox.contrib.joins"
    label = "inbox_joins"
    verbose_name = _("Joins")
    default_auto_field = "django.db.models.BigAutoField"

    def import_models(self) -> None:
        require_installed(self, "inbox")
        super().import_models()

    def ready(self) -> None:
        from inbox.contrib.joins.models import Run
        from inbox.housekeeping import Remains, remains

        remains["runs"] = Remains(model=Run, message="row_id", at="opened_at")
