"""Rows that the database refuses to change, because a trigger, a constraint or a damaged index raises for them.

A change of many rows that failed because of some of them is repeated in halves, and these in halves again, so that the others
are changed. Unwritable rows are set aside, longer after each try, and reported once a minute.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from django.db import Error, connections, transaction

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import Reminder, escaping_logger
from exactly_once.sql.connections import execute, fetch, is_postgresql
from exactly_once.sql.days import LIVE
from exactly_once.sql.faults import is_canceled, may_be_of_a_row, remedy
from exactly_once.sql.partitions import lately
from exactly_once.sql.schema import is_missing
from exactly_once.wire.text import describe
from outbox.models import OutboxMessage
from outbox.store.dialect import TABLE, chunks
from outbox.store.set_aside import LONGEST_SKIP_SECONDS, Reason, SetAside
from outbox.store.transitions import Found

logger = escaping_logger(__name__)

Rows = Sequence[int] | Found
Change = Callable[[Rows], int]
"""Changes rows inside an open transaction or in its own, and returns their number."""

_IMMEDIATE = "SET CONSTRAINTS ALL IMMEDIATE"
"""A deferred constraint would raise when the transaction commits, and not for a row."""
SAVEPOINT = (_IMMEDIATE, "SAVEPOINT writable")
_MANY = 100
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
    """May one of these rows be the cause of the error? Then it is worth searching for it."""
    if is_canceled(error):  # then the caller tries fewer rows first
        return rows is not None and len(rows) == 1
    return may_be_of_a_row(error) and not is_missing(error)


def _keys(alias: str, rows: Rows) -> dict[int, str]:
    """The keys of the messages by position, the oldest first."""
    if isinstance(rows, Found):
        rows = [position for (position,) in fetch(connections[alias], rows.locked(connections[alias]), rows.parameters)]
    live = OutboxMessage.objects.using(alias).filter(day=LIVE, pk__in=rows)
    return dict(live.order_by("pk").values_list("pk", "key"))


def _why_unwritable(error: BaseException, alias: str) -> str:
    """Why the database refuses to change a row of the outbox, and what to do, in sentences."""
    unknown = f"Look for a trigger, a constraint or a damaged index of {TABLE} that refuses it, and remove the cause."
    return f"{describe(error)}. {remedy(error, alias) or unknown}"


class UnwritableRows:
    """The rows that one loop could not change by one kind of transition.

    Args:
        component: begins the log line.
        purpose: of the change, as in "they cannot be made ready".
        reminder: decides when to report; loops may share it.
        aside: where they are set aside.
    """

    def __init__(
        self,
        alias: str,
        component: str = "relay",
        purpose: str = "made ready",
        *,
        reminder: Reminder | None = None,
        aside: SetAside | None = None,
    ) -> None:
        self._alias = alias
        self._component = component
        self._purpose = purpose
        self._reminder = reminder or Reminder()
        self.aside = SetAside() if aside is None else aside

    @property
    def count(self) -> int:
        return self.aside.counts()[Reason.UNWRITABLE]

    def __contains__(self, position: int) -> bool:
        return self.aside.reason(position) is Reason.UNWRITABLE

    def skipped(self) -> Mapping[int, str]:
        """See `SetAside.skipped`."""
        return self.aside.skipped()

    @property
    def are_many(self) -> bool:
        """May the cause be something else than single rows?"""
        return self.count >= _MANY

    def change(self, rows: Rows, change: Change, keys: Collection[str] | None = None) -> int:
        """`change_writable`, recording what is unwritable; the number of changed rows.

        Args:
            keys: of the messages among which the rows are; None for all.

        Raises:
            django.db.Error: none of many rows can be changed, so the cause is not one row.
        """
        changed = change_writable(self._alias, rows, change)
        self.aside.forget_due(changed.done, keys)
        self.record(changed.unwritable, changed.keys)
        if not changed.count and len(changed.unwritable) >= _MANY:
            raise next(iter(changed.unwritable.values()))
        return changed.count

    def record(self, refused: Mapping[int, BaseException], keys: Mapping[int, str]) -> None:
        """The refused rows are set aside, and reported if a report is due."""
        self.aside.hold({position: keys.get(position, "") for position in refused}, Reason.UNWRITABLE)
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
                _why_unwritable(error, self._alias),
                LONGEST_SKIP_SECONDS,
            )
