"""Export and import of the outbox's dead letters."""

from collections.abc import Iterable, Mapping
from typing import Any

from django.utils.translation import gettext as _

from exactly_once.console.operators.audit import Subject
from exactly_once.console.operators.dead_letters import Letters, Refused
from exactly_once.wire.identity import uuid_in
from exactly_once.wire.text import why_no_topic
from outbox.models import OutboxMessage
from outbox.states import State
from outbox.store.transitions import record
from outbox.store.unique import take_names
from outbox.store.writing import shard_of

COLUMNS = (
    *("message_id", "topic", "biz_id", "is_unique", "key", "priority", "headers", "wire"),
    *("correlation_id", "causation_id", "traceparent"),
    *("attempts", "last_error", "error_class", "failing_since", "failed_at"),
    *("created_at", "deliver_at", "available_at", "expires_at", "settled_at"),
)
"""The columns of a dead letter besides its body and what follows from these."""


class OutboxLetters(Letters):
    def ids(self, message_ids: Iterable[str]) -> list[Any]:
        """Another id than a UUID is none of the outbox."""
        return [name for given in message_ids if (name := uuid_in(given))]

    def insert(self, alias: str, values: Mapping[str, Any], reason: str) -> None:
        """It is the last of its ordering key, and the later ones wait for it. Its callbacks are not called."""
        if why := why_no_topic(values["topic"]):
            raise Refused(f"topic: {why}")
        message_id = values["message_id"]
        shard = shard_of(values.get("key", ""), message_id)
        row = OutboxMessage(**values, state=State.DEAD, shard=shard)
        if row.is_unique and take_names(alias, [row]):
            raise Refused(_("another message that was published with unique=True has its topic and biz-id"))
        row.save(using=alias, force_insert=True)
        record(alias, [message_id], was="", became=State.DEAD, reason=reason)

    def subject(self, values: Mapping[str, Any]) -> Subject:
        message_id = str(values["message_id"])
        return Subject(kind="message", id=message_id, name=f"{message_id} ({values['topic']} {values['biz_id']})")


letters = OutboxLetters("outbox", OutboxMessage, COLUMNS, ["message_id"])
