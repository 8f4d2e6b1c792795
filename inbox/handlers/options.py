"""The values of a handler's options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inbox.handlers.message import Message

_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*/\s*(s|m|h)\s*")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def per_second(rate: str) -> float:
    """`rate` as messages a second.

    Raises:
        ValueError: it is not a positive number by s, m or h, like "2000/s".
    """
    parts = _RATE.fullmatch(str(rate))
    if parts is None or not float(parts[1]):
        raise ValueError(f'rate_limit is {rate!r}: it must be a positive number per s, m or h, like "2000/s", "90/m" or "5/h".')
    return float(parts[1]) / _SECONDS[parts[2]]


def _always(message: Message) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Shed:
    """Load shedding: while more than `above` messages wait for a handler, those that are `droppable` are not handled.

    Each is written down as `shed`, with the reason; nothing is dropped silently.

    Attributes:
        above: messages waiting in the handler's queue; dropping ends when nine tenths of it are left.
        droppable: whether this message may be dropped. What it raises counts as no.
    """

    above: int = 100_000
    droppable: Callable[[Message], bool] = _always

    def __post_init__(self) -> None:
        if not callable(self.droppable):
            raise TypeError(f"droppable is {self.droppable!r}: it must be a function of the message.")
        if inspect.iscoroutinefunction(self.droppable):
            raise TypeError("droppable is async: it must answer at once, from the message alone.")
        if self.above < 1:
            raise ValueError(f"above is {self.above}: it must be a number of waiting messages, 1 or more.")
