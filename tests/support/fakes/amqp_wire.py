"""The bytes of AMQP 0-9-1, as far as `amqp_peer` needs them.

Shares no code with any client library, so that one cannot hide the other's mistakes.
"""

import struct
from typing import Any

HEADER = b"AMQP\x00\x00\x09\x01"
METHOD_FRAME, HEADER_FRAME, BODY_FRAME, HEARTBEAT_FRAME = 1, 2, 3, 8
FRAME_OVERHEAD = 8

Method = tuple[int, int]  # class and method number

START, START_OK, TUNE, TUNE_OK, OPEN, OPEN_OK = (10, 10), (10, 11), (10, 30), (10, 31), (10, 40), (10, 41)
CLOSE, CLOSE_OK, BLOCKED, UNBLOCKED = (10, 50), (10, 51), (10, 60), (10, 61)
CHANNEL_OPEN, CHANNEL_OPEN_OK, CHANNEL_CLOSE, CHANNEL_CLOSE_OK = (20, 10), (20, 11), (20, 40), (20, 41)
EXCHANGE_DECLARE, EXCHANGE_DECLARE_OK = (40, 10), (40, 11)
QUEUE_DECLARE, QUEUE_DECLARE_OK, QUEUE_BIND, QUEUE_BIND_OK = (50, 10), (50, 11), (50, 20), (50, 21)
QOS, QOS_OK, PUBLISH, RETURN, ACK, NACK = (60, 10), (60, 11), (60, 40), (60, 50), (60, 80), (60, 120)
CONFIRM_SELECT, CONFIRM_SELECT_OK = (85, 10), (85, 11)

# The basic properties in the order of their flags, highest bit first, each with its type.
PROPERTIES = {
    "content_type": "s", "content_encoding": "s", "headers": "F", "delivery_mode": "B", "priority": "B",
    "correlation_id": "s", "reply_to": "s", "expiration": "s", "message_id": "s", "timestamp": "Q",
    "type": "s", "user_id": "s", "app_id": "s", "cluster_id": "s",
}  # fmt: skip

# What struct calls the numbers in a table.
TABLE_NUMBERS = {
    "b": "b", "B": "B", "s": "h", "U": "h", "u": "H", "I": "i", "i": "I", "l": "q", "L": "q", "T": "Q",
    "f": "f", "d": "d", "t": "?",
}  # fmt: skip


def frame(kind: int, channel: int, payload: bytes = b"") -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def method_frame(channel: int, method: Method, args: bytes = b"") -> bytes:
    return frame(METHOD_FRAME, channel, struct.pack(">HH", *method) + args)


def shortstr(text: str) -> bytes:
    data = text.encode()
    return struct.pack("B", len(data)) + data


def longstr(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def flags_table(names: tuple[str, ...]) -> bytes:
    """A table in which every name is true."""
    return longstr(b"".join(shortstr(name) + b"t\x01" for name in names))


class Reader:
    """Takes AMQP values off a payload, one after the other. Short strings are "s", tables "F", numbers as in struct."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def values(self, kinds: str) -> list[Any]:
        return [self.value(kind) for kind in kinds]

    def value(self, kind: str) -> Any:
        if kind == "s":
            return self._take(self._number("B")).decode()
        return self._table() if kind == "F" else self._number(kind)

    def properties(self) -> dict[str, Any]:
        flags = self._number("H")
        return {name: self.value(kind) for i, (name, kind) in enumerate(PROPERTIES.items()) if flags & 0x8000 >> i}

    def _number(self, code: str) -> Any:
        return struct.unpack(">" + code, self._take(struct.calcsize(">" + code)))[0]

    def _take(self, size: int) -> bytes:
        self.at += size
        return self.data[self.at - size : self.at]

    def _table(self) -> dict[str, Any]:
        inner, entries = Reader(self._take(self._number("I"))), {}
        while inner.at < len(inner.data):
            name = inner.value("s")
            entries[name] = inner._field()
        return entries

    def _field(self) -> Any:
        kind = chr(self._number("B"))
        if kind in TABLE_NUMBERS:
            return self._number(TABLE_NUMBERS[kind])
        if kind == "V":
            return None
        if kind == "F":
            return self._table()
        data = self._take(self._number("I"))
        if kind == "S":
            return data.decode()
        if kind == "x":
            return data
        if kind == "A":
            inner, items = Reader(data), []
            while inner.at < len(data):
                items.append(inner._field())
            return items
        raise ValueError(f"table field of kind {kind!r}")
