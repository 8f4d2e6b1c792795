"""The HTTP API of the inbox: clients read messages under a lease, acknowledge, extend and release them."""

import asyncio
import http.client
import json
import logging
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from wsgiref import simple_server

import pytest
from asgiref.sync import sync_to_async
from django.core.handlers.wsgi import WSGIHandler
from django.core.servers.basehttp import WSGIRequestHandler, WSGIServer
from django.db import connection, connections, transaction
from django.test import AsyncClient, override_settings

from exactly_once.models import Minute
from inbox import Ordered, Retry
from inbox.contrib.http import queries, subscribe
from inbox.contrib.http.waiting import waiting
from inbox.handlers.registry import registry
from inbox.models import InboxMessage, TrailEntry
from inbox.operators.dry_run import why_not
from inbox.operators.handler_pauses import pause, resume
from inbox.states import Outcome, State
from inbox.store import counting, lease_rows
from inbox.testing import deliver as deliver_and_drain
from inbox.testing import make_message, travel
from inbox.transactions.running import DatabaseUnavailable
from tests.support.decisions import retry as retry_by_operator
from tests.support.decisions import skip
from tests.support.deliveries import InAThread, an_envelope, at_once, deliver, drain, the_row
from tests.support.http_api import AUDITOR, HTTP, PARTNER, SHOP, Api
from tests.support.servers.private import LOOPBACK
from tests.support.signals import recorded_signals
from tests.support.sql import fetched
from tests.support.waiting import A_WHILE, wait_until
from tests.support.workers import broker_options, consuming, declare, mark_redelivered, send

pytestmark = pytest.mark.django_db

TOPIC = "shop.order.placed"
PATH = f"inbox/subscriptions/{TOPIC}"
LEASE = {"lease": 60}


@pytest.fixture(autouse=True)
def _urls():
    with override_settings(ROOT_URLCONF="tests.support.http_urls", OUTBOX={"HTTP": HTTP}, INBOX={"MAX_ATTEMPTS": 3}):
        yield


@pytest.fixture
def subscribed(own_handlers):
    """Register a subscription for this test."""

    def register(topic=TOPIC, **options):
        subscribe(topic, **options)
        return registry.get(options.get("name") or topic)

    return register


@pytest.fixture
def orders(subscribed):
    return subscribed()


def arrive(handler, number=1, **attributes):
    """Messages that a consumer stores."""
    for _ in range(number):
        assert deliver(handler, an_envelope(**attributes)) is Outcome.STORED


def read(api=None, path=PATH, **how):
    response = (api or Api()).post(f"{path}/read", how)
    assert response.status_code == 200, response.json()
    return response.json()["messages"]


def settle(action, *messages, api=None, path=PATH, **more):
    return (api or Api()).post(f"{path}/{action}", {"leases": [message["lease"] for message in messages], **more})


def waiting_now():
    return waiting._by_client.total()


def end_leases():
    travel(timedelta(minutes=2))


@pytest.mark.every_database
def test_message_is_read_under_a_lease_and_done_when_it_is_acknowledged(orders):
    arrive(orders, payload={"order": "17"}, biz_id="order-17", key="customer-1", headers={"tenant": "acme"})

    [message] = read(**LEASE)
    assert (message["topic"], message["biz_id"], message["key"]) == (TOPIC, "order-17", "customer-1")
    assert (message["payload"], message["headers"], message["attempt"]) == ({"order": "17"}, {"tenant": "acme"}, 1)
    assert message["id"] == the_row().message_id
    assert the_row().state == State.RUNNING
    assert read() == [], "it is the first client's"

    assert settle("acknowledge", message).json() == {"settled": [message["lease"]], "ended": []}
    assert the_row().state == State.DONE
    assert read() == []


def test_consumer_stores_a_message_of_a_subscription_and_runs_nothing_also_while_it_is_paused(orders):
    deliver_and_drain(make_message(TOPIC, {"order": "17"}))
    assert drain() == 0
    assert (the_row().state, the_row().attempts) == (State.RECEIVED, 0)

    pause(orders.name, by="operator")
    assert read() == []
    resume(orders.name, by="operator")
    assert len(read()) == 1


def test_each_subscription_gets_every_message_and_its_clients_share_them(subscribed):
    orders, copies = subscribed(), subscribed(name="shop.copies")
    for handler in (orders, copies):
        arrive(handler, 4)

    first, second = read(max_messages=3), read(max_messages=3)

    assert (len(first), len(second)) == (3, 1)
    assert len({message["id"] for message in first + second}) == 4
    assert len(read(path="inbox/subscriptions/shop.copies", max_messages=10)) == 4


@pytest.mark.every_database
def test_message_is_read_again_when_its_lease_has_ended_and_the_old_lease_is_refused(orders):
    arrive(orders)
    [first] = read(**LEASE)
    end_leases()
    answers = [settle(action, first) for action in ("acknowledge", "extend", "release")]
    assert [answer.json()["ended"] for answer in answers] == [[first["lease"]]] * 3, "also before it is read again"
    [second] = read(**LEASE)

    assert (second["id"], second["attempt"]) == (first["id"], 2)
    assert second["fence"] > first["fence"]
    for action, more in (("acknowledge", {}), ("extend", {}), ("release", {}), ("release", {"error": "broken"})):
        late = settle(action, first, **more)
        assert late.json() == {"settled": [], "ended": [first["lease"]]}
    assert the_row().state == State.RUNNING
    assert settle("acknowledge", second).status_code == 200
    unknown = "999999999999999999.999999999"
    assert Api().post(f"{PATH}/acknowledge", {"leases": [unknown]}).json() == {"settled": [], "ended": [unknown]}


@pytest.mark.every_database
def test_other_leases_of_a_request_are_settled_beside_one_that_has_ended(orders):
    arrive(orders, 3)
    messages = read(max_messages=3, **LEASE)
    settle("extend", messages[0], messages[2], lease=600)
    end_leases()

    answer = settle("acknowledge", *messages)

    assert answer.status_code == 200
    assert answer.json() == {"settled": [messages[0]["lease"], messages[2]["lease"]], "ended": [messages[1]["lease"]]}
    assert InboxMessage.objects.filter(state=State.DONE).count() == 2


@pytest.mark.every_database
def test_repeated_acknowledgement_and_release_are_accepted_and_counted_once(orders):
    with recorded_signals("message_handled") as handled, override_settings(INBOX={"KEEP_HISTORY": None}):
        arrive(orders, 2)
        one, two = read(max_messages=2, **LEASE)
        assert [settle("acknowledge", one).status_code for _ in range(2)] == [200, 200]
        assert [settle("release", two, delay=60).status_code for _ in range(2)] == [200, 200]

    assert [given["message_id"] for _, given in handled] == [one["id"]]
    assert settle("acknowledge", two).json()["ended"] == [two["lease"]]


@pytest.mark.every_database
def test_released_message_is_due_at_once_or_after_the_delay_and_costs_no_attempt(orders):
    arrive(orders)
    for _ in range(5):
        [message] = read()
        assert settle("release", message).status_code == 200
    assert message["attempt"] == 1

    [message] = read()
    settle("release", message, delay=3600)
    assert read() == []
    travel(timedelta(hours=2))
    assert len(read()) == 1


def test_reported_errors_use_up_the_attempts_and_make_a_dead_letter_with_the_redacted_error(orders, caplog):
    arrive(orders)
    with override_settings(INBOX={"MAX_ATTEMPTS": 3, "REDACT_ERRORS": "tests.support.redactors.mask_ibans"}):
        for _ in range(3):
            [message] = read()
            assert settle("release", message, error="cannot book DE12345678901234567890", delay=0).status_code == 200

    assert message["attempt"] == 3
    row = the_row()
    assert (row.state, row.attempts, row.error_class) == (State.DEAD, 3, queries.REPORTED)
    assert row.last_error == "cannot book DE…"
    assert "is a dead letter after attempt 3: cannot book DE…" in caplog.text
    assert "read over HTTP" in why_not(row), "it is not run dry"
    assert retry_by_operator("default", row.pk)
    assert read()[0]["attempt"] == 1


def test_failed_attempt_waits_as_the_subscription_says(subscribed):
    arrive(subscribed(retry=Retry(max_attempts=2)))
    settle("release", read()[0], error="later")

    assert read() == []
    assert the_row().state == State.RETRYING
    travel(timedelta(minutes=1))
    settle("release", read()[0], error="again")
    assert the_row().state == State.DEAD


def test_message_whose_clients_die_becomes_a_dead_letter(orders):
    arrive(orders)
    with recorded_signals("message_dead") as dead:
        for attempt in (1, 2, 3):
            assert read(**LEASE)[0]["attempt"] == attempt
            end_leases()
        assert read() == []

    assert (the_row().state, the_row().attempts) == (State.DEAD, 3)
    [(_, given)] = dead
    assert given["error"] == "Its attempts never ended: no client acknowledged or released it before its lease ended."


DEEP = 9_900 if sys.version_info >= (3, 13) else 900
"""Python reads so many levels, and does not write many more."""


@pytest.mark.parametrize("body", [b"not json", b'{"total": NaN}', b'{"total": 1e999}', b"[" * DEEP + b"]" * DEEP])
def test_payload_that_clients_cannot_read_is_a_dead_letter_and_the_other_messages_are_read(orders, body):
    arrive(orders, 3)
    InboxMessage.objects.filter(pk=InboxMessage.objects.order_by("pk")[1].pk).update(body=body)

    assert len(read(max_messages=3)) == 2
    assert InboxMessage.objects.get(body=body).state == State.DEAD


def test_messages_that_were_claimed_before_the_database_became_unavailable_are_answered(orders, monkeypatch):
    arrive(orders, 3)
    grants = iter([lease_rows.lease_stored])

    def lease_one(*given, **options):
        for grant in grants:
            return grant(*given, **options)
        raise DatabaseUnavailable("default")

    monkeypatch.setattr(lease_rows, "lease_stored", lease_one)

    assert len(read(max_messages=3)) == 1
    assert Api().post(f"{PATH}/read", {}).status_code == 503


@pytest.mark.every_database
def test_duplicate_of_a_message_in_every_state_is_suppressed(orders):
    envelope = an_envelope()
    with recorded_signals("duplicate_suppressed") as suppressed:
        assert deliver(orders, envelope) is Outcome.STORED
        assert deliver(orders, envelope) is Outcome.DUPLICATE
        [message] = read()
        assert deliver(orders, envelope, redelivered=True) in {Outcome.DUPLICATE, Outcome.STORED}
        assert read() == []
        settle("acknowledge", message)
        assert deliver(orders, envelope) is Outcome.DUPLICATE

    assert InboxMessage.objects.count() == 1
    assert len(suppressed) == 3


@pytest.mark.every_database
def test_messages_of_a_key_are_read_one_at_a_time_in_order(subscribed):
    handler = subscribed(ordered=Ordered())
    for key in "aabab":
        arrive(handler, key=key, payload={"key": key})

    first = read(max_messages=10)
    assert [message["key"] for message in first] == ["a", "b"]
    assert read(max_messages=10) == []
    settle("release", first[0])
    assert [message["id"] for message in read(max_messages=10)] == [first[0]["id"]], "the head comes again before the next"
    end_leases()

    order = {"a": [], "b": []}
    while messages := read(max_messages=10):
        for message in messages:
            order[message["key"]].append(message["id"])
            assert settle("acknowledge", message).status_code == 200
    arrived = list(InboxMessage.objects.order_by("pk").values_list("key", "message_id"))
    assert order == {key: [message for of, message in arrived if of == key] for key in "ab"}


def test_dead_letter_blocks_its_key_until_an_operator_skips_it(subscribed):
    arrive(subscribed(ordered=True, retry=Retry(max_attempts=1)), 2, key="a")
    [head] = read(max_messages=10)
    settle("release", head, error="broken")

    assert read() == []
    assert skip("default", the_row(state=State.DEAD).pk, "not needed")
    assert len(read()) == 1


@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
def test_concurrent_readers_never_get_the_same_message(orders):
    arrive(orders, 12)

    answers = at_once([lambda: read(max_messages=6)] * 4)

    ids = [message["id"] for answer in answers for message in answer]
    assert len(ids) == len({*ids}) == 12


@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
def test_waiting_reader_gets_a_message_that_comes_later_and_holds_no_connection_meanwhile(orders):
    with InAThread(lambda: read(wait=20)) as reader:
        wait_until(lambda: waiting_now() == 1)
        if connection.vendor == "postgresql":
            wait_until(lambda: others_connected() == 0)
        arrive(orders)
    assert len(reader.answer) == 1


def others_connected():
    return fetched(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_type = 'client backend'"
    )


@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
def test_request_has_no_transaction_around_it_with_atomic_requests(orders, monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    with transaction.atomic():
        arrive(orders)

    [message] = read(wait=0.1)
    assert settle("acknowledge", message).status_code == 200
    assert Api().post("outbox/messages", {"topic": "shop.a", "payload": 1}).status_code == 201
    assert read(wait=0.1) == []


@pytest.mark.django_db(transaction=True)
def test_client_that_waits_often_leaves_places_to_the_other_clients(subscribed):
    handlers, path = [subscribed(), subscribed("shop.news", name="partner.news")], "inbox/subscriptions/partner.news"
    few = {"HTTP": {**HTTP, "MAX_WAITING": 3}}  # for three clients that may read
    with override_settings(OUTBOX=few), InAThread(lambda: read(wait=20)) as first:
        wait_until(lambda: waiting_now() == 1)
        refused = Api().post(f"{PATH}/read", {"wait": 20})
        assert (refused.status_code, refused["Retry-After"]) == (429, "1")
        assert read() == [], "a reader that does not wait is answered"
        with InAThread(lambda: read(Api(PARTNER), path, wait=20)) as other:
            wait_until(lambda: waiting_now() == 2)
            arrive(handlers[1], topic="shop.news")
        arrive(handlers[0])
    assert [len(reader.answer) for reader in (first, other)] == [1, 1]
    assert waiting_now() == 0


class _Pooled(WSGIServer):
    """A WSGI server with a few threads, each of which serves one request at a time."""

    def __init__(self, threads):
        super().__init__((LOOPBACK, 0), WSGIRequestHandler)
        self._threads = ThreadPoolExecutor(threads)

    def process_request(self, request, client_address):
        self._threads.submit(super().process_request, request, client_address)


class _OneThread(simple_server.WSGIServer):
    """A WSGI server that serves one request at a time, and says so (`wsgi.multithread`)."""

    def __init__(self):
        super().__init__((LOOPBACK, 0), simple_server.WSGIRequestHandler)


@contextmanager
def serving(server):
    """A function that sends a request to the server and returns its status and its body."""
    server.set_app(WSGIHandler())
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()

    def ask(where, body, token=SHOP, **headers):
        client = http.client.HTTPConnection(LOOPBACK, server.server_port, timeout=A_WHILE)
        with closing(client):
            headers = {"Host": "testserver", "Authorization": f"Bearer {token}", "Content-Type": "application/json", **headers}
            client.request("POST", f"/api/{where}", body if isinstance(body, list) else json.dumps(body), headers)
            answer = client.getresponse()
            return answer.status, json.load(answer)

    try:
        yield ask
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.django_db(transaction=True)
@override_settings(OUTBOX={"HTTP": {"TOKENS": HTTP["TOKENS"]}})
def test_readers_that_wait_under_wsgi_leave_threads_for_other_requests(orders):
    with serving(_Pooled(3)) as ask:
        polls = [InAThread(lambda: ask(f"{PATH}/read", {"wait": 30})) for _ in range(6)]
        with ExitStack() as running:
            for poll in polls:
                running.enter_context(poll)
            wait_until(lambda: sum(poll.ended for poll in polls) == 5 and waiting_now() == 1)
            assert ask("outbox/messages", {"topic": "shop.a", "payload": 1}, AUDITOR)[0] == 201
            assert waiting_now() == 1
            arrive_and_disconnect(orders)

    assert sorted(poll.answer[0] for poll in polls) == [200] + [429] * 5


@pytest.mark.django_db(transaction=True)
@override_settings(OUTBOX={"HTTP": {"TOKENS": HTTP["TOKENS"]}})
def test_server_with_a_single_thread_answers_readers_at_once_and_a_body_without_a_length_with_411(orders):
    with serving(_OneThread()) as ask:
        assert ask(f"{PATH}/read", {"wait": 30}) == (200, {"messages": []})
        arrive_and_disconnect(orders)
        assert len(ask(f"{PATH}/read", {"wait": 30})[1]["messages"]) == 1
    with serving(_Pooled(1)) as ask:
        status, problem = ask(f"{PATH}/read", [b'{"max_messages": 1}'], **{"Transfer-Encoding": "chunked"})
    assert (status, problem["status"]) == (411, 411)


@pytest.mark.django_db(transaction=True)
@override_settings(MIDDLEWARE=[])  # with a synchronous one a request occupies a thread, of which the test client has one
def test_reader_waits_under_asgi_without_a_thread(orders):
    async def both():
        client, headers = AsyncClient(), {"Authorization": f"Bearer {AUDITOR}"}

        def post(**how):
            return client.post(f"/api/{PATH}/read", json.dumps(how), content_type="application/json", headers=headers)

        waits = asyncio.create_task(post(wait=20))
        await asyncio.to_thread(wait_until, waiting_now)
        answered_at_once = await post()
        await asyncio.to_thread(arrive_and_disconnect, orders)
        waited = await waits
        await sync_to_async(connections.close_all)()
        return answered_at_once.json(), waited.json()

    answered_at_once, waited = asyncio.run(both())

    assert answered_at_once == {"messages": []}
    assert len(waited["messages"]) == 1


def arrive_and_disconnect(handler):
    try:
        arrive(handler)
    finally:
        connection.close()


def test_subscription_is_read_by_clients_with_its_scope_only(subscribed):
    orders, news = subscribed(), subscribed("shop.news", name="partner.news")
    arrive(orders)
    arrive(news, topic="shop.news")
    [message] = read()
    partner, path = Api(PARTNER), "inbox/subscriptions/partner.news"

    assert partner.post(f"{PATH}/read", {}).status_code == 403
    assert settle("acknowledge", message, api=partner).status_code == 403
    assert Api().post(f"{path}/read", {}).status_code == 403
    assert len(read(partner, path)) == 1
    of_another = settle("acknowledge", message, api=partner, path=path)
    assert of_another.json()["settled"] == [], "the lease is of another subscription"
    assert InboxMessage.objects.get(handler=TOPIC).state == State.RUNNING


def test_handler_of_this_project_is_not_a_subscription_and_a_name_must_fit_into_a_url(handles):
    handles(print, topic=TOPIC, name="shop.own")

    assert Api().post("inbox/subscriptions/shop.own/read", {}).status_code == 404
    assert Api().post("inbox/subscriptions/shop.unknown/read", {}).status_code == 404
    for name in ("a/b", "a b", "ü", "a?b"):
        with pytest.raises(ValueError, match="cannot be part of a URL"):
            subscribe(TOPIC, name=name)


@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
def test_transitions_are_in_the_trail_and_handled_messages_in_the_statistics(orders, monkeypatch):
    monkeypatch.setattr("inbox.contrib.http.queries._writers", {})
    counting.writer("default").write()  # what earlier tests have counted would be written before, and this a minute later
    with override_settings(INBOX={"TRAIL": "all"}):
        arrive(orders)
        settle("acknowledge", read()[0])

    entries = TrailEntry.objects.order_by("pk").values_list("was", "became")
    assert list(entries) == [("", "received"), ("received", "running"), ("running", "done")]
    assert Minute.objects.filter(app="inbox", subject=TOPIC, counts__handled__gte=1).exists()


def test_lone_surrogate_is_answered_as_it_came(orders):
    arrive(orders, body=rb'"\ud83d"')

    assert [message["payload"] for message in read()] == ["\ud83d"]


@pytest.mark.every_database
def test_large_bodies_are_not_read_all_at_once(orders, monkeypatch):
    monkeypatch.setattr(queries, "_LARGEST_ANSWER_BYTES", 1000)
    arrive(orders, 4, payload={"text": "x" * 900})

    assert [len(read(max_messages=4)) for _ in range(2)] == [2, 2]


def test_compressed_bodies_count_as_they_are_answered(orders, monkeypatch):
    monkeypatch.setattr(queries, "_LARGEST_ANSWER_BYTES", 1000)
    body = zlib.compress(json.dumps({"text": "x" * 900}).encode())
    arrive(orders, 4, body=body, headers={"compression": "application/x-gzip"})

    assert [len(read(max_messages=4)) for _ in range(2)] == [2, 2]


def test_log_of_failed_requests_has_no_lease_and_no_token(orders, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    arrive(orders)
    [message] = read(Api(AUDITOR))
    monkeypatch.setattr(lease_rows, "consume", "broken")
    statuses = [settle("acknowledge", message, api=Api(token)).status_code for token in ("wrong-token", AUDITOR)]

    assert statuses == [401, 500]
    assert "Unauthorized" in caplog.text
    assert "unexpected error" in caplog.text
    assert [secret for secret in ("wrong-token", AUDITOR, message["lease"]) if secret in caplog.text] == []


@pytest.mark.django_db(transaction=True)
def test_messages_from_rabbitmq_are_stored_and_read_once_although_they_are_delivered_again(orders, rabbitmq_url):
    options, messages = broker_options(rabbitmq_url), [f"message-{number:02}" for number in range(12)]
    declare(orders, options)
    for message in messages:
        send(rabbitmq_url, TOPIC, {"name": message}, message_id=message)
    mark_redelivered(orders, options)
    with consuming([orders], options):
        wait_until(lambda: InboxMessage.objects.count() == len(messages))

    assert set(InboxMessage.objects.values_list("state", "attempts")) == {(State.RECEIVED, 0)}
    ids = []
    while leased := queries.claim(orders, 100, timedelta(minutes=1), options):
        ids += [message.id for _lease, message in leased]
        assert all(queries.acknowledge(orders, [lease for lease, _message in leased], options).values())
    assert sorted(ids) == messages
    assert set(InboxMessage.objects.values_list("state", flat=True)) == {State.DONE}
