"""Redact payloads before a page or an export shows them, by a function of the project: `OUTBOX["REDACT"]`, `INBOX["REDACT"]`.

    def payload(topic, payload, headers):
        return {**payload, "iban": "…"} if topic.startswith("bank.") else payload

The function gets a decoded payload of its own and may change it. If it fails, nothing of the payload is shown. A body that
cannot be decoded is not shown either.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext

from exactly_once.conf.settings import load
from exactly_once.console.display import Shown, as_json, as_payload
from exactly_once.process.logs import escaping_logger
from exactly_once.wire.body import Undecodable, decode_payload

logger = escaping_logger(__name__)

_OF_CELERY = ("argsrepr", "kwargsrepr")
"""Headers in which Celery repeats the arguments of a task."""
_REMOVED = "…"


class RedactionFailed(Exception):
    """The function could not be loaded, raised, or returned something that is not JSON. The text is for a page."""


@dataclass(frozen=True)
class Redaction:
    """The redaction of one app.

    Attributes:
        path: of the function; "" shows payloads as they are.
        field: of the payload that the function gets, for a payload in an envelope of its own; "" is the whole payload.
    """

    path: str
    field: str = ""

    def __bool__(self) -> bool:
        return bool(self.path)

    def payload(self, topic: str, payload: Any, headers: Any) -> Any:
        """What may be shown of a decoded payload.

        Raises:
            RedactionFailed: nothing may be shown.
        """
        if not self.path:
            return payload
        try:
            given = payload[self.field] if self.field else payload
            redacted = load(self.path)(topic, given, dict(headers) if isinstance(headers, Mapping) else {})
            json.dumps(redacted)
        except Exception as error:
            logger.exception("The function %s failed to redact a payload of topic %s; it is not shown.", self.path, topic)
            # Its message may contain values of the payload.
            raise RedactionFailed(
                gettext("The function %(path)s failed to redact the payload (%(error)s). It is not shown.")
                % {"path": self.path, "error": type(error).__name__}
            ) from error
        return {**payload, self.field: redacted} if self.field else redacted

    def shown(self, body: bytes, content_type: str, *, topic: str, headers: Any, compression: str = "") -> Shown:
        """A body for a page."""
        if not self.path:
            return as_payload(body, content_type, compression)
        try:
            payload = decode_payload(body, content_type, compression=compression)
        except Undecodable:
            return Shown(text="", note=gettext("The body cannot be decoded, so it cannot be redacted. It is not shown."))
        try:
            return as_json(self.payload(topic, payload, headers))
        except RedactionFailed as failed:
            return Shown(text="", note=str(failed))

    def headers(self, value: Any) -> Any:
        """Headers, or a stored form that has some, without the arguments of a Celery task."""
        if not self.path or not isinstance(value, Mapping):
            return value
        return {name: _REMOVED if name in _OF_CELERY else self.headers(inner) for name, inner in value.items()}
