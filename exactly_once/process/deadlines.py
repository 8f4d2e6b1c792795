"""A thread that handles items when they are due, such as runs that have a timeout."""

import threading
from collections.abc import Callable
from math import inf
from typing import Generic, TypeVar

from exactly_once.process.clock import monotonic

Item = TypeVar("Item")


class Deadlines(Generic[Item]):
    """The items of one thread, which the first item starts, and starts again in a forked process.

    Args:
        due_at: when an item is due (monotonic); infinite if it is not.
        handle: called by the thread with the items that are due. It sets the time at which each is due again.
    """

    def __init__(self, name: str, due_at: Callable[[Item], float], handle: Callable[[list[Item]], None]) -> None:
        self._name = name
        self._due_at = due_at
        self._handle = handle
        self._changed = threading.Condition()
        self._items: set[Item] = set()
        self._thread: threading.Thread | None = None
        self._wakes_at = inf

    def add(self, item: Item) -> None:
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            # When it wakes up, most items that it waited for are removed. A notification for each new one would cost more.
            if self._due_at(item) < self._wakes_at:
                self._changed.notify()
            # Last: from then on `handle` may raise an exception in this thread, which must not hold the lock for long.
            self._items.add(item)

    def remove(self, item: Item) -> None:
        """It may be handled once more. This does not wait for a lock."""
        self._items.discard(item)

    def hasten(self, change: Callable[[Item], object]) -> None:
        """Change the items, some of which may be due earlier then."""
        with self._changed:
            for item in [*self._items]:
                change(item)
            self._changed.notify()

    def _work(self) -> None:
        while True:
            self._handle(self._wait())

    def _wait(self) -> list[Item]:
        with self._changed:
            while True:
                now, items = monotonic(), [*self._items]
                if due := [item for item in items if self._due_at(item) <= now]:
                    return due
                self._wakes_at = min(map(self._due_at, items), default=inf)
                self._changed.wait(None if self._wakes_at == inf else self._wakes_at - now)
