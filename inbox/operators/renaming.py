"""Names without code: handlers that have messages here, but that this process does not have, though it handles their topic.

The inbox deduplicates by handler. So a renamed handler is a new one: it handles again what it handled under its old name, and
the queue of that name collects a copy of every message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from inbox.handlers.registry import may_exist, registry
from inbox.operators.accounting import handlers_with_topics


class NameWithoutCode(NamedTuple):
    """A name without code, and the handlers of its topic that have no messages yet."""

    name: str
    topic: str
    new: tuple[str, ...]


def names_without_code(alias: str) -> list[NameWithoutCode]:
    pairs = handlers_with_topics(alias)
    having = {handler for handler, _ in pairs}
    found = []
    for name, topic in pairs:
        here = [handler.name for handler in registry.for_topic(topic) if handler.using == alias]
        if here and not may_exist(name):
            found.append(NameWithoutCode(name, topic, tuple(handler for handler in here if handler not in having)))
    return found


def warnings_of_new_names(found: Iterable[NameWithoutCode]) -> list[str]:
    """A warning for each new handler that may have had one of these names."""
    return [
        f"The handler {new} is new, and {old.name}, which has messages of its topic {old.topic}, has no code here. If it "
        f"was renamed, effects happen again: set renamed_from={old.name!r}."
        for old in found
        for new in old.new
    ]
