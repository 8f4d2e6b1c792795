"""The option `HTTP` of both apps, as a dataclass: who may call the HTTP API, and its limits.

A token is stored as the SHA-256 of its text. That is sufficient for a random token of 32 bytes, and it is not for a password.
"""

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from exactly_once.conf import settings as options
from exactly_once.conf.masking import quoted
from exactly_once.wire.text import matches, why_unfit

_SCOPE = re.compile(r"(publish|manage|read):(\*|[^*]+(?:\.\*)?)")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_OF_NOTHING = hashlib.sha256(b"").hexdigest()


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
        options.require_positive(self)
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


def read_http(given: object) -> HttpOptions:
    """`HTTP` of a setting.

    Raises:
        ValueError: it is invalid.
    """
    return options.parse(HttpOptions, "HTTP", given)


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
