"""The HTTP API of the outbox: publish, cancel, reschedule, restore, and ask for the state."""

import json
import uuid
from importlib import reload

import pytest
from django.core.handlers.wsgi import WSGIRequest
from django.db import DEFAULT_DB_ALIAS, OperationalError, connection, transaction
from django.test import override_settings

from exactly_once.contrib.views import checks, decorators
from exactly_once.models import AuditEntry, Operation
from exactly_once.process.loop import StopRequest
from exactly_once.upkeep.executing import Operations
from outbox import Draft, publish_many
from outbox.contrib.http import publishing
from outbox.models import OutboxMessage, TrailEntry
from outbox.operators.changes import operations
from outbox.testing import published, run_relay
from tests.support.deliveries import at_once
from tests.support.http_api import AUDITOR, HTTP, NEXT_SHOP, PARTNER, SHOP, Api

pytestmark = pytest.mark.django_db

TOPIC = "shop.order.placed"
MESSAGE = {"topic": TOPIC, "payload": {"order": "17", "total": "9.90"}}
LIMIT = 2048


@pytest.fixture(autouse=True)
def _urls():
    with override_settings(ROOT_URLCONF="tests.support.http_urls", OUTBOX={"HTTP": HTTP, "BODY_LIMIT_BYTES": LIMIT}):
        yield


def push(api=None, message=MESSAGE, **headers):
    return (api or Api()).post("outbox/messages", message, **headers)


def status_of(message_id, api=None):
    return (api or Api()).get(f"outbox/messages/{message_id}").json()


def test_message_is_published_as_by_publish():
    response = push(
        message={**MESSAGE, "biz_id": "order-17", "key": "customer-1", "headers": {"tenant": "acme", "n": 1, "ok": True}}
    )

    assert response.status_code == 201
    [message] = published()
    answer = response.json()
    assert answer == {"id": message.id, "topic": TOPIC, "biz_id": "order-17", "created": True, "state": "ready"}
    assert (message.payload, message.key) == (MESSAGE["payload"], "customer-1")
    assert message.headers == {"tenant": "acme", "n": 1, "ok": True}


def test_scheduled_and_expiring_message_is_published_with_its_times_and_rescheduled():
    scheduled = push(message={**MESSAGE, "delay": "1h", "expires_in": 60}).json()
    at = push(message={**MESSAGE, "deliver_at": "2027-01-31T12:00:00+02:00", "priority": 9}).json()

    assert (scheduled["state"], at["state"]) == ("scheduled", "scheduled")
    assert status_of(at["id"])["due_at"] == "2027-01-31T10:00:00Z"
    assert status_of(scheduled["id"])["expires_at"] is not None
    later = Api().post("outbox/messages/reschedule", {"id": scheduled["id"], "deliver_at": "2027-01-31T12:00:00Z"})
    assert later.json() == {"outcome": "rescheduled", "state": "scheduled"}
    assert status_of(scheduled["id"])["due_at"] == "2027-01-31T12:00:00Z"
    assert Api().post("outbox/messages/reschedule", {"id": scheduled["id"], "delay": 0}).json()["state"] == "ready"


@pytest.mark.every_database
@pytest.mark.parametrize("key", ["8e03978e-40d5", '"8e03978e-40d5"'])
def test_repeated_request_with_an_idempotency_key_publishes_once(key):
    first, second = (push(**{"Idempotency-Key": key}) for _ in range(2))

    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert ("Idempotency-Replayed" in first, second["Idempotency-Replayed"]) == (False, "true")
    assert [message.biz_id for message in published()] == ["shop/8e03978e-40d5"]


@pytest.mark.every_database
@pytest.mark.parametrize(
    "change",
    [
        *({"payload": payload} for payload in ({"order": "18"}, {"count": True})),
        *({"headers": headers} for headers in ({"tenant": "globex", "n": 1}, {"tenant": "acme", "n": True})),
        *({"key": "customer-2"}, {"key": "", "priority": 9}, {"delay": 60}, {"expires_in": 60}),
        {"delay": None, "deliver_at": "2027-01-31T12:00:00Z"},
    ],
    ids=str,
)
def test_another_request_with_the_same_idempotency_key_is_answered_with_422_and_not_published(change):
    given = {"payload": {"count": 1}, "headers": {"tenant": "acme", "n": 1}, "key": "customer-1", "delay": 3600}
    message = {**MESSAGE, **given}
    push(message=message, **{"Idempotency-Key": "k-1"})

    other = push(message={**message, **change}, **{"Idempotency-Key": "k-1"})

    assert other.status_code == 422
    assert len(published()) == 1


@pytest.mark.parametrize("content_type", ["multipart/form-data", "multipart/form-data; boundary=x"])
def test_another_payload_is_another_request_whatever_the_content_type_says(content_type):
    answers = [
        push(message={**MESSAGE, "payload": payload}, content_type=content_type, **{"Idempotency-Key": "k-1"})
        for payload in (1, 2, 1)
    ]

    assert [answer.status_code for answer in answers] == [201, 422, 201]
    assert [message.payload for message in published()] == [1]


def test_check_names_the_database_of_the_outbox_if_the_routers_keep_the_table_of_answers_off_it(monkeypatch):
    monkeypatch.setattr("django.db.router.allow_migrate_model", lambda alias, model: alias != "other")
    monkeypatch.setattr("django.db.router.db_for_write", lambda model, **hints: "other")
    found = set()
    monkeypatch.setattr(decorators, "declared", found)
    monkeypatch.setattr(checks, "declared", found)

    reload(publishing)  # as in a process with these routers
    [error] = checks.check_views(None)
    assert (error.id, "database 'other'" in error.msg) == ("exactly_once_views.E001", True)


def test_longest_idempotency_key_publishes_with_a_biz_id_that_fits():
    keys = "a" * 255, "b" * 255

    assert [push(**{"Idempotency-Key": key}).status_code for key in (*keys, *keys)] == [201] * 4
    biz_ids = {message.biz_id for message in published()}
    assert len(biz_ids) == 2
    assert all(biz_id.startswith("sha256:") for biz_id in biz_ids)


def test_request_with_an_idempotency_key_may_be_repeated_after_its_message_was_rescheduled_and_published():
    message = {**MESSAGE, "delay": 3600}
    first = push(message=message, **{"Idempotency-Key": "k-1"}).json()
    Api().post("outbox/messages/reschedule", {"id": first["id"], "delay": 0})
    run_relay(handlers=False)

    again = push(message=message, **{"Idempotency-Key": "k-1"})

    assert (again.status_code, again.json()) == (201, first)
    assert len(published()) == 1


def test_idempotency_keys_of_two_clients_are_independent():
    answers = [push(api, **{"Idempotency-Key": "k-1"}) for api in (Api(SHOP), Api(AUDITOR), Api(NEXT_SHOP))]

    assert [answer.status_code for answer in answers] == [201, 201, 201]
    assert ["Idempotency-Replayed" in answer for answer in answers] == [False, False, True]
    assert len(published()) == 2


@pytest.mark.every_database
def test_number_and_boolean_are_different_payloads_of_a_unique_message():
    one, true = ({**MESSAGE, "biz_id": "order-17", "unique": True, "payload": payload} for payload in (1, True))

    assert [push(message=message).status_code for message in (one, true)] == [201, 409]


@pytest.mark.parametrize("key", ["", '""', "  "])
def test_empty_idempotency_key_is_refused(key):
    assert push(**{"Idempotency-Key": key}).status_code == 400
    assert published() == []


def test_message_with_a_biz_id_keeps_it_beside_an_idempotency_key():
    first, second = (push(message={**MESSAGE, "biz_id": "order-17"}, **{"Idempotency-Key": "k-1"}) for _ in range(2))

    assert first.content == second.content
    assert [message.biz_id for message in published()] == ["order-17"]


@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
def test_concurrent_requests_with_one_idempotency_key_publish_once():
    def persistent():
        while (answer := push(**{"Idempotency-Key": "k-1"})).status_code == 409:
            assert answer["Retry-After"] == "1"
        return answer

    answers = at_once([persistent] * 6)

    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert sum("Idempotency-Replayed" not in answer for answer in answers) == 1
    assert OutboxMessage.objects.count() == 1


@pytest.mark.every_database
def test_many_messages_are_published_in_one_transaction():
    batch = {"messages": [{**MESSAGE, "biz_id": f"order-{number}", "unique": True} for number in range(5)]}

    first, second = (Api().post("outbox/messages/batch", batch) for _ in range(2))

    assert (first.status_code, second.status_code) == (200, 200)
    assert [one["biz_id"] for one in first.json()["messages"]] == [f"order-{number}" for number in range(5)]
    assert [one["id"] for one in first.json()["messages"]] == [one["id"] for one in second.json()["messages"]]
    assert len(published()) == 5


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        ({"topic": "shop.*", "payload": 1}, 422),
        ({"topic": TOPIC, "payload": 1, "priority": 3, "key": "a"}, 422),
        ({"topic": "partner.news", "payload": 1}, 403),
        ({"topic": TOPIC, "payload": {}, "biz_id": "order-0", "unique": True}, 409),
    ],
)
def test_no_message_of_a_batch_is_published_if_one_is_refused(bad, status):
    push(message={**MESSAGE, "biz_id": "order-0", "unique": True})

    response = Api().post("outbox/messages/batch", {"messages": [MESSAGE, bad]})

    assert response.status_code == status
    assert len(published()) == 1


@pytest.mark.every_database
def test_batch_with_an_idempotency_key_is_published_once():
    first, second = (
        Api().post("outbox/messages/batch", {"messages": [MESSAGE] * 3}, **{"Idempotency-Key": "k-1"}) for _ in range(2)
    )

    assert (first.status_code, second.status_code, first.content) == (200, 200, second.content)
    assert len(published()) == 3


def test_batch_is_refused_if_it_is_empty_or_too_large(monkeypatch):
    monkeypatch.setattr("outbox.contrib.http.urls.MAX_MESSAGES", 2)
    answers = [
        Api().post("outbox/messages/batch", {"messages": []}),
        Api().post("outbox/messages/batch", {"messages": [MESSAGE] * 3}),
    ]

    assert [answer.status_code for answer in answers] == [422, 422]
    assert published() == []


UNPUBLISHABLE = {
    "topic": ["", 1, "x" * 256, "shop.\x00"],
    "biz_id": ["  "],
    "priority": [10, "1", True],
    "delay": [-1, "5", "90 s", "99999d", True, 1e300],
    "deliver_at": ["2027-01-31T12:00:00", 1700000000],
    "expires_in": [0],
    "unique": ["yes", 1],
    "headers": [{"tenant": ["acme"]}, {"cloudEvents:id": "1"}, {"n": 2**64}],
    "payload": ["\ud800"],
    "delay_seconds": [5],
}


@pytest.mark.parametrize(
    "change",
    [
        *({field: value} for field, values in UNPUBLISHABLE.items() for value in values),
        {"delay": 1, "deliver_at": "2027-01-31T12:00:00Z"},
    ],
    ids=lambda change: ascii(change)[:40],
)
def test_message_that_cannot_be_published_is_refused_and_not_stored(change):
    assert push(Api(AUDITOR), {**MESSAGE, **change}).status_code == 422
    assert published() == []


BODIES = {
    400: [b"not json", b"\xff", b"[" * 2000],
    422: [b"", b"[]", b'{"topic": "shop.a"}', b'{"topic": "shop.a", "payload": NaN}'],
    413: [b'{"topic": "shop.a", "payload": "' + b"x" * LIMIT + b'"}'],
}


@pytest.mark.parametrize(("body", "status"), [(body, status) for status, bodies in BODIES.items() for body in bodies])
def test_body_that_is_not_a_message_is_refused_and_not_stored(body, status):
    assert push(message=body).status_code == status
    assert published() == []


def test_announced_length_of_many_digits_is_too_large_and_an_error_names_the_field_and_not_its_value():
    for length in (str(10**18), "9" * 5_000):
        assert push(**{"Content-Length": length}).status_code == 413
    problem = push(message={**MESSAGE, "priority": "secret"}).json()

    assert [error["field"] for error in problem["errors"]] == ["body.message.priority"]
    assert "secret" not in json.dumps(problem)
    assert published() == []


@pytest.mark.parametrize(
    ("where", "body"),
    [
        ("outbox/messages/batch", {"messages": [1] * 500}),
        ("outbox/messages", {**MESSAGE, "headers": {str(number): [] for number in range(150)}}),
        ("outbox/messages", {**MESSAGE, "headers": {"x" * 1_500: []}}),
    ],
)
def test_answer_to_many_wrong_fields_is_short(where, body):
    response = Api().post(where, body)

    assert response.status_code == 422
    assert len(response.content) < 2 * LIMIT


@pytest.mark.parametrize("token", ["", "wrong", "x" * 5000, "ü", f"{SHOP} {SHOP}", HTTP["TOKENS"]["shop"]["DIGESTS"][0]])
def test_request_without_a_valid_token_is_answered_with_401_and_its_body_is_not_read(token, monkeypatch):
    monkeypatch.setattr(WSGIRequest, "read", lambda *given: pytest.fail("the body was read"))
    answers = [
        push(Api(token), b"x" * (LIMIT + 1)),
        Api(token).get("outbox/messages", topic=TOPIC, biz_id="order-17"),
        Api(token).post("outbox/messages/restore", {"topic": TOPIC}),
        *(Api(token).post(f"inbox/subscriptions/{TOPIC}/{action}", {}) for action in ("read", "acknowledge")),
    ]

    assert [answer.status_code for answer in answers] == [401] * 5
    assert {answer["WWW-Authenticate"] for answer in answers} == {"Bearer"}
    assert published() == []
    with override_settings(OUTBOX={}):
        assert push().status_code == 401, "without tokens in the settings"


def test_token_does_nothing_beyond_its_scopes():
    message = push().json()
    partner = Api(PARTNER)

    answers = [
        push(partner),
        push(partner, {**MESSAGE, "topic": "partner.news.daily"}),
        partner.get("outbox/messages", topic=TOPIC, biz_id=message["biz_id"]),
        partner.post("outbox/messages/cancel", {"topic": TOPIC, "biz_id": message["biz_id"]}),
        partner.post("outbox/messages/reschedule", {"topic": TOPIC, "biz_id": message["biz_id"], "delay": 0}),
        partner.post("outbox/messages/restore", {"topic": TOPIC}),
    ]

    assert [answer.status_code for answer in answers] == [403] * 6
    assert answers[0].json()["scope"] == f"publish:{TOPIC}"
    assert push(partner, {**MESSAGE, "topic": "partner.news"}).status_code == 201


def test_message_outside_the_scopes_looks_as_if_it_did_not_exist():
    known, unknown = push().json()["id"], str(uuid.uuid4())
    partner = Api(PARTNER)

    for where in ("cancel", "restore"):
        answers = [partner.post(f"outbox/messages/{where}", {"id": each}) for each in (known, unknown)]
        assert [answer.status_code for answer in answers] == [404, 404]
    texts = [partner.get(f"outbox/messages/{each}").json()["detail"].replace(each, "…") for each in (known, unknown)]
    assert texts[0] == texts[1]


def test_message_is_cancelled_once_by_its_id_or_by_its_topic_and_biz_id():
    one, two = push().json(), push(message={**MESSAGE, "biz_id": "order-18"}).json()

    by_id = Api().post("outbox/messages/cancel", {"id": one["id"]})
    by_name = Api().post("outbox/messages/cancel", {"topic": TOPIC, "biz_id": "order-18"})
    again = Api().post("outbox/messages/cancel", {"id": one["id"]})

    assert [answer.json()["outcome"] for answer in (by_id, by_name)] == ["cancelled", "cancelled"]
    assert (again.status_code, again.json()["state"]) == (409, "cancelled")
    assert status_of(two["id"])["state"] == "cancelled"
    assert {entry.reason for entry in TrailEntry.objects.all()} == {"cancel() by the HTTP client shop"}
    unknown = {"topic": TOPIC, "biz_id": "order-99"}
    for where, more in (("cancel", {}), ("reschedule", {"delay": 1})):
        assert Api().post(f"outbox/messages/{where}", {**unknown, **more}).status_code == 404


UNCLEAR = {
    "cancel": [
        *({}, {"topic": TOPIC}, {"biz_id": "order-17"}, {"id": "17"}, {"topic": TOPIC, "biz_id": "\x00"}),
        {"id": str(uuid.uuid4()), "topic": TOPIC, "biz_id": "order-17"},
    ],
    "reschedule": [{"topic": TOPIC, "biz_id": "order-17"}],
    "restore": [{}, {"topic": TOPIC, "states": ["published"]}, {"topic": TOPIC, "states": []}],
}


@pytest.mark.parametrize(("where", "body"), [(where, body) for where, bodies in UNCLEAR.items() for body in bodies])
def test_decision_without_a_clear_choice_of_messages_is_refused(where, body):
    assert Api().post(f"outbox/messages/{where}", body).status_code == 422


def test_messages_are_restored_one_by_one_and_all_of_a_topic_without_overdue_ones_on_request():
    messages = [push(message={**MESSAGE, "biz_id": f"order-{number}"}).json() for number in range(3)]
    ahead = push(message={**MESSAGE, "delay": 3600}).json()
    other = push(message={**MESSAGE, "topic": "shop.order.paid"}).json()
    for message in [*messages, ahead, other]:
        Api().post("outbox/messages/cancel", {"id": message["id"]})

    one = Api().post("outbox/messages/restore", {"id": messages[0]["id"]})
    some = executed(Api().post("outbox/messages/restore", {"topic": TOPIC, "overdue": False}))
    rest, again = (executed(Api().post("outbox/messages/restore", {"topic": TOPIC})) for _ in range(2))

    assert one.json() == {"outcome": "restored", "state": "ready"}
    assert (some["restored"], [*some["left"].values()]) == (1, [2])
    assert status_of(ahead["id"])["state"] == "scheduled"
    assert [answer["restored"] for answer in (rest, again)] == [2, 0]
    assert {status_of(message["id"])["state"] for message in messages} == {"ready"}
    assert status_of(other["id"])["state"] == "cancelled"
    assert f"operation {rest['id']} by the HTTP client shop" in {entry.reason for entry in TrailEntry.objects.all()}


def executed(response):
    """The state of a planned operation after a relay has executed it."""
    assert response.status_code == 202
    Operations("outbox", [DEFAULT_DB_ALIAS]).drain(StopRequest())
    return Api().get(response["Location"].removeprefix("/api/")).json()


@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
def test_each_decision_is_in_the_audit_log_with_its_client():
    first, second = (push(message={**MESSAGE, "biz_id": "order-17", "delay": 60}).json()["id"] for _ in range(2))
    decide = Api().post
    decide("outbox/messages/reschedule", {"id": first, "delay": 3600})
    decide("outbox/messages/cancel", {"topic": TOPIC, "biz_id": "order-17"})
    decide("outbox/messages/restore", {"id": second, "overdue": False})
    decide("outbox/messages/cancel", {"id": str(uuid.uuid4())})
    operation = decide("outbox/messages/restore", {"topic": TOPIC}).json()["id"]

    entries = AuditEntry.objects.order_by("pk")
    assert {(entry.app, entry.actor, entry.place, entry.address) for entry in entries} == {
        ("outbox", "shop", "HTTP API", "127.0.0.1")
    }
    assert [(entry.action, entry.kind, entry.object_id) for entry in entries] == [
        ("reschedule", "message", first),
        ("cancel", "message", first),
        ("cancel", "message", second),
        ("restore", "message", second),
        ("restore", "operation", str(operation)),
    ]
    assert entries[0].parameters == {"id": first, "delay": "1:00:00"}
    assert entries[3].parameters == {"id": second, "without_overdue": True}
    assert entries[4].parameters == {"topic": TOPIC, "messages": 1}


def test_operation_of_a_user_who_is_named_like_a_client_is_not_that_clients():
    by_user = {"requested_by": "the HTTP client shop", "permission": "outbox.restore_outboxmessage"}
    plan = Operation(action="restore", selection=f"topic {TOPIC}", sources=["dead"], given={"overdue": True}, **by_user)
    operation = operations.plan("default", plan, [1])

    assert Api().get(f"outbox/operations/{operation.pk}").status_code == 404


def test_restore_of_a_topic_is_answered_before_its_messages_are_restored():
    ids = [message.id for message in some_cancelled(2_500)]

    response = Api().post("outbox/messages/restore", {"topic": TOPIC})

    planned = response.json()
    assert (response.status_code, planned["state"], planned["total"], planned["restored"]) == (202, "planned", 2_500, 0)
    assert status_of(ids[0])["state"] == "cancelled"
    ended = executed(response)
    assert (ended["state"], ended["restored"], ended["left"]) == ("finished", 2_500, {})
    assert {status_of(ids[0])["state"], status_of(ids[-1])["state"]} == {"ready"}


def some_cancelled(number):
    with transaction.atomic():
        messages = publish_many([Draft(TOPIC, number) for number in range(number)])
    table = "outbox_outboxmessage"
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {table} SET state = 'cancelled', day = 1, settled_at = created_at")
    return messages


@pytest.mark.parametrize("token", [PARTNER, AUDITOR])
def test_operation_is_shown_to_its_own_client_only(token):
    planned = Api().post("outbox/messages/restore", {"topic": TOPIC}).json()

    assert Api().get(f"outbox/operations/{planned['id']}").json() == planned
    assert Api(token).get(f"outbox/operations/{planned['id']}").status_code == 404
    assert Api().get(f"outbox/operations/{2**63}").status_code == 422


@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
def test_repeated_restore_of_a_topic_is_answered_with_the_operation_that_is_still_open():
    some_cancelled(2)
    restore = {"topic": TOPIC}
    first, again = (Api().post("outbox/messages/restore", restore) for _ in range(2))
    others = [
        Api(AUDITOR).post("outbox/messages/restore", restore),
        Api().post("outbox/messages/restore", {**restore, "overdue": False}),
        Api().post("outbox/messages/restore", {**restore, "states": ["dead"]}),
    ]

    assert (again.json(), again["Location"]) == (first.json(), first["Location"])
    assert len({answer.json()["id"] for answer in (first, *others)}) == 4
    executed(first)
    assert Api().post("outbox/messages/restore", restore).json()["id"] != first.json()["id"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("tokens", "state"),
    [
        pytest.param(HTTP["TOKENS"], "finished", id="has its scope"),
        pytest.param({}, "finished", id="a relay without tokens"),
        pytest.param({"shop": {**HTTP["TOKENS"]["shop"], "SCOPES": ["manage:other"]}}, "stopped", id="reduced"),
        pytest.param({"partner": HTTP["TOKENS"]["partner"]}, "stopped", id="removed"),
    ],
)
def test_operation_stops_when_its_client_has_lost_the_scope(tokens, state):
    message = some_cancelled(1)[0]
    planned = Api().post("outbox/messages/restore", {"topic": TOPIC})

    with override_settings(OUTBOX={"HTTP": {**HTTP, "TOKENS": tokens}}):
        Operations("outbox", [DEFAULT_DB_ALIAS]).drain(StopRequest())
        if "shop" in tokens:
            assert (Api().get(f"outbox/operations/{planned.json()['id']}").status_code == 404) == (state == "stopped")

    ended = Api().get(f"outbox/operations/{planned.json()['id']}").json()
    assert ended["state"] == state
    assert ("no longer has the scope manage:shop.order.placed" in ended["stopped_because"]) == (state == "stopped")
    assert status_of(message.id)["state"] == ("cancelled" if state == "stopped" else "ready")


def test_state_is_shown_by_id_and_by_topic_and_biz_id_from_publishing_to_history():
    first = push(message={**MESSAGE, "biz_id": "order-17"}).json()
    second = push(message={**MESSAGE, "biz_id": "order-17"}).json()
    assert status_of(first["id"])["state"] == "ready"
    run_relay(handlers=False)

    found = Api().get("outbox/messages", topic=TOPIC, biz_id="order-17").json()["messages"]

    assert [one["id"] for one in found] == [second["id"], first["id"]]
    assert "payload" not in found[0]
    assert Api().get("outbox/messages", topic=TOPIC, biz_id="order-99").json() == {"messages": []}


def test_no_other_method_and_no_other_address_is_served():
    for where in ("batch", "cancel", "reschedule", "restore"):
        response = Api().ask("DELETE", f"outbox/messages/{where}")
        assert (response.status_code, response["Allow"]) == (405, "POST")
    for where in ("", "unknown", "messages/17", "messages/", "openapi.json/"):
        assert Api().get(f"outbox/{where}").status_code == 404


def test_unavailable_database_is_answered_with_503_and_an_unexpected_error_with_500(monkeypatch, caplog):
    def fails(error):
        def publish_many(*args, **kwargs):
            raise error

        return publish_many

    monkeypatch.setattr("outbox.contrib.http.publishing.publish_many", fails(OperationalError("password=secret")))
    unavailable = push()
    monkeypatch.setattr("outbox.contrib.http.publishing.publish_many", fails(ZeroDivisionError("secret")))
    unexpected = push()

    assert (unavailable.status_code, unavailable["Retry-After"]) == (503, "1")
    assert unexpected.status_code == 500
    assert "secret" not in unavailable.content.decode() + unexpected.content.decode()
    assert "ZeroDivisionError" in caplog.text
