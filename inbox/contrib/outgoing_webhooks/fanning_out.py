"""One message for several endpoints: in one transaction it becomes an inbox row for each of them.

The row has the body that is sent, so every attempt sends the same bytes. The rows have the id of the message: it finds them
all, and the receivers deduplicate on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial, update_wrapper
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, register
from django.core.serializers.json import DjangoJSONEncoder
from django.db import router

from exactly_once.process.clock import utcnow
from exactly_once.wire.envelope import COMPRESSION, JSON, headers_as_json
from exactly_once.wire.formats import WEBHOOK_HANDLERS
from exactly_once.wire.identity import new_message_id
from exactly_once.wire.text import encoded
from inbox.checks import errors_without_tables
from inbox.contrib.outgoing_webhooks.endpoints import subscribed
from inbox.contrib.outgoing_webhooks.models import Endpoint, State
from inbox.handlers.decorator import database_of, registering
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.handlers.registry import registry
from inbox.states import State as MessageState
from inbox.store.arrivals import Insertion, insert_many
from inbox.store.dialect import LONGEST_LOCK_WAIT
from inbox.store.message_rows import NewRow

Payload = Callable[[Message], Any]
Wanted = Callable[[Message, Endpoint], bool]
TEST = "webhook.test"
"""The topic of a test message, which an operator sends."""
_FAN_OUTS = "webhooks/"
_AT_ONCE, _BYTES_AT_ONCE = 500, 8 * 1024 * 1024
"""Rows of one statement, and the bytes of their bodies."""
_BODIES = DjangoJSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def send_webhooks(*topics: str, payload: Payload | None = None, to: Wanted | None = None, using: str | None = None) -> None:
    """Send the messages of these topics to the endpoints that are registered for them. For the module `handlers` of an app.

    The body of a request is `{"type": topic, "timestamp": …, "data": payload}`.

    Args:
        payload: a function of the message that returns the data to send; default: the message's payload. What it returns is
            public: it should not change with the internal format.
        to: a function of the message and an endpoint; False leaves this endpoint out. Default: every endpoint of the topic.
        using: the database alias of the endpoints.

    Raises:
        TypeError: there is no topic, or `payload` or `to` is not a function.
        ValueError: a topic is invalid or given twice.
    """
    if not topics:
        raise TypeError("send_webhooks() needs at least one topic.")
    for option, function in (("payload", payload), ("to", to)):
        if function is not None and not callable(function):
            raise TypeError(f"{option} is {function!r}: it must be a function.")
    alias = database_of(using)
    for topic in topics:
        if registry.get(f"{_FAN_OUTS}{topic}"):
            raise ValueError(f"send_webhooks() was called for the topic {topic!r} before. Call it once for each topic.")
        add = registering([topic], name=f"{_FAN_OUTS}{topic}", using=alias)
        add(update_wrapper(partial(_fan_out, payload, to, alias), _fan_out))


def fan_outs() -> list[Handler]:
    """The handlers that `send_webhooks` has registered."""
    return [handler for handler in registry.all() if handler.name.startswith(_FAN_OUTS)]


@register()
def check_tables(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """inbox_outgoing_webhooks.E001: webhooks on a database that has no table of endpoints."""
    return errors_without_tables(
        Endpoint,
        [(f"send_webhooks({handler.topics[0]!r})", handler) for handler in fan_outs()],
        what="table of endpoints",
        hint="A message and its requests are stored in one transaction. Allow inbox_outgoing_webhooks to be migrated there in "
        "the database routers, or set using= to another alias.",
        id="inbox_outgoing_webhooks.E001",
    )


def aliases() -> list[str]:
    """The databases with endpoints: those of `send_webhooks`, and the routers' choice, unless they keep the table off it."""
    declared, chosen = {handler.using for handler in fan_outs()}, router.db_for_write(Endpoint)
    return sorted(declared | {chosen} if router.allow_migrate_model(chosen, Endpoint) else declared or {chosen})


def handler_name(endpoint: Endpoint) -> str:
    """The name of the handler of an endpoint's messages."""
    return f"{WEBHOOK_HANDLERS}{endpoint.name}"


def handler_names(alias: str) -> list[str]:
    """The handlers of all endpoints, if this service sends messages to them."""
    is_ours = any(handler.using == alias for handler in fan_outs())
    return [handler_name(endpoint) for endpoint in Endpoint.objects.using(alias).only("name")] if is_ours else []


def _fan_out(payload: Payload | None, to: Wanted | None, using: str, message: Message) -> None:
    endpoints = [endpoint for endpoint in subscribed(using, message.topic) if to is None or to(message, endpoint)]
    if endpoints:
        body = _body(message.topic, message.created_at, message.payload if payload is None else payload(message))
        row = replace(
            _row(message.topic, message.biz_id, message.id, body),
            headers=headers_as_json({name: value for name, value in message.headers.items() if name != COMPRESSION}),
            correlation_id=message.correlation_id,
            causation_id=message.causation_id,
            created_at=message.created_at,
        )
        insert(using, endpoints, row)


def send_test(alias: str, pk: int) -> bool:
    """Send a message of the topic `TEST` to an endpoint, as any other. False: it does not exist, or is disabled."""
    endpoint = Endpoint.objects.using(alias).exclude(state=State.DISABLED).filter(pk=pk).first()
    if endpoint is None:
        return False
    message_id, now = str(new_message_id()), utcnow()
    row = _row(TEST, message_id, message_id, _body(TEST, now, {}))
    insert(alias, [endpoint], replace(row, correlation_id=message_id, created_at=now))
    return True


def _body(topic: str, created_at: datetime | None, data: Any) -> bytes:
    """The body of the requests, as Standard Webhooks recommends it."""
    return encoded(_BODIES.encode({"type": topic, "timestamp": created_at or utcnow(), "data": data}))


def _row(topic: str, biz_id: str, message_id: str, body: bytes) -> NewRow:
    digest = hashlib.sha256(body).hexdigest()
    return NewRow(handler="", topic=topic, biz_id=biz_id, body=body, digest=digest, message_id=message_id, content_type=JSON)


def insert(alias: str, to: Sequence[Endpoint], row: NewRow) -> None:
    """∅ → received, due now, for a message to these endpoints; nothing for those that have it already.

    Raises:
        ConcurrentDuplicate: another transaction is inserting it and did not end in time. The inbox runs the message again.
    """
    size = max(1, min(_AT_ONCE, _BYTES_AT_ONCE // len(row.body)))
    for first in range(0, len(to), size):
        insertions = [
            Insertion(replace(row, handler=handler_name(endpoint)), MessageState.RECEIVED, {"due_after": 0.0})
            for endpoint in to[first : first + size]
        ]
        insert_many(alias, insertions, LONGEST_LOCK_WAIT)
