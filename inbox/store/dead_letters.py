"""Dead letters that were exported, stored again with the steps that they had completed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from inbox.models import InboxMessage, State, Step
from inbox.store.ordering import hold_gates
from inbox.store.trail import record

COLUMNS = (
    *("handler", "topic", "biz_id", "message_id", "key", "ordered", "content_type", "digest", "headers"),
    *("source", "correlation_id", "causation_id", "traceparent"),
    *("attempts", "fence", "quarantined", "last_error", "error_class", "error_place", "failing_since", "failed_at"),
    *("failures", "traceback", "created_at", "received_at", "settled_at"),
)
"""The columns of a dead letter besides its body."""
STEP_COLUMNS = ("name", "result", "taken_at")


def dead(alias: str) -> QuerySet[InboxMessage]:
    return InboxMessage.objects.using(alias).filter(state=State.DEAD)


def store_dead(alias: str, values: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], reason: str) -> State | None:
    """∅ → dead; None. Or the state of the row with its handler, topic and biz-id if there is one already.

    In an order it is the last of its key.
    """
    try:
        with transaction.atomic(using=alias):
            if values.get("ordered"):
                hold_gates(alias, values["handler"], [values.get("key", "")])
            row = InboxMessage.objects.using(alias).create(**values, state=State.DEAD)
            Step.objects.using(alias).bulk_create(Step(message=row, **step) for step in steps)
            record(alias, [row.pk], was="", reason=reason)
    except IntegrityError:
        if (state := state_of(alias, values)) is not None:
            return state  # it was received or imported at the same time
        raise
    return None


def state_of(alias: str, values: Mapping[str, Any]) -> State | None:
    named = {name: values[name] for name in ("handler", "topic", "biz_id")}
    found = InboxMessage.objects.using(alias).filter(**named).values_list("state", flat=True).first()
    return None if found is None else State(found)
