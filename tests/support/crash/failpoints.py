"""A process that ends itself at a named point, without a line of it in the product.

FAILPOINT is "<kill|stop|sleep> <before|after> <function> [<n-th call>] [once <function>] [in <thread>]", each function by its
dotted name, in this product, kombu or py-amqp. At that call the process sends itself SIGKILL, so that none of its code runs any
more: no `finally`, no rollback, no close of the connection. Or it sends itself SIGSTOP and is frozen until SIGCONT. Or only the
calling thread sleeps, forever. Loops run in several threads: with `once` only the calls of a thread that has begun the other
function count, with `in` only those of the thread of that name.

DELIVERIES is a file to which a consumer appends the message id of every delivery before the product processes it, and RUNS one
for every call of the handler; so a test knows what arrived, independently of the database.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

ACTIONS = {
    # To this very thread: a signal to the process may let it run on for a moment.
    "kill": lambda: signal.pthread_kill(threading.get_ident(), signal.SIGKILL),
    "stop": lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP),
    "sleep": lambda: threading.Event().wait(),
}


def install_from_environment() -> None:
    if order := os.environ.get("FAILPOINT"):
        action, when, name, *rest = order.split()
        nth = int(rest.pop(0)) if len(rest) % 2 else 1
        only = dict(zip(rest[::2], rest[1::2], strict=True))
        assert only.keys() <= {"once", "in"}, order
        patch(name, _failing(ACTIONS[action], when, nth, _counted(**only)))
    if place := os.environ.get("DELIVERIES"):
        patch("kombu.messaging.Consumer._receive_callback", _recording_deliveries(Path(place)))


def patch(name: str, decorate: Any) -> None:
    """Replace a function by its dotted name. A missing name is an error, because the test would prove nothing."""
    owner, attribute = _owner(name)
    setattr(owner, attribute, decorate(getattr(owner, attribute)))


def record(variable: str, line: str) -> None:
    """Append a line to the file that an environment variable names; nothing, when there is none."""
    if place := os.environ.get(variable):
        append(Path(place), line)


def append(place: Path, line: str) -> None:
    # One write to a file opened for appending: whole lines, from any number of processes, also when they are killed.
    descriptor = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def _counted(once: str = "", **thread: str) -> Callable[[], bool]:
    """Does a call of the current thread count?"""
    begun = threading.local()

    def beginning(function: Any) -> Any:
        @functools.wraps(function)
        def begin(*args: Any, **kwargs: Any) -> Any:
            begun.here = True
            return function(*args, **kwargs)

        return begin

    if once:
        patch(once, beginning)

    def counted() -> bool:
        return thread.get("in") in (None, threading.current_thread().name) and (not once or hasattr(begun, "here"))

    return counted


def _failing(act: Callable[[], object], when: str, nth: int, counted: Callable[[], bool]) -> Any:
    calls = count(1)

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def failing(*args: Any, **kwargs: Any) -> Any:
            if when == "before" and counted() and next(calls) == nth:
                act()
            result = function(*args, **kwargs)
            if when == "after" and counted() and next(calls) == nth:
                act()
            return result

        return failing

    assert when in {"before", "after"}, when
    return decorate


def _recording_deliveries(place: Path) -> Any:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def noting(consumer: Any, message: Any) -> Any:
            append(place, str(message.properties.get("message_id")))
            return function(consumer, message)

        return noting

    return decorate


def _owner(name: str) -> tuple[Any, str]:
    *path, attribute = name.split(".")
    for length in range(len(path), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(path[:length]))
        except ModuleNotFoundError:
            continue
        for step in path[length:]:
            owner = getattr(owner, step)
        getattr(owner, attribute)
        return owner, attribute
    raise LookupError(f"there is no {name}")
