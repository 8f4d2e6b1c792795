"""Names that must not collide: of messages and of processes."""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid


def new_message_id() -> uuid.UUID:
    """A fresh message id: a UUIDv7 (RFC 9562 §5.7), 48 bits of milliseconds and 74 random bits.

    Ids that grow with time keep the unique index's inserts on its right edge.
    """
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    value = (milliseconds & (1 << 48) - 1) << 80 | random
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return uuid.UUID(int=value)


def process_name() -> str:
    """Who is doing this, for people to read: `host:pid:thread`."""
    return f"{socket.gethostname()}:{os.getpid()}:{threading.current_thread().name}"
