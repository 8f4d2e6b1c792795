"""Bulk operations in the database: planned, taken by one process at a time, recorded batch by batch.

A batch is one transaction: it locks the operation, changes some messages and records their outcome. If the process is killed,
the batch is rolled back as a whole, and another process continues with the same rows. A process that has lost its lease no
longer finds its token, and changes nothing.
"""

import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import Any, NamedTuple

from django.db import connections, transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.functions import Coalesce

from exactly_once.models import OPEN, Operation, OperationPart, OperationState
from exactly_once.sql.connections import decision_transaction, is_postgresql
from exactly_once.sql.deletions import delete_matching
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.identity import process_name
from exactly_once.wire.text import ERROR_LENGTH, NAME_LENGTH, printable

LEASE = timedelta(seconds=10)
"""A process that has not recorded a batch for this long is taken to be dead."""
UNCHANGED_KEPT = 1_000
"""Unchanged messages that an operation names one by one; all of them are counted by reason."""
_PREVIEW_KEPT = timedelta(hours=1)
_PART = 500
_MOST_REASONS = 50
_OTHER_REASONS = "other reasons"
_LONGEST_SLEEP = timedelta(seconds=30)


class RowOutcome(NamedTuple):
    """The outcome of an action for one row.

    Attributes:
        unchanged: why it was not changed; "" if it was.
        is_error: the reason is an error, such as a database failure, and not the row's state.
        is_locked: its state allows the action; another transaction has locked it.
    """

    row: int
    name: str = ""
    unchanged: str = ""
    is_error: bool = False
    is_locked: bool = False


@dataclass(frozen=True, kw_only=True)
class Given:
    """Who acts, and what they have said with it.

    Attributes:
        operation: the number of the operation that acts for the user; None on a page.
        values: of the further fields of the form.
        sources: restricts the states from which the change is allowed; None: all of its own.
    """

    user: str
    operation: int | None = None
    reason: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    sources: Collection[str] | None = None

    @property
    def who(self) -> str:
        return f"{self.user} in the admin"

    @property
    def by(self) -> str:
        return f"operation {self.operation} by {self.user}" if self.operation else f"by {self.who}"

    @property
    def text(self) -> str:
        """Who and why, for the trail."""
        return f"{self.by}: {self.reason}" if self.reason else self.by


class OperationTable:
    """The operations of one app.

    Args:
        app: its package.
    """

    def __init__(self, app: str) -> None:
        self.app = app

    def plan(self, alias: str, planned: Operation, rows: Iterable[int]) -> Any:
        """Store a new operation on these rows; returns it."""
        planned.app, planned.planned_at = self.app, DatabaseTime()
        planned.selection = printable(planned.selection, 900)
        planned.requested_by = planned.requested_by[:NAME_LENGTH]
        with transaction.atomic(using=alias):
            planned.save(using=alias, force_insert=True)
            total, remaining = 0, iter(rows)
            while some := list(islice(remaining, _PART)):
                self._parts(alias).create(operation_id=planned.pk, rows=some)
                total += len(some)
            self._of(alias, planned).update(total=total)
        return self._of(alias, planned).get()

    def preview(
        self, alias: str, planned: Operation, rows: Iterable[tuple[int, str]], *, instead_of: int
    ) -> tuple[Any, Counter[str]]:
        """Store an operation on these rows, which is not executed until `confirm`; returns it, and the number of rows by state.

        What matches later does not belong to it. It is kept for an hour, and not without a row.

        Args:
            rows: each with its state. The states are the `sources` of the operation.
            instead_of: the primary key of an earlier preview of this user, which is deleted.
        """
        states = Counter[str]()

        def counted() -> Iterator[int]:
            for row, state in rows:
                states[state] += 1
                yield row

        with transaction.atomic(using=alias):
            earlier = Q(planned_at__lt=DatabaseTime(-_PREVIEW_KEPT)) | Q(pk=instead_of, requested_by=planned.requested_by)
            delete_matching(self.rows(alias).filter(earlier, state=OperationState.PREVIEWED))
            # Retention deletes a preview like an operation that has ended.
            planned.state, planned.ended_at = OperationState.PREVIEWED, DatabaseTime()
            operation = self.plan(alias, planned, counted())
            if states:
                self._of(alias, operation).update(sources=sorted(states))
            else:
                self._of(alias, operation).delete()
        return operation, states

    def confirm(self, alias: str, pk: int, previewed: Operation, **answered: Any) -> Any | None:
        """previewed → planned, with what the user has answered; returns it. None: it is not this user's, or no longer kept.

        Args:
            previewed: has the action and the user, and what the user needs.
        """
        mine = {"action": previewed.action, "requested_by": previewed.requested_by[:NAME_LENGTH]}
        kept = {"state": OperationState.PREVIEWED, "planned_at__gte": DatabaseTime(-_PREVIEW_KEPT)}
        now = {"state": OperationState.PLANNED, "planned_at": DatabaseTime(), "ended_at": None}
        found = self.rows(alias).filter(pk=pk, **mine, **kept)
        return self.rows(alias).get(pk=pk) if found.update(permission=previewed.permission, **answered, **now) else None

    def rows(self, alias: str) -> QuerySet[Any]:
        return QuerySet(Operation, using=alias).filter(app=self.app)

    def ended(self, alias: str, older_than: timedelta) -> QuerySet[Any]:
        """The operations that ended longer ago than `older_than`."""
        return self.rows(alias).filter(ended_at__lt=DatabaseTime(-older_than))

    def take(self, alias: str, token: uuid.UUID) -> Any | None:
        """Take an open operation that no live process executes; None if there is none."""
        ended = Q(leased_until=None) | Q(leased_until__lte=DatabaseTime())
        found = self.rows(alias).filter(ended, state__in=OPEN)
        # Reading first, because an UPDATE of no row would still take SQLite's write lock.
        if not found.exists():
            return None
        with transaction.atomic(using=alias):
            taken: Any = (
                found.select_for_update(skip_locked=is_postgresql(connections[alias])).order_by("leased_until", "pk").first()
            )
            if taken is None:
                return None
            self._of(alias, taken).update(
                token=token,
                holder=process_name()[:NAME_LENGTH],
                leased_until=DatabaseTime(LEASE),
                state=OperationState.RUNNING,
                started_at=Coalesce("started_at", DatabaseTime()),
            )
        return taken

    @contextmanager
    def batch(self, alias: str, pk: int, token: uuid.UUID) -> Iterator[Any | None]:
        """The transaction of one batch, and its locked operation; None if another process has it, or it has ended."""
        with decision_transaction(alias, _LONGEST_SLEEP):
            yield self.rows(alias).filter(pk=pk, token=token, state=OperationState.RUNNING).select_for_update().first()

    def next_rows(self, alias: str, operation: Operation, most: int) -> list[int]:
        """Take rows out of the selection, inside the transaction of the batch that changes them."""
        found: list[int] = []
        while len(found) < most and (part := self._parts(alias).filter(operation_id=operation.pk).order_by("pk").first()):
            wanted = most - len(found)
            found += part.rows[:wanted]
            if part.rows[wanted:]:
                self._parts(alias).filter(pk=part.pk).update(rows=part.rows[wanted:])
            else:
                part.delete()
        return found

    def put_back(self, alias: str, operation: Operation, rows: Sequence[int]) -> None:
        """Undo `next_rows` for these rows, inside its transaction. They are the next ones again."""
        first = self._parts(alias).filter(operation_id=operation.pk).order_by("pk").first()
        if first is None:
            self._parts(alias).create(operation_id=operation.pk, rows=rows)
        else:
            self._parts(alias).filter(pk=first.pk).update(rows=[*rows, *first.rows])

    def record(self, alias: str, operation: Operation, outcomes: Sequence[RowOutcome], **written: Any) -> None:
        """Record the outcomes of a batch inside its transaction, and extend the lease."""
        unchanged = [outcome for outcome in outcomes if outcome.unchanged]
        failed = sum(outcome.is_error for outcome in unchanged)
        reasons = Counter(operation.reasons)
        for outcome in unchanged:
            said = printable(outcome.unchanged, ERROR_LENGTH)
            reasons[said if said in reasons or len(reasons) < _MOST_REASONS else _OTHER_REASONS] += 1
        kept = [*operation.unchanged]
        room = UNCHANGED_KEPT - len(kept)
        kept += [
            [outcome.row, printable(outcome.name, ERROR_LENGTH), printable(outcome.unchanged, ERROR_LENGTH)]
            for outcome in unchanged[:room]
        ]
        operation.done += len(outcomes) - len(unchanged)
        operation.refused += len(unchanged) - failed
        operation.failed += failed
        operation.reasons, operation.unchanged = dict(reasons), kept
        counted = {name: getattr(operation, name) for name in ("done", "refused", "failed", "reasons", "unchanged")}
        self._of(alias, operation).update(**counted, leased_until=DatabaseTime(LEASE), **written)

    def end(self, alias: str, operation: Operation, state: OperationState, because: str = "", **written: Any) -> None:
        """running → finished | stopped | cancelled, inside the transaction of a batch. A stopped one can be continued."""
        self._of(alias, operation).update(
            state=state,
            stopped_because=printable(because, ERROR_LENGTH),
            ended_at=DatabaseTime(),
            token=None,
            leased_until=None,
            **written,
        )
        if state is not OperationState.STOPPED:
            self._parts(alias).filter(operation_id=operation.pk).delete()

    def leave(self, alias: str, pk: int, token: uuid.UUID, after: timedelta = timedelta(), **written: Any) -> None:
        """End the lease: any process may take the operation `after` this duration."""
        self.rows(alias).filter(pk=pk, token=token).update(token=None, leased_until=DatabaseTime(after), **written)

    def cancel(self, alias: str, pk: int, *, by: str) -> bool:
        """Ask for the end of an operation. The present batch ends first. False: it has ended."""
        return bool(self.rows(alias).filter(pk=pk, state__in=OPEN).update(cancelled_by=by[:NAME_LENGTH]))

    def resume(self, alias: str, pk: int, *, by: str, permission: str) -> bool:
        """stopped → planned, by this user, with the rows that are left; a canary begins with one. False: none is left.

        Args:
            permission: what the user needs until it has ended. Another may have planned it.
        """
        left = Exists(self._parts(alias).filter(operation_id=OuterRef("pk")))
        stopped = self.rows(alias).filter(left, pk=pk, state=OperationState.STOPPED)
        planned = {"state": OperationState.PLANNED, "planned_at": DatabaseTime(), "ended_at": None, "stopped_because": ""}
        requested = {"requested_by": by[:NAME_LENGTH], "client": "", "permission": permission}
        return bool(stopped.update(**planned, **requested, wave=0, wave_rows=[]))

    def stop(self, alias: str, pk: int, token: uuid.UUID, because: str) -> None:
        """running → stopped, after batches that failed."""
        with self.batch(alias, pk, token) as operation:
            if operation is not None:
                self.end(alias, operation, OperationState.STOPPED, because)

    def _of(self, alias: str, operation: Operation) -> QuerySet[Any]:
        return self.rows(alias).filter(pk=operation.pk)

    def _parts(self, alias: str) -> QuerySet[Any]:
        return QuerySet(OperationPart, using=alias)
