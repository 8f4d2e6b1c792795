"""The operations of the HTTP API, as URLs: `path("api/outbox/", include("outbox.contrib.http.urls"))`."""

import exactly_once.console.http  # noqa: F401 - it says what to install, before the imports that need it

# isort: split
from collections.abc import Callable, Sequence
from http import HTTPStatus
from itertools import islice
from typing import Annotated, Any, cast
from uuid import UUID

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import ResolverMatch, reverse
from ninja import Header, Path, Query
from ninja.responses import Status
from pydantic import BaseModel

from exactly_once.conf.app_options import Client
from exactly_once.console.http.frame import MAX_MESSAGES, Api, Name, answers, client_of, require
from exactly_once.console.http.problems import with_status
from exactly_once.console.operators.audit import Actor, Subject, record
from exactly_once.contrib.views.requests import key_of
from exactly_once.models import OPEN, Operation
from exactly_once.problems import Problem
from exactly_once.process.logs import escaping_logger
from exactly_once.sql.connections import decision_transaction
from exactly_once.sql.partitions import lately, newest
from exactly_once.wire.text import fit
from outbox import decisions
from outbox.conf import outbox_options
from outbox.contrib.http import schemas
from outbox.contrib.http.publishing import idempotency, publish_all
from outbox.decisions import Decision, Outcome
from outbox.errors import InvalidMessage, PayloadTooLarge, UnknownMessage
from outbox.models import OutboxMessage
from outbox.operators.changes import MANAGE, RESTORE_THEM, operations
from outbox.operators.replaying import plan_alone
from outbox.states import State
from outbox.store.dialect import database_of
from outbox.store.restoring import restored_by_default
from outbox.store.selecting import Selection, identified, placed

logger = escaping_logger(__name__)

app_name = "outbox_http"
_Key = Annotated[str | None, Header(alias="Idempotency-Key")]
_MOST_ROWS = 1_000_000
"""Of an operation, as on the pages of the admin."""
_SHOWN = (
    *("message_id", "topic", "biz_id", "key", "state", "attempts", "last_error"),
    *("created_at", "available_at", "expires_at", "settled_at"),
)


def _alias() -> str:
    return database_of(None)


api = Api(
    name=app_name,
    title="Outbox",
    description="Publish messages, and decide about those that are not published yet.",
    options=lambda: outbox_options().http,
    body_limit=lambda: outbox_options().BODY_LIMIT_BYTES,
    answered={
        PayloadTooLarge: with_status(HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
        InvalidMessage: with_status(HTTPStatus.UNPROCESSABLE_ENTITY),
        UnknownMessage: with_status(HTTPStatus.UNPROCESSABLE_ENTITY),
    },
)


@api.post("/messages", operation_id="publish", response=answers({200: schemas.Published, 201: schemas.Published}, 409))
def publish(request: HttpRequest, message: schemas.NewMessage, idempotency_key: _Key = None) -> HttpResponseBase:
    """Publish a message. 201: it is committed. 200: an earlier request with the same biz-id has published it.

    A request with an Idempotency-Key may be repeated: for seven days, the client gets the first answer, with the header
    Idempotency-Replayed. Without a biz_id, that of the message is the client's name, a slash and the key, or the SHA-256 of
    that if it is longer than 255 bytes. Another request with the same key is answered with 422, and with 409 while the first
    one is running.
    """
    client, alias = require(request, "publish", message.topic), _alias()

    def respond() -> HttpResponse:
        key = key_of(request, required=False)
        (published,) = publish_all([message], alias, name=key and fit(f"{client.name}/{key}"))
        return _answer(request, schemas.Published.model_validate(published), created=published.created)

    return idempotency(client.name, alias).answer(request, respond)


@api.post("/messages/batch", operation_id="publish_many", response=answers({200: schemas.PublishedMessages}, 409))
def publish_many(request: HttpRequest, batch: schemas.NewMessages, idempotency_key: _Key = None) -> HttpResponseBase:
    """Publish messages in one transaction: all of them are committed, or none.

    A request may be repeated with an Idempotency-Key, or if every message has a biz_id and unique: true.
    """
    for topic in {message.topic for message in batch.messages}:
        require(request, "publish", topic)
    if (count := len(batch.messages)) > MAX_MESSAGES:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"messages has {count} items, and the limit is {MAX_MESSAGES}.")
    alias = _alias()

    def respond() -> HttpResponse:
        published = [schemas.Published.model_validate(one) for one in publish_all(batch.messages, alias)]
        return _answer(request, schemas.PublishedMessages(messages=published))

    return idempotency(client_of(request).name, alias).answer(request, respond)


@api.get("/messages/{uuid:message_id}", operation_id="message", response=answers({200: schemas.MessageStatus}, 404))
def message(request: HttpRequest, message_id: UUID) -> schemas.MessageStatus:
    """The state of a message."""
    return schemas.MessageStatus.model_validate(_identified(client_of(request), message_id, "publish", "manage"))


@api.get("/messages", operation_id="messages", response=answers({200: schemas.Statuses}))
def messages(request: HttpRequest, topic: Annotated[Name, Query()], biz_id: Annotated[Name, Query()]) -> schemas.Statuses:
    """The state of the messages with a topic and biz-id, the newest first."""
    if not client_of(request).may(topic, "publish", "manage"):
        require(request, "publish", topic)
    decisions.refuse_unfit(topic=topic, biz_id=biz_id)
    rows = OutboxMessage.objects.using(_alias()).filter(topic=topic, biz_id=biz_id).only(*_SHOWN)
    found = newest(rows, MAX_MESSAGES)
    return schemas.Statuses(messages=[schemas.MessageStatus.model_validate(row) for row in found])


@api.post("/messages/cancel", operation_id="cancel", response=answers({200: schemas.Decided}, 404, 409))
def cancel(request: HttpRequest, which: schemas.Chosen) -> schemas.Decided:
    """Cancel a message before it is published, or all unpublished ones with a topic and biz-id. 409: it is too late."""
    return _decided(request, "cancel", which, decisions.cancel)


@api.post("/messages/reschedule", operation_id="reschedule", response=answers({200: schemas.Decided}, 404, 409))
def reschedule(request: HttpRequest, which: schemas.Rescheduling) -> schemas.Decided:
    """Change the time before which an unpublished message is not delivered; a delay of 0 publishes it now."""
    return _decided(request, "reschedule", which, decisions.reschedule, delay=which.delay, deliver_at=which.deliver_at)


@api.post(
    "/messages/restore",
    operation_id="restore",
    response=answers({200: schemas.Decided, 202: schemas.OperationStatus}, 404, 409),
)
def restore(
    request: HttpRequest, response: HttpResponse, which: schemas.Restoring
) -> schemas.Decided | Status[schemas.OperationStatus]:
    """Have cancelled, expired or dead messages published after all: one by its id, all with a topic and biz-id, or all of a
    topic.

    202: all of a topic, at most a million, are restored by a relay, batch by batch. The header Location is the address of this
    operation. The request may be repeated: it is answered with the same operation until that has ended, and what was restored
    stays restored.
    """
    if which.topic is not None and which.id is None and which.biz_id is None:
        planned = _planned(request, which.topic, which)
        match = cast(ResolverMatch, request.resolver_match)
        response["Location"] = reverse(f"{match.namespace}:operation", args=[planned.id])
        return Status(HTTPStatus.ACCEPTED, planned)
    return _decided(request, "restore", which, decisions.restore, states=which.states, overdue=which.overdue)


@api.get("/operations/{int:operation_id}", operation_id="operation", response=answers({200: schemas.OperationStatus}, 404))
def operation(request: HttpRequest, operation_id: Annotated[int, Path(lt=2**63)]) -> schemas.OperationStatus:
    """The progress of an operation that this client has asked for."""
    client = client_of(request)
    found = operations.rows(_alias()).filter(pk=operation_id, client=client.name).first()
    if found is None or not client.may(found.given["topic"], MANAGE):
        raise Problem(HTTPStatus.NOT_FOUND, f"There is no operation {operation_id} of this client and its scopes.")
    return schemas.OperationStatus.model_validate(found)


urlpatterns = api.patterns


def _planned(request: HttpRequest, topic: str, which: schemas.Restoring) -> schemas.OperationStatus:
    """Plan the operation, unless one that this client has asked for with the same values is still open."""
    client = _manager(request, which)
    decisions.refuse_unfit(topic=topic)
    states = [str(state) for state in which.states or restored_by_default(by_id=False)]
    plan = Operation(
        action=RESTORE_THEM.name,
        selection=f"topic {topic}",
        sources=states,
        requested_by=_name_of(client),
        client=client.name,
        permission=MANAGE,
        given={"topic": topic, "overdue": which.overdue},
    )
    alias = _alias()
    with decision_transaction(alias):
        # A request is repeated while the first one, of a million messages, is still being planned.
        plan_alone(alias)
        for found in operations.rows(alias).filter(action=plan.action, client=plan.client, state__in=OPEN):
            if (found.sources, found.given) == (states, plan.given):
                return schemas.OperationStatus.model_validate(found)
        rows = Selection(topic=topic, states=states).positions(alias)
        planned = operations.plan(alias, plan, islice(rows, _MOST_ROWS))
        subject = Subject(kind="operation", id=str(planned.pk), name=plan.selection)
        _record(request, plan.action, which, [subject], messages=planned.total)
    logger.info(
        "http: client %s plans operation %d: restore %d messages of topic %s", client.name, planned.pk, planned.total, topic
    )
    return schemas.OperationStatus.model_validate(planned)


def _answer(request: HttpRequest, content: BaseModel, *, created: bool = False) -> HttpResponse:
    return api.create_response(request, content, status=HTTPStatus.CREATED if created else HTTPStatus.OK)


def _manager(request: HttpRequest, which: schemas.Chosen) -> Client:
    """The client, if it may decide about these messages."""
    if which.topic is not None:
        return require(request, "manage", which.topic)
    client = client_of(request)
    if which.id is not None:
        _identified(client, which.id, "manage")
    return client


def _identified(client: Client, message_id: UUID, *actions: str) -> OutboxMessage:
    """The message with this id.

    Raises:
        Problem: there is none, or the client has no scope for its topic. It must not learn which.
    """
    row = identified(_alias(), [message_id]).only(*_SHOWN).first()
    if row is None or not client.may(row.topic, *actions):
        raise Problem(
            HTTPStatus.NOT_FOUND, f"There is no message {message_id}, or its topic is outside the scopes of the token."
        )
    return row


def _decided(
    request: HttpRequest, action: str, which: schemas.Chosen, decide: Callable[..., Decision], **given: Any
) -> schemas.Decided:
    """Make a decision, and write it into the audit log in the same transaction."""
    client, alias = _manager(request, which), _alias()
    names = {"message_id": which.id, "topic": which.topic, "biz_id": which.biz_id}
    with decision_transaction(alias):
        decision = decide(**names, **given, by=_name_of(client), using=alias)
        if decision:
            # History has no index of the positions of published messages, which no decision changes.
            changed = placed(alias, decision.changed, unless=State.PUBLISHED, likely=lately())
            subjects = [
                Subject(kind="message", id=str(row.message_id), name=f"{row.message_id} ({row.topic} {row.biz_id})")
                for row in changed.only("message_id", "topic", "biz_id").order_by("pk")
            ]
            _record(request, action, which, subjects)
    if decision.outcome is Outcome.NOT_FOUND:
        raise Problem(HTTPStatus.NOT_FOUND, f"There is no message with {_text_of(which)}.")
    if not decision:
        raise Problem(
            HTTPStatus.CONFLICT,
            f"It is too late to {action} the message with {_text_of(which)}: {decision.why}. Nothing was changed.",
            state=decision.state,
        )
    logger.info("http: client %s: %s (%s): %s", client.name, action, _text_of(which), decision.outcome)
    return schemas.Decided(outcome=decision.outcome, state=decision.state)


def _text_of(which: schemas.Chosen) -> str:
    return ", ".join(f"{name} {value}" for name in ("id", "topic", "biz_id") if (value := getattr(which, name)) is not None)


def _record(request: HttpRequest, action: str, which: schemas.Chosen, subjects: Sequence[Subject], **more: Any) -> None:
    """Write a decision into the audit log, in its transaction."""
    actor = Actor(name=client_of(request).name, place="HTTP API", address=str(request.META.get("REMOTE_ADDR", "")))
    given = which.model_dump(exclude={"overdue"}, exclude_none=True) | more
    if isinstance(which, schemas.Restoring):
        given["without_overdue"] = not which.overdue
    record("outbox", _alias(), actor, action, subjects, given)


def _name_of(client: Client) -> str:
    return f"the HTTP client {client.name}"
