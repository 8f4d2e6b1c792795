"""Reading the delivery of a Celery task: which call is it, by which name does the business know it, what does it say?

Nothing here touches a database or a broker. Arguments and results are written in kombu's JSON, which Celery itself sends them
in: dates, Decimals, UUIDs and bytes come back as what they were.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.utils.json import dumps, loads

from inbox.conf import InboxOptions
from inbox.handlers.handler import Handler
from inbox.handlers.message import Message
from inbox.handlers.options import AS_THE_SETTINGS
from inbox.models import InboxMessage
from inbox.receiving.reading import outside_window
from inbox.store.rows import NewRow
from outbox.kernel.envelope import JSON, Envelope
from outbox.kernel.text import fit
from outbox.kernel.wire import CELERY_TOPICS

_NOT_JSON = "text/plain"
_TRACEPARENT = "traceparent"
_SIGNATURE = "signature"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One delivery of a task, read.

    Attributes:
        arguments: the args and kwargs that came, even after the function has changed what it was given.
        row: what it would be in the inbox.
        redelivered: the broker says that it has delivered this very message before.
        eager: there is no message and no broker: it runs inside its caller.
        outside: why it lies outside the deduplication window, or "".
        awaited: another task waits for what it returns.
    """

    task: Any
    arguments: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    handler: Handler
    message: Message
    envelope: Envelope
    row: NewRow
    redelivered: bool
    eager: bool
    outside: str
    awaited: bool


def handler_name(task_name: str) -> str:
    """What the inbox calls a task, as its handler and as its topic; no handler of messages is called like a topic."""
    return fit(f"{CELERY_TOPICS}{task_name}")


def read_call(
    task: Any,
    function: Callable[..., Any],
    signature: inspect.Signature,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    options: InboxOptions,
    *,
    sent_at: datetime | None,
) -> Call:
    """What is to be done, and by which name the inbox knows it.

    Raises:
        TypeError: the arguments are not those of the function, or `biz_id` answered with what names nothing.
        LookupError: `biz_id` is a path that these arguments do not have.
        Exception: whatever `biz_id` raises.
    """
    args, kwargs = arguments
    request = task.request
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    said = _by_name(bound)
    name, task_id = handler_name(task.name), fit(str(request.id))
    as_they_came = _as_they_came(args, kwargs)
    handler = Handler(
        name=name,
        topic=name,
        function=_again_and_again(function, args, kwargs, as_they_came),
        biz_id=_identity(type(task).biz_id, bound),
        using=task.using,
        retry=type(task)._retry or AS_THE_SETTINGS,  # noqa: SLF001 - given to the decorator
    )
    message = Message(
        id=task_id,
        topic=name,
        key="",
        biz_id=task_id,
        payload=said,
        headers=dict(request.headers or {}),
        created_at=sent_at,
        attempt=request.retries + 1,
        redelivered=_is_redelivered(request) or request.retries > 0,
        correlation_id=fit(str(request.root_id or "")),
        causation_id=fit(str(request.parent_id or "")),
    )
    due = maybe_make_aware(maybe_iso8601(request.eta), task.app.timezone) if request.eta else None
    content_type, body, digest = _body(said)
    envelope = Envelope(
        id=task_id,
        topic=name,
        created_at=sent_at or due,
        deliver_at=due,
        correlation_id=message.correlation_id,
        causation_id=message.causation_id,
        traceparent=fit(str(message.headers.get(_TRACEPARENT) or "")),
        content_type=content_type,
        body=body,
    )
    biz_id = handler.identify(message)
    outside = "" if request.is_eager else outside_window(envelope, options)
    # How it was sent is written down for those that an operator may have to send again.
    kept = as_sent(task, args, kwargs) if outside or _is_redelivered(request) else "{}"
    return Call(
        task=task,
        arguments=as_they_came,
        handler=handler,
        message=replace(message, biz_id=biz_id),
        envelope=envelope,
        row=_row(envelope, biz_id=biz_id, digest=digest, headers=kept),
        redelivered=_is_redelivered(request),
        eager=bool(request.is_eager),
        outside=outside,
        awaited=bool(request.callbacks or request.chain or request.chord),
    )


def to_remember(returned: object) -> str | None:
    """What a task returned, as JSON that every database takes; None when it cannot be that."""
    try:
        text: str = dumps(returned, ensure_ascii=False, allow_nan=False)
        text.encode()
        loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
    # PostgreSQL's jsonb has no NUL.
    return None if "\\u0000" in text else text


def remembered(text: str) -> Any:
    return loads(text)


def signature_to_resend(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Any:
    """The task that is being run as Celery would retry it, and no more telling in logs than it was."""
    request = task.request
    shown = {name: request.get(name) for name in ("argsrepr", "kwargsrepr") if request.get(name) is not None}
    return task.signature_from_request(request, args, kwargs, **shown, **options)


def as_sent(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """How the task that is being run was sent, as headers of its row, for an operator who has it sent again."""
    signature = dict(signature_to_resend(task, args, kwargs))
    # Of this delivery, and not of the call. An operator's word is newer than the time when the call was to expire.
    signature["options"] = {
        name: value for name, value in signature["options"].items() if name not in {"redelivered", "expires"}
    }
    return to_remember({_SIGNATURE: signature}) or "{}"


def signature_of(row: InboxMessage) -> dict[str, Any] | None:
    """How the task of a stored row was sent, for Celery to send it again; None when that is not known."""
    kept = row.headers.get(_SIGNATURE)
    if isinstance(kept, Mapping):
        sent: dict[str, Any] = loads(dumps(kept))
        return sent
    if row.content_type != JSON:
        return None
    kwargs = loads(bytes(row.body))
    return {"task": row.handler.removeprefix(CELERY_TOPICS), "kwargs": kwargs, "options": {"task_id": row.message_id}}


def _as_they_came(*arguments: Any) -> Callable[[], Any]:
    """Answers with the arguments as they are now, whatever a run makes of them meanwhile."""
    try:
        kept = pickle.dumps(arguments)
    except Exception:  # noqa: BLE001 - whatever their classes raise; such arguments came from no broker
        return lambda: arguments
    return lambda: pickle.loads(kept)  # noqa: S301 - ours, of a moment ago


def _again_and_again(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], as_they_came: Callable[[], Any]
) -> Callable[[Message], object]:
    """Calls it with the arguments, and when a run that collided with another is begun again, with the unchanged ones.

    The message does not carry them as they are: what is not JSON could not be read from it again.
    """
    first = iter([(args, kwargs)])

    def call(message: Message) -> object:
        given_args, given_kwargs = next(first, None) or as_they_came()
        return function(*given_args, **given_kwargs)

    return call


def _is_redelivered(request: Any) -> bool:
    return bool((request.delivery_info or {}).get("redelivered"))


def _by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments by name, however they were passed; those that `**kwargs` takes, too."""
    said = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            said |= said.pop(name)
    return said


def _identity(biz_id: Any, bound: inspect.BoundArguments) -> Callable[[Message], object] | None:
    if biz_id is None:
        return None
    if callable(biz_id):
        return lambda message: biz_id(*bound.args, **bound.kwargs)
    return lambda message: _follow(biz_id, message.payload)


def _follow(path: str, arguments: Mapping[str, Any]) -> object:
    found: Any = arguments
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            raise LookupError(f"the arguments have no {path!r}")
        found = found[name]
    return found


def _body(said: Mapping[str, Any]) -> tuple[str, bytes, str]:
    """Content type, body and digest of the arguments. What JSON cannot say is for people to read, and never conflicts."""
    try:
        body = dumps(said, sort_keys=True).encode()
    except (TypeError, ValueError, RecursionError):
        return _NOT_JSON, repr(said).encode("utf-8", "backslashreplace"), hashlib.sha256().hexdigest()
    return JSON, body, hashlib.sha256(body).hexdigest()


def _row(envelope: Envelope, *, biz_id: str, digest: str, headers: str) -> NewRow:
    return NewRow(
        handler=envelope.topic,
        topic=envelope.topic,
        biz_id=biz_id,
        message_id=envelope.id,
        key="",
        content_type=envelope.content_type,
        body=envelope.body,
        digest=digest,
        headers=headers,
        source="",
        correlation_id=envelope.correlation_id,
        causation_id=envelope.causation_id,
        traceparent=envelope.traceparent,
        created_at=envelope.created_at,
    )
