"""Encode a message as AMQP frames: `basic.publish`, its content header and its body.

AMQP 0-9-1, sections 2.3.5 (framing) and 4.2 (wire-level format). py-amqp makes one system call per message and packs each
header again, which costs about five times as much. The broker also reads many messages fastest from one write.

py-amqp still connects, declares, sends heartbeats and reads the socket, because projects configure their connections through
kombu, which uses none of the AMQP clients in C or Rust. The price is about 160 lines for a format that has not changed
since 2008, and the use of parts that py-amqp does not document: the `write` of its socket, its read buffer, the counters of its
heartbeat check and its property lists.

This module produces bytes and uses no socket.
"""

from collections.abc import Mapping
from functools import lru_cache
from struct import Struct, pack
from typing import Any, TypeVar

from amqp.basic_message import Message
from amqp.serialization import dumps

from exactly_once.transport.interface import OutgoingMessage
from exactly_once.wire.envelope import COPIES, Envelope
from exactly_once.wire.formats import Wire

_Headers = TypeVar("_Headers", bound=Mapping[str, Any])

METHOD, _HEADER, _BODY, _END = 1, 2, 3, b"\xce"
_FRAME_OVERHEAD = 8
_BASIC, _PUBLISH = 60, 40
_MANDATORY = b"\x01"
_PERSISTENT = b"\x02"
# content-type, content-encoding, headers, delivery-mode, priority, (expiration,) message-id, type: in this order
_FLAGS = 0x8000 | 0x4000 | 0x2000 | 0x1000 | 0x0800 | 0x0080 | 0x0020
_PROPERTIES, _PROPERTIES_OF_EXPIRING = pack(">H", _FLAGS), pack(">H", _FLAGS | 0x0100)
_LONGEST_EXPIRATION = 2**32 - 1
"""In milliseconds, some 50 days. RabbitMQ refuses a message with a longer one."""
_ENCODING = "utf-8"
_pack_frame_head = Struct(">BHI").pack
_pack_content = Struct(">HHQ").pack
_pack_length = Struct(">I").pack


class FrameWriter:
    """Encodes mandatory publishes for one channel. CloudEvents are persistent.

    Args:
        frame_max: largest frame in bytes that the broker agreed to.
    """

    def __init__(self, *, channel: int, frame_max: int) -> None:
        self._channel = channel
        self._largest = frame_max - _FRAME_OVERHEAD
        self._method = lru_cache(maxsize=1024)(self._encode_method)

    def publish(self, message: OutgoingMessage, exchange: str, routing_key: str) -> bytes:
        """All frames of `message`, as a CloudEvent.

        Raises:
            ValueError: a name is longer than AMQP's 255 bytes, the headers do not fit into one frame, or RabbitMQ would refuse
                them.
        """
        envelope = message.envelope
        body = envelope.body
        expiration = b"" if message.expires_in_seconds is None else _expiration(message.expires_in_seconds)
        properties = b"".join(
            (
                _pack_content(_BASIC, 0, len(body)),
                _PROPERTIES_OF_EXPIRING if expiration else _PROPERTIES,
                _short(envelope.content_type),
                _short(_ENCODING),
                _table(_checked(envelope.to_headers())),
                _PERSISTENT,
                bytes((message.priority,)),
                expiration,
                _text(envelope.id),
                _short(envelope.topic),
            )
        )
        return self._assemble(self._method(exchange, routing_key), properties, body)

    def publish_formed(self, envelope: Envelope, wire: Wire) -> bytes:
        """All frames of a message in the format of another protocol, with our message id, which identifies a returned message.

        Raises:
            ValueError, struct.error, amqp.AMQPError: a name is too long, AMQP does not support the type of a header, the
                headers do not fit into one frame, or RabbitMQ would refuse them.
        """
        body = envelope.body
        formed = Message()
        # Unlike the constructor, it takes properties of any name, of which unknown ones are omitted.
        formed.properties = {
            **wire.properties,
            "content_type": wire.content_type,
            "content_encoding": wire.content_encoding,
            "application_headers": _checked(wire.headers),
            "priority": wire.priority,
            "message_id": envelope.id,
        }
        content = _pack_content(_BASIC, 0, len(body)) + formed._serialize_properties()  # noqa: SLF001
        return self._assemble(self._method(wire.exchange, wire.routing_key), content, body)

    def _assemble(self, method: bytes, properties: bytes, body: bytes) -> bytes:
        if len(properties) > self._largest:
            raise ValueError(f"its headers have {len(properties)} bytes; the broker's limit is {self._largest} per frame")
        frames = [method, *self._frame(_HEADER, properties)]
        for start in range(0, len(body), self._largest):
            frames += self._frame(_BODY, body[start : start + self._largest])
        return b"".join(frames)

    def _encode_method(self, exchange: str, routing_key: str) -> bytes:
        arguments = b"".join((pack(">HHH", _BASIC, _PUBLISH, 0), _short(exchange), _short(routing_key), _MANDATORY))
        return b"".join(self._frame(METHOD, arguments))

    def _frame(self, kind: int, payload: bytes) -> tuple[bytes, bytes, bytes]:
        return _pack_frame_head(kind, self._channel, len(payload)), payload, _END


def _expiration(seconds: float) -> bytes:
    """The property: milliseconds, as text. Empty when the value exceeds the broker's limit.

    Never "0": with it RabbitMQ drops a message that it cannot deliver to a consumer at once.
    """
    milliseconds = max(int(seconds * 1000), 1)
    return _text(str(milliseconds)) if milliseconds <= _LONGEST_EXPIRATION else b""


def _checked(headers: _Headers) -> _Headers:
    if wrong := [name for name in COPIES if not isinstance(headers.get(name, []), list)]:
        raise ValueError(f"its header {wrong[0]!r} must be a list: RabbitMQ reserves it for the routing keys of copies")
    return headers


def _table(headers: dict[str, Any]) -> bytes:
    fields: list[bytes] = []
    for name, value in headers.items():
        if type(value) is str:
            text = value.encode()
            fields += _text_field(name), _pack_length(len(text)), text
        else:
            fields.append(dumps("F", ({name: value},))[4:])
    table = b"".join(fields)
    return _pack_length(len(table)) + table


def _text(value: str) -> bytes:
    encoded = value.encode()
    if len(encoded) > 255:  # noqa: PLR2004 - one length byte
        raise ValueError(f"{value!r} has {len(encoded)} bytes; AMQP's limit is 255")
    return bytes((len(encoded),)) + encoded


_short = lru_cache(maxsize=4096)(_text)
"""For recurring names: of headers, topics and content types."""


@lru_cache(maxsize=4096)
def _text_field(name: str) -> bytes:
    return _text(name) + b"S"
