from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext_lazy as _

from exactly_once.apps import require_installed


class RecurringConfig(AppConfig):
    name = "outbox.contrib.recurring"
    label = "outbox_recurring"
    verbose_name = _("Recurring messages")
    default_auto_field = "django.db.models.BigAutoField"

    def import_models(self) -> None:
        require_installed(self, "outbox")
        super().import_models()

    def ready(self) -> None:
        from outbox.contrib.recurring import declarations  # noqa: F401 - registers its checks
        from outbox.relay.elsewhere import companions_elsewhere

        companions_elsewhere.append("outbox.contrib.recurring.ticking.attendants")
        autodiscover_modules("recurring")
