"""`manage.py check` for webhooks."""

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, register
from django.db import connections, router

from inbox.contrib.outgoing_webhooks.fanning_out import fan_outs
from inbox.contrib.outgoing_webhooks.models import Endpoint


@register()
def check_tables(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox_outgoing_webhooks.E001: webhooks on a database that has no table of endpoints."""
    return [
        Error(
            f"send_webhooks({handler.topics[0]!r}) has using={handler.using!r}, but that database has no table of endpoints.",
            hint="A message and its requests are stored in one transaction. Allow inbox_outgoing_webhooks to be migrated there "
            "in the database routers, or set using= to another alias.",
            id="inbox_outgoing_webhooks.E001",
        )
        for handler in fan_outs()
        if handler.using not in connections or not router.allow_migrate_model(handler.using, Endpoint)
    ]
