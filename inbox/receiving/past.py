"""Which new handlers wait for their past, the messages that were published before they existed."""

from collections.abc import Iterable

from django.apps import apps
from django.db import router

from exactly_once.sql.labels import label_of
from inbox.conf import outbox_keeps_history
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.store import starts
from inbox.store.starts import Wanted


def has_outbox(alias: str) -> bool:
    """Does this project have an outbox in the database, from which a relay can hand the past over?"""
    return apps.is_installed("outbox") and bool(router.allow_migrate(alias, label_of("outbox")))


def wanting_on(alias: str) -> list[Handler]:
    """The handlers of this process that want their past from the outbox in this database."""
    wanting = [handler for handler in registry.all() if handler.wants_past and handler.using == alias]
    return wanting if wanting and has_outbox(alias) else []


def waiting_among(alias: str, handlers: Iterable[Handler]) -> frozenset[str]:
    """The names of those that wait for their past. A handler that is seen for the first time is recorded.

    Without history a new handler has no past, so its start is complete when it is recorded.
    """
    wanted = [Wanted(handler.name, handler.starts_at) for handler in handlers]
    return starts.waiting_among(alias, wanted, has_past=outbox_keeps_history())
