"""Reading the delivery of a Celery task: its arguments, its business id, and the row that it has in the inbox.

This module accesses no database and no broker. Arguments and results are serialised with kombu's JSON, as Celery does: dates,
Decimals, UUIDs and bytes keep their types.
"""

import hashlib
import inspect
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.utils.json import JSONEncoder, dumps, loads

from exactly_once.wire.envelope import JSON, Envelope
from exactly_once.wire.formats import CELERY_TOPICS
from exactly_once.wire.text import fit
from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler, as_biz_id, value_at
from inbox.handlers.message import Message
from inbox.handlers.options import AS_THE_SETTINGS
from inbox.models import InboxMessage
from inbox.receiving.reading import outside_window, row_of
from inbox.transactions.arrival import Arrival

_NOT_JSON = "text/plain"
_SIGNATURE = "signature"
NO_RESULT = "null"
"""The result of a task that returns None, as JSON."""
_in_order_of_names = JSONEncoder(sort_keys=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A delivery of a task that was read.

    Attributes:
        arguments: returns the args and kwargs of the delivery, even after the function has changed its arguments.
        message: the argument of the handler's function, which calls the task's function.
        eager: it is run by its caller, without a message.
        awaited: another task needs its result.
    """

    task: Any
    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    handler: Handler
    arrival: Arrival
    message: Message
    eager: bool
    awaited: bool


def handler_name(task_name: str) -> str:
    """The handler and the topic of a task's rows; no handler of messages has the name of its topic."""
    return fit(f"{CELERY_TOPICS}{task_name}")


def read_call(
    task: Any,
    function: Callable[..., Any],
    signature: inspect.Signature,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    options: InboxOptions,
    *,
    using: str,
    sent_at: datetime | None,
) -> Call:
    """Read the delivery that `task` is running.

    Raises:
        TypeError: the function does not take these arguments, or `biz_id` returned a value that identifies nothing.
        LookupError: `biz_id` is a path that the arguments do not have.
        Exception: what `biz_id` raised.
    """
    args, kwargs = arguments
    request = task.request
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    by_name = _by_name(bound)
    name, task_id = handler_name(task.name), fit(str(request.id))
    biz_id = _identity(type(task).biz_id, bound, by_name) or task_id
    snapshot = _snapshot(args, kwargs)
    handler = Handler(
        name=name,
        topics=(name,),
        function=_with_fresh_arguments(function, args, kwargs, snapshot),
        biz_id=None,
        using=using,
        retry=type(task)._retry or AS_THE_SETTINGS,  # noqa: SLF001 - given to the decorator
    )
    redelivered = bool((request.delivery_info or {}).get("redelivered"))
    message = Message(
        id=task_id,
        topic=name,
        key="",
        biz_id=biz_id,
        payload=by_name,
        headers=dict(request.headers or {}),
        created_at=sent_at,
        attempt=request.retries + 1,
        redelivered=redelivered or request.retries > 0,
        correlation_id=fit(str(request.root_id or "")),
        causation_id=fit(str(request.parent_id or "")),
    )
    due = maybe_make_aware(maybe_iso8601(request.eta), task.app.timezone) if request.eta else None
    content_type, body = _body(by_name)
    envelope = Envelope(
        id=task_id,
        topic=name,
        created_at=sent_at or due,
        deliver_at=due,
        correlation_id=message.correlation_id,
        causation_id=message.causation_id,
        traceparent=fit(str(message.headers.get("traceparent") or "")),
        content_type=content_type,
        body=body,
    )
    outside = "" if request.is_eager else outside_window(envelope, options)
    row = row_of(handler, envelope, biz_id=biz_id, redelivered=redelivered)
    if content_type == _NOT_JSON:
        # Equal arguments may differ as text, so they never conflict.
        row = replace(row, digest=hashlib.sha256().hexdigest())
    if outside or redelivered:
        # An operator may have to send it again.
        row = replace(row, headers=as_sent(task, args, kwargs))
    return Call(
        task=task,
        arguments=snapshot,
        handler=handler,
        arrival=Arrival(handler=handler, row=row, envelope=envelope, refused=outside, quarantined=bool(outside)),
        message=message,
        eager=bool(request.is_eager),
        awaited=bool(request.callbacks or request.chain or request.chord),
    )


def encode_result(returned: object) -> str | None:
    """The result of a task as JSON that every database stores; None if it cannot be that."""
    if returned is None:
        return NO_RESULT
    try:
        text: str = dumps(returned, ensure_ascii=False, allow_nan=False)
        text.encode()
        loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
    # PostgreSQL's jsonb has no NUL.
    return None if "\\u0000" in text else text


def signature_to_resend(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Any:
    """The signature of the running task, as Celery makes it for a retry, with the same representations for logs."""
    request = task.request
    shown = {name: request.get(name) for name in ("argsrepr", "kwargsrepr") if request.get(name) is not None}
    return task.signature_from_request(request, args, kwargs, **shown, **options)


def as_sent(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The signature of the running task as headers of its row, for an operator who has it sent again."""
    signature = dict(signature_to_resend(task, args, kwargs))
    # `redelivered` is of this delivery. An operator's decision is newer than the time at which the call expires.
    signature["options"] = {
        name: value for name, value in signature["options"].items() if name not in {"redelivered", "expires"}
    }
    return encode_result({_SIGNATURE: signature}) or "{}"


def signature_of(row: InboxMessage) -> dict[str, Any] | None:
    """The signature of the task of a stored row; None if it is unknown."""
    stored = row.headers.get(_SIGNATURE)
    if isinstance(stored, Mapping):
        signature: dict[str, Any] = loads(dumps(stored))
        return signature
    if row.content_type != JSON:
        return None
    kwargs = loads(bytes(row.body))
    return {"task": row.handler.removeprefix(CELERY_TOPICS), "kwargs": kwargs, "options": {"task_id": row.message_id}}


def _snapshot(*arguments: Any) -> Callable[[], Any]:
    """Returns the arguments as they are now, even after a run has changed them."""
    try:
        pickled = pickle.dumps(arguments)
    except Exception:  # noqa: BLE001 - whatever their classes raise; such arguments did not come from a broker
        return lambda: arguments
    return lambda: pickle.loads(pickled)  # noqa: S301 - pickled above


def _with_fresh_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], snapshot: Callable[[], Any]
) -> Callable[[Message], object]:
    """Calls the function with its arguments, and in every later run with unchanged copies of them.

    They are not read from the message, because JSON cannot represent all of them.
    """
    first = iter([(args, kwargs)])

    def call(message: Message) -> object:
        given_args, given_kwargs = next(first, None) or snapshot()
        return function(*given_args, **given_kwargs)

    return call


def _by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """All arguments by name, also positional ones and those of `**kwargs`."""
    by_name = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            by_name |= by_name.pop(name)
    return by_name


def _identity(biz_id: Any, bound: inspect.BoundArguments, by_name: Mapping[str, Any]) -> str | None:
    if biz_id is None:
        return None
    if callable(biz_id):
        return as_biz_id(biz_id(*bound.args, **bound.kwargs))
    return as_biz_id(value_at(biz_id, by_name, "the arguments have no"))


def _body(by_name: Mapping[str, Any]) -> tuple[str, bytes]:
    """Content type and body of the arguments. Arguments that JSON cannot represent are stored as text."""
    try:
        return JSON, _in_order_of_names.encode(by_name).encode()
    except (TypeError, ValueError, RecursionError):
        return _NOT_JSON, repr(by_name).encode("utf-8", "backslashreplace")
