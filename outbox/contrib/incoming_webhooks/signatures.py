"""Signature schemes: each verifier is a callable of the raw body and the headers.

A verifier accepts a request by returning True. Any other result refuses it, so a function that forgets to return refuses
everything. Signatures are compared in constant time, and neither an error nor a `repr` contains a secret.

The timestamp is compared with the clock of this machine and not with the database's: a request without a valid signature must
not cost a database connection.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

from django.core.exceptions import ImproperlyConfigured

from exactly_once.process.clock import utcnow
from exactly_once.wire.durations import parse_duration

Verify = Callable[[bytes, Mapping[str, str]], bool]
"""A function of the raw body and the headers, whose names are case-insensitive. True accepts the request."""

TOLERANCE = timedelta(minutes=5)
_TIMESTAMP = re.compile(r"[0-9]{1,12}")


class InvalidSignature(Exception):
    """The request is not signed by the provider, or not recently. The text goes to the log: it must not contain a secret."""


class StandardWebhooks:
    """The Standard Webhooks specification with symmetric signatures (`v1`): `webhook-id`, `-timestamp`, `-signature`.

    Args:
        secrets: one, or several while a secret is rotated: base64, with or without the prefix "whsec_".
        tolerance: maximum difference between the signed timestamp and this machine's clock.

    Raises:
        ImproperlyConfigured: a secret or the tolerance cannot be used.
    """

    def __init__(self, *secrets: str, tolerance: timedelta | str = TOLERANCE) -> None:
        self._keys = [_decoded(secret) for secret in _checked(self, secrets)]
        self._tolerance = _duration(self, tolerance)

    def __call__(self, body: bytes, headers: Mapping[str, str]) -> bool:
        timestamp = _required(headers, "webhook-timestamp")
        signed = b".".join([_as_bytes(_required(headers, "webhook-id")), _as_bytes(timestamp), body])
        given = _versions(_required(headers, "webhook-signature").split(), ",")
        _require_match(given, (base64.b64encode(_hmac(key, signed)) for key in self._keys))
        _require_recent(timestamp, self._tolerance)
        return True


class Stripe:
    """Stripe's scheme: `Stripe-Signature: t=…,v1=…`.

    Args:
        secrets: the endpoint's signing secret "whsec_…", or several while it is rolled.
        tolerance: maximum difference between the signed timestamp and this machine's clock.

    Raises:
        ImproperlyConfigured: a secret or the tolerance cannot be used.
    """

    def __init__(self, *secrets: str, tolerance: timedelta | str = TOLERANCE) -> None:
        self._keys = [secret.encode() for secret in _checked(self, secrets)]
        self._tolerance = _duration(self, tolerance)

    def __call__(self, body: bytes, headers: Mapping[str, str]) -> bool:
        parts = _required(headers, "Stripe-Signature").split(",")
        timestamp = next((value for name, _, value in (part.partition("=") for part in parts) if name == "t"), "")
        signed = _as_bytes(timestamp) + b"." + body
        _require_match(_versions(parts, "="), (_hmac(key, signed).hex().encode() for key in self._keys))
        _require_recent(timestamp, self._tolerance)
        return True


class GitHub:
    """GitHub's scheme: `X-Hub-Signature-256: sha256=…`. It signs no timestamp and no delivery id.

    Args:
        secrets: the webhook's secret, or several while it is changed.

    Raises:
        ImproperlyConfigured: a secret cannot be used.
    """

    def __init__(self, *secrets: str) -> None:
        self._keys = [secret.encode() for secret in _checked(self, secrets)]

    def __call__(self, body: bytes, headers: Mapping[str, str]) -> bool:
        given = _as_bytes(_required(headers, "X-Hub-Signature-256"))
        _require_match([given], (b"sha256=" + _hmac(key, body).hex().encode() for key in self._keys))
        return True


def _checked(verifier: object, secrets: Sequence[object]) -> list[str]:
    name, usable = type(verifier).__name__, []
    if not secrets:
        raise ImproperlyConfigured(f"{name}() has no secret: pass the one that the provider shows for this webhook.")
    for number, secret in enumerate(secrets, start=1):
        if not isinstance(secret, str) or not secret.strip():
            what = "blank" if isinstance(secret, str) else f"of the type {type(secret).__name__}"
            raise ImproperlyConfigured(
                f"{name}(): secret {number} of {len(secrets)} is {what}: it must be a str with the secret."
            )
        usable.append(secret)
    return usable


def _decoded(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not key:
        raise ImproperlyConfigured('StandardWebhooks(): a secret is not base64. Pass it as the provider shows it: "whsec_…".')
    return key


def _duration(verifier: object, tolerance: timedelta | str) -> timedelta:
    name = f"{type(verifier).__name__}(): tolerance"
    try:
        duration = parse_duration(name, tolerance)
    except (TypeError, ValueError) as error:
        raise ImproperlyConfigured(str(error)) from error
    if duration <= timedelta():
        raise ImproperlyConfigured(f"{name} is {tolerance!r}: it must be longer than zero.")
    return duration


def _required(headers: Mapping[str, str], name: str) -> str:
    if not (value := headers.get(name)):
        raise InvalidSignature(f"the header {name} is missing")
    return value


def _versions(signatures: Iterable[str], separator: str) -> list[bytes]:
    """The signatures of version 1; those of other versions are ignored, as both specifications demand."""
    split = (signature.partition(separator) for signature in signatures)
    return [_as_bytes(value) for version, _, value in split if version == "v1"]


def _require_match(given: Sequence[bytes], expected: Iterable[bytes]) -> None:
    if not any(hmac.compare_digest(one, other) for other in expected for one in given):
        raise InvalidSignature("no signature matches the body")


def _require_recent(timestamp: str, tolerance: timedelta) -> None:
    if not _TIMESTAMP.fullmatch(timestamp):
        raise InvalidSignature("the timestamp is not a number of seconds")
    if abs(utcnow().timestamp() - int(timestamp)) > tolerance.total_seconds():
        raise InvalidSignature(f"the timestamp differs by more than {tolerance} from the clock of this machine")


def _hmac(key: bytes, signed: bytes) -> bytes:
    return hmac.digest(key, signed, hashlib.sha256)


def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")
