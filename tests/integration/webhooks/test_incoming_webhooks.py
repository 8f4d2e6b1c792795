"""The webhook view: what it answers and stores, also for a provider that repeats, forges and contradicts itself."""

import hashlib
import hmac
import json
import logging
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connections
from django.test import Client, RequestFactory, override_settings
from django.urls import path

from exactly_once.process.clock import utcnow
from inbox import RetryLater
from outbox.contrib.incoming_webhooks import GitHub, StandardWebhooks, Stripe, WebhookView, conflicting_event, header
from outbox.models import OutboxMessage
from outbox.testing import published, run_relay, travel
from tests.support.apps.effects.models import Effect

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


def test_correlation_id_of_the_message_is_what_correlate_finds():
    assert view(correlate="merchant_ref")(a_request()).status_code == 200
    assert view(correlate="merchant_ref")(a_request({"event": {"id": "evt-2"}})).status_code == 200

    first, second = published()
    assert first.correlation_id == "order-17"
    assert second.correlation_id == second.id, "an event without one is published without it"


def test_ids_are_read_from_headers_and_by_functions():
    by_header = view(biz_id=header("webhook-id"), correlate=lambda callback: callback.payload["merchant_ref"].upper())

    assert by_header(a_request(**{"webhook-id": "msg_1"})).status_code == 200

    [message] = published()
    assert (message.biz_id, message.correlation_id) == ("msg_1", "ORDER-17")


def test_whole_number_is_an_event_id():
    assert view()(a_request({"event": {"id": 42}})).status_code == 200

    assert published()[0].biz_id == "42"


@pytest.mark.parametrize(
    ("payload", "expected"), [("event", {"id": "evt-1"}), (lambda callback: [callback.payload["amount"]], ["9.90"])]
)
def test_part_of_the_body_is_published(payload, expected):
    assert view(payload=payload)(a_request()).status_code == 200

    assert published()[0].payload == expected


@pytest.mark.parametrize("signature", ["", "t=1,v1=0", "nonsense", "ü"])
def test_request_with_a_wrong_signature_is_answered_with_401_and_not_stored(signature):
    assert view()(a_request(signature=signature)).status_code == 401
    assert published() == []


def test_old_request_is_answered_with_401():
    body = json.dumps(EVENT).encode()
    old = signed(body, int(utcnow().timestamp()) - 301)

    assert view()(a_request(body, signature=old)).status_code == 401
    assert published() == []


@pytest.mark.parametrize("result", [False, None, 1, "yes"])
def test_own_function_accepts_with_true_and_nothing_else(result):
    assert view(verify=lambda body, headers: result)(a_request()).status_code == 401
    assert published() == []
    assert (
        view(verify=lambda body, headers: headers["x-mine"] == body.decode()[:1])(a_request(**{"X-Mine": "{"})).status_code
        == 200
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b"17",
        b"{}",
        b"\xff",
        b"[" * 900,
        b'{"event": "evt-1"}',
        b'{"event": {"id": null}}',
        b'{"event": {"id": ""}}',
        b'{"event": {"id": true}}',
        b'{"event": {"id": 1.5}}',
        b'{"event": {"id": "\\u0000"}}',
        b'{"event": {"id": "evt-1"}, "amount": NaN}',
        b'{"event": {"id": "evt-1"}, "name": "\\ud800"}',
        b'{"event": {"id": "' + b"x" * 256 + b'"}}',
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


@override_settings(OUTBOX={"BODY_LIMIT_BYTES": LIMIT})
def test_large_body_is_answered_with_413_before_it_is_read():
    class Unread:
        def read(self, size=-1):
            raise AssertionError("the body was read")

    announced = a_request(b"x" * (LIMIT + 1))
    announced._stream = Unread()

    assert view()(announced).status_code == 413
    assert published() == []


@override_settings(OUTBOX={"BODY_LIMIT_BYTES": LIMIT})
def test_large_body_without_a_length_is_read_up_to_the_limit_only():
    read = []

    class Endless:
        def read(self, size):
            read.append(size)
            return b"x" * size

    chunked = a_request()
    del chunked.META["CONTENT_LENGTH"]
    chunked._stream = Endless()

    assert view()(chunked).status_code == 413
    assert read == [LIMIT + 1]
    assert published() == []


def test_body_of_a_client_that_disconnects_is_answered_with_400():
    class Broken:
        def read(self, size):
            raise ConnectionResetError

    request = a_request()
    request._stream = Broken()

    assert view()(request).status_code == 400
    assert published() == []


@pytest.mark.parametrize("method", ["get", "head", "put", "delete", "options"])
def test_other_methods_are_answered_with_405(method):
    response = view()(getattr(RequestFactory(), method)("/"))

    assert (response.status_code, response["Allow"]) == (405, "POST")


def test_repeated_event_is_answered_with_200_and_stored_once():
    assert [view()(a_request()).status_code for _ in range(3)] == [200, 200, 200]

    assert len(published()) == 1


def test_repeated_event_in_other_bytes_is_the_same():
    view()(a_request())

    assert view()(a_request(json.dumps(EVENT, indent=2, sort_keys=True).encode())).status_code == 200
    assert len(published()) == 1


@pytest.mark.every_database
def test_event_that_was_published_before_is_still_known():
    view()(a_request())
    run_relay(handlers=False)

    assert view()(a_request()).status_code == 200
    assert [message.state for message in published()] == ["published"]
    assert view()(a_request({**EVENT, "amount": "10.90"})).status_code == 409


def test_same_event_id_with_other_content_is_answered_with_409_and_reported(caplog):
    reports = []

    def report(**arguments):
        reports.append({name: arguments[name] for name in ("topic", "biz_id", "message_id")})

    conflicting_event.connect(report)
    try:
        view()(a_request())
        response = view()(a_request({**EVENT, "amount": "10.90"}))
    finally:
        conflicting_event.disconnect(report)

    assert response.status_code == 409
    [message] = published()
    assert message.payload == EVENT
    assert reports == [{"topic": TOPIC, "biz_id": "evt-1", "message_id": message.id}]
    [line] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert f"refused the event 'evt-1' with 409, because the message {message.id}" in line.getMessage()


def test_only_the_published_part_has_to_be_the_same():
    """Stripe counts its pending webhooks in the event, so that two requests differ."""
    stripe = view(payload=lambda callback: {**callback.payload, "pending_webhooks": None})

    answers = [stripe(a_request({**EVENT, "pending_webhooks": count})).status_code for count in (2, 1)]

    assert answers == [200, 200]


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


def test_request_needs_no_csrf_token_and_no_login(settings):
    settings.ROOT_URLCONF = __name__
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.contrib.auth.middleware.LoginRequiredMiddleware"]
    body = json.dumps(EVENT).encode()

    response = Client(enforce_csrf_checks=True).post(
        "/hook/", body, content_type="application/json", headers={"Stripe-Signature": signed(body)}
    )

    assert response.status_code == 200
    assert len(published()) == 1


@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
@override_settings(ROOT_URLCONF=__name__)
def test_event_is_committed_before_the_answer_also_with_atomic_requests(monkeypatch):
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    seen = []
    body = json.dumps(EVENT).encode()

    def look(get_response):
        def middleware(request):
            response = get_response(request)
            seen.append((response.status_code, connections["default"].in_atomic_block, len(published())))
            return response

        return middleware

    monkeypatch.setattr("tests.support.content_policy.strict_content_security_policy", look)
    Client().post("/hook/", body, content_type="application/json", headers={"Stripe-Signature": signed(body)})

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


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("topic", ""),
        ("topic", " "),
        ("topic", None),
        ("topic", "payments.*"),
        ("verify", None),
        ("verify", SECRET),
        ("verify", GitHub),
        ("biz_id", None),
        ("biz_id", ""),
        ("biz_id", "event..id"),
        ("biz_id", 1),
        ("correlate", ""),
        ("payload", ["event"]),
        ("using", "elsewhere"),
    ],
)
def test_argument_that_cannot_be_used_is_refused_when_the_urls_are_read(argument, value):
    with pytest.raises(ImproperlyConfigured, match=rf"WebhookView.as_view\(\): {argument} cannot be used") as refused:
        view(**{argument: value})
    assert SECRET not in str(refused.value)


def test_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="bizid"):
        view(bizid="event.id")


@pytest.mark.parametrize("verify", [StandardWebhooks(SECRET), Stripe(SECRET), GitHub(SECRET), hmac.compare_digest])
def test_verifiers_and_functions_are_accepted(verify):
    assert callable(view(verify=verify))
