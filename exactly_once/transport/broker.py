"""How both apps connect to a broker: with bounded waits, the same exchange and the same definition of a broken connection.

A broker URL may be a list separated by `;`: the brokers of one cluster, of which kombu's failover uses the first that answers.
This module ensures that kombu tries each of them, and that they are of one kind.

This module opens no connection.
"""

import inspect
import socket
import ssl
import struct
from collections.abc import Callable, Collection
from typing import Any

from amqp.exceptions import AccessRefused, AMQPError, FrameSyntaxError, NotAllowed
from amqp.method_framing import frame_handler
from kombu import Connection
from kombu.exceptions import KombuError
from kombu.transport import TRANSPORT_ALIASES, get_transport_cls
from kombu.utils.url import url_to_parts

from exactly_once.conf.app_options import DEFAULT_TLS, TlsOptions
from exactly_once.conf.masking import is_url, quoted, why_unreadable
from exactly_once.wire.text import fit, why_unfit

EXCHANGE_TYPE = "topic"
HEARTBEAT_SECONDS = 10
Frame = tuple[int, int, bytes]
"""One frame of AMQP: its type, its channel and its payload."""

_FRAME = struct.Struct(">BHI")
"""Type, channel and size; `size` bytes of payload and one end byte follow."""
_FRAME_END = 0xCE
_HEADER_FRAME = 2
# Class, weight and body size; the flags and the properties follow.
_HEADER_PREFIX = 12
_AMQP_SCHEMES = {"amqp", "amqps", "pyamqp"}
_REDIS_SCHEMES = {"redis", "rediss", "valkey", "valkeys"}
_ENCRYPTED_SCHEMES = {"amqps", "rediss", "valkeys"}
_OPTIONS_IN_A_URL = {"heartbeat", "login_method"}
"""Of those that kombu knows, the ones that work as text."""
LOCAL_BROKER = "local://"
_LOCAL = "local"
_CHUNK_BYTES = 16_384
_CONNECT_SECONDS = 5.0
_ALL_CONNECT_SECONDS = 15.0
"""For all brokers of a list together, so that a broker is tried within this time even if those before it drop packets."""
_LAST_ATTEMPT_SECONDS = 20.0
# py-amqp's default TCP_USER_TIMEOUT of 1 s ends a connection when the broker pauses for a moment.
_SOCKET_SETTINGS = {"TCP_USER_TIMEOUT": 10_000, "TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}

SEVERAL_HINT = (
    "Name the brokers of one cluster, all of one kind: amqp://user:password@first//;amqp://user:password@second//. "
    "A ';' that is part of a password is written %3B."
)

_REFUSALS_OF_REDIS = {"AuthenticationError", "NoPermissionError"}
"""Names of classes, because the library may not be installed."""

BROKER_FAILURES: tuple[type[Exception], ...] = (AMQPError, KombuError, OSError, AttributeError)
"""Errors of a lost connection; each kombu transport adds its own (`connection_errors`, `channel_errors`).
py-amqp raises AttributeError when it loses its connection at the wrong moment; kombu's pyamqp transport lists it, too."""
_SYSTEMS = {"redis": "redis", "rediss": "redis", "sqs": "aws_sqs", "confluentkafka": "kafka"}


def failures_of(connection: Any) -> tuple[type[Exception], ...]:
    """The errors of a lost connection of kombu, or of one that is not open (None)."""
    if connection is None:
        return BROKER_FAILURES
    return (*BROKER_FAILURES, *connection.connection_errors, *connection.channel_errors)


def queue_name(subscriber: str, *topics: str) -> str:
    """The name of the queue of one handler, or of the exchange of its partitions.

    Args:
        subscriber: group and name of the handler: "billing.orders.reserve_stock".
    """
    return fit(f"{subscriber}@{'+'.join(sorted(topics))}")


def scheme_of(url: str) -> str:
    """`amqp` of `amqp://…`, `sqla` of `sqla+postgresql://…`, in lower case; of a list the first, or "" if the kinds differ."""
    schemes = [_scheme(one) for one in url.split(";")]
    if len(schemes) > 1 and (_LOCAL in schemes or len(set(map(_kind, schemes))) > 1):
        return ""
    return schemes[0]


def is_local(url: str) -> bool:
    """Is it `local://`, which needs no broker?"""
    return scheme_of(url) == _LOCAL


def speaks_amqp(url: str) -> bool:
    """Is this AMQP, with confirms and queue types, rather than one of kombu's virtual transports?"""
    return scheme_of(url) in _AMQP_SCHEMES


def system_of(url: str) -> str:
    """OpenTelemetry's `messaging.system` of a broker: "rabbitmq", "redis", or the scheme of another one."""
    scheme = scheme_of(url)
    return "rabbitmq" if speaks_amqp(url) else _SYSTEMS.get(scheme, scheme)


def why_unusable(url: str, tls: TlsOptions | None = None) -> str | None:
    """Why kombu cannot use `url`, or one URL of a list; None if it can try.

    Args:
        tls: the BROKER_SSL that is given for this URL.
    """
    urls = url.split(";")
    schemes = [_scheme(one) for one in urls]
    if len(urls) > 1 and _LOCAL in schemes:
        return "local:// cannot be part of a list: it is not a broker"
    for number, one in enumerate(urls, 1):
        if reason := _why_unusable(one):
            return reason if len(urls) == 1 else f"{reason} (number {number} of its {len(urls)} URLs, which ';' separates)"
    if not scheme_of(url):
        kinds = " and ".join(f"{scheme}://" for scheme in dict.fromkeys(schemes))
        return f"its URLs are of different kinds, {kinds}, and a list is for the brokers of one cluster"
    if tls and not _ENCRYPTED_SCHEMES.intersection(schemes):
        return "BROKER_SSL is set, but the connection would not be encrypted; write amqps:// or rediss://"
    if tls and tls.server_hostname and scheme_of(url) in _REDIS_SCHEMES:
        return "BROKER_SSL has server_hostname, which the library for Redis does not know; write that name as the host"
    return None


def _why_unusable(url: str) -> str | None:
    if not is_url(url.strip()):
        return "it is not a URL"
    if url != url.strip():
        return "there is a space before or after it"
    if _scheme(url) not in TRANSPORT_ALIASES:
        return "kombu does not know this transport"
    try:
        transport = get_transport_cls(_scheme(url))
    except (ImportError, NameError, AttributeError) as error:  # some modules of kombu use names of a library that is missing
        return f"a library that kombu needs for it is missing ({error}); it is in an extra of kombu, such as kombu[redis]"
    return None if transport.can_parse_url else why_unreadable(url) or _why_misread(url)


def _why_misread(url: str) -> str | None:
    """Why kombu would fail at an option of `url` whenever it connects, or None."""
    if "+" in url.partition("://")[0]:
        return None
    query = url_to_parts(url).query
    for name in query:
        if speaks_amqp(url) and name not in _OPTIONS_IN_A_URL:
            return f"its option {quoted(name)} is not understood; options of TLS are given in BROKER_SSL"
        if _scheme(url) in _REDIS_SCHEMES and name.startswith("ssl_") and name not in _options_of_redis():
            return f"its option {quoted(name)} is not understood"
    try:
        Connection(url, ssl=True)
    except (TypeError, ValueError, KeyError):
        return f"one of its options is not understood, or has a wrong value: {', '.join(map(quoted, query))}"
    return None


def _options_of_redis() -> Collection[str]:
    from redis import SSLConnection  # noqa: PLC0415 - an extra

    return inspect.signature(SSLConnection).parameters


def _scheme(url: str) -> str:
    return url.partition("://")[0].partition("+")[0].lower()


def _kind(scheme: str) -> str:
    return "amqp" if scheme in _AMQP_SCHEMES else scheme


def why_no_exchange(name: str) -> str | None:
    """Why a broker would refuse to declare an exchange called `name`; None if it would not."""
    if not name:
        return "it is empty, which is the broker's own default exchange"
    if name.startswith("amq."):
        return "the broker reserves names that begin with 'amq.'"
    return why_unfit(name)


class BrokerConnection(Connection):  # type: ignore[misc] # kombu has no types
    """A connection of kombu, encrypted as BROKER_SSL says if the scheme of its URL says that it is.

    Each broker of a list has a host name to compare. kombu has one set of options for all, and writes the first name into it.
    """

    def __init__(self, *given: Any, tls: TlsOptions = DEFAULT_TLS, **named: Any) -> None:
        self._tls = tls
        super().__init__(*given, **named)

    def clone(self, **named: Any) -> "BrokerConnection":
        cloned: BrokerConnection = super().clone(tls=self._tls, **named)
        return cloned

    def _init_params(self, **params: Any) -> None:
        # kombu calls it for the first URL, and for each one that it switches to.
        scheme = params["transport"]
        if scheme == "amqps":
            params["ssl"] = self._tls.for_amqp(params["hostname"])
        elif scheme in _ENCRYPTED_SCHEMES:
            params["ssl"] = {**self._tls.for_redis(), **(params["ssl"] or {})}
        super()._init_params(**params)


def connection_options(url: str, **transport_options: Any) -> dict[str, Any]:
    """Keyword arguments for `BrokerConnection(url, …)`."""
    seconds = min(_CONNECT_SECONDS, _ALL_CONNECT_SECONDS / _count(url))
    if not speaks_amqp(url):
        # kombu's Redis transport reads the transport option.
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
    return {"connect_timeout": seconds, "heartbeat": HEARTBEAT_SECONDS, "transport_options": {**bounded, **transport_options}}


def connection_attempts(url: str) -> dict[str, Any]:
    """Keyword arguments for `kombu.Connection.ensure_connection`: try every broker of a list once, a single broker twice."""
    return {"max_retries": max(_count(url) - 1, 1), "interval_start": 0, "timeout": _LAST_ATTEMPT_SECONDS}


def _count(url: str) -> int:
    return url.count(";") + 1


def _read_frames_of_anybody(connection: Any, callback: Any) -> Any:
    """py-amqp's frame reader; it drops the properties of a message if it cannot decode them.

    A producer may send a property that is not UTF-8, or a header of a type that py-amqp does not know. py-amqp's reader then
    raises an exception from the current wait, and the broker redelivers the message to the next consumer, without end. Without
    its properties the message has no id, and becomes a dead letter that operators can see.
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
    """Does the broker refuse this login or virtual host, or does the user lack a permission? Waiting does not help then.

    Nor does it if the certificate of the broker is not accepted.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, AccessRefused | NotAllowed | ssl.SSLCertVerificationError):
            return True
        if _REFUSALS_OF_REDIS & {kind.__name__ for kind in type(link).__mro__}:
            return True
        # The library for Redis raises its own error while it handles that of a certificate.
        cause, context = link.__cause__, link.__context__
        link = context if cause is None and isinstance(context, ssl.SSLCertVerificationError) else cause
    return False


def read_in_chunks(transport: Any) -> None:
    """Let py-amqp read all available bytes of its socket at once, instead of six times for every message.

    `_read` keeps surplus bytes in `_read_buffer`, so only its call of the socket is changed.
    """
    read = transport._quick_recv  # noqa: SLF001 - py-amqp has no public hook
    transport._quick_recv = lambda size: read(max(size, _CHUNK_BYTES))  # noqa: SLF001


def dispatch_what_is_read(connection: Any, take: Callable[[Frame], bool] | None = None) -> None:
    """Dispatch the complete frames that `read_in_chunks` left in py-amqp's buffer.

    They go to py-amqp's connection, or to `take` until it returns False.

    This saves py-amqp two socket timeouts per frame, a third of its time. py-amqp handles an incomplete or invalid frame
    itself: it waits for the remaining bytes or raises.
    """
    transport = connection.transport
    while len(read := transport._read_buffer) > _FRAME.size:  # noqa: SLF001 - see read_in_chunks
        kind, channel, size = _FRAME.unpack_from(read)
        end = _FRAME.size + size
        if len(read) <= end or read[end] != _FRAME_END:
            return
        # Before the call, because the called function may read more or fail.
        transport._read_buffer = read[end + 1 :]  # noqa: SLF001
        frame = (kind, channel, read[_FRAME.size : end])
        if take is None:
            connection.on_inbound_frame(frame)
        elif not take(frame):
            return
