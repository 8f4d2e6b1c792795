"""Names without code: handlers with messages of a topic here, for which this process has no code.

The inbox deduplicates by handler. So a renamed handler is a new one: it handles again what it handled under its old name, and
the queue of that name collects a copy of every message.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from exactly_once.process.logs import escaping_logger
from inbox.handlers.handler import Handler
from inbox.handlers.registry import may_exist, registry
from inbox.store import due
from inbox.store.handler_rows import running_handlers
from inbox.store.receipts import handlers_with_topics
from inbox.transactions.running import committed

logger = escaping_logger(__name__)


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


class Unattended:
    """The names without code on each database, as a process reads them."""

    def __init__(self) -> None:
        self._without_code: dict[str, list[NameWithoutCode]] = {}
        self._names: dict[str, list[NameWithoutCode]] = {}

    @property
    def names(self) -> list[NameWithoutCode]:
        """Those that no other process runs, as last read; from any thread."""
        return [old for names in list(self._names.values()) for old in names]

    def report_once(self, alias: str, handlers: Sequence[Handler]) -> None:
        """Log that messages of handlers other than these are stored, and that a handler may have been renamed.

        Raises:
            DatabaseUnavailable: the database does not answer.
        """
        if alias in self._without_code:
            return
        stored = committed(alias, due.orphans, [handler.name for handler in (*handlers, *registry.all())])
        self._without_code[alias] = committed(alias, names_without_code)
        self.read_running(alias)
        for problem in warnings_of_new_names(self._without_code[alias]):
            logger.warning("runner: %s", problem)
        for name, count in stored.items():
            logger.warning(
                "runner: %s for the handler %r, which this process does not have, until a process with this handler runs. If "
                "the handler was renamed, set renamed_from= to this name. If it was removed, skip its messages in the admin.",
                _waiting(count),
                name,
            )

    def read_running(self, alias: str) -> None:
        """Leave out the names that another process runs now.

        Raises:
            DatabaseUnavailable: they stay as they were read before.
        """
        if names := self._without_code.get(alias):
            running = committed(alias, running_handlers)
            self._names[alias] = [old for old in names if old.name not in running or registry.get(old.name)]


def _waiting(count: int) -> str:
    if count == 1:
        return "1 stored message waits"
    return f"{count} stored messages wait" if count < due.MOST_COUNTED else f"At least {count} stored messages wait"
