"""The options that `OUTBOX` and `INBOX` both have, and those of `ALERTS`, `HTTP` and `BROKER_SSL`, as dataclasses.

`HTTP` says who may call the HTTP API. A token is stored as the SHA-256 of its text. That is sufficient for a random token of 32
bytes, and it is not for a password.
"""

import hashlib
import hmac
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, cast
from urllib.parse import urlsplit

from exactly_once.conf import settings as options
from exactly_once.conf.masking import masked, quoted
from exactly_once.wire.text import describe, matches, why_unfit

_SCOPE = re.compile(r"(publish|manage|read):(\*|[^*]+(?:\.\*)?)")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_OF_NOTHING = hashlib.sha256(b"").hexdigest()
_KEPT_OTHERS = timedelta(days=7)
"""A person may want to know of a message that has not succeeded, or decide about it."""
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_TLS_FILES = ("ca_certs", "certfile", "keyfile")


@dataclass(frozen=True, kw_only=True)
class AlertOptions:
    """Every option of `ALERTS`, with its default.

    Attributes:
        EVERY: time between two evaluations.
        IGNORE: names of conditions that are not evaluated.
        BACKLOG: more messages in the queues of a handler at the broker raise an alert.
        MAIL_TO: recipients of an e-mail for each raised and cleared alert. Django's EMAIL settings, or its MAILERS, send it.
        WEBHOOK_URL: receives a JSON object by POST for each raised and cleared alert; "" for none. It must be https://, except
            on this host.
    """

    EVERY: timedelta = timedelta(minutes=1)
    IGNORE: tuple[str, ...] = ()
    BACKLOG: int = 10_000
    MAIL_TO: tuple[str, ...] = ()
    WEBHOOK_URL: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.WEBHOOK_URL and (reason := _why_no_webhook(self.WEBHOOK_URL)):
            raise ValueError(f"WEBHOOK_URL is {masked(self.WEBHOOK_URL)}: {reason}.")

    @property
    def channels(self) -> list[str]:
        """Where alerts are sent, apart from the signal."""
        return [*(["mail"] if self.MAIL_TO else []), *(["webhook"] if self.WEBHOOK_URL else [])]


@dataclass(frozen=True)
class Scope:
    """What a client may do with some names: `publish:shop.*`.

    Attributes:
        action: "publish" and "manage" apply to topics, "read" to subscriptions.
        pattern: see `matches`.
    """

    action: str
    pattern: str


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client of the HTTP API.

    Attributes:
        name: for the trail and the log.
        digests: of its valid tokens, several while a token is replaced.
        scopes: what it may do.
    """

    name: str
    digests: tuple[str, ...] = field(repr=False)
    scopes: tuple[Scope, ...]

    def may(self, name: str, *actions: str) -> bool:
        """Does a scope allow one of the actions on this topic or subscription?"""
        return any(scope.action in actions and matches(scope.pattern, name) for scope in self.scopes)


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """One client in `TOKENS`.

    Attributes:
        DIGESTS: the SHA-256 of each of its valid tokens, in hexadecimal digits.
        SCOPES: what it may do: "publish:shop.*", "manage:shop.order.placed", "read:*".
    """

    DIGESTS: tuple[str, ...] = field(default=(), repr=False)
    SCOPES: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.DIGESTS or not all(map(_DIGEST.fullmatch, self.DIGESTS)):
            # The value is not quoted: it may be the token itself.
            raise ValueError("DIGESTS must have at least one SHA-256, 64 lower-case hexadecimal digits, and nothing else.")
        if _OF_NOTHING in self.DIGESTS:
            raise ValueError("DIGESTS has the SHA-256 of an empty text: the token was empty when it was hashed.")
        if not self.SCOPES:
            raise ValueError('SCOPES is empty: name what the client may do, such as "publish:shop.*".')
        for text in self.SCOPES:
            _scope(text)


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Every option of `HTTP`, with its default.

    Attributes:
        TOKENS: the clients by name, each a dict with DIGESTS and SCOPES, see `TokenOptions`. Without one, every request
            is refused.
        MAX_WAITING: maximum number of requests that wait for messages at the same time in one web process; one client has
            an equal share of them. None: 20 under ASGI; under WSGI 1, or 0 if the process has a single thread.
    """

    TOKENS: dict = field(default_factory=dict, repr=False)  # type: ignore[type-arg] # the parser compares with the bare type
    MAX_WAITING: int | None = None

    def __post_init__(self) -> None:
        digests = [digest for client in self.clients for digest in client.digests]
        if len({*digests}) < len(digests):
            raise ValueError("TOKENS has the same digest twice: a token must identify one client.")

    @cached_property
    def clients(self) -> Sequence[Client]:
        return [_client(name, given) for name, given in self.TOKENS.items()]

    @cached_property
    def readers(self) -> Sequence[Client]:
        """The clients that may read a subscription."""
        return [client for client in self.clients if any(scope.action == "read" for scope in client.scopes)]

    def client_of(self, token: str) -> Client | None:
        """The client with this token; None if there is none. The time it takes does not depend on the token."""
        given = hashlib.sha256(token.encode("utf-8", "backslashreplace")).hexdigest()
        found = None
        for client in self.clients:
            for digest in client.digests:
                if hmac.compare_digest(digest, given):
                    found = client
        return found


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """The options of `BROKER_SSL`, with their defaults, under the names of Python's `ssl`.

    The certificate and the host name of the server are verified unless they say otherwise. By default py-amqp does not compare
    the host name, and kombu verifies nothing of a Redis.

    Attributes:
        ca_certs: a file with the certificates of the authorities that are trusted; "": those of the system.
        certfile: a file with the client's certificate, and those that lead to its authority; "": none.
        keyfile: a file with the private key of `certfile`, not encrypted; "": `certfile` contains it.
        cert_reqs: `ssl.CERT_NONE` accepts any certificate.
        check_hostname: whether the certificate must be for the host of the URL.
        server_hostname: the name that the certificate must be for, instead of the host of the URL; for RabbitMQ only.
    """

    ca_certs: str = ""
    certfile: str = ""
    keyfile: str = ""
    cert_reqs: ssl.VerifyMode = ssl.CERT_REQUIRED
    check_hostname: bool = True
    server_hostname: str = ""

    def __post_init__(self) -> None:
        if self.keyfile and not self.certfile:
            raise ValueError("keyfile is the key of certfile, which is not set.")
        if self.server_hostname and not self.compares_names:
            raise ValueError("server_hostname is set, but the host name is not compared.")

    @property
    def compares_names(self) -> bool:
        return self.check_hostname and self.cert_reqs is not ssl.CERT_NONE

    def for_amqp(self, host: str) -> dict[str, Any]:
        """The argument `ssl` of py-amqp, which compares the host name if it is given one."""
        names = {"server_hostname": self.server_hostname or host} if self.compares_names else {}
        return {**self._given(), "cert_reqs": self.cert_reqs, **names}

    def for_redis(self) -> dict[str, Any]:
        """Arguments of redis-py's connection."""
        names = {"ssl_cert_reqs": self.cert_reqs, "ssl_check_hostname": self.compares_names}
        return {**{f"ssl_{name}": value for name, value in self._given().items()}, **names}

    def context(self) -> ssl.SSLContext:
        """As py-amqp makes one. Raises OSError or ValueError if a file or an option cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.compares_names
        context.verify_mode = self.cert_reqs
        if self.certfile:
            # An encrypted key would ask for its password on the terminal.
            context.load_cert_chain(self.certfile, self.keyfile or None, password="")
        if self.ca_certs:
            context.load_verify_locations(self.ca_certs)
        else:
            context.load_default_certs()
        return context

    def why_unloadable(self) -> str:
        """Why this process cannot use the files, or ""."""
        if given := self._given():
            try:
                self.context()
            except (OSError, ValueError) as error:
                named = ", ".join(f"{name} {value!r}" for name, value in given.items())
                return f"BROKER_SSL cannot be used ({named}): {describe(error)}"
        return ""

    def _given(self) -> dict[str, str]:
        return {name: value for name in _TLS_FILES if (value := getattr(self, name))}


DEFAULT_TLS = TlsOptions()


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """The options that both apps have.

    Attributes:
        BROKER_SSL: the options of TLS to the broker and to its management API, see `TlsOptions`.
        CONCURRENCY: threads of one process that call functions of the project, each with its own database connection: handlers
            in a consumer; callbacks in a relay, and as many checkers. One callback, or topic, may use all but one of them.
        MAX_ATTEMPTS: failed attempts after which a message is dead: the first and 16 retries. An unroutable message never is.
        BACKOFF: the delay after the first failed attempt, and the longest one.
        KEEP_HISTORY: how long settled messages stay. With None the content of one that has succeeded is deleted at once:
            its row in the outbox, its body and headers in the inbox; what else is settled stays for seven days.
        TRAIL: the transitions to record in the trail: "decisions", those that matter to an operator, or "all".
        TRAIL_RETENTION: how long trail entries are kept, and bulk operations after their end, with their outcomes.
        AUDIT_RETENTION: how long entries of the audit log are kept.
        ALERTS: the options of alerts, see `AlertOptions`.
        HTTP: the options of the HTTP API, see `HttpOptions`.
        REDACT: the dotted path of a function that redacts payloads for the admin, see `console.operators.redaction`; "": none.
        REDACT_ERRORS: the dotted path of a function that redacts the text of errors and tracebacks before they are stored, see
            `exactly_once.conf.settings.redacted_error`; "": none.
        POLL_INTERVAL: longest poll interval of a loop that nothing wakes up.
        STUCK_AFTER: a message that is overdue by more than this is shown as stuck, and raises an alert.
        WATCHDOG: a process ends if one of its loops is silent for this long.
        SHUTDOWN_GRACE: longest time from SIGTERM to the end of the process.
    """

    BROKER_SSL: TlsOptions = DEFAULT_TLS
    CONCURRENCY: int = 4
    MAX_ATTEMPTS: int = 17
    BACKOFF: tuple[timedelta, ...] = (timedelta(seconds=10), timedelta(hours=2))
    KEEP_HISTORY: timedelta | None = timedelta(days=7)
    TRAIL: str = "decisions"
    TRAIL_RETENTION: timedelta = timedelta(days=30)
    AUDIT_RETENTION: timedelta = timedelta(days=365)
    ALERTS: AlertOptions = AlertOptions()
    HTTP: HttpOptions = HttpOptions()
    REDACT: str = ""
    REDACT_ERRORS: str = ""
    POLL_INTERVAL: timedelta = timedelta(seconds=0.5)
    STUCK_AFTER: timedelta = timedelta(minutes=5)
    WATCHDOG: timedelta = timedelta(seconds=60)
    SHUTDOWN_GRACE: timedelta = timedelta(seconds=25)

    def __post_init__(self) -> None:
        options.require_backoff(self.BACKOFF)
        if self.TRAIL not in {"decisions", "all"}:
            raise ValueError(f"TRAIL is {quoted(self.TRAIL)}: it must be 'decisions' or 'all'.")

    def is_given(self, name: str) -> bool:
        """Does the dictionary have this option, and is it not empty?"""
        return getattr(self, name) is not getattr(type(self), name)

    def in_force(self, name: str) -> Any:
        """The value of ALERTS, HTTP or BROKER_SSL."""
        return getattr(self, name)

    @cached_property
    def keeps(self) -> timedelta:
        """How long history is kept. Without KEEP_HISTORY it has what has not succeeded, and messages with pending callbacks."""
        return self.KEEP_HISTORY or _KEPT_OTHERS

    @cached_property
    def keeps_successes(self) -> bool:
        return self.KEEP_HISTORY is not None

    @cached_property
    def records_all(self) -> bool:
        """Does the trail record also the transitions that do not matter to an operator?"""
        return self.TRAIL == "all"

    @cached_property
    def tls(self) -> TlsOptions:
        return cast("TlsOptions", self.in_force("BROKER_SSL"))

    @cached_property
    def own_tls(self) -> TlsOptions | None:
        """None if this app has no BROKER_SSL."""
        return self.BROKER_SSL if self.is_given("BROKER_SSL") else None

    @cached_property
    def alerts(self) -> AlertOptions:
        return cast("AlertOptions", self.in_force("ALERTS"))

    @cached_property
    def http(self) -> HttpOptions:
        return cast("HttpOptions", self.in_force("HTTP"))


def _why_no_webhook(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError as error:
        return f"it cannot be read ({error})"
    if parts.scheme == "https" and host:
        return None
    if parts.scheme == "http" and host in _LOOPBACK:
        return None
    return "it must be a URL like https://host/path"


def _client(name: object, given: object) -> Client:
    # The slash ends it in the biz-ids of messages with an Idempotency-Key.
    if not isinstance(name, str) or not name or "/" in name or why_unfit(name):
        raise ValueError(f"TOKENS has the name {quoted(name)}: it must be the short name of a client, without a slash.")
    token = options.parse(TokenOptions, f"TOKENS[{name!r}]", given)
    return Client(name=name, digests=tuple(token.DIGESTS), scopes=tuple(map(_scope, token.SCOPES)))


def _scope(text: str) -> Scope:
    if not (parts := _SCOPE.fullmatch(text)):
        raise ValueError(
            f"SCOPES has {text[:60]!r}: it must be publish, manage or read, a colon, and a name, the beginning of names with "
            '".*" after it, or "*" for all, as in "publish:shop.*".'
        )
    return Scope(*parts.groups())
