"""Outgoing webhooks, sent to real HTTP servers: signed, retried, paused, refused; each endpoint by itself."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from email.utils import format_datetime

import pytest
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext

import inbox.contrib.outgoing_webhooks
from exactly_once.process.clock import utcnow
from exactly_once.process.loop import StopRequest
from inbox.consumer.runner import Runner
from inbox.contrib.outgoing_webhooks import Endpoint, endpoints, posting, send_webhooks
from inbox.contrib.outgoing_webhooks.fanning_out import send_test
from inbox.contrib.outgoing_webhooks.service import EndpointHandlers, serve
from inbox.housekeeping import Housekeeper
from inbox.models import InboxMessage, KeptHandler
from inbox.testing import deliver, make_message, run_handler, travel
from outbox.contrib.incoming_webhooks import InvalidSignature, StandardWebhooks
from outbox.testing import run_relay
from tests.support import arounds
from tests.support.decisions import retry
from tests.support.deliveries import OPTIONS, InAThread, at_once, make_due, options
from tests.support.fakes.receiver import CERTIFICATE, Receiver, Reply
from tests.support.inbox_rows import settle
from tests.support.servers.private import LOOPBACK, free_port
from tests.support.waiting import A_WHILE, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

TOPIC = "shop.order.placed"
ORDER = {"order": "order-17", "total": "9.90", "name": "Ñandú"}


@pytest.fixture(autouse=True)
def network(settings):
    settings.INBOX = {"WEBHOOK_NETWORKS": ["127.0.0.0/8"]}


@pytest.fixture
def offers(own_handlers):
    """`send_webhooks` for this test."""
    return send_webhooks


@pytest.fixture
def receiver():
    with Receiver() as receiver:
        yield receiver


def an_endpoint(receiver, name="partner", **columns):
    return Endpoint.objects.create(name=name, url=receiver.url, **columns)


@pytest.fixture
def endpoint(offers, receiver):
    """An endpoint that gets the messages of the topic."""
    offers(TOPIC)
    return an_endpoint(receiver)


def offered(*orders, topic=TOPIC):
    """Messages of the topic have been handled; what is to be sent is stored."""
    messages = [make_message(topic, order) for order in orders or [ORDER]]
    deliver(*messages)
    return messages


def send(known=None, given=OPTIONS):
    """What the process does: the messages that are due now, for the endpoints that are active now."""
    if known is None:
        known = EndpointHandlers(["default"])
        known.refresh()
    return Runner(given, handlers=known.all, reports_unknown=False).drain(StopRequest())


@contextmanager
def sending() -> Iterator[None]:
    """The process, in a thread of this test."""
    stop = StopRequest()
    with InAThread(lambda: serve(["default"], threads=6, stop=stop)):
        try:
            yield
        finally:
            stop.set()


def rows(name="partner"):
    return InboxMessage.objects.filter(handler=f"webhook/{name}").order_by("pk")


def states(name="partner"):
    return list(rows(name).values_list("state", flat=True))


def the_endpoint(name="partner"):
    return Endpoint.objects.get(name=name)


def test_service_that_sends_to_an_endpoint_records_how_long_its_receipts_are_kept(endpoint, settings):
    settings.INBOX = {"RETENTION": timedelta(days=100)}
    Housekeeper("default").drain(StopRequest())

    assert KeptHandler.objects.filter(handler="webhook/partner", retention=timedelta(days=100)).exists()


class TestRequest:
    def test_request_is_signed_so_that_our_own_verifier_accepts_it(self, receiver, endpoint):
        (message,) = offered()
        send()

        (request,) = receiver.requests
        assert StandardWebhooks(endpoint.secret)(request.body, request.headers)
        with pytest.raises(InvalidSignature):
            StandardWebhooks("whsec_b3RoZXI=")(request.body, request.headers)
        assert request.id == message.id
        assert request.headers["Content-Type"] == "application/json"
        assert request.headers["Host"] == f"{LOOPBACK}:{receiver.server_port}"
        assert (request.json["type"], request.json["data"]) == (TOPIC, ORDER)
        assert states() == ["done"]

    @pytest.mark.parametrize("message_id", ["bestellung-ü", "1", "\u200b"])
    def test_another_producers_id_becomes_one_that_every_receiver_can_deduplicate_on(self, receiver, message_id, endpoint):
        deliver(*(make_message(TOPIC, ORDER, id=message_id, biz_id=f"{source}#{message_id}") for source in ("a", "b")))
        receiver.answer = lambda request: Reply(500 if len(receiver.requests) == 1 else 200)
        send()
        make_due()
        send()

        assert set(states()) == {"done"}
        assert (len(receiver.ids), len({*receiver.ids})) == (3, 2)
        for request in receiver.requests:
            assert StandardWebhooks(endpoint.secret)(request.body, request.headers)

    def test_half_of_a_character_is_sent_as_it_came_and_in_the_same_bytes_in_every_attempt(self, receiver, endpoint):
        run_handler(f"webhooks/{TOPIC}", make_message(TOPIC, {"name": "Ñ\ud83d"}))
        receiver.answer = lambda request: Reply(500 if len(receiver.requests) == 1 else 200)
        send()
        make_due()
        send()

        first, second = receiver.requests
        assert r'"data":{"name":"Ñ\ud83d"}'.encode() in first.body
        assert second.body == first.body == bytes(rows().get().body)
        assert StandardWebhooks(endpoint.secret)(first.body, first.headers)

    def test_new_secret_signs_beside_the_old_one_for_a_day(self, offers, receiver):
        offers(TOPIC)
        old = an_endpoint(receiver).secret
        endpoints.rotate("default", the_endpoint().pk)
        offered()
        send()
        travel(endpoints.OLD_SECRET)
        offered()
        send()

        first, second = receiver.requests
        new = the_endpoint().secret
        assert new != old
        assert all(StandardWebhooks(secret)(first.body, first.headers) for secret in (old, new))
        assert StandardWebhooks(new)(second.body, second.headers)
        with pytest.raises(InvalidSignature):
            StandardWebhooks(old)(second.body, second.headers)

    def test_encrypted_request_verifies_the_certificate_for_the_host_and_connects_to_the_checked_address(
        self, offers, monkeypatch
    ):
        offers(TOPIC)
        asked, resolve = [], socket.getaddrinfo

        def resolver(host, port, *args, **kwargs):
            asked.append(host)
            return resolve(LOOPBACK if host.endswith(".example") else host, port, *args, **kwargs)

        monkeypatch.setattr(socket, "getaddrinfo", resolver)
        monkeypatch.setattr(posting, "_tls", lambda: ssl.create_default_context(cafile=CERTIFICATE))
        with Receiver(encrypted=True) as receiver:
            for host in ("hooks", "other"):
                Endpoint.objects.create(name=host, url=f"https://{host}.example:{receiver.server_port}/in?key=s3cret")
            offered()
            send()

        assert receiver.paths == ["/in?key=s3cret"]
        assert receiver.requests[0].headers["Host"] == f"hooks.example:{receiver.server_port}"
        assert states("hooks") == ["done"]
        assert "CERTIFICATE_VERIFY_FAILED" in rows("other").get().last_error
        # A second answer of the name server could name a private address.
        assert [asked.count(f"{host}.example") for host in ("hooks", "other")] == [1, 1]

    def test_test_message_is_sent_as_any_other(self, receiver):
        endpoint = an_endpoint(receiver, topics=["other"])
        assert send_test("default", endpoint.pk)
        send()
        assert receiver.requests[0].json["type"] == "webhook.test"
        endpoints.disable("default", endpoint.pk, "no")
        assert not send_test("default", endpoint.pk)

    def test_context_managers_around_requests_get_the_headers_of_the_message_and_not_those_of_a_test(
        self, receiver, endpoint, settings
    ):
        settings.INBOX = {**settings.INBOX, "AROUND": ["tests.support.arounds.required_tenant_of"]}
        arounds.called.clear()
        headers = {"tenant": "north", "compression": "application/x-gzip"}  # as of a message that was compressed
        run_handler(f"webhooks/{TOPIC}", make_message(TOPIC, ORDER, headers=headers))
        assert send_test("default", endpoint.pk)
        send()

        assert [request.json["type"] for request in receiver.requests] == [TOPIC, "webhook.test"]
        assert arounds.called == [("tenant", "north")] * 2
        assert not {"tenant", "compression"} & {*receiver.requests[0].headers}


class TestFanOut:
    @pytest.mark.every_database
    def test_message_becomes_one_request_for_each_endpoint_that_wants_its_topic(self, offers, receiver):
        offers(TOPIC, "shop.order.shipped")
        for name, columns in {
            "all": {},
            "placed": {"topics": [TOPIC]},
            "shipped": {"topics": ["shop.order.shipped"]},
            "disabled": {"state": "disabled"},
        }.items():
            Endpoint.objects.create(name=name, url=f"{receiver.url}/{name}", **columns)
        deliver(make_message(TOPIC, ORDER, biz_id="order-17"), times=3)
        deliver(make_message(TOPIC, ORDER, biz_id="order-17"))
        send()

        assert sorted(receiver.paths) == ["/hooks/all", "/hooks/placed"]
        assert len(set(receiver.ids)) == 1

    def test_functions_choose_the_data_and_the_endpoints(self, offers, receiver):
        offers(
            TOPIC,
            payload=lambda message: {"id": message.payload["order"]},
            to=lambda message, endpoint: endpoint.name == message.headers["partner"],
        )
        an_endpoint(receiver)
        an_endpoint(receiver, "other")
        deliver(make_message(TOPIC, ORDER, headers={"partner": "other"}))
        send()

        assert [request.json["data"] for request in receiver.requests] == [{"id": "order-17"}]
        assert not rows("partner").exists()

    @pytest.mark.every_database
    def test_fan_out_that_fails_stores_no_request(self, offers, receiver):
        def to(message, endpoint):
            if endpoint.name == "other":
                raise RuntimeError("not yet")
            return True

        offers(TOPIC, to=to)
        an_endpoint(receiver)
        an_endpoint(receiver, "other")
        with pytest.raises(RuntimeError):
            offered()
        assert not rows().exists()

    @pytest.mark.every_database
    def test_copies_at_the_same_moment_are_sent_once(self, receiver, endpoint):
        message = make_message(TOPIC, ORDER, biz_id="order-17")
        at_once([lambda: deliver(message, raise_errors=False) for _ in range(4)])
        make_due()
        run_relay()
        send()
        assert receiver.ids == [message.id]

    def test_invalid_declarations_are_refused(self, offers):
        for error, topics, given in (
            *((TypeError, [], {}), (ValueError, [TOPIC, TOPIC], {}), (ValueError, ["shop.*"], {})),
            *((TypeError, [TOPIC], {"payload": "id"}), (TypeError, [TOPIC], {"to": "partner"})),
        ):
            with pytest.raises(error):
                offers(*topics, **given)

    def test_use_without_the_app_is_refused(self, settings):
        settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app != "inbox.contrib.outgoing_webhooks"]
        for name in ("Endpoint", "send_webhooks"):
            with pytest.raises(ImproperlyConfigured, match=r"add 'inbox.contrib.outgoing_webhooks' to INSTALLED_APPS"):
                getattr(inbox.contrib.outgoing_webhooks, name)

    def test_handler_of_a_topic_can_be_tested_as_any_other(self, endpoint):
        run_handler(f"webhooks/{TOPIC}", make_message(TOPIC, ORDER))
        assert states() == ["received"]


class TestAnswers:
    @pytest.mark.parametrize("status", [101, 302, 400, 404, 500, 503])
    def test_other_answer_is_a_failed_attempt_that_shows_the_beginning_of_the_answer(self, receiver, status, endpoint):
        offered()
        elsewhere = receiver.url.replace("/hooks", "/elsewhere")
        receiver.answer = lambda request: Reply(status, {"Location": elsewhere}, b"out of \x00 order\n" + b"x" * 5000)
        send()

        row = rows().get()
        assert (row.state, row.attempts) == ("retrying", 1)
        assert f"was answered with {status}" in row.last_error
        assert status == 101 or "out of" in row.last_error
        assert len(row.last_error) < 1000
        assert receiver.paths == ["/hooks"]
        assert the_endpoint().failures == 1

    @pytest.mark.parametrize(("status", "state"), [(200, "done"), (400, "retrying")])
    def test_interim_answers_are_not_the_answer(self, receiver, status, state, endpoint):
        offered()
        receiver.answer = lambda request: Reply(status, {}, b"unknown order", interim=[102, 103, 100, 103])
        send()

        assert states() == [state]
        assert status == 200 or f"was answered with {status}: unknown order" in rows().get().last_error

    def test_answer_is_redacted_before_it_is_stored(self, receiver, settings, endpoint):
        settings.INBOX = {**settings.INBOX, "REDACT_ERRORS": "tests.support.redactors.mask_ibans"}
        offered()
        receiver.answer = lambda request: Reply(400, {}, b"unknown account DE89370400440532013000")
        send(given=options(REDACT_ERRORS="tests.support.redactors.mask_ibans"))

        for text in (rows().get().last_error, rows().get().traceback, the_endpoint().reason):
            assert "unknown account DE…" in text

    def test_message_that_fails_too_often_is_a_dead_letter_that_an_operator_retries(self, receiver, endpoint):
        (message,) = offered()
        receiver.answer = lambda request: Reply(500)
        for _ in range(OPTIONS.MAX_ATTEMPTS):
            make_due()
            send()
        assert states() == ["dead"]

        receiver.answer = lambda request: Reply()
        assert retry("default", rows().get().pk)
        send()
        assert states() == ["done"]
        assert receiver.ids == [message.id] * (OPTIONS.MAX_ATTEMPTS + 1), "the same id and the same bytes"
        assert len({request.body for request in receiver.requests}) == 1
        assert all(StandardWebhooks(endpoint.secret)(request.body, request.headers) for request in receiver.requests)

    def test_status_410_disables_the_endpoint_and_its_other_messages_wait_until_it_is_enabled(self, receiver, endpoint):
        offered(*({"order": number} for number in range(3)))
        receiver.answer = lambda request: Reply(410)
        send()

        assert len(receiver.requests) == 1
        assert sorted(states()) == ["dead", "retrying", "retrying"] or sorted(states()) == ["dead", "received", "received"]
        assert the_endpoint().state == "disabled"
        assert "410" in the_endpoint().reason
        offered({"order": 4})
        assert len(states()) == 3, "a disabled endpoint gets no new messages"

        receiver.answer = lambda request: Reply()
        assert endpoints.enable("default", the_endpoint().pk)
        make_due()
        send()
        assert sorted(states()) == ["dead", "done", "done"]

    @pytest.mark.parametrize("given", ["120", "date"])
    @pytest.mark.parametrize("status", [429, 503])
    def test_retry_after_pauses_the_endpoint_and_counts_no_attempt(self, receiver, status, given, endpoint):
        offered({"order": 1}, {"order": 2})
        value = format_datetime(utcnow() + timedelta(seconds=120), usegmt=True) if given == "date" else given
        receiver.answer = lambda request: Reply(status, {"Retry-After": value})
        send()

        endpoint = the_endpoint()
        assert (endpoint.state, endpoint.failures, len(receiver.requests)) == ("paused", 0, 1)
        assert set(rows().values_list("attempts", flat=True)) == {0}
        receiver.answer = lambda request: Reply()
        travel(timedelta(seconds=100))
        send()
        assert len(receiver.requests) == 1
        travel(timedelta(seconds=21))
        send()
        assert states() == ["done", "done"]
        assert the_endpoint().state == "active"

    @pytest.mark.every_database
    def test_messages_that_have_waited_for_days_are_not_given_up_when_the_endpoint_limits_their_rate(self, receiver, endpoint):
        offered()
        endpoints.disable("default", endpoint.pk, "asked by the customer")
        travel(timedelta(days=10))
        endpoints.enable("default", endpoint.pk)
        receiver.answer = lambda request: Reply(429, {"Retry-After": "60"})
        send()

        assert len(receiver.requests) == 1
        assert (states(), rows().get().attempts) == (["retrying"], 0)

    def test_server_that_answers_too_slowly_or_does_not_listen_is_a_failed_attempt(self, monkeypatch, endpoint):
        monkeypatch.setattr("inbox.contrib.outgoing_webhooks.delivering._TIMEOUT", timedelta(seconds=0.3))
        offered()
        with _dripping() as port:
            Endpoint.objects.update(url=f"http://{LOOPBACK}:{port}/")
            send()
        assert "took longer than 0.3 s" in rows().get().last_error

        Endpoint.objects.update(url=f"http://{LOOPBACK}:{free_port()}/")
        make_due()
        send()
        assert "ConnectionRefusedError" in rows().get().last_error
        assert rows().get().attempts == 2

    @pytest.mark.parametrize("url", [f"http://{LOOPBACK}", f"https://{LOOPBACK}", "http://localhost", "https://[::1]"])
    def test_private_address_is_refused_without_a_connection(self, offers, receiver, settings, url):
        settings.INBOX = {}
        offers(TOPIC)
        Endpoint.objects.create(name="partner", url=f"{url}:{receiver.server_port}/")
        offered()
        send()
        assert "no address that requests may be sent to" in rows().get().last_error
        assert not receiver.requests


@contextmanager
def _dripping():
    """A server that sends a byte of its answer now and then, for ever."""
    ended = threading.Event()

    def drip(client):
        with client:
            client.sendall(b"HTTP/1.1 200 OK\r\nX-A: ")
            while not ended.wait(0.05):
                try:
                    client.sendall(b"1")
                except OSError:
                    return

    with socket.create_server((LOOPBACK, 0)) as server:
        thread = threading.Thread(target=lambda: drip(server.accept()[0]), daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            ended.set()
            thread.join(A_WHILE)


@pytest.mark.every_database
class TestCircuitBreaker:
    def test_endpoint_that_fails_repeatedly_is_paused_for_all_processes_and_tried_again_one_at_a_time(self, receiver, endpoint):
        offered(*({"order": number} for number in range(endpoints.FAILURES + 5)))
        receiver.answer = lambda request: Reply(500)
        send()
        assert len(receiver.requests) == endpoints.FAILURES
        assert the_endpoint().state == "paused"
        assert sum(rows().values_list("attempts", flat=True)) == endpoints.FAILURES

        make_due()
        other = EndpointHandlers(["default"])
        other.refresh()
        assert send(other) == 0
        travel(timedelta(seconds=31))
        other.refresh()
        assert [handler.concurrency for handler in other.all()] == [1]
        send(other)
        assert len(receiver.requests) == endpoints.FAILURES + 1
        travel(timedelta(seconds=31))
        make_due()
        send()
        assert len(receiver.requests) == endpoints.FAILURES + 1, "the second pause is longer"

        receiver.answer = lambda request: Reply()
        travel(timedelta(seconds=30))
        make_due()
        send()
        assert set(states()) == {"done"}
        endpoint = the_endpoint()
        assert (endpoint.state, endpoint.failures, endpoint.reason) == ("active", 0, "")

    def test_requests_that_were_running_at_the_pause_do_not_prolong_the_next_one(self, receiver):
        endpoint = an_endpoint(receiver)
        for _ in range(endpoints.FAILURES + 10):
            endpoints.failed("default", endpoint, "no answer")
        assert the_endpoint().failures == endpoints.FAILURES

        travel(timedelta(seconds=31))
        endpoints.resume_due("default")
        endpoints.failed("default", endpoint, "no answer")
        travel(timedelta(seconds=61))
        endpoints.resume_due("default")
        assert the_endpoint().state == "active"

        endpoints.disable("default", endpoint.pk, "asked by the customer")
        endpoints.failed("default", endpoint, "no answer")
        assert the_endpoint().reason == "asked by the customer"

    def test_failures_between_successes_pause_nothing(self, receiver, endpoint):
        offered(*({"order": number} for number in range(4 * endpoints.FAILURES)))
        receiver.answer = lambda request: Reply(500 if len(receiver.requests) % endpoints.FAILURES else 200)
        send()
        assert len(receiver.requests) == 4 * endpoints.FAILURES
        assert the_endpoint().state == "active"

    def test_request_of_a_process_that_does_not_know_of_the_pause_yet_is_deferred(self, receiver, endpoint):
        offered()
        known = EndpointHandlers(["default"])
        known.refresh()
        endpoints.disable("default", the_endpoint().pk, "asked by the customer")
        send(known)
        assert not receiver.requests
        assert rows().get().attempts == 0


@pytest.mark.every_database
class TestProcess:
    def test_drain_sends_to_later_endpoints_after_another_process_has_sent_to_the_first_ones(self, offers, receiver):
        offers(TOPIC)
        names = [f"partner-{number:03}" for number in range(70)]
        for name in names:
            an_endpoint(receiver, name)
        offered()

        def answers(request):
            due = InboxMessage.objects.filter(state="received", attempts=0, handler__lt=f"webhook/{names[-1]}")
            settle(due)
            connections.close_all()
            return Reply()

        receiver.answer = answers
        with InAThread(lambda: serve(["default"], drain=True)):
            pass

        assert states(names[-1]) == ["done"]
        assert len(receiver.requests) == 2

    def test_slow_endpoint_does_not_delay_another_one_also_a_new_one(self, offers, receiver):
        offers(TOPIC)
        go = threading.Event()

        def answers_slowly(request):
            go.wait(A_WHILE)
            return Reply()

        with Receiver(answers_slowly) as slow:
            an_endpoint(slow, "slow", concurrency=2)
            with sending():
                offered({"order": "first"})
                wait_until(lambda: slow.requests)
                an_endpoint(receiver, "fast")
                offered(*({"order": number} for number in range(20)))
                wait_until(lambda: len(receiver.requests) == 20)
                assert len(slow.requests) == 2
                go.set()
                wait_until(lambda: set(states("slow")) == {"done"})
        assert len(set(slow.ids)) == 21

    def test_leases_may_be_in_redis(self, receiver, settings, redis_url, endpoint):
        settings.INBOX = {**settings.INBOX, "LEASE_STORE": redis_url}
        receiver.answer = lambda request: Reply(500 if len(receiver.requests) < 2 else 200)
        offered()
        for _ in range(2):
            make_due()
            call_command("inbox_outgoing_webhooks", drain=True)
        assert states() == ["done"]
        assert len(receiver.requests) == 2


class OnlyOnOther:
    """A router that keeps our tables off the default database, and chooses no database."""

    def allow_migrate(self, db, app_label, **hints):
        return db == "other" if app_label in {"exactly_once", "inbox", "inbox_outgoing_webhooks"} else None


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_process_does_not_need_tables_that_the_routers_keep_off_the_default_database(offers, receiver, settings):
    settings.DATABASE_ROUTERS = [OnlyOnOther()]
    with pytest.raises(CommandError, match="keep the app 'inbox' out of the database 'default'"):
        call_command("inbox_outgoing_webhooks", drain=True)

    offers(TOPIC, using="other")
    endpoint = Endpoint.objects.using("other").create(name="partner", url=receiver.url)
    assert send_test("other", endpoint.pk)
    call_command("inbox_outgoing_webhooks", drain=True)
    assert len(receiver.requests) == 1


@pytest.mark.every_database
class TestManyEndpoints:
    def test_endpoints_take_turns_however_many_they_are_and_however_large_the_backlog_of_one_is(self, offers, receiver):
        offers(TOPIC, "shop.many")
        names = [f"partner-{number:03}" for number in range(80)]
        for name in names:
            Endpoint.objects.create(name=name, url=f"{receiver.url}/{name}", topics=[TOPIC])
        Endpoint.objects.create(name="partner-070-busy", url=f"{receiver.url}/busy", topics=["shop.many"])
        offered(*({"order": number} for number in range(30)), topic="shop.many")
        offered()
        assert send() == 110

        first = receiver.paths[: len(names) + 10]
        assert {path.rpartition("/")[2] for path in first} >= {*names}
        assert receiver.paths.count("/hooks/busy") == 30

    def test_work_of_a_request_does_not_grow_with_the_number_of_endpoints(self, offers, receiver):
        offers(TOPIC)
        an_endpoint(receiver, topics=[TOPIC])
        offered(*({"order": number} for number in range(20)))
        alone = bytes_of_statements(send)

        Endpoint.objects.bulk_create(Endpoint(name=f"idle-{number}", url=receiver.url, topics=["x"]) for number in range(500))
        offered(*({"order": number} for number in range(20)))
        assert bytes_of_statements(send) < 1.5 * alone
        assert len(receiver.requests) == 40


def bytes_of_statements(job):
    with CaptureQueriesContext(connection) as captured:
        job()
    return sum(len(query["sql"]) for query in captured)


class TestEndpoint:
    @pytest.mark.parametrize(
        "columns",
        [
            *(
                {"url": f"https://{rest}"}
                for rest in ("", "user:password@a.com/", "a.com/#b", "a.com/ü", "a.com/a b", "a.com/\n")
            ),
            *({"url": url} for url in ("ftp://example.com/", "example.com", "https://example.com:99999/", "https://[::1/")),
            *({"name": "Partner X"}, {"name": "a/b"}, {"topics": "x"}, {"topics": ["#"]}, {"concurrency": 0}),
        ],
        ids=str,
    )
    def test_invalid_values_are_refused(self, columns):
        valid = {"name": "partner-1", "url": "https://example.com:8443/hooks?key=1", "topics": [TOPIC]}
        Endpoint(**valid).full_clean()
        with pytest.raises(ValidationError):
            Endpoint(**{**valid, **columns}).full_clean()

    @pytest.mark.every_database
    def test_transitions_are_guarded(self, receiver):
        pk = an_endpoint(receiver).pk
        assert not endpoints.enable("default", pk)
        assert endpoints.disable("default", pk, "asked by the customer")
        assert not endpoints.disable("default", pk, "again")
        endpoints.asked_to_wait("default", the_endpoint(), timedelta(minutes=1), "later")
        endpoints.succeeded("default", the_endpoint())
        assert the_endpoint().state == "disabled"
        assert endpoints.edit("default", pk, concurrency=5)
        assert not endpoints.edit("default", 0)

    def test_answers_to_earlier_requests_neither_disable_the_endpoint_nor_end_a_pause(self, receiver):
        first = an_endpoint(receiver)
        endpoints.failed("default", first, "POST … was answered with 500.")
        asked = the_endpoint()
        endpoints.asked_to_wait("default", asked, timedelta(minutes=1), "later")
        endpoints.succeeded("default", asked)
        assert (the_endpoint().state, the_endpoint().reason) == ("paused", "later")

        travel(timedelta(minutes=2))
        endpoints.resume_due("default")
        endpoints.edit("default", first.pk, url="https://example.com/new")
        endpoints.gone("default", first, "gone")
        assert the_endpoint().state == "active", "that was its earlier URL"
        endpoints.gone("default", the_endpoint(), "gone")
        assert the_endpoint().state == "disabled"
