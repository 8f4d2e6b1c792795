"""What operators can do to messages of the inbox, on a page or as an operation in batches."""

from collections.abc import Callable, Sequence
from typing import Any

from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from exactly_once.console.operators.changes import Canary, Change, by_name, each
from exactly_once.console.operators.failure_groups import FailureGroups
from exactly_once.failures import without_line
from exactly_once.states import Transition
from exactly_once.upkeep.operation_rows import Given, OperationTable, RowOutcome
from inbox import states
from inbox.models import InboxMessage
from inbox.operators import decisions
from inbox.operators.decisions import Decision, overriding, retrying, skipping
from inbox.operators.editing import replace_message, run_conflicting
from inbox.states import SETTLED, State
from inbox.store.dialect import TABLE

operations = OperationTable("inbox")
groups = FailureGroups(InboxMessage, lambda connection: TABLE, place="error_place", who="handler")
"""The failed messages by exception class and place in the code."""


def _change(name: str, transition: Transition, decided: Callable[[Given], Decision], **more: Any) -> Change:
    def perform(alias: str, rows: Sequence[int], given: Given) -> Sequence[RowOutcome]:
        return decisions.decide_many(alias, rows, decided(given), waits=given.operation is None)

    def is_offered(row: Any) -> bool:
        is_leased = row.state == State.RUNNING and row.next_attempt_at and row.next_attempt_at > row.database_now
        return transition.allows(row) and not is_leased

    condition = Q(**transition.needs)
    return Change(name=name, sources=transition.sources, offered=is_offered, condition=condition, perform=perform, **more)


_CANARY = Canary(
    model=InboxMessage,
    failing=(State.RETRYING, State.DEAD),
    succeeded=SETTLED,
    place="error_place",
    failure=without_line,  # an unrelated change moves the line
)
RETRY = _change(
    "retry", states.RETRY, lambda given: retrying(given.text, sources=given.sources), is_operation=True, canary=_CANARY
)
SKIP = _change("skip", states.SKIP, lambda given: skipping(given.reason, by=given.by, sources=given.sources), is_operation=True)
OVERRIDE = _change("override_maximum_age", states.OVERRIDE, lambda given: overriding(given.text))
EDIT = Change(
    name="edit",
    sources=(State.DEAD,),
    offered=states.RETRY.allows,
    perform=each(
        InboxMessage,
        lambda alias, pk, given: replace_message(alias, pk, given.values["payload"], by=given.by) is not None,
    ),
)
RUN_CONFLICTING = Change(
    name="run_conflicting",
    offered=lambda row: row.conflicting_attributes is not None,
    perform=each(
        InboxMessage,
        lambda alias, pk, given: run_conflicting(alias, pk, confirmed=given.values["shown"].split(), by=given.text),
        _("no other content is stored with it, or it was run"),
    ),
)
CHANGES = by_name(RETRY, SKIP)
"""Those that can be operations."""
