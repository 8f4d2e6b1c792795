"""Which settled messages this process may delete: not those of handlers that only processes of other services have.

`RETENTION` is the deduplication window of a service. Of several services on one database, each deletes the messages of its own
handlers, those of Celery tasks and webhook endpoints, and those of handlers that no process has lately run.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from inbox.handlers.registry import may_exist
from inbox.store import operating
from inbox.store.heartbeats import lately_running_handlers


def purge_settled(alias: str, older_than: timedelta, *, chunk: int = 1000, since: datetime | None = None) -> Iterator[int]:
    """See `operating.purge_settled`."""
    return operating.purge_settled(alias, older_than, chunk=chunk, kept=_of_others(alias), since=since)


def purgeable(alias: str, older_than: timedelta) -> int:
    """How many rows `purge_settled` would delete."""
    return operating.purgeable(alias, older_than, kept=_of_others(alias))


def _of_others(alias: str) -> list[str]:
    return [name for name in lately_running_handlers(alias) if not may_exist(name)]
