"""Results are kept for `keep_results` of their queue, whatever the inbox keeps of its messages."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.db import router
from django.db.models import Q, QuerySet

from exactly_once.sql.now import DatabaseTime
from inbox.contrib.tasks.models import Result
from inbox.contrib.tasks.registering import backends
from inbox.housekeeping import Remains, Walk


class OldResults(Remains):
    """Those to delete. A result does not wait for its message to be deleted: a failed task has a message for longer."""

    def _gone(self, alias: str, chunk: int = 1000, walk: Walk | None = None) -> Iterator[QuerySet[Any]]:
        if not router.allow_migrate_model(alias, Result):
            return
        rows: QuerySet[Any] = QuerySet(Result, using=alias)
        old, last = Q(pk__in=()), 0
        for queue, period in _periods(alias):
            old |= Q(queue=queue, finished_at__lt=DatabaseTime(-period))
        while found := [*rows.filter(old, pk__gt=last).order_by("pk").values_list("pk", flat=True)[:chunk]]:
            yield rows.filter(pk__in=found)
            last = found[-1]


def _periods(alias: str) -> Iterator[tuple[str, timedelta]]:
    """The queues of this service on a database. The results of others are those of other services."""
    for backend in backends():
        for queue in sorted(backend.queues):
            options = backend.given.of(queue)
            if options.alias == alias:
                yield queue, options.keep_results
