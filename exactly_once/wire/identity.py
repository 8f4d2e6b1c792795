"""Unique names of messages, processes and functions."""

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

# RFC 9562 §5.7: the version, the variant, and the 74 bits around them that are random.
_UUID7 = 0x7 << 76 | 0x2 << 62
_RANDOM = (1 << 76) - 1 & ~(0x3 << 62)
_RANDOM_BYTES = 10


def new_message_id() -> uuid.UUID:
    """A new message id: a UUIDv7 (RFC 9562 §5.7), 48 bits of milliseconds and 74 random bits.

    Ids that grow with time keep the inserts on the right edge of the unique index.
    """
    return uuid.UUID(int=_this_millisecond() | int.from_bytes(os.urandom(_RANDOM_BYTES), "big") & _RANDOM)


def new_message_ids(count: int) -> list[uuid.UUID]:
    """`count` new message ids of one millisecond, ascending, with one call for all their random bits."""
    random, now = os.urandom(_RANDOM_BYTES * count), _this_millisecond()
    pieces = [random[start : start + _RANDOM_BYTES] for start in range(0, len(random), _RANDOM_BYTES)]
    return [uuid.UUID(int=now | bits) for bits in sorted(int.from_bytes(piece, "big") & _RANDOM for piece in pieces)]


def uuid_in(text: str) -> uuid.UUID | None:
    """The UUID that the text is, or None."""
    try:
        return uuid.UUID(text)
    except ValueError:
        return None


def _this_millisecond() -> int:
    return time.time_ns() // 1_000_000 << 80 | _UUID7


def process_name() -> str:
    """A human-readable name of this thread: `host:pid:thread`."""
    return f"{socket.gethostname()}:{os.getpid()}:{threading.current_thread().name}"


def origin(function: Callable[..., Any]) -> str:
    """The dotted path of a function, and its line."""
    inner = getattr(function, "awaitable", function)
    path = f"{getattr(inner, '__module__', '?')}.{getattr(inner, '__qualname__', repr(inner))}"
    code = getattr(inner, "__code__", None)
    return f"{path} (line {code.co_firstlineno})" if code else path
