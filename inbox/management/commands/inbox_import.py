from collections.abc import Mapping
from typing import Any

from exactly_once.cli.importing import ImportCommand
from exactly_once.operators.audit import Subject
from inbox.dead_letters import letters, store_dead


class Command(ImportCommand):
    """See `ImportCommand`."""

    letters = letters

    def store(self, alias: str, values: Mapping[str, Any], reason: str) -> str:
        state = store_dead(alias, values, reason)
        return str(state.label) if state else ""

    def subject(self, values: Mapping[str, Any]) -> Subject:
        message_id = values["message_id"]
        name = f"{message_id or 'without id'} ({values['topic']} {values['biz_id']}, {values['handler']})"
        return Subject(kind="message", id=message_id, name=name)
