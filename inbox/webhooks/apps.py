from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class WebhooksConfig(AppConfig):
    name = "inbox.webhooks"
    label = "inbox_webhooks"
    verbose_name = _("Webhooks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from inbox.webhooks import checks  # noqa: F401 - importing it registers the checks
