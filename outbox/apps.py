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
        from exactly_once.packages import register
        from outbox import checks  # noqa: F401 - registers itself
        from outbox.migrations._partitions import LAYOUT
        from outbox.models import OutboxMessage

        register("outbox", "outbox.half.OUTBOX")
        post_migrate.connect(partial(LAYOUT.partition_plain_table, OutboxMessage), sender=self, weak=False)
        autodiscover_modules("callbacks")
