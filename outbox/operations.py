"""Bulk operations on messages of the outbox: restore, cancel and publish now, in batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.utils.translation import gettext_lazy as _

from exactly_once.operators.operation_rows import OperationTable, RowOutcome
from exactly_once.operators.operations import BulkAction, Canary, Judgement, Perform, why_not_permitted
from outbox import doorbell
from outbox.conf import outbox_options
from outbox.states import CANCEL, PUBLISH_NOW, RESTORE, State, Transition
from outbox.store import bulk, operating
from outbox.store.restoring import LOCKED, OVERDUE, REPLACED, restore_some

operations = OperationTable("outbox")
CLIENT, TOPIC = "the HTTP client ", "topic "
"""What the requester and the selection of an operation of an HTTP client begin with."""

_WHY = {
    LOCKED: "another transaction has locked it, or it no longer exists",
    OVERDUE: "it is overdue, and overdue messages were not selected",
    REPLACED: "it was published with unique=True, and so was a later message with its topic and biz-id",
}


def restore(
    alias: str, rows: Sequence[int], *, sources: Collection[str], given: Mapping[str, Any], by: str, reason: str
) -> Sequence[RowOutcome]:
    """Restore messages with a full set of attempts."""
    names = bulk.names_of(alias, rows)
    restored = restore_some(alias, rows, states=sources, overdue=bool(given.get("overdue", True)), reason=_told(by, reason))
    if restored.ready:
        doorbell.ring_after_commit(alias)
    return [
        RowOutcome(row, names.get(row, f"number {row}"), _why(restored.unchanged[row]) if row in restored.unchanged else "")
        for row in rows
    ]


def _decided(
    transition: Transition,
    one: Any,
    alias: str,
    rows: Sequence[int],
    *,
    sources: Collection[str],
    given: Mapping[str, Any],
    by: str,
    reason: str,
) -> Sequence[RowOutcome]:
    names, told = bulk.names_of(alias, rows), _told(by, reason)
    changed = bulk.decide_some(alias, transition, rows, sources=sources, one=partial(one, reason=told), reason=told)
    if changed:
        doorbell.ring_after_commit(alias)
    states = bulk.states_of(alias, [row for row in rows if row not in changed])
    return [
        RowOutcome(row, names.get(row, f"number {row}"), "" if row in changed else _why(states.get(row, LOCKED)))
        for row in rows
    ]


def _told(by: str, reason: str) -> str:
    return f"{by}: {reason}" if reason else by


def _why(left: str) -> str:
    return _WHY.get(left) or f"it is {State(left).label.lower()} now"


def _publish_now(alias: str, row: int, *, reason: str) -> bool:
    return operating.reschedule(alias, row, timedelta(), reason=reason)


cancel: Perform = partial(_decided, CANCEL, operating.cancel)
publish_now: Perform = partial(_decided, PUBLISH_NOW, _publish_now)


def _judge(alias: str, rows: Sequence[int], instant: datetime) -> Judgement:
    since = bulk.since(alias, rows, instant)
    return Judgement(pending=since.pending, succeeded=since.succeeded, failed=since.failed)


RESTORE_THEM = BulkAction(
    name="restore",
    label=_("Restore"),
    done=_("restored"),
    permission="restore_outboxmessage",
    sources=RESTORE.sources,
    perform=restore,
    canary=Canary(failures=bulk.failures_of, judge=_judge),
)
CANCEL_THEM = BulkAction(
    name="cancel",
    label=_("Cancel"),
    done=_("cancelled"),
    permission="cancel_outboxmessage",
    sources=CANCEL.sources,
    perform=cancel,
    warning=_("These messages are not sent any more. A message whose last outcome is unknown may already be in the broker."),
)
PUBLISH_THEM_NOW = BulkAction(
    name="publish_now",
    label=_("Publish now"),
    done=_("to be published now"),
    permission="reschedule_outboxmessage",
    sources=PUBLISH_NOW.sources,
    perform=publish_now,
    warning=_("A message that was sent cannot be taken back."),
)
MANAGE = "manage"
"""The permission of an operation that a client of the HTTP API has planned: its scope for the topic."""
ACTIONS = {action.name: action for action in (RESTORE_THEM, CANCEL_THEM, PUBLISH_THEM_NOW)}


def why_not(operation: Any) -> str:
    """Why the user or client that planned an operation may no longer do so; "" if it may."""
    if operation.permission != MANAGE:
        return why_not_permitted(operation)
    # The settings of a relay may have no tokens.
    clients, topic = outbox_options().http.clients, operation.selection.removeprefix(TOPIC)
    name = operation.requested_by.removeprefix(CLIENT)
    if not clients or any(client.name == name and client.may(topic, MANAGE) for client in clients):
        return ""
    return f"{operation.requested_by} no longer has the scope {MANAGE}:{topic}"
