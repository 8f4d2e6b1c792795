from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from exactly_once.apps import require_installed


class ViewsConfig(AppConfig):
    name = "exactly_once.contrib.views"
    label = "exactly_once_views"
    verbose_name = _("Idempotent views")

    def import_models(self) -> None:
        require_installed(self)
        super().import_models()

    def ready(self) -> None:
        from exactly_once.contrib.views import checks  # noqa: F401 - registers itself
        from exactly_once.contrib.views.store import expired
        from exactly_once.upkeep.housekeeping import more_old_rows

        more_old_rows["exactly_once_views"] = expired
