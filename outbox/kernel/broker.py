"""How both halves reach a broker: bounded waits, the same exchange, the same idea of what a broken connection is.

A broker URL may be several, separated by `;`: brokers of one cluster, of which the first that answers is used. That is kombu's
own failover; here it is seen to that every one of them is asked, and that they are of one kind.

Nothing is connected here.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

from amqp.exceptions import AccessRefused, AMQPError, FrameSyntaxError, NotAllowed
from amqp.method_framing import frame_handler
from kombu.exceptions import KombuError
from kombu.transport import TRANSPORT_ALIASES, get_transport_cls

from outbox.kernel.masking import is_url, why_unreadable
from outbox.kernel.text import why_unfit

EXCHANGE_TYPE = "topic"
HEARTBEAT_SECONDS = 10
Frame = tuple[int, int, bytes]
"""One frame of AMQP: its type, its channel and its payload."""

_FRAME = struct.Struct(">BHI")
"""Type, channel and size; then come so many bytes of payload and one that ends the frame."""
_FRAME_END = 0xCE
_HEADER_FRAME = 2
# Class, weight and body size; the flags and the properties come after.
_HEADER_PREFIX = 12
_AMQP_SCHEMES = {"amqp", "amqps", "pyamqp"}
_LOCAL = "local"
_CHUNK_BYTES = 16_384
_CONNECT_SECONDS = 5.0
_ALL_CONNECT_SECONDS = 15.0
"""For all brokers of a list together, that none of them waits behind others that swallow packets for longer than this."""
_LAST_ATTEMPT_SECONDS = 20.0
# py-amqp's own TCP_USER_TIMEOUT is 1 s, which kills a connection that the broker holds up for a moment.
_SOCKET_SETTINGS = {"TCP_USER_TIMEOUT": 10_000, "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}

SEVERAL_HINT = (
    "Name the brokers of one cluster, all of one kind: amqp://user:password@first//;amqp://user:password@second//. "
    "A ';' that is part of a password is written %3B."
)

REFUSAL_REMEDY = (
    "Correct its user, password or virtual host, or grant the user its permissions on the broker. It is tried again every few "
    "seconds; no message is lost and no attempt is counted."
)
_REFUSALS_OF_REDIS = {"AuthenticationError", "NoPermissionError"}
"""Names of classes, because its library need not be installed."""

BROKER_FAILURES: tuple[type[Exception], ...] = (AMQPError, KombuError, OSError, AttributeError)
"""What a lost connection can look like, whatever the kombu transport adds to it (`connection_errors`, `channel_errors`).
py-amqp raises AttributeError when its connection is lost at the wrong moment; kombu's pyamqp transport says so, too."""


def scheme_of(url: str) -> str:
    """`amqp` of `amqp://…`, `sqla` of `sqla+postgresql://…`, in lower case; of several, the first's, or "" when they differ."""
    schemes = [_scheme(one) for one in url.split(";")]
    if len(schemes) > 1 and (_LOCAL in schemes or len(set(map(_kind, schemes))) > 1):
        return ""
    return schemes[0]


def speaks_amqp(url: str) -> bool:
    """Is this RabbitMQ's protocol, with confirms and queue types, and not one of kombu's virtual transports?"""
    return scheme_of(url) in _AMQP_SCHEMES


def why_unusable(url: str) -> str | None:
    """Why kombu cannot speak to `url`, or to one of several, or None when it can try."""
    urls = url.split(";")
    schemes = [_scheme(one) for one in urls]
    if len(urls) > 1 and _LOCAL in schemes:
        return "local:// is no broker and must stand alone: there is nothing to fail over to"
    for number, one in enumerate(urls, 1):
        if reason := _why_unusable(one):
            return reason if len(urls) == 1 else f"{reason} (number {number} of its {len(urls)} URLs, which ';' separates)"
    if not scheme_of(url):
        kinds = " and ".join(f"{scheme}://" for scheme in dict.fromkeys(schemes))
        return f"its URLs are of different kinds, {kinds}, and a list is for the brokers of one cluster"
    return None


def _why_unusable(url: str) -> str | None:
    if not is_url(url.strip()):
        return "it is no URL"
    if url != url.strip():
        return "there is a space before or after it"
    if _scheme(url) not in TRANSPORT_ALIASES:
        return "kombu knows no such transport"
    try:
        transport = get_transport_cls(_scheme(url))
    except ImportError as error:
        return f"its library is not installed: {error}"
    return None if transport.can_parse_url else why_unreadable(url)


def _scheme(url: str) -> str:
    return url.partition("://")[0].partition("+")[0].lower()


def _kind(scheme: str) -> str:
    return "amqp" if scheme in _AMQP_SCHEMES else scheme


def why_no_exchange(name: str) -> str | None:
    """Why no broker would declare an exchange called `name`, or None when it would."""
    if not name:
        return "it is empty, which is the broker's own default exchange"
    if name.startswith("amq."):
        return "names that begin with 'amq.' are the broker's own"
    return why_unfit(name)


def connection_options(url: str, **transport_options: Any) -> dict[str, Any]:
    """Keyword arguments for `kombu.Connection(url, …)`."""
    seconds = min(_CONNECT_SECONDS, _ALL_CONNECT_SECONDS / _count(url))
    if not speaks_amqp(url):
        # The second is what kombu's Redis transport goes by.
        options = {"socket_connect_timeout": seconds, **transport_options}
        return {"connect_timeout": seconds, "transport_options": options}
    settings = {getattr(socket, name): value for name, value in _SOCKET_SETTINGS.items() if hasattr(socket, name)}
    bounded = {
        "confirm_publish": False,
        "read_timeout": 5,
        "write_timeout": 5,
        "socket_settings": settings,
        "frame_handler": _read_frames_of_anybody,
    }
    return {
        "connect_timeout": seconds,
        "heartbeat": HEARTBEAT_SECONDS,
        "transport_options": {**bounded, **transport_options},
    }


def connection_attempts(url: str) -> dict[str, Any]:
    """Keyword arguments for `kombu.Connection.ensure_connection`: ask every broker once, a single one twice, and no longer."""
    return {"max_retries": max(_count(url) - 1, 1), "interval_start": 0, "timeout": _LAST_ATTEMPT_SECONDS}


def _count(url: str) -> int:
    return url.count(";") + 1


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


def is_refusal(error: BaseException) -> bool:
    """Does the broker refuse this login or virtual host, or lack its user a right? Waiting does not help then."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, AccessRefused | NotAllowed) or _REFUSALS_OF_REDIS & {kind.__name__ for kind in type(link).__mro__}:
            return True
        link = link.__cause__
    return False


def read_in_chunks(transport: Any) -> None:
    """Have py-amqp read as much of its socket as there is, instead of six times for every message.

    `_read` keeps in `_read_buffer` what it got too much, so only its call of the socket is changed.
    """
    read = transport._quick_recv  # noqa: SLF001 - py-amqp offers no other place
    transport._quick_recv = lambda size: read(max(size, _CHUNK_BYTES))  # noqa: SLF001


def dispatch_what_is_read(connection: Any, take: Callable[[Frame], bool] | None = None) -> None:
    """Have py-amqp's connection take the whole frames that `read_in_chunks` has left in its buffer.

    Or have `take` do it, until it returns False.

    Without setting two time limits on the socket for each, which costs it a third of its time. A frame that is not whole, or
    not sound, is left to py-amqp, which waits for the rest or says what is wrong.
    """
    transport = connection.transport
    while len(read := transport._read_buffer) > _FRAME.size:  # noqa: SLF001 - see read_in_chunks
        kind, channel, size = _FRAME.unpack_from(read)
        end = _FRAME.size + size
        if len(read) <= end or read[end] != _FRAME_END:
            return
        # Before it is taken: whoever takes it may read on, or fail.
        transport._read_buffer = read[end + 1 :]  # noqa: SLF001
        frame = (kind, channel, read[_FRAME.size : end])
        if take is None:
            connection.on_inbound_frame(frame)
        elif not take(frame):
            return
