"""How both halves reach a broker: bounded waits, the same exchange, the same idea of what a broken connection is.

Nothing is connected here.
"""

from __future__ import annotations

import socket
from typing import Any

from amqp.exceptions import AMQPError
from kombu.exceptions import KombuError

EXCHANGE_TYPE = "topic"
HEARTBEAT_SECONDS = 10
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
    }
    return {
        "connect_timeout": 5,
        "heartbeat": HEARTBEAT_SECONDS,
        "transport_options": {**bounded, **transport_options},
    }


def masked(url: str) -> str:
    """`url` without its password, for people and logs."""
    scheme, separator, rest = url.partition("://")
    credentials, at, where = rest.rpartition("@")
    user, colon, _ = credentials.partition(":")
    return f"{scheme}{separator}{user}{':***' if colon else ''}{at}{where}"
