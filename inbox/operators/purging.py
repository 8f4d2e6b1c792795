"""Deletes what is older than its retention: history, receipts, and what other tables have about deleted messages.

Of several services on one database, each deletes the rows of its own handlers, those of Celery tasks and webhook endpoints, and
those of handlers that no process has lately run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from typing import Any

from django.db import router
from django.db.models import Exists, Model, OuterRef, Q, QuerySet

from exactly_once.operators.history import History
from exactly_once.operators.minutes import database_time
from exactly_once.process.clock import monotonic
from exactly_once.sql.now import DatabaseTime
from inbox.conf import InboxOptions, inbox_options
from inbox.handlers.registry import may_exist
from inbox.models import InboxMessage, Receipt, Step
from inbox.operators.processes import lately_running_handlers

_READ_ALL_SECONDS = 3600.0


def _of_other_services(alias: str) -> Q:
    return Q(handler__in=[name for name in lately_running_handlers(alias) if not may_exist(name)])


def _has_rows_of_others(alias: str, day: int) -> bool:
    return HISTORY.rows(alias).filter(_of_other_services(alias), day=day).exists()


HISTORY = History(
    model=InboxMessage,
    by="id",
    # A row with new content may have its only copy, so it stays as if it had been settled then.
    instants=("settled_at", "conflicting_at"),
    stays=_of_other_services,
    keeps=_has_rows_of_others,
)


@dataclass(frozen=True, kw_only=True)
class Remains:
    """Rows of a table that outlive their message.

    Attributes:
        message: the field with the id of the message.
        at: the field with the instant from which they are kept, and `kept` how long. Their primary keys are in its order.
        stays: by alias, the condition of rows that are not deleted.
    """

    name: str
    model: type[Model]
    message: str
    at: str
    kept: Callable[[InboxOptions], timedelta]
    stays: Callable[[str], Q] = lambda _: Q(pk__in=())

    def rows(self, alias: str) -> QuerySet[Model]:
        """What is deleted. A database may not have the table."""
        if not router.allow_migrate_model(alias, self.model):
            return QuerySet(self.model, using=alias).none()
        old = Q(**{f"{self.at}__lt": DatabaseTime(-self.kept(inbox_options()))})
        has_message = Exists(InboxMessage.objects.using(alias).filter(pk=OuterRef(self.message)))
        return QuerySet(self.model, using=alias).filter(old).exclude(self.stays(alias)).exclude(has_message)

    def deletions(self, alias: str, *, chunk: int = 1000, walk: Walk | None = None) -> Iterator[int]:
        """Delete them in small transactions, in the order of their keys, up to the first that are too young."""
        if not router.allow_migrate_model(alias, self.model):
            return
        walk, until = walk or Walk(), database_time(alias) - self.kept(inbox_options())
        walk.begin()
        keys: QuerySet[Any] = QuerySet(self.model, using=alias).order_by("pk").values_list("pk", self.at)
        while found := list(keys.filter(pk__gt=walk.last)[:chunk]):
            last, youngest = found[-1][0], max(at for _, at in found)
            yield self.rows(alias).filter(pk__gte=found[0][0], pk__lte=last).delete()[1].get(self.model._meta.label, 0)
            if youngest >= until:
                return
            walk.last = last


@dataclass
class Walk:
    """How far a table has been read. Rows that stay may be many, so they are read again only once an hour."""

    last: int = 0
    again_at: float = field(default=-inf)

    def begin(self) -> None:
        if (now := monotonic()) >= self.again_at:
            self.last, self.again_at = 0, now + _READ_ALL_SECONDS


def history_lifetime(options: InboxOptions) -> timedelta:
    return options.KEEP_HISTORY


def _receipt_lifetime(options: InboxOptions) -> timedelta:
    return options.RETENTION


remains: dict[str, Remains] = {}
"""By name. An optional package that stores more about messages adds its own."""


def add_remains(*kinds: Remains) -> None:
    remains.update((kind.name, kind) for kind in kinds)


add_remains(
    Remains(name="receipts", model=Receipt, message="pk", at="received_at", kept=_receipt_lifetime, stays=_of_other_services),
    Remains(name="steps", model=Step, message="message_id", at="taken_at", kept=history_lifetime),
)
