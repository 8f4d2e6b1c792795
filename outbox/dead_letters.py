"""Export and import of the outbox's dead letters."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from django.db import IntegrityError
from django.db.models import QuerySet
from django.utils.translation import gettext as _

from exactly_once.operators.audit import Subject
from exactly_once.operators.dead_letters import Letters, Refused
from exactly_once.wire.text import why_no_topic
from outbox.models import OutboxMessage
from outbox.operators import dead_letters


class OutboxLetters(Letters):
    def rows(self, alias: str) -> QuerySet[Any]:
        return dead_letters.dead(alias)

    def ids(self, message_ids: Iterable[str]) -> list[Any]:
        """Another id than a UUID is none of the outbox."""
        found = []
        for given in message_ids:
            with suppress(ValueError):
                found.append(uuid.UUID(given))
        return found

    def store(self, alias: str, values: Mapping[str, Any], reason: str) -> str:
        if why := why_no_topic(values["topic"]):
            raise Refused(f"topic: {why}")
        try:
            state = dead_letters.store_dead(alias, values, reason)
        except IntegrityError as error:
            if not values.get("is_unique"):
                raise
            raise Refused(_("another message that was published with unique=True has its topic and biz-id")) from error
        return str(state.label) if state else ""

    def subject(self, values: Mapping[str, Any]) -> Subject:
        message_id = str(values["message_id"])
        return Subject(kind="message", id=message_id, name=f"{message_id} ({values['topic']} {values['biz_id']})")


letters = OutboxLetters("outbox", OutboxMessage, dead_letters.COLUMNS)
