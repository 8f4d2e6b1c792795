from functools import partial

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules

from exactly_once.apps import require_installed


class OutboxConfig(AppConfig):
    name = "outbox"
    verbose_name = "Outbox"
    default_auto_field = "django.db.models.BigAutoField"

    def import_models(self) -> None:
        require_installed(self)
        super().import_models()

    def ready(self) -> None:
        from exactly_once.console.cli.parts import register_part
        from exactly_once.console.operators import dry_run as publishing
        from exactly_once.console.operators.alerts import register_conditions
        from exactly_once.console.operators.trail import register
        from exactly_once.upkeep.heartbeat_table import register_process_kind
        from outbox import checks  # noqa: F401 - registers itself
        from outbox.migrations._partitions import LAYOUT
        from outbox.models import OutboxMessage
        from outbox.operators import dry_run, trail
        from outbox.operators.alerting import CONDITIONS
        from outbox.operators.relays import RELAYS

        register_part("outbox", "outbox.management.part.OutboxPart")
        register("outbox", trail)
        register_process_kind(RELAYS)
        publishing.register("outbox", dry_run)
        register_conditions("outbox", CONDITIONS)

        post_migrate.connect(partial(LAYOUT.partition_plain_table, OutboxMessage), sender=self, weak=False)
        autodiscover_modules("callbacks")
