"""The `INBOX` setting, read into one frozen dataclass."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from ipaddress import ip_network
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import router

from exactly_once.conf import settings as options
from exactly_once.conf.app_options import AppOptions
from exactly_once.conf.masking import kind, masked, quoted, why_unreadable
from exactly_once.conf.settings import load
from exactly_once.packages import label_of
from exactly_once.transport.broker import LOCAL_BROKER, why_no_exchange
from exactly_once.wire.body import BODY_LIMIT_BYTES
from exactly_once.wire.retry import RetryPolicy
from exactly_once.wire.text import why_unfit

IN_THE_DATABASE = "database"
_RETRY_FACTOR = 2.5
_LARGEST_AGE_MARGIN = timedelta(days=1)
_HTTP = ("http://", "https://"), "a URL like http://host:15672"
_REDIS = ("redis://", "rediss://", "unix://"), "'database' or a URL like redis://host:6379/0"
"""The schemes of an option, and what it must be."""


@dataclass(frozen=True, kw_only=True)
class InboxOptions(AppOptions):
    """The options of `INBOX`, with their defaults, besides those that both apps have. BROKER_SSL, ALERTS, HTTP, REDACT
    and REDACT_ERRORS that are empty are taken from `OUTBOX`.

    Attributes:
        BROKER_URL: any kombu URL or `local://`; "" takes `OUTBOX["BROKER_URL"]`, so that a service sets it once.
        MANAGEMENT_URL: RabbitMQ's management API, which shows policies that limit deliveries; "": its default port, if the
            broker uses its default port.
        EXCHANGE: the topic exchange that the queues are bound to; "" takes `OUTBOX["EXCHANGE"]`.
        GROUP: this service's name on the broker, the prefix of its queue names; "" takes the project's name.
        QUEUE_TYPE: RabbitMQ queue type of the queues declared: "quorum" or "classic".
        BODY_LIMIT_BYTES: largest body that is decoded, before and after inflating. Larger messages become dead letters.
        ACK_TIMEOUT: how long the broker waits for an acknowledgement: RabbitMQ's `consumer_timeout`.
        PREFETCH: maximum number of unacknowledged deliveries of each queue in one process.
        REDELIVERY_AFTER: a stored message whose process died during its run is tried again after this; of several of them, a
            process begins one in this time.
        DUPLICATE_TIMEOUT: how long a delivery waits for a concurrent duplicate's transaction before it is deferred.
        LEASE_STORE: the store of leased handlers' leases: "database", the handler's own, or a redis:// URL.
        RETENTION: how long receipts are stored, which is the deduplication window.
        AROUND: dotted paths of functions that take a message and return a context manager, which is entered around each call
            of a handler, inside its transaction.
        WEBHOOK_NETWORKS: networks that webhook endpoints may be in although they are not public, such as "10.1.0.0/16".
    """

    BROKER_URL: str = field(default="", repr=False)
    MANAGEMENT_URL: str = field(default="", repr=False)
    EXCHANGE: str = ""
    GROUP: str = ""
    QUEUE_TYPE: str = "quorum"
    BODY_LIMIT_BYTES: int = BODY_LIMIT_BYTES
    ACK_TIMEOUT: timedelta = timedelta(minutes=30)
    PREFETCH: int = 50
    REDELIVERY_AFTER: timedelta = timedelta(seconds=10)
    DUPLICATE_TIMEOUT: timedelta = timedelta(seconds=2)
    LEASE_STORE: str = field(default=IN_THE_DATABASE, repr=False)
    RETENTION: timedelta = timedelta(days=365)
    AROUND: tuple[str, ...] = ()
    WEBHOOK_NETWORKS: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.MANAGEMENT_URL and (reason := _why_no_url(self.MANAGEMENT_URL, *_HTTP)):
            raise ValueError(f"MANAGEMENT_URL is {masked(self.MANAGEMENT_URL)}: {reason}.")
        if self.EXCHANGE and (reason := why_no_exchange(self.EXCHANGE)):
            raise ValueError(f"EXCHANGE is {quoted(self.EXCHANGE)}: {reason}.")
        if self.GROUP and (reason := why_unfit(self.GROUP)):
            raise ValueError(f"GROUP is {quoted(self.GROUP)}, which cannot be the prefix of a queue name: {reason}.")
        if self.QUEUE_TYPE not in {"quorum", "classic"}:
            raise ValueError(f"QUEUE_TYPE is {quoted(self.QUEUE_TYPE)}: it must be 'quorum' or 'classic'.")
        for network in self.WEBHOOK_NETWORKS:
            if reason := _why_no_network(network):
                raise ValueError(f"WEBHOOK_NETWORKS contains {network!r}: {reason}.")
        if self.LEASE_STORE != IN_THE_DATABASE and (reason := _why_no_url(self.LEASE_STORE, *_REDIS)):
            raise ValueError(f"LEASE_STORE is {masked(self.LEASE_STORE)}: {reason}.")

    def in_force(self, name: str) -> Any:
        """The value of ALERTS, HTTP or BROKER_SSL, if it is empty that of `OUTBOX`."""
        own = getattr(self, name)
        return own if self.is_given(name) else options.parse(type(own), f"OUTBOX[{name!r}]", _given_to_the_outbox(name, {}))

    @cached_property
    def retry(self) -> RetryPolicy:
        first, longest = self.BACKOFF
        return RetryPolicy(max_attempts=self.MAX_ATTEMPTS, base=first, factor=_RETRY_FACTOR, cap=longest)

    @cached_property
    def broker_url(self) -> str:
        return self.BROKER_URL or _option_of_the_outbox("BROKER_URL", LOCAL_BROKER)

    @property
    def broker_setting(self) -> str:
        """The name of the setting that `broker_url` comes from."""
        return 'INBOX["BROKER_URL"]' if self.BROKER_URL else 'OUTBOX["BROKER_URL"]'

    @cached_property
    def exchange(self) -> str:
        return self.EXCHANGE or _option_of_the_outbox("EXCHANGE", "outbox")

    @cached_property
    def redact(self) -> str:
        return self.REDACT or _option_of_the_outbox("REDACT", "")

    @cached_property
    def redact_errors(self) -> str:
        return self.REDACT_ERRORS or _option_of_the_outbox("REDACT_ERRORS", "")

    @cached_property
    def around(self) -> list[Callable[..., Any]]:
        """The functions of AROUND.

        Raises:
            Exception: one cannot be loaded; `inbox.E008` reports it.
        """
        return [load(path) for path in self.AROUND]

    @cached_property
    def group(self) -> str:
        return self.GROUP or str(getattr(settings, "ROOT_URLCONF", "")).partition(".")[0] or "django"

    @cached_property
    def longest_silence(self) -> float:
        """Seconds after which a waiting delivery is stored and acknowledged: half of ACK_TIMEOUT, to leave time for its run."""
        return self.ACK_TIMEOUT.total_seconds() / 2

    @cached_property
    def age_margin(self) -> timedelta:
        """How far the clocks may differ by which an age is measured: a day, or a quarter of a RETENTION below four days."""
        return min(_LARGEST_AGE_MARGIN, self.RETENTION / 4)

    @cached_property
    def oldest_run(self) -> timedelta:
        """The maximum message age: an older delivery is not run, because its receipt may already be deleted."""
        return self.RETENTION - self.age_margin


_latest: tuple[object, object, InboxOptions] | None = None


def inbox_options() -> InboxOptions:
    """The current options.

    Raises:
        ImproperlyConfigured: `INBOX`, or an option it takes from `OUTBOX`, is invalid; `manage.py check` reports it, too.
    """
    global _latest  # noqa: PLW0603 - a cache of one entry, keyed by the settings objects
    given, outbox = getattr(settings, "INBOX", None), getattr(settings, "OUTBOX", None)
    if _latest is None or _latest[0] is not given or _latest[1] is not outbox:
        read = options.parse(InboxOptions, "INBOX", {} if given is None else given)
        _ = read.broker_url, read.tls, read.alerts, read.http, read.exchange, read.redact, read.redact_errors
        _latest = given, outbox, read
    return _latest[2]


def has_outbox(alias: str) -> bool:
    """Does this project have an outbox in the database, from which a relay can hand the past over?"""
    return apps.is_installed("outbox") and bool(router.allow_migrate(alias, label_of("outbox")))


def outbox_keeps_history() -> bool:
    """Does the outbox of this project keep published messages?"""
    return _given_to_the_outbox("KEEP_HISTORY", ...) is not None


def _option_of_the_outbox(name: str, otherwise: str) -> str:
    """An option of the `OUTBOX` setting.

    Raises:
        ImproperlyConfigured: it is not a string.
    """
    given = _given_to_the_outbox(name, otherwise)
    if not isinstance(given, str):
        raise ImproperlyConfigured(f"OUTBOX[{name!r}] is {kind(given)}: it must be a str.")
    return given


def _given_to_the_outbox(name: str, otherwise: Any) -> Any:
    """What the `OUTBOX` setting says. The outbox app need not be installed."""
    outbox = getattr(settings, "OUTBOX", None)
    return outbox.get(name, otherwise) if isinstance(outbox, dict) else otherwise


def _why_no_url(url: str, schemes: tuple[str, ...], expected: str) -> str | None:
    return why_unreadable(url) if url.startswith(schemes) else f"it must be {expected}"


def _why_no_network(text: str) -> str | None:
    try:
        ip_network(text)
    except ValueError as error:
        return f"it must be a network such as 10.1.0.0/16 or fd00::/8 ({error})"
    return None
