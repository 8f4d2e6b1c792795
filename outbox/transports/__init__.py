"""The transport for each broker URL."""

from collections.abc import Callable

from django.apps import apps
from django.db import connections
from django.utils.module_loading import import_string

from exactly_once.transport.broker import is_local, scheme_of, why_unusable
from exactly_once.transport.interface import Transport
from outbox.conf import outbox_options

_BY_SCHEME = {
    "local": "inbox.local.LocalTransport",
    "amqp": "outbox.transports.amqp.AmqpTransport",
    "amqps": "outbox.transports.amqp.AmqpTransport",
    "pyamqp": "outbox.transports.amqp.AmqpTransport",
}
_OTHERWISE = "outbox.transports.virtual.VirtualTransport"


def transport_class(url: str) -> type[Transport]:
    """The transport for a broker URL, found by name so that the outbox imports nothing of the inbox.

    Raises:
        ImportError: no transport supports the URL, or its library is not installed.
    """
    scheme = scheme_of(url)
    if scheme == "local" and not apps.is_installed("inbox"):
        raise ImportError("local:// delivers messages to 'inbox', which is not in INSTALLED_APPS")
    if scheme != "local" and (reason := why_unusable(url)):
        raise ImportError(reason)
    found: type[Transport] = import_string(_BY_SCHEME.get(scheme, _OTHERWISE))
    return found


def why_not_from(alias: str, url: str) -> str | None:
    """Why a relay of this database must not send to a broker; None if it may."""
    if is_local(url) or connections[alias].vendor != "sqlite":
        return None
    return f"{alias!r} is a SQLite database, and a relay would hold its only write lock until the broker confirms"


def open_transport(url: str, *, alias: str, exchange: str) -> Transport:
    """A transport to `url` for messages of the database `alias`; not connected yet."""
    make: Callable[..., Transport] = transport_class(url)
    if is_local(url):
        return make(url, alias=alias, exchange=exchange)
    return make(url, alias=alias, exchange=exchange, tls=outbox_options().tls)
