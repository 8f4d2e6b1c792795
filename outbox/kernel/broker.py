"""How both halves reach a broker: bounded waits, the same exchange, the same idea of what a broken connection is.

Nothing is connected here.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

from amqp.exceptions import AMQPError, FrameSyntaxError
from amqp.method_framing import frame_handler
from kombu.exceptions import KombuError
from kombu.transport import get_transport_cls

from outbox.kernel.text import why_unfit

EXCHANGE_TYPE = "topic"
HEARTBEAT_SECONDS = 10
_HEADER_FRAME = 2
# Class, weight and body size; the flags and the properties come after.
_HEADER_PREFIX = 12
_AMQP_SCHEMES = {"amqp", "amqps", "pyamqp"}
# py-amqp's own TCP_USER_TIMEOUT is 1 s, which kills a connection that the broker holds up for a moment.
_SOCKET_SETTINGS = {"TCP_USER_TIMEOUT": 10_000, "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}

BROKER_FAILURES: tuple[type[Exception], ...] = (AMQPError, KombuError, OSError, AttributeError)
"""What a lost connection can look like, whatever the kombu transport adds to it (`connection_errors`, `channel_errors`).
py-amqp raises AttributeError when its connection is lost at the wrong moment; kombu's pyamqp transport says so, too."""


def scheme_of(url: str) -> str:
    """`amqp` of `amqp://…`, `sqla` of `sqla+postgresql://…`, in lower case."""
    return url.partition("://")[0].partition("+")[0].lower()


def speaks_amqp(url: str) -> bool:
    """Is this RabbitMQ's protocol, with confirms and queue types, and not one of kombu's virtual transports?"""
    return scheme_of(url) in _AMQP_SCHEMES


def why_unusable(url: str) -> str | None:
    """Why kombu cannot speak to `url`, or None when it can try."""
    if "://" not in url:
        return "it is no URL"
    try:
        get_transport_cls(scheme_of(url))
    except KeyError:
        return f"kombu knows no transport called {scheme_of(url)!r}"
    except ImportError as error:
        return f"its library is not installed: {error}"
    return None


def why_no_exchange(name: str) -> str | None:
    """Why no broker would declare an exchange called `name`, or None when it would."""
    if not name:
        return "it is empty, which is the broker's own default exchange"
    if name.startswith("amq."):
        return "names that begin with 'amq.' are the broker's own"
    return why_unfit(name)


def connection_options(url: str, **transport_options: Any) -> dict[str, Any]:
    """Keyword arguments for `kombu.Connection(url, …)`; `url` may be several, separated by `;`, for failover."""
    if not speaks_amqp(url):
        return {"connect_timeout": 5, "transport_options": transport_options}
    settings = {getattr(socket, name): value for name, value in _SOCKET_SETTINGS.items() if hasattr(socket, name)}
    bounded = {
        "confirm_publish": False,
        "read_timeout": 5,
        "write_timeout": 5,
        "socket_settings": settings,
        "frame_handler": _read_frames_of_anybody,
    }
    return {
        "connect_timeout": 5,
        "heartbeat": HEARTBEAT_SECONDS,
        "transport_options": {**bounded, **transport_options},
    }


def _read_frames_of_anybody(connection: Any, callback: Any) -> Any:
    """py-amqp's frame reader, which also reads a message whose properties it cannot unpack: without them.

    A producer may put bytes that are not UTF-8 into a property, or a header of a type that py-amqp does not know. The reader
    raises then, out of whatever was being waited for, and the broker delivers the message to the next consumer, for ever.
    Without its properties it has no identity and becomes a dead letter that people can see.
    """
    read = frame_handler(connection, callback)

    def on_frame(frame: tuple[int, int, Any]) -> Any:
        try:
            return read(frame)
        except (ValueError, ArithmeticError, LookupError, struct.error, FrameSyntaxError):
            kind, channel, content = frame
            if kind != _HEADER_FRAME:
                raise
            return read((kind, channel, bytes(content[:_HEADER_PREFIX]) + b"\0\0"))

    return on_frame


def masked(url: str) -> str:
    """`url` without its password, for people and logs."""
    scheme, separator, rest = url.partition("://")
    credentials, at, where = rest.rpartition("@")
    user, colon, _ = credentials.partition(":")
    return f"{scheme}{separator}{user}{':***' if colon else ''}{at}{where}"
