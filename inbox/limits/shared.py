"""What limits a handler, shared by all threads of this process."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from inbox.handlers.handler import Handler

T = TypeVar("T")


class Shared(Generic[T]):
    """Returns what `make` makes of a handler, once by name, and again when its option has changed; None without the option."""

    def __init__(self, option: str, make: Callable[[Handler], T]) -> None:
        self._option = option
        self._make = make
        self._lock = threading.Lock()
        self._made: dict[str, tuple[object, T]] = {}

    def __call__(self, handler: Handler) -> T | None:
        option = getattr(handler, self._option)
        if option is None:
            return None
        with self._lock:
            before, made = self._made.get(handler.name, (None, None))
            if made is None or before != option:
                made = self._make(handler)
                self._made[handler.name] = option, made
            return made
