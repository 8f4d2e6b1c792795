from typing import Any

from django.apps import AppConfig
from django.db import connections, router
from django.db.models.signals import post_migrate
from django.utils.module_loading import autodiscover_modules


class OutboxConfig(AppConfig):
    name = "outbox"
    verbose_name = "Outbox"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from outbox import checks  # noqa: F401 - registers itself
        from outbox.alerting import CONDITIONS
        from outbox.console import dry_run as publishing
        from outbox.console.alerts import register_conditions
        from outbox.console.trail import register
        from outbox.kernel.logs import escape_log_lines
        from outbox.store import dry_run, life

        escape_log_lines()
        register("outbox", life)
        publishing.register("outbox", dry_run)
        register_conditions("outbox", CONDITIONS)

        post_migrate.connect(_partition, sender=self)
        autodiscover_modules("callbacks")


def _partition(sender: Any, using: str, **kwargs: Any) -> None:
    """With `--nomigrations`, or without migrations in MIGRATION_MODULES, tests have a plain table."""
    from outbox.migrations._partitions import partition_plain_table
    from outbox.models import OutboxMessage

    if connections[using].vendor == "postgresql" and router.allow_migrate_model(using, OutboxMessage):
        partition_plain_table(connections[using], OutboxMessage._meta.db_table)
