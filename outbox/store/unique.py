"""Messages published with `unique=True`: of those with one topic and biz-id, at most one has not been given up.

The index `outbox_unique_biz_id` guarantees this, whoever writes and however concurrently. An insert that meets such a message
waits until the transaction that wrote it, or is giving it up, has ended.
"""

from __future__ import annotations

import uuid
from typing import NamedTuple

from django.db.models import Exists, OuterRef, Q

from outbox.models import OutboxMessage
from outbox.states import GIVEN_UP

# The condition of the index, word for word: SQLite infers the index from nothing else.
UNLESS_FOUND = (
    "ON CONFLICT (topic, biz_id) "
    f"WHERE is_unique AND NOT (state IN ({', '.join(repr(state.value) for state in GIVEN_UP)})) DO NOTHING"
)

IS_REPLACED = Q(is_unique=True, state__in=GIVEN_UP) & Q(
    Exists(
        OutboxMessage.objects.filter(
            Q(pk__gt=OuterRef("pk")) | ~Q(state__in=GIVEN_UP),
            topic=OuterRef("topic"),
            biz_id=OuterRef("biz_id"),
            is_unique=True,
        )
    )
)
"""It was given up, and another message has been published in its place. Of several that were given up, the last counts."""


class UniqueMessage(NamedTuple):
    message_id: uuid.UUID
    position: int
    state: str


def find_unique(alias: str, topic: str, biz_id: str) -> UniqueMessage | None:
    """The message that an insert has met; None when it has been given up or purged since."""
    # The last of several: a transaction with one snapshot still sees one that has been given up since it began.
    found = (
        OutboxMessage.objects.using(alias)
        .filter(topic=topic, biz_id=biz_id, is_unique=True)
        .exclude(state__in=GIVEN_UP)
        .order_by("-pk")
        .values_list("message_id", "pk", "state")
        .first()
    )
    return found and UniqueMessage(*found)


def is_replaced(alias: str, position: int) -> bool:
    """Was this message given up, and another one published in its place?"""
    return OutboxMessage.objects.using(alias).filter(IS_REPLACED, pk=position).exists()
