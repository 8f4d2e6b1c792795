from functools import partial

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules

from exactly_once.apps import require_installed


class InboxConfig(AppConfig):
    name = "inbox"
    verbose_name = "Inbox"
    default_auto_field = "django.db.models.BigAutoField"

    def import_models(self) -> None:
        require_installed(self)
        super().import_models()

    def ready(self) -> None:
        from exactly_once.packages import register
        from inbox import checks  # noqa: F401 - importing it registers the checks
        from inbox.migrations._partitions import LAYOUT
        from inbox.models import InboxMessage

        register("inbox", "inbox.half.INBOX")
        post_migrate.connect(partial(LAYOUT.partition_plain_table, InboxMessage), sender=self, weak=False)
        autodiscover_modules("handlers")
