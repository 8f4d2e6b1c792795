from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from exactly_once.apps import require_installed


class OutgoingWebhooksConfig(AppConfig):
    name = "inbox.contrib.outgoing_webhooks"
    label = "inbox_outgoing_webhooks"
    verbose_name = _("Outgoing webhooks")
    default_auto_field = "django.db.models.BigAutoField"

    def import_models(self) -> None:
        require_installed(self, "inbox")
        super().import_models()

    def ready(self) -> None:
        from inbox.contrib.outgoing_webhooks.fanning_out import handler_names
        from inbox.housekeeping import handlers_elsewhere

        handlers_elsewhere.append(handler_names)
