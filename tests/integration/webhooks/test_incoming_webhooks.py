"""The webhook view: what it answers and stores, also for a provider that repeats, forges and contradicts itself."""

import hashlib
import hmac
import json
import logging
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from http.client import HTTPConnection
from io import BytesIO
from urllib.parse import urlsplit

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.handlers.asgi import ASGIRequest
from django.db import OperationalError, connections
from django.test import Client, RequestFactory, override_settings
from django.urls import path

from exactly_once.process.clock import utcnow
from inbox import RetryLater
from outbox.contrib.incoming_webhooks import GitHub, StandardWebhooks, Stripe, WebhookView, conflicting_event, header
from outbox.models import OutboxMessage
from outbox.testing import published, run_relay, travel
from tests.support.apps.effects.models import Effect
from tests.support.signals import listening

pytestmark = pytest.mark.django_db

TOPIC = "payments.event"
SECRET = "whsec_c2VjcmV0IG9mIHRoZSBwcm92aWRlcg=="
EVENT = {"event": {"id": "evt-1"}, "merchant_ref": "order-17", "amount": "9.90"}
LIMIT = 1024


def view(**arguments):
    return WebhookView.as_view(**{"topic": TOPIC, "verify": Stripe(SECRET), "biz_id": "event.id", **arguments})


def signed(body, seconds=None):
    seconds = int(utcnow().timestamp()) if seconds is None else seconds
    return f"t={seconds},v1={hmac.digest(SECRET.encode(), b'%d.%s' % (seconds, body), hashlib.sha256).hex()}"


def a_request(event=EVENT, *, signature=None, **headers):
    body = event if isinstance(event, bytes) else json.dumps(event).encode()
    headers = {"Stripe-Signature": signed(body) if signature is None else signature, **headers}
    return RequestFactory().post("/", body, content_type="application/json", headers=headers)


def test_signed_event_is_published_with_the_id_of_the_provider():
    response = view()(a_request())

    assert response.status_code == 200
    [message] = published()
    assert (message.topic, message.biz_id, message.payload) == (TOPIC, "evt-1", EVENT)
    assert message.correlation_id == message.id


def test_ids_are_read_from_paths_headers_and_by_functions_and_may_be_whole_numbers():
    by_header = view(biz_id=header("webhook-id"), correlate=lambda callback: callback.payload["merchant_ref"].upper())
    answers = [
        view(correlate="merchant_ref")(a_request()),
        view(correlate="merchant_ref")(a_request({"event": {"id": "evt-2"}})),
        by_header(a_request(**{"webhook-id": "msg_1"})),
        view()(a_request({"event": {"id": 42}})),
    ]

    assert {answer.status_code for answer in answers} == {200}
    by_path, without, by_function, number = published()
    assert by_path.correlation_id == "order-17"
    assert without.correlation_id == without.id, "an event without one is published without it"
    assert (by_function.biz_id, by_function.correlation_id, number.biz_id) == ("msg_1", "ORDER-17", "42")


def test_part_of_the_body_is_published_and_only_that_has_to_be_the_same():
    """Stripe counts its pending webhooks in the event, so that two requests differ."""
    parts = {"evt-1": "event", "evt-2": lambda callback: [callback.payload["amount"]]}
    for name, payload in parts.items():
        assert view(payload=payload)(a_request({**EVENT, "event": {"id": name}})).status_code == 200
    assert [message.payload for message in published()] == [{"id": "evt-1"}, ["9.90"]]

    stripe = view(payload=lambda callback: {**callback.payload, "pending_webhooks": None})
    requests = [a_request({**EVENT, "event": {"id": "evt-3"}, "pending_webhooks": count}) for count in (2, 1)]
    assert [stripe(request).status_code for request in requests] == [200, 200]


@pytest.mark.parametrize("signature", ["", "t=1,v1=0", "nonsense", "ü", "of an old request"])
def test_request_with_a_wrong_signature_is_answered_with_401_and_not_stored(signature):
    if signature == "of an old request":
        signature = signed(json.dumps(EVENT).encode(), int(utcnow().timestamp()) - 301)

    assert view()(a_request(signature=signature)).status_code == 401
    assert published() == []


@pytest.mark.parametrize("result", [False, None, 1, "yes"])
def test_own_function_accepts_with_true_and_nothing_else(result):
    assert view(verify=lambda body, headers: result)(a_request()).status_code == 401
    assert published() == []
    own = view(verify=lambda body, headers: headers["x-mine"] == body.decode()[:1])
    assert own(a_request(**{"X-Mine": "{"})).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"not json", b"[]", b"17", b"{}", b"\xff", b"[" * 900, b'{"event": "evt-1"}'),
        *(b'{"event": {"id": %s}}' % name for name in (b"null", b'""', b"true", b"1.5", b'"\\u0000"', b'"%s"' % (b"x" * 256))),
        b'{"event": {"id": "evt-1"}, "amount": NaN}',
        b'{"event": {"id": "evt-1"}, "name": "\\ud800"}',
        b'{"event": {"id": "evt-1"}, "merchant_ref": {}}',
    ],
)
def test_signed_body_that_is_not_an_event_is_answered_with_400_and_not_stored(body):
    assert view(correlate="merchant_ref")(a_request(body)).status_code == 400
    assert published() == []


@pytest.mark.parametrize("argument", [{"biz_id": lambda callback: callback.payload["data"]["id"]}, {"payload": "data.object"}])
def test_event_without_what_a_function_or_a_path_reads_is_answered_with_400(argument):
    assert view(**argument)(a_request()).status_code == 400
    assert published() == []


class Stream:
    """The body of a request: each read of it is recorded, and answered in full or with an error."""

    def __init__(self, error=None):
        self.error, self.sizes = error, []

    def read(self, size=-1):
        self.sizes.append(size)
        if self.error:
            raise self.error
        return b"x" * size


@override_settings(OUTBOX={"BODY_LIMIT_BYTES": LIMIT})
@pytest.mark.parametrize(
    ("body", "error", "status", "read"),
    [(b"x" * (LIMIT + 1), None, 413, []), (EVENT, ConnectionResetError, 400, [LIMIT + 1])],
    ids=["too large", "of a client that disconnects"],
)
def test_body_is_read_up_to_the_limit_only(body, error, status, read):
    request, stream = a_request(body), Stream(error)
    request._stream = stream

    assert view()(request).status_code == status
    assert stream.sizes == read
    assert published() == []


def test_other_methods_are_answered_with_405():
    for method in ("get", "head", "put", "delete", "options"):
        response = view()(getattr(RequestFactory(), method)("/"))
        assert (response.status_code, response["Allow"]) == (405, "POST")


@pytest.mark.every_database
def test_repeated_event_is_answered_with_200_and_stored_once_also_in_other_bytes_and_after_it_was_published():
    in_other_bytes = json.dumps(EVENT, indent=2, sort_keys=True).encode()
    assert [view()(a_request(body)).status_code for body in (EVENT, EVENT, in_other_bytes)] == [200, 200, 200]
    run_relay(handlers=False)

    assert view()(a_request()).status_code == 200
    assert [message.state for message in published()] == ["published"]
    assert view()(a_request({**EVENT, "amount": "10.90"})).status_code == 409


@dataclass
class Paid:
    amount: str


@pytest.mark.parametrize("convert", [lambda amount: {amount, "EUR"}, Paid])
def test_repeated_event_is_known_however_its_payload_becomes_json(convert):
    read = view(payload=lambda callback: convert(callback.payload["amount"]))
    with override_settings(OUTBOX={"TOPICS": {TOPIC: {"ENCODER": "tests.support.hooks.SortedSets"}}}):
        answers = [read(a_request({**EVENT, "amount": amount})).status_code for amount in ("9.90", "9.90", "10.90")]

    assert answers == [200, 200, 409]


def test_same_event_id_with_other_content_is_answered_with_409_and_reported(caplog):
    reports = []

    def report(**arguments):
        reports.append({name: arguments[name] for name in ("topic", "biz_id", "message_id")})

    with listening(conflicting_event, report):
        view()(a_request())
        response = view()(a_request({**EVENT, "amount": "10.90"}))

    assert response.status_code == 409
    [message] = published()
    assert message.payload == EVENT
    assert reports == [{"topic": TOPIC, "biz_id": "evt-1", "message_id": message.id}]
    [line] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert f"refused the event 'evt-1' with 409, because the message {message.id}" in line.getMessage()


def test_neither_a_body_nor_a_secret_is_logged(caplog):
    caplog.set_level(logging.DEBUG, logger="outbox.contrib.incoming_webhooks")
    for request in (
        a_request(),
        a_request({**EVENT, "amount": "private-2"}),
        a_request(signature="private-3"),
        a_request(b"private-4"),
        a_request({**EVENT, "amount": "private-5\ud800"}),
    ):
        assert b"private" not in view()(request).content

    logged = caplog.text
    assert "private" not in logged
    assert SECRET not in logged
    assert "refused a request with 401" in logged


urlpatterns = [path("hook/", view())]


@pytest.mark.django_db(transaction=True)
@override_settings(ROOT_URLCONF=__name__)
def test_body_without_a_length_is_answered_with_411_by_a_wsgi_server(live_server):
    address, body = urlsplit(live_server.url), json.dumps(EVENT).encode()
    with closing(HTTPConnection(address.hostname, address.port, timeout=60)) as client:
        client.request("POST", "/hook/", iter([body]), {"Stripe-Signature": signed(body)})
        answer = client.getresponse()
        assert (answer.status, b"no Content-Length" in answer.read()) == (411, True)
    assert published() == []


@override_settings(OUTBOX={"BODY_LIMIT_BYTES": LIMIT})
@pytest.mark.parametrize(("size", "status"), [(LIMIT, 200), (LIMIT + 1, 413)])
def test_body_without_a_length_is_read_up_to_the_limit_by_an_asgi_server(size, status):
    body = json.dumps(EVENT).encode().ljust(size)
    headers = {b"stripe-signature": signed(body).encode(), b"transfer-encoding": b"chunked"}
    request = ASGIRequest({"method": "POST", "path": "/", "headers": headers.items()}, BytesIO(body))

    assert view()(request).status_code == status
    assert len(published()) == (status == 200)


def post_signed(client):
    body = json.dumps(EVENT).encode()
    return client.post("/hook/", body, content_type="application/json", headers={"Stripe-Signature": signed(body)})


def test_request_needs_no_csrf_token_and_no_login(settings):
    settings.ROOT_URLCONF = __name__
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.contrib.auth.middleware.LoginRequiredMiddleware"]

    assert post_signed(Client(enforce_csrf_checks=True)).status_code == 200
    assert len(published()) == 1


@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
@override_settings(ROOT_URLCONF=__name__)
def test_event_is_committed_before_the_answer_also_with_atomic_requests(monkeypatch):
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    seen = []

    def look(get_response):
        def middleware(request):
            response = get_response(request)
            seen.append((response.status_code, connections["default"].in_atomic_block, len(published())))
            return response

        return middleware

    monkeypatch.setattr("tests.support.content_policy.strict_content_security_policy", look)
    post_signed(Client())

    assert seen == [(200, False, 1)]


@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
def test_request_whose_transaction_fails_is_not_answered_with_200(monkeypatch):
    def fail(*arguments):
        raise OperationalError("no commit")

    monkeypatch.setattr(connections["default"], "_commit", fail)
    with pytest.raises(OperationalError, match="no commit"):
        view()(a_request())
    monkeypatch.undo()

    assert published() == []


@pytest.mark.long
@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
def test_provider_that_repeats_forges_and_contradicts_causes_one_effect_per_event(handles):
    """Every event comes one to five times, at the same time, among forged and contradicting ones."""

    def apply(message):
        Effect.objects.create(name=message.biz_id, detail=message.payload["amount"])

    handles(apply, topic=TOPIC)
    rng = random.Random(17)
    events = {f"evt-{number}": {"event": {"id": f"evt-{number}"}, "amount": f"{number}"} for number in range(40)}
    calls = []
    for name, event in events.items():
        calls += [(event, "genuine")] * rng.randint(1, 5)
        calls += [({**event, "amount": "forged"}, "forged")] * rng.randint(0, 2)
        calls += [({"event": {"id": f"{name}-unknown"}}, "forged")] * rng.randint(0, 1)
    rng.shuffle(calls)
    the_view = view()

    def call(event, kind):
        try:
            return kind, the_view(a_request(event, signature="t=1,v1=0" if kind == "forged" else None)).status_code
        finally:
            connections.close_all()

    with ThreadPoolExecutor(8) as threads:
        answers = Counter(threads.map(lambda given: call(*given), calls))
        contradictions = Counter(
            threads.map(lambda event: call({**event, "amount": "other"}, "contradicting"), list(events.values()))
        )
    run_relay()
    again = Counter(call(event, "genuine") for event in events.values())
    run_relay()

    genuine = sum(kind == "genuine" for _, kind in calls)
    assert answers == {("genuine", 200): genuine, ("forged", 401): len(calls) - genuine}
    assert contradictions == {("contradicting", 409): len(events)}
    assert again == {("genuine", 200): len(events)}
    assert OutboxMessage.objects.count() == len(events)
    assert sorted(Effect.objects.values_list("name", "detail")) == sorted(
        (name, event["amount"]) for name, event in events.items()
    )


@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
def test_event_that_is_no_longer_in_history_has_no_second_effect(handles):
    def apply(message):
        Effect.objects.create(name=message.biz_id)

    handles(apply, topic=TOPIC)
    view()(a_request())
    run_relay()
    OutboxMessage.objects.all().delete()

    assert view()(a_request()).status_code == 200
    assert len(published()) == 1, "it is published again"
    run_relay()

    assert Effect.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_event_that_comes_before_its_request_is_committed_is_matched_later(handles):
    def match(message):
        if not Effect.objects.filter(name=message.correlation_id, detail="requested").update(detail="answered"):
            raise RetryLater(timedelta(seconds=10), "its request is not committed yet")

    handles(match, topic=TOPIC)
    assert view(correlate="merchant_ref")(a_request()).status_code == 200
    run_relay()

    Effect.objects.create(name="order-17", detail="requested")
    travel(timedelta(seconds=11))
    run_relay()

    assert Effect.objects.get().detail == "answered"


UNUSABLE = {
    "topic": ["", " ", None, "payments.*"],
    "verify": [None, SECRET, GitHub],
    "biz_id": [None, "", "event..id", 1],
    "correlate": [""],
    "payload": [["event"]],
    "using": ["elsewhere"],
}


@pytest.mark.parametrize(("argument", "value"), [(argument, value) for argument in UNUSABLE for value in UNUSABLE[argument]])
def test_argument_that_cannot_be_used_is_refused_when_the_urls_are_read(argument, value):
    with pytest.raises(ImproperlyConfigured, match=rf"WebhookView.as_view\(\): {argument} cannot be used") as refused:
        view(**{argument: value})
    assert SECRET not in str(refused.value)


def test_unknown_argument_is_refused_and_verifiers_and_functions_are_accepted():
    with pytest.raises(TypeError, match="bizid"):
        view(bizid="event.id")
    for verify in (StandardWebhooks(SECRET), Stripe(SECRET), GitHub(SECRET), hmac.compare_digest):
        assert callable(view(verify=verify))
