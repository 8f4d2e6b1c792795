"""A task that cannot be run now: its copy comes later each time, and its delivery is given up once the broker has the copy."""

from datetime import UTC, datetime

import pytest
from celery import Celery, states
from django.db import connections, transaction

from exactly_once.process.clock import utcnow
from exactly_once.wire.retry import Pause
from inbox.celery import IdempotentTask, receiving, sending
from inbox.models import InboxMessage
from outbox.celery import OutboxTask
from outbox.models import OutboxMessage
from tests.integration.celery.apps import close
from tests.integration.celery.handling.conftest import INBOX
from tests.integration.celery.handling.tracing import deliver
from tests.support.aliases import unresolvable
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import InAThread, effects
from tests.support.sql import executed
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

FIRST = INBOX["BACKOFF"][0].total_seconds()
LONGEST = 300.0
ROUNDING = 1.5
"""Celery delays by whole seconds, and time passes until a message is looked at."""


class Both(IdempotentTask, OutboxTask):
    pass


def never_runs(order_id):
    raise AssertionError


@pytest.fixture
def unavailable_database(monkeypatch):
    connections["default"].close()
    with monkeypatch.context() as unavailable:
        unavailable.setitem(connections["default"].settings_dict, "PORT", "1")
        yield
        connections["default"].close()


@pytest.fixture(autouse=True)
def _no_pause_of_an_earlier_test(monkeypatch):
    monkeypatch.setattr(receiving, "_requeue_pause", Pause())


@pytest.fixture
def task_of_the_peer(peer, settings):
    """A task of an app whose broker does what the test says."""
    settings.INBOX = INBOX
    app = Celery("tests", broker=peer.url, backend="cache+memory://", set_as_current=False)
    app.conf.broker_connection_retry = False
    app.task(never_runs, base=IdempotentTask, name="tests.task", shared=False)
    yield app.tasks["tests.task"]
    close(app)


def asks_another_database(order_id):
    connections["other"].ensure_connection()


def headers_of_ours(message):
    return {name: value for name, value in message.headers.items() if name.startswith("inbox_")}


def test_stored_task_that_another_database_has_stopped_can_be_run_by_any_process(a_task, sent):
    with unresolvable("other"):
        connections["other"].close()
        state, _ = deliver(a_task(asks_another_database), "o-1", task_id="t-1", redelivered=True)

    assert (state, len(sent())) == (states.IGNORED, 1)
    row = InboxMessage.objects.get()
    assert (row.attempts, row.next_attempt_at <= utcnow()) == (0, True)


def test_each_further_copy_of_a_task_comes_later_up_to_five_minutes(a_task, sent, unavailable_database):
    task, headers, etas = a_task(never_runs), {}, []
    for _ in range(12):
        before = datetime.now(tz=UTC)
        state, _ = deliver(task, "o-1", task_id="t-1", **headers)
        [message] = sent()
        assert (state, message.headers["id"]) == (states.IGNORED, "t-1")
        headers = headers_of_ours(message)
        etas.append((before, datetime.fromisoformat(message.headers["eta"]), datetime.now(tz=UTC)))

    for number, (before, eta, after) in enumerate(etas):
        longest = min(FIRST * 2**number, LONGEST)
        assert longest / 2 - ROUNDING <= (eta - before).total_seconds()
        assert (eta - after).total_seconds() <= longest + ROUNDING


def test_task_is_given_up_once_its_copy_is_confirmed(task_of_the_peer, peer, unavailable_database):
    state, _ = deliver(task_of_the_peer, "o-1", task_id="t-1")

    [copy] = peer.published
    assert (state, copy.headers["id"], copy.mandatory) == (states.IGNORED, "t-1", True)


def test_outbox_task_is_sent_past_the_outbox_in_an_open_transaction(task_of_the_peer, peer, monkeypatch):
    """As by an operator's retry, which waits for the confirm before its commit."""
    monkeypatch.setattr(sending, "_CONFIRM_SECONDS", 5.0)
    app = task_of_the_peer.app
    task = app.task(never_runs, base=Both, name="tests.both", shared=False)

    with transaction.atomic():
        sending.send(app, task.s("o-1"))

    assert [copy.headers["task"] for copy in peer.published] == ["tests.both"]
    assert not OutboxMessage.objects.exists()


def test_connection_that_the_broker_closed_while_it_was_idle_loses_no_copy(task_of_the_peer, peer, unavailable_database):
    deliver(task_of_the_peer, "o-1", task_id="t-1")
    peer.drop()

    state, _ = deliver(task_of_the_peer, "o-2", task_id="t-2")

    assert (state, [copy.headers["id"] for copy in peer.published]) == (states.IGNORED, ["t-1", "t-2"])


def nack(peer):
    peer.script = lambda copy: [lambda: peer.nack(copy)]


def return_it(peer):
    peer.script = lambda copy: [lambda: peer.return_message(copy), lambda: peer.ack(copy)]


def close_the_channel(peer):
    peer.script = lambda copy: [peer.close_channel]


def drop_the_connection(peer):
    peer.script = lambda copy: [peer.drop]


def say_nothing(peer):
    peer.hold()


@pytest.mark.parametrize("misbehave", [nack, return_it, close_the_channel, drop_the_connection, say_nothing])
def test_task_whose_copy_the_broker_does_not_confirm_goes_back_to_the_broker(
    misbehave, task_of_the_peer, peer, unavailable_database, monkeypatch
):
    monkeypatch.setattr(sending, "_CONFIRM_SECONDS", 0.2)
    misbehave(peer)

    state, rejected = deliver(task_of_the_peer, "o-1", task_id="t-1")

    assert (state, rejected.requeue) == (states.REJECTED, True)
    assert "cannot be sent again" in str(rejected.reason)
    # A late answer of that broker must not be taken for the answer to the next copy.
    peer.hold()
    late = list(peer.published)
    peer.script = lambda copy: [*(lambda old=old: peer.ack(old) for old in late), lambda: peer.nack(copy)]
    assert deliver(task_of_the_peer, "o-2", task_id="t-2")[0] == states.REJECTED


def test_duplicate_of_a_running_task_is_sent_again_for_later(a_task, sent):
    go = []

    def wait(order_id):
        Effect.objects.create(name=order_id)
        go.append("begun")
        wait_until(lambda: "go" in go)

    task = a_task(wait, biz_id="order_id", max_retries=0)
    with InAThread(lambda: deliver(task, "o-1", task_id="t-1")) as first:
        wait_until(lambda: go)
        request = {"retries": 5, "inbox_sent_at": "2026-01-02T00:00:00+00:00", "argsrepr": "(hidden)"}
        state, reason = deliver(task, "o-1", task_id="t-2", **request)
        again, _ = deliver(task, "o-1", task_id="t-1", redelivered=True)
        go.append("go")

    assert first.answer[0] == states.SUCCESS
    assert (state, again, str(reason)) == (states.IGNORED, states.IGNORED, "another delivery of its business id is being run")
    copies = sent()
    headers = copies[0].headers
    assert [copy.headers["id"] for copy in copies] == ["t-2", "t-1"]
    assert {name: headers[name] for name in (*request, "task")} == {**request, "task": "tests.task"}
    assert headers["eta"]
    assert effects() == 1


@pytest.mark.parametrize("redelivered", [False, True], ids=["first delivery", "redelivery"])
def test_task_that_ends_its_own_session_runs_once_per_retry_and_once_more(a_task, redelivered):
    runs = []

    def end_own_session(order_id):
        runs.append(order_id)
        executed("SELECT pg_terminate_backend(pg_backend_pid())")

    task = a_task(end_own_session)
    for retries in range(3):
        state, _ = deliver(task, "o-1", task_id="t-1", retries=retries, redelivered=redelivered and not retries)
        assert state == states.FAILURE

    assert len(runs) == 4
