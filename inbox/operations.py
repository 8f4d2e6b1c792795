"""Bulk operations on messages of the inbox: retry and skip, in batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from django.db import DEFAULT_DB_ALIAS
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from exactly_once.operators.operation_rows import OperationTable, RowOutcome, one_by_one
from exactly_once.operators.operations import BulkAction, Canary, Judgement, Operations
from inbox.errors import TaskNotSent
from inbox.handlers.registry import registry
from inbox.leases.operating import once_ended
from inbox.leases.stores import LeaseStoreUnavailable
from inbox.models import State
from inbox.resending import Transition, resending
from inbox.store import bulk, operating

operations = OperationTable("inbox")
_REFUSALS = (TaskNotSent, LeaseStoreUnavailable)


def retry(
    alias: str, rows: Sequence[int], *, sources: Collection[str], given: Mapping[str, Any], by: str, reason: str
) -> Sequence[RowOutcome]:
    """Make messages due now, with a full set of attempts."""
    told = _told(by, reason)
    decided = bulk.retry_some(alias, rows, sources=sources, reason=told)
    return _completed(alias, decided, once_ended(resending(partial(operating.retry, reason=told))))


def skip(
    alias: str, rows: Sequence[int], *, sources: Collection[str], given: Mapping[str, Any], by: str, reason: str
) -> Sequence[RowOutcome]:
    """Skip messages: their effect will not happen."""
    decided = bulk.skip_some(alias, rows, sources=sources, reason=reason, by=by)
    return _completed(alias, decided, once_ended(partial(operating.skip, reason=reason, by=by)))


def _told(by: str, reason: str) -> str:
    return f"{by}: {reason}" if reason else by


def _completed(alias: str, decided: bulk.Decided, transition: Transition) -> list[RowOutcome]:
    """The outcomes of a set-based decision, with a transition of its own for each remaining row."""

    def change(row: int) -> RowOutcome:
        if transition(alias, row):
            return RowOutcome(row, decided.names[row])
        state = bulk.state_of(alias, row)
        why = f"it is {State(state).label.lower()} now, and a process may be working on it" if state else "it no longer exists"
        return RowOutcome(row, decided.names[row], why)

    outcomes = [RowOutcome(row, decided.names[row]) for row in decided.changed]
    outcomes += [RowOutcome(row, decided.names.get(row, f"number {row}"), why) for row, why in decided.unchanged.items()]
    return outcomes + one_by_one(alias, decided.remaining, change, refusals=_REFUSALS)


def _judge(alias: str, rows: Sequence[int], instant: datetime) -> Judgement:
    since = bulk.since(alias, rows, instant)
    return Judgement(pending=since.pending, succeeded=since.succeeded, failed=since.failed)


RETRY = BulkAction(
    name="retry",
    label=_("Retry"),
    done=_("due for a retry now"),
    permission="retry_inboxmessage",
    sources=operating.RETRYABLE,
    perform=retry,
    condition=Q(quarantined=False),
    canary=Canary(failures=bulk.failures_of, judge=_judge),
)
SKIP = BulkAction(
    name="skip",
    label=_("Skip"),
    done=_("skipped"),
    permission="skip_inboxmessage",
    sources=operating.SKIPPABLE,
    perform=skip,
    needs_reason=True,
    warning=_("The effect of these messages will not happen."),
)
ACTIONS = {action.name: action for action in (RETRY, SKIP)}


def executor() -> Operations:
    """The companion of a process that runs handlers: it executes the operations on their databases."""

    def aliases() -> list[str]:
        return sorted({handler.using for handler in registry.all()} or {DEFAULT_DB_ALIAS})

    return Operations("inbox", aliases, operations, ACTIONS)
