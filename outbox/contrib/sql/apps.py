from django.apps import AppConfig, apps
from django.db.models.signals import post_migrate

from exactly_once.apps import require_installed


class SqlConfig(AppConfig):
    name = "outbox.contrib.sql"
    label = "outbox_sql"

    def import_models(self) -> None:
        require_installed(self, "outbox")
        super().import_models()

    def ready(self) -> None:
        from outbox.contrib.sql import checks
        from outbox.contrib.sql.function import refresh

        outbox = next(app for app in apps.get_app_configs() if app.name == "outbox")
        post_migrate.connect(refresh, sender=outbox, dispatch_uid=checks.__name__)
