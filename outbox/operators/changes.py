"""What operators can do to messages of the outbox, on a page or as an operation in batches."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from django.db.models import Q
from django.utils.translation import gettext

from exactly_once.console.operators.changes import DELETED, Canary, Change, by_name, in_hand_now, state_now, why_not_permitted
from exactly_once.console.operators.failure_groups import FailureGroups
from exactly_once.sql.days import LIVE
from exactly_once.states import Transition
from exactly_once.upkeep.operation_rows import Given, OperationTable, RowOutcome
from outbox.conf import outbox_options
from outbox.models import OutboxMessage
from outbox.states import (
    CANCEL,
    COMMIT,
    IN_TROUBLE,
    PUBLISH_NOW,
    RESCHEDULE,
    RESTORE,
    RESUME_CHECKS,
    ROLL_BACK,
    UNDECIDED,
    State,
)
from outbox.store import decision_rows, prepared_rows
from outbox.store.decision_rows import LOCKED, WHY
from outbox.store.dialect import live
from outbox.store.selecting import placed

operations = OperationTable("outbox")
groups = FailureGroups(OutboxMessage, live, place="topic", who="topic", only=Q(day=LIVE))
"""Failing messages by the broker's kind of answer and topic."""


def _decide(transition: Transition, alias: str, rows: Sequence[int], given: Given) -> list[RowOutcome]:
    due, overdue, sources = given.values.get("due"), bool(given.values.get("overdue", True)), given.sources
    decided = decision_rows.decide(alias, transition, rows, sources=sources, reason=given.text, due=due, overdue=overdue)
    found = _found(alias, decided.left) if decided.left else {}
    left = {row: _unchanged(row, why, found.get(row), sources or transition.sources) for row, why in decided.left.items()}
    return [left.get(row) or RowOutcome(row) for row in rows]


def _unchanged(row: int, left: str, message: OutboxMessage | None, sources: Collection[str]) -> RowOutcome:
    if message is None:
        return RowOutcome(row, f"number {row}", str(DELETED))
    if left == LOCKED:
        # The process that had locked it may have ended since.
        why = in_hand_now(message) if message.state in sources else state_now(message)
    else:
        why = gettext(WHY[left]) if left in WHY else state_now(message)
    return RowOutcome(row, _name_of(message), why)


def _found(alias: str, rows: Collection[int]) -> dict[int, OutboxMessage]:
    return {message.pk: message for message in placed(alias, rows).only("message_id", "topic", "biz_id", "state")}


def _name_of(message: OutboxMessage) -> str:
    return f"{message.message_id} ({message.topic} {message.biz_id})"


def names_of(alias: str, rows: Collection[int]) -> dict[int, str]:
    """The names of these messages, for reports."""
    return {row: _name_of(message) for row, message in _found(alias, rows).items()}


def _ask_again(alias: str, rows: Sequence[int], given: Given) -> list[RowOutcome]:
    """Resume the checks of stuck messages; for those that are not stuck, make the next check due at once."""
    resumed = _decide(RESUME_CHECKS, alias, rows, given)
    return [RowOutcome(one.row) if one.unchanged and prepared_rows.make_check_due(alias, one.row) else one for one in resumed]


def _change(name: str, transition: Transition, **more: Any) -> Change:
    return Change(name=name, sources=transition.sources, perform=partial(_decide, transition), **more)


_CANARY = Canary(
    model=OutboxMessage,
    failing=IN_TROUBLE,
    succeeded=(State.PUBLISHED, State.SCHEDULED),
    place="topic",
    found=partial(placed, unless=State.PUBLISHED),
)
RESTORE_THEM = _change("restore", RESTORE, is_operation=True, canary=_CANARY)
CANCEL_THEM = _change("cancel", CANCEL, is_operation=True)
PUBLISH_THEM_NOW = _change("publish_now", PUBLISH_NOW, is_operation=True)
RESCHEDULE_THEM = _change("reschedule", RESCHEDULE)
COMMIT_THEM = _change("commit", COMMIT)
ROLL_THEM_BACK = _change("roll_back", ROLL_BACK)
ASK_AGAIN = Change(name="ask_again", sources=UNDECIDED, perform=_ask_again)
CHANGES = by_name(RESTORE_THEM, CANCEL_THEM, PUBLISH_THEM_NOW)
"""Those that can be operations."""
MANAGE = "manage"
"""The permission of an operation that a client of the HTTP API has planned: its scope for the topic."""


def why_not(operation: Any) -> str:
    """Why the user or client that planned an operation may no longer do so; "" if it may."""
    if not operation.client:
        return why_not_permitted(operation)
    # The settings of a relay may have no tokens.
    clients, topic = outbox_options().http.clients, operation.given["topic"]
    if not clients or any(client.name == operation.client and client.may(topic, MANAGE) for client in clients):
        return ""
    return f"{operation.requested_by} no longer has the scope {MANAGE}:{topic}"
