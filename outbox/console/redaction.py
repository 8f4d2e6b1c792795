"""Redact payloads before a page or an export shows them, by a function of the project: `OUTBOX["REDACT"]`, `INBOX["REDACT"]`.

    def payload(topic, payload, headers):
        return {**payload, "iban": "…"} if topic.startswith("bank.") else payload

The function gets a decoded payload of its own and may change it. If it fails, nothing of the payload is shown. A body that
cannot be decoded is not shown either.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from django.utils.translation import gettext

from outbox.console.display import Shown, as_json, as_payload
from outbox.kernel.body import Undecodable, decode_payload
from outbox.kernel.text import describe

logger = logging.getLogger(__name__)

Redactor = Callable[[str, Any, dict[str, Any]], Any]
"""Takes the topic, the decoded payload and the headers; returns what may be shown."""
_OF_CELERY = ("argsrepr", "kwargsrepr")
"""Headers in which Celery repeats the arguments of a task."""
_REMOVED = "…"


class RedactionFailed(Exception):
    """The function could not be loaded, raised, or returned something that is not JSON. The text is for a page."""


def why_no_redactor(path: str) -> str | None:
    """Why no function can be loaded by this dotted path, or None if one can."""
    try:
        _load(path)
    except Exception as error:  # noqa: BLE001 - an import runs code of the project
        return describe(error)
    return None


def _load(path: str) -> Redactor:
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ImportError("it is not a dotted path like 'myproject.redact.payload'")
    module = import_module(module_name)
    function: Any = getattr(module, name, None)
    if callable(function):
        redactor: Redactor = function
        return redactor
    close = difflib.get_close_matches(name, [known for known, value in vars(module).items() if callable(value)], n=1)
    remedy = f"; did you mean '{module_name}.{close[0]}'?" if close else ""
    raise ImportError(f"the module {module_name} has no function {name!r}{remedy}")


@dataclass(frozen=True)
class Redaction:
    """The redaction of one app.

    Attributes:
        path: of the function; "" shows payloads as they are.
    """

    path: str

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
            redacted = _load(self.path)(topic, payload, dict(headers) if isinstance(headers, Mapping) else {})
            json.dumps(redacted)
        except Exception as error:
            logger.exception("The function %s failed to redact a payload of topic %s; it is not shown.", self.path, topic)
            # Its message may contain values of the payload.
            raise RedactionFailed(
                gettext("The function %(path)s failed to redact the payload (%(error)s). It is not shown.")
                % {"path": self.path, "error": type(error).__name__}
            ) from error
        return redacted

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
