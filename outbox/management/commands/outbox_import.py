from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError
from django.utils.translation import gettext as _

from exactly_once.cli.importing import ImportCommand
from exactly_once.operators.audit import Subject
from exactly_once.operators.dead_letters import Refused
from exactly_once.wire.text import why_no_topic
from outbox.dead_letters import letters
from outbox.store.dead_letters import store_dead


class Command(ImportCommand):
    """See `ImportCommand`."""

    letters = letters

    def store(self, alias: str, values: Mapping[str, Any], reason: str) -> str:
        if why := why_no_topic(values["topic"]):
            raise Refused(f"topic: {why}")
        try:
            state = store_dead(alias, values, reason)
        except IntegrityError as error:
            if not values.get("is_unique"):
                raise
            raise Refused(_("another message that was published with unique=True has its topic and biz-id")) from error
        return str(state.label) if state else ""

    def subject(self, values: Mapping[str, Any]) -> Subject:
        message_id = str(values["message_id"])
        return Subject(kind="message", id=message_id, name=f"{message_id} ({values['topic']} {values['biz_id']})")
