"""Rows that the database refuses to change, because a trigger, a constraint or a damaged index raises for them.

A change of many rows that failed because of some of them is repeated in halves, and these in halves again, so that the others
are changed. Unwritable rows are skipped for some time, longer after each try, and reported once a minute. Later rows of their
keys wait for them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from django.db import Error, connections, transaction

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import Reminder, escaping_logger
from exactly_once.sql import unwritable_rows
from exactly_once.sql.connections import execute, fetch, is_postgresql
from exactly_once.sql.days import LIVE
from exactly_once.sql.faults import is_canceled
from exactly_once.sql.partitions import lately
from exactly_once.sql.unwritable_rows import LONGEST_SKIP_SECONDS, may_be_of_one_row, why_unwritable
from outbox.models import OutboxMessage
from outbox.store.dialect import TABLE, chunks
from outbox.store.transitions import Found

logger = escaping_logger(__name__)

Rows = Sequence[int] | Found
Change = Callable[[Rows], int]
"""Changes rows inside an open transaction or in its own, and returns their number."""

_IMMEDIATE = "SET CONSTRAINTS ALL IMMEDIATE"
"""A deferred constraint would raise when the transaction commits, and not for a row."""
SAVEPOINT = (_IMMEDIATE, "SAVEPOINT writable")
_MANY = 100
_RETRIED_AT_ONCE = 25
_LONGEST_SEARCH_SECONDS = 0.5
"""In one change. All other messages wait for the search."""


@dataclass(frozen=True, kw_only=True)
class Changed:
    """The result of a change.

    Attributes:
        count: the number of changed rows.
        done: the positions that `change` took; None for all rows of a query.
        unwritable: by position, the error of each row that the database refused to change.
        untried: the same for rows that a long search has not tried alone; the error is that of another row.
        keys: those of the messages, by position; known if some are unwritable.
    """

    count: int
    done: Collection[int] | None = None
    unwritable: Mapping[int, Error] = field(default_factory=dict)
    untried: Mapping[int, Error] = field(default_factory=dict)
    keys: Mapping[int, str] = field(default_factory=dict)


def change_writable(alias: str, rows: Rows, change: Change, last: Change | None = None) -> Changed:
    """Call `change` with all rows or, if the database refuses that because of some of them, with the others.

    Args:
        last: called instead with all rows, as the last statement of the open transaction: it executes `SAVEPOINT`, changes the
            rows and commits, in one round trip.

    Raises:
        django.db.Error: an error that these rows do not cause.
    """
    positions = None if isinstance(rows, Found) else rows
    if positions == []:
        return Changed(count=0, done=())
    connection = connections[alias]
    in_transaction = connection.in_atomic_block
    if in_transaction and last is None:
        # One round trip: it is not released, because the transaction soon ends.
        execute(connection, "; ".join(SAVEPOINT if is_postgresql(connection) else SAVEPOINT[1:]))
    try:
        return Changed(count=(last or change)(rows), done=positions)
    except Error as error:
        if not _may_be_of_one(error, positions):
            raise
    if in_transaction:
        transaction.set_rollback(False, using=alias)
        execute(connection, "ROLLBACK TO SAVEPOINT writable")
    with transaction.atomic(using=alias):
        return change_in_parts(alias, rows, change)


def change_in_parts(alias: str, rows: Rows, change: Change) -> Changed:
    """Call `change` with all rows, and with the halves of each part that the database refuses. Inside an open transaction."""
    if is_postgresql(connections[alias]):
        execute(connections[alias], _IMMEDIATE)
    keys = _keys(alias, rows)
    count, done, stopped_keys = 0, set[int](), set[str]()
    unwritable: dict[int, Error] = {}
    untried: dict[int, Error] = {}
    parts, until = [list(keys)], monotonic() + _LONGEST_SEARCH_SECONDS
    while parts:
        part = [position for position in parts.pop() if keys[position] not in stopped_keys]
        if unwritable and monotonic() > until:
            untried.update(dict.fromkeys(part, next(iter(unwritable.values()))))
            continue
        try:
            with transaction.atomic(using=alias):
                count += change(part) if part else 0
        except Error as error:
            if not _may_be_of_one(error, keys):
                raise
            if len(part) > 1:
                # Where most rows are unwritable, halves only cost time.
                size = 1 if len(unwritable) > len(done) else (len(part) + 1) // 2
                parts += reversed([*chunks(part, size)])
                continue
            unwritable[part[0]] = error
            stopped_keys.update(key for key in [keys[part[0]]] if key)
        else:
            done.update(part)
    return Changed(count=count, done=done, unwritable=unwritable, untried=untried, keys=keys)


def _may_be_of_one(error: BaseException, rows: Collection[int] | None) -> bool:
    # After a canceled statement the caller tries fewer rows first.
    return may_be_of_one_row(error) or (is_canceled(error) and rows is not None and len(rows) == 1)


def _keys(alias: str, rows: Rows) -> dict[int, str]:
    """The keys of the messages by position, the oldest first."""
    if isinstance(rows, Found):
        rows = [position for (position,) in fetch(connections[alias], rows.locked(connections[alias]), rows.parameters)]
    live = OutboxMessage.objects.using(alias).filter(day=LIVE, pk__in=rows)
    return dict(live.order_by("pk").values_list("pk", "key"))


class UnwritableRows(unwritable_rows.UnwritableRows):
    """The rows that one loop could not change by one kind of transition.

    Args:
        component: begins the log line.
        purpose: of the change, as in "they cannot be made ready".
        reminder: decides when to report; loops may share it.
    """

    def __init__(
        self,
        alias: str,
        component: str = "relay",
        purpose: str = "made ready",
        *,
        reminder: Reminder | None = None,
    ) -> None:
        super().__init__(_RETRIED_AT_ONCE)
        self._alias = alias
        self._component = component
        self._purpose = purpose
        self._reminder = reminder or Reminder()

    @property
    def are_many(self) -> bool:
        """May the cause be something else than single rows?"""
        return self.count >= _MANY

    def change(self, rows: Rows, change: Change) -> int:
        """`change_writable`, recording what is unwritable; the number of changed rows.

        Raises:
            django.db.Error: none of many rows can be changed, so the cause is not one row.
        """
        changed = change_writable(self._alias, rows, change)
        self.forget_due(changed.done)
        self.record(changed.unwritable, changed.keys)
        if not changed.count and len(changed.unwritable) >= _MANY:
            raise next(iter(changed.unwritable.values()))
        return changed.count

    def record(self, refused: Mapping[int, BaseException], keys: Mapping[int, str] = unwritable_rows.NO_KEYS) -> None:
        """Skip the refused rows until their backoff ends, and report them if a report is due."""
        super().record(refused, keys)
        if refused and self._reminder.is_due():
            position, error = next(iter(refused.items()))
            named = (
                OutboxMessage.objects.using(self._alias)
                .filter(pk=position, day__in=lately())
                .values_list("message_id", "topic", "biz_id")
            )
            logger.error(
                "%s: the database refuses to change the rows of %d messages, so they cannot be %s; the first is message %s "
                "(%s, biz-id %s): %s They are tried again every %.0f s at least, and are not sent meanwhile; the later "
                "messages of their keys wait, and all others continue.",
                self._component,
                self.count,
                self._purpose,
                # Another session may have changed or deleted the row since.
                *(named.first() or ("unknown", "deleted", "unknown")),
                why_unwritable(error, self._alias, TABLE),
                LONGEST_SKIP_SECONDS,
            )
