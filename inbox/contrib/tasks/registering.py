"""Registers a handler for each queue of the backends of this project, and one more for its tasks under a lease."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from inbox.contrib.tasks.backend import ExactlyOnceBackend
from inbox.contrib.tasks.compat import task_backends
from inbox.contrib.tasks.queues import topic_of, why_unusable
from inbox.contrib.tasks.running import end_failed, retry_of, run
from inbox.handlers.decorator import registering
from inbox.handlers.kinds import PLAIN


def register_queues() -> None:
    """Register the handlers of all queues, but for those whose name a check refuses.

    Raises:
        TypeError, ValueError: as `idempotent_handler`, for OPTIONS.
    """
    for alias in task_backends:
        backend = task_backends[alias]
        for queue in sorted(backend.queues) if isinstance(backend, ExactlyOnceBackend) else ():
            if not why_unusable(queue):
                _register(backend, queue)


def _register(backend: ExactlyOnceBackend, queue: str) -> None:
    options = backend.given.of(queue)
    limits: dict[str, Any] = {
        "using": options.using,
        "timeout": options.timeout,
        "retry": _bound(retry_of, backend),
        "on_dead": _bound(end_failed, backend),
        "rate_limit": options.rate_limit,
        "concurrency": options.concurrency,
        "ordered": options.ordered,
    }
    for kind in (PLAIN, *([options.lease] if options.lease else [])):
        topic = topic_of(queue, lease=kind is not PLAIN)
        registering([topic], name=topic, kind=kind, **limits)(_bound(run, backend))


def _bound(function: Callable[..., Any], backend: ExactlyOnceBackend) -> Callable[..., Any]:
    """The function for one backend. By its alias: an instance belongs to one thread."""
    return update_wrapper(partial(function, backend.alias), function)
