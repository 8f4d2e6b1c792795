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
        from exactly_once.console.cli.parts import register_part
        from exactly_once.console.operators.alerts import register_conditions
        from exactly_once.console.operators.trail import register
        from exactly_once.upkeep.heartbeat_table import register_process_kind
        from inbox import checks  # noqa: F401 - importing it registers the checks
        from inbox.migrations._partitions import LAYOUT
        from inbox.models import InboxMessage
        from inbox.operators import trail
        from inbox.operators.alerting import CONDITIONS
        from inbox.operators.processes import CONSUMERS

        register_part("inbox", "inbox.management.part.InboxPart")
        register("inbox", trail)
        register_process_kind(CONSUMERS)
        register_conditions("inbox", CONDITIONS)

        post_migrate.connect(partial(LAYOUT.partition_plain_table, InboxMessage), sender=self, weak=False)
        autodiscover_modules("handlers")
