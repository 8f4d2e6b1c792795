"""Names without code: handlers with messages of a topic here, for which this process has no code.

The inbox deduplicates by handler. So a renamed handler is a new one: it handles again what it handled under its old name, and
the queue of that name collects a copy of every message.
"""

from collections.abc import Iterable
from typing import NamedTuple

from inbox.handlers.registry import may_exist, registry
from inbox.operators.accounting import handlers_with_topics


class NameWithoutCode(NamedTuple):
    """A name that has messages of a topic, but here no code that handles it.

    Attributes:
        topics: all topics of which it has messages.
        new: the handlers of the topic that have no messages yet.
    """

    name: str
    topic: str
    topics: tuple[str, ...]
    new: tuple[str, ...] = ()


def names_without_code(alias: str) -> list[NameWithoutCode]:
    pairs = handlers_with_topics(alias)
    having: dict[str, tuple[str, ...]] = {}
    for name, topic in pairs:
        having[name] = (*having.get(name, ()), topic)
    found = []
    for name, topic in pairs:
        here = [handler.name for handler in registry.for_topic(topic) if handler.using == alias]
        if here and not may_exist(name):
            new = tuple(handler for handler in here if handler not in having)
            found.append(NameWithoutCode(name, topic, having[name], new))
        elif (known := registry.get(name)) and known.using == alias and topic not in known.topics:
            found.append(NameWithoutCode(name, topic, having[name]))
    return found


def warnings_of_new_names(found: Iterable[NameWithoutCode]) -> list[str]:
    """A warning for each new handler that may have had one of these names."""
    return [
        f"The handler {new} is new, and {old.name}, which has messages of its topic {old.topic}, has no code here. If it "
        f"was renamed, effects happen again: set renamed_from={old.name!r}."
        for old in found
        for new in old.new
    ]
