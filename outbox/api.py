"""Publishing: one INSERT in the caller's own transaction.

Everything that can be wrong with a message is found before its row is written. What is written is what will travel: the
payload is serialised here and now, so that a later change of the code or of the data cannot change what was said.

On its way to the broker a message has five types, one for each step, with what is known there: a `Draft` has the arguments,
unchecked; a `NewRow` is checked and serialised, with its message id; a `RelayedMessage` is what the read of a pass returns, as
it is stored; an `OutgoingMessage` adds exchange, queue and expiry, for any transport; an `Envelope` is what is on the wire. A
pass does not read instances of the model, because one takes eight times as long as a named tuple. A transport does not get
columns that only a pass needs, such as the shard and the attempts.

The arguments of `publish` are in `Draft` and once more in `PublishOptions`, because no type checker derives a `TypedDict` from
a dataclass. Signatures and error messages are made from `Draft`.
"""

from __future__ import annotations

import asyncio
import json
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from datetime import UTC, datetime, timedelta
from inspect import signature
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack

from asgiref.sync import sync_to_async
from django.db import transaction
from django.utils import timezone

from exactly_once.process.clock import utcnow
from exactly_once.sql.connections import is_inside_a_transaction
from exactly_once.telemetry import tracing
from exactly_once.telemetry.tracing import OUTER_CORRELATION, caused_by, current_cause
from exactly_once.wire.durations import parse_duration
from exactly_once.wire.envelope import HEADERS_LIMIT_BYTES, RESERVED_HEADERS, HeaderValue, headers_as_json, is_reserved
from exactly_once.wire.formats import PUBLISHED_SETS
from exactly_once.wire.identity import new_message_id, new_message_ids
from exactly_once.wire.payloads import plain
from exactly_once.wire.text import did_you_mean, why_no_topic, why_unfit
from outbox import doorbell
from outbox.conf import outbox_options
from outbox.errors import InvalidMessage, PayloadTooLarge, PublishedOutsideTransaction
from outbox.models import MAX_PRIORITY
from outbox.store import writing
from outbox.store.dialect import database_of
from outbox.store.unique import Name, has_body, take_names
from outbox.topic_options import load_encoder

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Function = TypeVar("_Function", bound=Callable[..., Any])

TRACEPARENT = "traceparent"
"""The W3C trace header: given as a header, it travels as the CloudEvents attribute of that name."""
_SHOWN = 80
_INT64 = range(-(2**63), 2**63)
_ENCODER = "django.core.serializers.json.DjangoJSONEncoder"


@dataclass(frozen=True, kw_only=True)
class PublishedMessage:
    """The stored message: what `publish()` has written or, with `unique=True`, found.

    It is returned before the commit, so nothing has been sent yet. A relay sends the message after the commit;
    `on_published` reports when the broker has confirmed it.

    Attributes:
        id: the message id, the same on every resend.
        topic: as given.
        biz_id: as given, or the message id.
        position: the row's id; grows with every insert on one database.
        created: False when `unique=True` found an earlier message and wrote nothing.
        state: of the message when `publish` returned: "ready" or "scheduled" for a new one; for an earlier one that was found
            also "retrying", "waiting", "paused", "published" or "dead".
    """

    id: uuid.UUID
    topic: str
    biz_id: str
    position: int
    created: bool
    state: str


@dataclass(frozen=True)
class Draft:
    """A message before it is published; the arguments of `publish`, for `publish_many`."""

    topic: str
    payload: Any
    _: KW_ONLY
    biz_id: str | None = None
    key: str = ""
    headers: Mapping[str, HeaderValue] | None = None
    priority: int = 0
    delay: timedelta | str | None = None
    deliver_at: datetime | None = None
    expires_in: timedelta | str | None = None
    unique: bool = False
    strict_order: bool = False


class PrepareOptions(TypedDict, total=False):
    """The fields of a `Draft` that `prepare` takes by name."""

    biz_id: str | None
    key: str
    headers: Mapping[str, HeaderValue] | None
    priority: int
    delay: timedelta | str | None
    deliver_at: datetime | None
    expires_in: timedelta | str | None


class PublishOptions(PrepareOptions, total=False):
    """The fields of a `Draft` that `publish` takes by name."""

    unique: bool
    strict_order: bool


def takes(options: type[PrepareOptions]) -> Callable[[_Function], _Function]:
    """Give the decorated function, for readers of its signature, the fields of a `Draft` in place of its `**options`."""

    def decorate(function: _Function) -> _Function:
        own = signature(function)
        fields = [field for name, field in signature(Draft).parameters.items() if name in options.__annotations__]
        first, using = [*own.parameters.values()][:2], own.parameters["using"]
        function.__signature__ = own.replace(parameters=[*first, *fields, using])  # type: ignore[attr-defined]
        return function

    return decorate


@takes(PublishOptions)
def publish(topic: str, payload: Any, *, using: str | None = None, **options: Unpack[PublishOptions]) -> PublishedMessage:
    """Write a message in the transaction that is open on `using`; the relay carries it once that has committed.

    Args:
        topic: what the message is about; routes it. At most 255 bytes.
        payload: anything the topic's encoder, by default `DjangoJSONEncoder`, turns into JSON; or an instance of a dataclass, a
            Pydantic model or a msgspec Struct.
        biz_id: the business's own name of the fact ("order-17"); consumers deduplicate on it. Default: the message id.
        key: messages with the same key keep their order, that of their rows; "" promises none.
        headers: text, whole numbers, floats and booleans that travel beside the payload.
        priority: 0 (default) to 9, higher first; not together with a key, whose order it would break.
        delay: deliver no earlier than this long from now, by the database's clock: a timedelta, or text such as "90s", "30m",
            "2h" or "1d".
        deliver_at: deliver no earlier than this aware instant.
        expires_in: once it has been due for this long, it is not delivered any more; its state becomes `expired`.
        unique: at most one message per (topic, biz_id) that is published or may still be, as long as it is retained
            (`OUTBOX["KEEP_HISTORY"]` after it was published): a second call writes nothing and returns the first, with its
            state. After one that was cancelled or has expired, a new one is written.
        strict_order: the order of the key is the order of the commits: another transaction that publishes this key with
            strict_order waits here until this one has ended.
        using: the database alias of the business change. Default: the one that the database routers choose for writes of
            `OutboxMessage`; without routers "default".

    Raises:
        PublishedOutsideTransaction: `using` is not inside `atomic()`.
        InvalidMessage, PayloadTooLarge: with the value and the remedy; nothing was written.
        Exception: whatever a function of `OUTBOX["PUBLISH_HOOKS"]` raises.
    """
    draft = draft_of("publish", topic, payload, options)
    alias = _require_transaction(using)
    row = new_row(draft, new_message_id())
    if draft.strict_order:
        writing.hold_order(alias, [draft.key])
    [written] = _insert(alias, [row])
    _ring(alias, [row])
    return written


def draft_of(function: str, topic: str, payload: Any, options: Mapping[str, Any]) -> Draft:
    """The draft of these options, which a caller of the function has given.

    Raises:
        TypeError: one of them does not exist.
    """
    try:
        return Draft(topic, payload, **options)
    except TypeError:
        known = PublishOptions.__annotations__
        unknown = next((name for name in options if name not in known), None)
        if unknown is None:
            raise
        raise TypeError(f"{function}() has no argument {unknown!r}. {did_you_mean(unknown, known)}".rstrip()) from None


def request(topic: str, payload: Any, *, using: str | None = None, **options: Unpack[PublishOptions]) -> PublishedMessage:
    """Publish a message that is answered by another one, for a handler of `inbox.contrib.joins.correlated`.

    The request begins a chain of its own: its correlation id is its message id, whatever message is being handled now. The
    answer has the same correlation id, see Correlation Identifier in "Enterprise Integration Patterns". The handler of the
    answer continues the chain in which the request was made.

    Args:
        options: those of `publish`.

    Returns:
        the message, whose `id` is the correlation id.

    Raises:
        PublishedOutsideTransaction, InvalidMessage, PayloadTooLarge: as `publish`.
    """
    cause = current_cause()
    if cause.correlation_id:
        options["headers"] = {**(options.get("headers") or {}), OUTER_CORRELATION: cause.correlation_id}
    with caused_by(replace(cause, correlation_id="")):
        return publish(topic, payload, using=using, **options)


def publish_many(drafts: Iterable[Draft], *, on_done: Draft | None = None, using: str | None = None) -> list[PublishedMessage]:
    """Write many messages in few statements, in the transaction that is open on `using`.

    All of them are checked before the first is written. The answers come in the order of `drafts`.

    Args:
        on_done: a message that is published when the last of these has been handled, by the service that has declared its topic
            with `inbox.contrib.joins.when_handled`; without a delay or an expiry.

    Raises:
        PublishedOutsideTransaction, InvalidMessage, PayloadTooLarge: as `publish`; the last two name the draft.
    """
    drafts = list(drafts)
    alias = _require_transaction(using)
    create = tracing.creating()
    rows = []
    for index, (draft, name) in enumerate(zip(drafts, new_message_ids(len(drafts)), strict=True)):
        try:
            rows.append(new_row(draft, name, create))
        except InvalidMessage as error:
            if len(drafts) == 1:
                raise
            raise type(error)(f"drafts[{index}] (biz_id={_short(draft.biz_id)}): {error}") from error
    end = None if on_done is None else _end(on_done)
    writing.hold_order(alias, {draft.key for draft in drafts if draft.strict_order})
    # The message about a set may be refused, for its size, when its members are known.
    with nullcontext() if end is None else transaction.atomic(using=alias):
        published = _insert(alias, rows)
        if end is not None:
            _publish_set(alias, published, end)
    _ring(alias, rows)
    return published


def _publish_set(alias: str, published: Sequence[PublishedMessage], end: Mapping[str, Any]) -> None:
    members: dict[str, list[tuple[uuid.UUID, str]]] = {}
    for message in published:
        members.setdefault(message.topic, []).append((message.id, message.biz_id))
    publish(f"{PUBLISHED_SETS}{end['topic']}", {"members": members, "on_done": end}, using=alias)


def _end(on_done: Draft) -> dict[str, Any]:
    """The arguments of `publish` for the message at the end of a set, as JSON."""
    later = {"delay": on_done.delay, "deliver_at": on_done.deliver_at, "expires_in": on_done.expires_in}
    if given := [name for name, value in later.items() if value is not None]:
        raise InvalidMessage(f"on_done has {', '.join(given)}: omit it, or let a handler of {on_done.topic!r} publish later.")
    row = new_row(on_done, new_message_id())
    kept = {name: getattr(on_done, name) for name in signature(Draft).parameters if name not in later}
    return kept | {"topic": row.topic, "payload": json.loads(row.body)}


async def apublish(
    topic: str, payload: Any, *, using: str | None = None, **options: Unpack[PublishOptions]
) -> PublishedMessage:
    """`publish` for async code that runs inside a transaction: an async handler, or code called through `async_to_sync`.

    Async code cannot open a transaction, see `PublishedOutsideTransaction` for what an async view does instead.
    """
    return await _joining(publish, topic, payload, using=using, **options)


async def arequest(
    topic: str, payload: Any, *, using: str | None = None, **options: Unpack[PublishOptions]
) -> PublishedMessage:
    """`request` for async code, see `apublish`."""
    return await _joining(request, topic, payload, using=using, **options)


async def apublish_many(
    drafts: Iterable[Draft], *, on_done: Draft | None = None, using: str | None = None
) -> list[PublishedMessage]:
    """`publish_many` for async code, see `apublish`."""
    return await _joining(publish_many, drafts, on_done=on_done, using=using)


async def _joining(function: Callable[_P, _Result], *args: _P.args, **options: _P.kwargs) -> _Result:
    """Call it in the thread of the synchronous code around, which has the transaction, if there is one."""
    try:
        return await sync_to_async(function)(*args, **options)
    except PublishedOutsideTransaction as error:
        raise PublishedOutsideTransaction(error.alias, is_async=True) from None


def _require_transaction(using: str | None) -> str:
    """The alias, which is inside `atomic()`."""
    alias = database_of(using)
    if not is_inside_a_transaction(alias):
        raise PublishedOutsideTransaction(alias, is_async=_in_event_loop())
    return alias


def _in_event_loop() -> bool:
    """Does this thread run async code at this moment?"""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _ring(alias: str, rows: Iterable[writing.NewRow]) -> None:
    for due_at in {row.deliver_at or row.delay for row in rows}:
        doorbell.ring_if_soon(alias, due_at or None)


def _insert(alias: str, rows: Sequence[writing.NewRow]) -> list[PublishedMessage]:
    """Insert those that are new; the messages in the order of `rows`. Positions follow it, and with them the order of a key."""
    unique = [row for row in rows if row.is_unique]
    if not unique:
        return _insert_new(alias, rows)
    found = {
        (topic, biz_id): PublishedMessage(
            id=message_id, topic=topic, biz_id=biz_id, position=position, created=False, state=state
        )
        for (topic, biz_id), (message_id, position, state) in take_names(alias, unique).items()
    }
    takers: dict[Name, writing.NewRow] = {}
    for row in unique:
        takers.setdefault(row.name, row)
    new = [row for row in rows if not row.is_unique or (row.name not in found and takers[row.name] is row)]
    written = {message.id: message for message in _insert_new(alias, new)}
    found |= {
        name: replace(written[row.message_id], created=False) for name, row in takers.items() if row.message_id in written
    }
    return [written.get(row.message_id) or found[row.name] for row in rows]


def _insert_new(alias: str, rows: Sequence[writing.NewRow]) -> list[PublishedMessage]:
    return [
        PublishedMessage(
            id=row.message_id, topic=row.topic, biz_id=row.biz_id, position=position, created=True, state=row.state
        )
        for row, position in zip(rows, writing.insert_many(alias, rows), strict=True)
    ]


def contradicts(found: PublishedMessage, payload: Any, *, using: str) -> bool:
    """Was a message that `unique=True` has found published with another payload? False if it has been purged."""
    return not (found.created or has_body(using, found.id, _body(Draft(found.topic, payload))))


def new_row(draft: Draft, message_id: uuid.UUID, create: Callable[[str, str, str], str] | None = None) -> writing.NewRow:
    """The draft, checked and serialised.

    Args:
        create: `tracing.creating()`, if several messages share it.

    Raises:
        InvalidMessage, PayloadTooLarge: with the value and the remedy.
    """
    for path, hook in outbox_options().publish_hooks.items():
        draft = _with_headers(draft, hook(draft), path)
    name, cause = str(message_id), current_cause()
    at = due(draft.delay, draft.deliver_at)
    headers = "{}"
    traceparent: object = None
    if draft.headers:
        headers = _headers(draft.headers)
        traceparent = draft.headers.get(TRACEPARENT)
    topic, correlation_id = _name("topic", draft.topic), cause.correlation_id or name
    if traceparent is None:
        traceparent = (create or tracing.creating())(topic, name, correlation_id)
    return writing.NewRow(
        message_id=message_id,
        topic=topic,
        biz_id=name if draft.biz_id is None else _name("biz_id", draft.biz_id),
        key=_key(draft),
        priority=_priority(draft),
        body=_body(draft),
        headers=headers,
        correlation_id=correlation_id,
        causation_id=cause.message_id,
        traceparent=_name(TRACEPARENT, traceparent, may_be_empty=True),
        is_unique=_unique(draft),
        delay=at if isinstance(at, timedelta) else None,
        deliver_at=at if isinstance(at, datetime) else None,
        expires_in=_duration("expires_in", draft.expires_in),
    )


def _with_headers(draft: Draft, added: Mapping[str, HeaderValue] | None, path: str) -> Draft:
    """The draft with the headers of a publish hook, except those that it has already."""
    if added is None or not isinstance(draft.headers or {}, Mapping):  # the latter is refused with the draft
        return draft
    try:
        _headers(added)
    except InvalidMessage as error:
        raise InvalidMessage(f"The publish hook {path} returned headers that cannot be sent. {error}") from error
    return replace(draft, headers={**added, **(draft.headers or {})})


def _name(argument: str, value: object, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise InvalidMessage(f"{argument} is {value!r}: it must be a str; write {argument}=str(…).")
    # A consumer takes a blank name for none.
    if not value.strip() and (not may_be_empty or (value and argument in _WHAT)):
        raise InvalidMessage(f"{argument} is {'blank' if value else 'empty'}: name {_WHAT[argument]}.")
    if reason := why_no_topic(value) if argument == "topic" else why_unfit(value):
        raise InvalidMessage(f"{argument} {_short(value)} cannot be used: {reason}. {_REMEDY[argument]}")
    return str.__str__(value)  # of an enumeration's member, which str() names


_WHAT = {
    "topic": 'what the message is about, for example "shop.order.placed"',
    "biz_id": "the business fact, or omit it",
    "key": "the thing whose messages must keep their order, or omit it",
}
_REMEDY = {
    "topic": "Choose a printable topic of at most 255 bytes, without the words '*' and '#'.",
    "biz_id": "Use the id of the order, payment … that the message is about.",
    TRACEPARENT: "It is the W3C trace context: 00-<trace id>-<span id>-<flags>.",
    "key": "Use the id of the thing whose messages must keep their order.",
}


def _key(draft: Draft) -> str:
    key = _name("key", draft.key, may_be_empty=True)
    if _flag("strict_order", draft.strict_order) and not key:
        raise InvalidMessage(
            "strict_order is True and there is no key: without one no order is promised. Give the key whose order it is, or "
            "one and the same key to all messages that must keep one order."
        )
    return key


def _unique(draft: Draft) -> bool:
    if _flag("unique", draft.unique) and draft.biz_id is None:
        raise InvalidMessage(
            "unique is True and there is no biz_id: the default is the message id, which no other message has. Give the biz_id "
            "of the business fact, or omit unique."
        )
    return draft.unique


def _priority(draft: Draft) -> int:
    priority = draft.priority
    if type(priority) is not int or not 0 <= priority <= MAX_PRIORITY:
        raise InvalidMessage(f"priority is {priority!r}: it must be a whole number from 0 to {MAX_PRIORITY}.")
    if priority and draft.key:
        raise InvalidMessage(
            f"priority {priority} and key {_short(draft.key)} exclude each other: a message that overtakes breaks the "
            "order of its key. Drop one of them."
        )
    return priority


def _body(draft: Draft) -> bytes:
    options = outbox_options()
    encoder = load_encoder((options.TOPICS and options.topic(draft.topic).ENCODER) or _ENCODER)
    try:
        body = encoder.encode(plain(draft.payload, encoder)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidMessage(
            f"The payload for topic {draft.topic!r} is not JSON: {error}. Pass dicts, lists, text, finite numbers, "
            f"booleans, None, dates, Decimals and UUIDs; got {_short(draft.payload)}."
        ) from error
    limit = options.BODY_LIMIT_BYTES
    if len(body) > limit:
        raise PayloadTooLarge(
            f"The payload for topic {draft.topic!r} is {len(body)} bytes as JSON and OUTBOX['BODY_LIMIT_BYTES'] is "
            f"{limit}. Store the large part elsewhere and publish a reference to it, or raise the limit."
        )
    return body


def _headers(headers: Mapping[Any, Any]) -> str:
    if not isinstance(headers, Mapping):
        raise InvalidMessage(f"headers is {_short(headers)}: it must be a dict of names to text, numbers and booleans.")
    for name, value in headers.items():
        if not isinstance(name, str) or not name or why_unfit(name):
            raise InvalidMessage(f"The header name {_short(name)} cannot be used: take a short printable str.")
        if is_reserved(name):
            raise InvalidMessage(
                f"The header {name!r} is reserved ({RESERVED_HEADERS}): choose another name, or use the argument of "
                "publish() that sets it."
            )
        if not _is_header_value(value):
            raise InvalidMessage(
                f"The header {name!r} is {_short(value)}: it must be printable text, a 64-bit whole number, a finite "
                "float or a bool. Put anything else into the payload."
            )
    text = headers_as_json({name: value for name, value in headers.items() if name != TRACEPARENT})
    if len(text) > HEADERS_LIMIT_BYTES:
        raise InvalidMessage(
            f"The headers are {len(text)} bytes and the limit is {HEADERS_LIMIT_BYTES}: put large values into the payload."
        )
    return text


def _is_header_value(value: object) -> bool:
    match value:
        case bool():
            return True
        case int():
            return value in _INT64
        case float():
            return math.isfinite(value)
        case str():
            return why_unfit(value, limit=HEADERS_LIMIT_BYTES) is None
    return False


def _flag(argument: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidMessage(f"{argument} is {_short(value)}: it must be True or False.")
    return value


def _duration(argument: str, given: timedelta | str | None) -> timedelta | None:
    if given is None:
        return None
    try:
        value = parse_duration(argument, given)
    except (TypeError, ValueError) as error:
        raise InvalidMessage(str(error)) from None
    if value < timedelta() or (argument == "expires_in" and not value):
        raise InvalidMessage(f"{argument} is {value!r}: it must not lie in the past.")
    if value > _LONGEST:
        raise InvalidMessage(f"{argument} is {value!r}: the longest duration is {_LONGEST.days} days.")
    return value


_LONGEST = timedelta(days=3650)
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)


def due(delay: timedelta | str | None, deliver_at: datetime | None) -> timedelta | datetime | None:
    """When to deliver a message: a duration from now, an instant, or None for now.

    Args:
        delay: a duration from now, also as text.

    Raises:
        InvalidMessage: it cannot be, or both are given.
    """
    if delay is not None and deliver_at is not None:
        raise InvalidMessage(f"delay ({delay!r}) and deliver_at ({deliver_at!r}): only one of them can be given.")
    if deliver_at is not None:
        return _instant(deliver_at)
    return _duration("delay", delay)


def _instant(value: datetime) -> datetime:
    if not isinstance(value, datetime):
        raise InvalidMessage(f"deliver_at is {value!r}: it must be an aware datetime.")
    if timezone.is_naive(value):
        raise InvalidMessage(
            f"deliver_at is {value!r}, which has no time zone: use django.utils.timezone.now() + … or make_aware()."
        )
    if not _EARLIEST < value < utcnow() + _LONGEST:
        raise InvalidMessage(f"deliver_at is {value!r}: it must lie after 1970 and within the next {_LONGEST.days} days.")
    # In another zone, what is added to it is added to the clock on its walls.
    return value.astimezone(UTC)


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a user's own __repr__
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
