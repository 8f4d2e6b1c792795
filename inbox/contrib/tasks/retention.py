"""Results are kept for `keep_results` of their queue, whatever the inbox keeps of its messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db import router
from django.db.models import QuerySet

from exactly_once.sql.now import DatabaseTime
from inbox.contrib.tasks.models import Result
from inbox.housekeeping import Remains, Walk


class OldResults(Remains):
    """Those to delete. A result does not wait for its message to be deleted: a failed task has a message for longer.

    Each has its time, because its queue may be one of another service, or may be removed from `QUEUES`.
    """

    def _gone(self, alias: str, chunk: int = 1000, walk: Walk | None = None) -> Iterator[QuerySet[Any]]:
        if not router.allow_migrate_model(alias, Result):
            return
        rows: QuerySet[Any] = QuerySet(Result, using=alias).filter(expires_at__lt=DatabaseTime())
        last = 0
        while found := [*rows.filter(pk__gt=last).order_by("pk").values_list("pk", flat=True)[:chunk]]:
            yield rows.filter(pk__in=found)
            last = found[-1]
