"""The queues of a backend, and its OPTIONS: each queue is a topic and a handler of one name, and two more under a lease."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from exactly_once.wire.text import did_you_mean, why_no_topic
from inbox.handlers.decorator import database_of
from inbox.handlers.kinds import Lease
from inbox.handlers.options import Ordered, Retry, require_duration

PREFIX = "tasks."
"""Of the topics and handlers of queues."""
LEASED = ".leased"


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """The OPTIONS of a backend; those of `idempotent_handler` and `leased_handler`, where they have the same name.

    Attributes:
        using: the database of messages, results and effects.
        retry: a `Retry`, or a dictionary of its arguments.
        ordered: True, an `Ordered`, or a dictionary of its arguments: the tasks of one key are run one at a time, in order.
        lease: a `Lease`, or a dictionary of its arguments: tasks may have lease=True.
        keep_results: how long results are kept.
        queues: by name, other options of single queues.
    """

    using: str | None = None
    retry: Any = None
    timeout: Any = None
    rate_limit: str | None = None
    concurrency: int | None = None
    ordered: Any = False
    lease: Any = None
    keep_results: Any = timedelta(days=14)
    queues: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep_results", require_duration("keep_results", self.keep_results))
        if self.timeout is not None:
            object.__setattr__(self, "timeout", require_duration("timeout", self.timeout))
        for name, kind in (("retry", Retry), ("ordered", Ordered), ("lease", Lease)):
            given = getattr(self, name)
            if isinstance(given, Mapping):
                object.__setattr__(self, name, kind(**given))

    @property
    def alias(self) -> str:
        """The database."""
        return database_of(self.using)

    def of(self, queue: str) -> QueueOptions:
        """Those of one queue."""
        return replace(self, **self.queues[queue]) if queue in self.queues else self


def options_of(alias: str, given: Mapping[str, Any]) -> QueueOptions:
    """The OPTIONS of the backend with this alias.

    Raises:
        ImproperlyConfigured: an option does not exist, or has a wrong value.
    """
    where, known = f"TASKS[{alias!r}]['OPTIONS']", [each.name for each in fields(QueueOptions)]
    per_queue = given.get("queues", {})
    if not isinstance(per_queue, Mapping) or not all(isinstance(options, Mapping) for options in per_queue.values()):
        raise ImproperlyConfigured(f"{where}: queues is {per_queue!r}: it must be a dictionary of options by queue.")
    for name in {*given, *(name for options in per_queue.values() for name in options)}:
        if name not in known:
            raise ImproperlyConfigured(f"{where} has the unknown option {name!r}. {did_you_mean(name, known)}".rstrip())
    try:
        options = QueueOptions(**given)
        for queue in per_queue:
            options.of(queue)
    except (TypeError, ValueError) as error:
        raise ImproperlyConfigured(f"{where}: {error}") from error
    return options


def topic_of(queue: str, *, lease: bool = False) -> str:
    """The topic, and the name of the handler, of a queue."""
    return f"{PREFIX}{queue}{LEASED if lease else ''}"


def why_unusable(queue: str) -> str | None:
    """Why no handler can have the name of this queue; None if one can."""
    return f"{LEASED} is the end of those of leased tasks" if queue.endswith(LEASED) else why_no_topic(topic_of(queue))


def queue_of(topic: str) -> str:
    """The queue of a topic."""
    return topic.removeprefix(PREFIX).removesuffix(LEASED)


def is_leased(topic: str) -> bool:
    """Is it the topic of tasks under a lease?"""
    return topic.endswith(LEASED)
