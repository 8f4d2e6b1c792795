"""The registry of handlers."""

import difflib

from exactly_once.wire.formats import RUN_ELSEWHERE
from inbox import deaths
from inbox.conf import has_outbox
from inbox.errors import UnknownHandler
from inbox.handlers.handler import Handler


class Registry:
    """The handlers of this process, by name."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def add(self, handler: Handler) -> None:
        """Raises ValueError if a handler with another function, other topics or another database has the same name."""
        known = self._handlers.get(handler.name)
        if known is not None and known.identity != handler.identity:
            is_same = known.identity[0] == handler.identity[0]
            remedy = "set another name= for one of them" + (", or give all topics to one decorator" if is_same else "")
            raise ValueError(
                f"Two handlers have the name {handler.name!r}: {' on '.join(known.identity)}, and "
                f"{' on '.join(handler.identity)}. They would share inbox rows; {remedy}."
            )
        self._handlers[handler.name] = handler
        if handler.kind.dead_letters_of:
            deaths.reported.add(handler.kind.dead_letters_of)

    def remove(self, name: str) -> None:
        """Also that of its dead letters."""
        for each in (name, f"{name}{deaths.SUFFIX}"):
            self._handlers.pop(each, None)
        deaths.reported.discard(name)

    def get(self, name: str) -> Handler | None:
        return self._handlers.get(name)

    def all(self) -> list[Handler]:
        return list(self._handlers.values())

    def selected(self, names: str) -> list[Handler]:
        """The handlers with these names, separated by commas, each with those that belong to it: of a join, those that collect
        its messages; the one of its dead letters.

        Raises:
            UnknownHandler: there is no such handler; the error suggests similar names.
        """
        chosen = [name.strip() for name in names.split(",")]
        for name in chosen:
            if name not in self._handlers:
                close = " or ".join(map(repr, difflib.get_close_matches(name, self._handlers)))
                known = f"did you mean {close}?" if close else f"known: {', '.join(self._handlers) or 'none'}."
                raise UnknownHandler(f"No handler is called {name!r}; {known}")
        belonging = (
            (handler, {handler.name, handler.kind.collects_for, handler.kind.dead_letters_of}) for handler in self.all()
        )
        return [handler for handler, names in belonging if names & {*chosen}]

    def topics_of(self, name: str) -> tuple[str, ...]:
        """The topics of a handler; none, if it is not one of this process."""
        return self._handlers[name].topics if name in self._handlers else ()

    def wanting_past(self, alias: str) -> list[Handler]:
        """The handlers that want their past from the outbox in this database."""
        wanting = [handler for handler in self._handlers.values() if handler.wants_past and handler.using == alias]
        return wanting if wanting and has_outbox(alias) else []

    def for_topic(self, topic: str) -> list[Handler]:
        """The handlers that a message of this topic is delivered to."""
        return [handler for handler in self._handlers.values() if topic in handler.topics and handler.kind.has_queue]


registry = Registry()


def may_exist(handler: str) -> bool:
    """Is it a handler of this process, or one that other processes run: a Celery task, or a webhook endpoint?"""
    return registry.get(handler) is not None or handler.startswith(RUN_ELSEWHERE)
