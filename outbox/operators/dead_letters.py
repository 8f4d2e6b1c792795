"""Dead letters that were exported, stored again."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from outbox.models import OutboxMessage
from outbox.states import State
from outbox.store.trail import record
from outbox.store.unique import require_unpublished
from outbox.store.writing import shard_of

COLUMNS = (
    *("message_id", "topic", "biz_id", "is_unique", "key", "priority", "headers", "wire"),
    *("correlation_id", "causation_id", "traceparent"),
    *("attempts", "last_error", "error_class", "failing_since", "failed_at"),
    *("created_at", "deliver_at", "available_at", "expires_at", "settled_at"),
)
"""The columns of a dead letter besides its body and what follows from these."""


def dead(alias: str) -> QuerySet[OutboxMessage]:
    return OutboxMessage.objects.using(alias).filter(state=State.DEAD)


def store_dead(alias: str, values: Mapping[str, Any], reason: str) -> State | None:
    """∅ → dead; None. Or the state of the message if its message id is here already.

    It is the last of its ordering key, and the later ones wait for it. Its callbacks are not called.

    Raises:
        django.db.IntegrityError: another unique message has its topic and biz-id.
    """
    message_id = values["message_id"]
    if (state := _state_of(alias, message_id)) is not None:
        return state
    try:
        with transaction.atomic(using=alias):
            row = OutboxMessage.objects.using(alias).create(
                **values, state=State.DEAD, shard=shard_of(values.get("key", ""), message_id)
            )
            if row.is_unique:
                require_unpublished(alias, [row.pk])
            record(alias, [message_id], was="", became=State.DEAD, reason=reason)
    except IntegrityError:
        if (state := _state_of(alias, message_id)) is not None:
            return state  # it was imported at the same time
        raise
    return None


def _state_of(alias: str, message_id: uuid.UUID) -> State | None:
    found = OutboxMessage.objects.using(alias).filter(message_id=message_id).values_list("state", flat=True).first()
    return None if found is None else State(found)
