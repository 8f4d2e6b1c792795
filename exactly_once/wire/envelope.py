"""The wire format: CloudEvents 1.0 in AMQP binary mode, and the other formats that the inbox accepts.

Attributes are message headers named `cloudEvents:<attribute>`. The body holds the payload, byte for byte as it was serialised
at publish. Deliveries may also use the `cloudEvents_` prefix (the CloudEvents AMQP binding allows both), structured mode
(`application/cloudevents+json`), or plain JSON with an AMQP `message_id`.

Sources: CloudEvents 1.0.2; CloudEvents AMQP Protocol Binding 1.0.2; W3C Trace Context (for `traceparent`).
docs/reference/wire-format.md documents this format, with frozen vectors.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from exactly_once.wire.body import BODY_LIMIT_BYTES, Undecodable, decode_payload
from exactly_once.wire.identity import uuid_in
from exactly_once.wire.text import NAME_LENGTH, describe, encoded, fit, fits, printable

JSON = "application/json"
STRUCTURED_JSON = "application/cloudevents+json"
OPAQUE = "application/octet-stream"
SPECVERSION = "1.0"
_COLON, _UNDERSCORE = "cloudEvents:", "cloudEvents_"
BIZ_ID_HEADER = "cloudEvents:bizid"
ORDERING_KEY_HEADER = "cloudEvents:orderingkey"
REPLAY_HEADER = "cloudEvents:replay"
"""Marks a message that was sent again on purpose, and by whom: "operator"."""
BY_OPERATOR = "operator"
_RESERVED = ("cloudevents", "x-", "ce-")
# RabbitMQ adds these after a redelivery or in a dead letter exchange. No publisher set them, and none may publish them again.
_BY_BROKER = (
    "x-death",
    "x-first-death-",
    "x-last-death-",
    "x-delivery-count",
    "x-acquired-count",
    "x-received-from",
    "x-shovel",
)
COMPRESSION = "compression"
"""kombu's header that names the compression of a body."""
_RESERVED_NAMES = {COMPRESSION}
COPIES = ("CC", "BCC")
"""Headers by which RabbitMQ routes copies of a message ("Sender-selected Distribution"), in capitals only. Their values must
be lists; RabbitMQ closes the channel for any other value."""
RESERVED_HEADERS = "'compression', 'CC', 'BCC', and names that begin with 'cloudEvents', 'ce-' or 'x-'"

# Milliseconds since 1970 exceeded this in 1973; seconds will in the year 5138.
_LEAST_MILLISECONDS = 1e11
_INT64_END = 2**63
HEADERS_LIMIT_BYTES = 16 * 1024
"""Of the headers of a publisher, as JSON; and of one header that is received."""
_FIRST_WITH_EXPONENT = 1e16

HeaderValue = str | int | float | bool


def is_reserved(header: str) -> bool:
    """Does `header` belong to CloudEvents or to the broker? A publisher must not set it then."""
    return header in COPIES or header.lower() in _RESERVED_NAMES or header.lower().startswith(_RESERVED)


def headers_as_json(headers: Mapping[str, HeaderValue]) -> str:
    """Text for a jsonb column. jsonb turns a float in the form 1e+16 into a whole number, so such floats are written out."""
    if not headers:
        return "{}"
    return f"{{{', '.join(f'{json.dumps(name)}: {_as_json(value)}' for name, value in headers.items())}}}"


def _as_json(value: HeaderValue) -> str:
    return f"{value:.1f}" if isinstance(value, float) and abs(value) >= _FIRST_WITH_EXPONENT else json.dumps(value)


class Envelope(NamedTuple):
    """One message in its form on the wire.

    Attributes:
        id: the message id; "" when a foreign producer gave none.
        topic: CloudEvents `type`.
        source: CloudEvents `source`, a URI reference.
        created_at: by the producer's database clock; None when a foreign producer gave none.
        deliver_at: not before this instant, for delayed messages; else None.
        biz_id: the name of the business fact; "" for none.
        key: ordering key; "" guarantees no order.
        body: the serialised payload.
        headers: the publisher's own.
        replayed: an operator had it sent again, so it may arrive once more.
    """

    id: str
    topic: str
    source: str = ""
    created_at: datetime | None = None
    deliver_at: datetime | None = None
    biz_id: str = ""
    key: str = ""
    correlation_id: str = ""
    causation_id: str = ""
    traceparent: str = ""
    content_type: str = JSON
    body: bytes = b""
    headers: Mapping[str, HeaderValue] = MappingProxyType({})
    replayed: bool = False

    @property
    def sent_at(self) -> datetime | None:
        """When it could first be delivered, by the producer's clock; None if that is unknown."""
        return self.created_at and max(self.created_at, self.deliver_at or self.created_at)

    def to_headers(self) -> dict[str, Any]:  # noqa: C901 - written out: a loop over names and values takes twice as long
        """The headers of this message on the wire: the publisher's, then the attributes that are not empty."""
        headers: dict[str, Any] = {**self.headers, "cloudEvents:specversion": SPECVERSION}
        if self.id:
            headers["cloudEvents:id"] = self.id
        if self.source:
            headers["cloudEvents:source"] = self.source
        if self.topic:
            headers["cloudEvents:type"] = self.topic
        if self.created_at:
            headers["cloudEvents:time"] = _format_time(self.created_at)
        if self.deliver_at:
            headers["cloudEvents:deliverat"] = _format_time(self.deliver_at)
        if self.biz_id:
            headers[BIZ_ID_HEADER] = self.biz_id
        if self.key:
            headers[ORDERING_KEY_HEADER] = self.key
        if self.correlation_id:
            headers["cloudEvents:correlationid"] = self.correlation_id
        if self.causation_id:
            headers["cloudEvents:causationid"] = self.causation_id
        if self.traceparent:
            headers["cloudEvents:traceparent"] = self.traceparent
        if self.replayed:
            headers[REPLAY_HEADER] = BY_OPERATOR
        return headers

    @property
    def dedup_id(self) -> str:
        """The default deduplication key: the biz-id, else the identity that CloudEvents defines.

        CloudEvents ids are unique within their source only. A UUID is unique without its source.
        """
        if self.biz_id or not self.id:
            return self.biz_id
        return self.id if uuid_in(self.id) else fit(f"{self.source}#{self.id}" if self.source else self.id)


def from_delivery(*, properties: Mapping[str, Any], headers: Mapping[str, Any], body: bytes, routing_key: str) -> Envelope:
    """The envelope of a delivery, without reading its body; see `opened`.

    Args:
        properties: AMQP basic properties (`message_id`, `content_type`, `correlation_id`, `timestamp`…).
        headers: application headers.
        routing_key: the topic of a message without a CloudEvents type.
    """
    attributes, own_headers = _divided(headers)
    content_type = str(properties.get("content_type") or JSON)
    fields = {"content_type": content_type if fits(content_type) else fit(content_type), "body": body, "headers": own_headers}
    otherwise = [
        ("id", properties.get("message_id")),
        ("type", routing_key),
        ("time", properties.get("timestamp")),
        ("correlationid", properties.get("correlation_id")),
    ]
    return _described([*otherwise, *attributes.items()], fields)


def opened(envelope: Envelope, limit: int = BODY_LIMIT_BYTES) -> Envelope:
    """The envelope that the body of a delivery in structured mode describes; any other delivery unchanged.

    Raises:
        OverLimit: see `decode_payload`.
        Undecodable: its body is not a CloudEvent.
    """
    if media_type(envelope.content_type) != STRUCTURED_JSON:  # not by a call, because this is asked twice for each message
        return envelope
    event = decode_payload(envelope.body, STRUCTURED_JSON, compression=compression_of(envelope), limit=limit)
    if not isinstance(event, dict) or "specversion" not in event:
        raise Undecodable(f"The content type is {STRUCTURED_JSON}, but the body is not a CloudEvent.")
    headers = {name: value for name, value in envelope.headers.items() if name != COMPRESSION}
    content_type = fit(str(event.get("datacontenttype") or JSON))
    fields = {**envelope._asdict(), "body": _data(event), "content_type": content_type, "headers": headers}
    return _described(event.items(), fields)


def is_structured(envelope: Envelope) -> bool:
    """Is the message in structured mode, with the attributes and the data of the event in its body?"""
    return media_type(envelope.content_type) == STRUCTURED_JSON


def compression_of(envelope: Envelope) -> str:
    """kombu's name of the body's compression; "" for an uncompressed body."""
    return str(envelope.headers.get(COMPRESSION, ""))


@lru_cache(maxsize=256)  # few distinct values, looked up several times per message
def media_type(content_type: str) -> str:
    """`content_type` without its parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


_FIELDS = {
    "id": "id",
    "type": "topic",
    "source": "source",
    "time": "created_at",
    "deliverat": "deliver_at",
    "bizid": "biz_id",
    "orderingkey": "key",
    "correlationid": "correlation_id",
    "causationid": "causation_id",
    "traceparent": "traceparent",
}
"""By attribute, the field of an `Envelope`."""
_INSTANTS = ("time", "deliverat")
_REPLAY = "replay"
_ATTRIBUTES = {f"{_COLON}{name}": name for name in (*_FIELDS, "specversion", _REPLAY)}
"""By header, the attribute."""
_is_name = re.compile(rf"[ -~]{{,{NAME_LENGTH - 1}}}[!-~]").fullmatch
"""As `fits`, and not blank."""


def _described(attributes: Iterable[tuple[str, Any]], otherwise: Mapping[str, Any]) -> Envelope:
    """The envelope that the attributes describe; the last one of a name that is not blank counts. `otherwise` has its other
    fields, also those of blank attributes.
    """
    fields = {"id": "", "topic": "", **otherwise}
    for name, value in attributes:
        if (field := _FIELDS.get(name)) is None:
            if name == _REPLAY and value:
                fields["replayed"] = True
        elif name not in _INSTANTS and type(value) is str and _is_name(value):
            fields[field] = value
        elif value is not None and str(value).strip():
            fields[field] = _parse_time(value) if name in _INSTANTS else fit(str(value))
    return Envelope(**fields)


def _divided(headers: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, HeaderValue]]:
    """The CloudEvents attributes, and the publisher's own headers, without the broker's.

    For an attribute with both prefixes the value with the colon is used.
    """
    attributes: dict[str, Any] = {}
    own: dict[str, HeaderValue] = {}
    for given, value in headers.items():
        name = str(given)
        if name in _ATTRIBUTES:
            attributes[_ATTRIBUTES[name]] = value
        elif name.startswith((_COLON, _UNDERSCORE)):
            attribute = name[len(_COLON) :]
            attributes[attribute] = headers.get(_COLON + attribute, value)
        elif not name.startswith(_BY_BROKER):
            own[printable(name, NAME_LENGTH)] = _json_safe(value)
    return attributes, own


def _data(event: Mapping[str, Any]) -> bytes:
    """The data of an event in structured mode, in the form of a body in binary mode."""
    try:
        if "data_base64" in event:
            return base64.b64decode(str(event["data_base64"]), validate=True)
        return encoded(json.dumps(event.get("data"), ensure_ascii=False, separators=(",", ":")))
    except binascii.Error as error:
        raise Undecodable(f"The CloudEvent's data_base64 is not base64: {error}") from error
    except (ValueError, RecursionError) as error:
        raise Undecodable(f"The CloudEvent's data cannot be written as JSON: {describe(error)}") from error


def _format_time(instant: datetime) -> str:
    utc = instant if instant.tzinfo is UTC else instant.astimezone(UTC)
    return utc.isoformat(timespec="microseconds")[: -len("+00:00")] + "Z"


def _parse_time(value: object) -> datetime | None:
    """RFC 3339 text, an AMQP timestamp (seconds) or the milliseconds of the CloudEvents AMQP binding; else None."""
    try:
        match value:
            case datetime():
                instant = value
            case str():
                instant = datetime.fromisoformat(value)
            case int() | float():
                instant = datetime.fromtimestamp(value / 1000 if abs(value) >= _LEAST_MILLISECONDS else value, tz=UTC)
            case _:
                return None
        # In UTC, so that the first and the last day of the calendar overflow here, not in a database driver.
        return instant.astimezone(UTC) if instant.tzinfo else instant.replace(tzinfo=UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _json_safe(value: object) -> HeaderValue:
    if isinstance(value, int) and not -_INT64_END <= value < _INT64_END:
        return "a whole number of more than 64 bits"
    if isinstance(value, int | float) and math.isfinite(value):
        return value
    return printable(str(value), HEADERS_LIMIT_BYTES)
