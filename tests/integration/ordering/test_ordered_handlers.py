"""Ordered handlers: the messages of a key one at a time, in the order of arrival; keys concurrently. Without a broker."""

import logging
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import psycopg
import pytest
from django.core.management import call_command
from django.db import connection, transaction
from django.test import override_settings

from exactly_once.process.clock import utcnow
from inbox import Ordered
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.receiving.admit import admit
from inbox.receiving.reading import read
from inbox.receiving.receive import claim_next, run_stored
from inbox.states import Outcome, State
from inbox.store import arrivals, dialect, ordering
from inbox.transactions.running import DatabaseUnavailable
from outbox import Draft, publish, publish_many
from tests.support import decisions
from tests.support.aliases import the_default_at
from tests.support.deliveries import (
    A_WHILE,
    OPTIONS,
    TOPIC,
    InAThread,
    an_envelope,
    as_redelivered,
    at_once,
    deliver,
    drain,
    in_the_order_of_their_effects,
    make_due,
    options,
    run_to_the_end,
    the_effect,
    the_row,
)
from tests.support.inbox_rows import NEXT_ID, RECEIPTS
from tests.support.open_transactions import lock_waits
from tests.support.sql import executed
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

everywhere = pytest.mark.every_database


def a_message(name, key="a", **attributes):
    return an_envelope({"name": name}, biz_id=name, key=key, **attributes)


def arrive(handler, *envelopes, redelivered=False, given=OPTIONS, refused=""):
    """What the consumer does with deliveries of an ordered queue, in their order."""
    return admit(handler, [as_redelivered(read(handler, one, given, refused=refused), redelivered) for one in envelopes], given)


def named(handler, *names, key="a", **how):
    return arrive(handler, *(a_message(name, key) for name in names), **how)


def states(*names):
    found = dict(InboxMessage.objects.values_list("biz_id", "state"))
    return [found.get(name) for name in names]


def states_of_all():
    return list(InboxMessage.objects.order_by("pk").values_list("state", flat=True))


class Failing:
    """A handler that fails for the messages of these names."""

    def __init__(self, *names, error=ValueError):
        self.names = set(names)
        self.error = error

    def __call__(self, message):
        the_effect(message)
        if message.biz_id in self.names:
            raise self.error("no stock")


def mend(handler):
    """It fails no more."""
    handler.function.names.clear()


class Waiting:
    """A handler that waits in the middle of the messages of these names until `go` is set."""

    def __init__(self, *names):
        self.names = set(names)
        self.began, self.go = threading.Event(), threading.Event()

    def __call__(self, message):
        if message.biz_id in self.names:
            self.began.set()
            assert self.go.wait(A_WHILE)
        the_effect(message)


def failed_out(given=OPTIONS):
    """Let what fails fail until it is dead."""
    for _ in range(given.MAX_ATTEMPTS):
        drain(given)
        make_due()


@everywhere
class TestRedeliveriesThatOnlyTheirBodyIdentifies:
    """Stored unread in their place in the order, and identified when it is their turn."""

    @pytest.fixture
    def handler(self, handles):
        return handles(the_effect, ordered=Ordered(), biz_id=lambda message: message.payload["name"])

    def redelivered(self, handler, *envelopes):
        return admit(handler, [read(handler, one, OPTIONS, redelivered=True) for one in envelopes], OPTIONS)

    def test_they_keep_their_order(self, handler):
        self.redelivered(handler, a_message("1"), a_message("2"))
        named(handler, "3")

        run_to_the_end()

        assert in_the_order_of_their_effects() == ["1", "2", "3"]
        assert states_of_all() == [State.DONE] * 3

    def test_copy_of_an_earlier_message_is_counted_and_the_next_one_runs(self, handler):
        first = a_message("1")
        arrive(handler, first)
        self.redelivered(handler, first)
        named(handler, "2")

        run_to_the_end()

        assert in_the_order_of_their_effects() == ["1", "2"]
        assert (states("1", "2"), the_row(biz_id="1").duplicates) == ([State.DONE] * 2, 1)
        assert InboxMessage.objects.count() == 2

    def test_message_keeps_its_first_place_although_a_copy_was_read_before_it(self, handler):
        first = a_message("1")
        self.redelivered(handler, first)
        named(handler, "2")
        arrive(handler, first, first)
        named(handler, "3")

        run_to_the_end()

        assert in_the_order_of_their_effects() == ["1", "2", "3"]
        assert the_row(biz_id="1").duplicates == 2
        assert InboxMessage.objects.count() == 3

    def test_one_that_cannot_be_read_blocks_its_key_until_it_is_skipped(self, handler):
        self.redelivered(handler, a_message("1")._replace(body=b"{"))
        named(handler, "2")

        run_to_the_end()
        assert (states("2"), in_the_order_of_their_effects()) == ([State.WAITING], [])

        assert decisions.skip("default", the_row(state=State.DEAD).pk, "unreadable")
        run_to_the_end()
        assert in_the_order_of_their_effects() == ["2"]


@everywhere
class TestStoring:
    def test_first_message_of_a_key_is_due_and_the_rest_wait_behind_it(self, handles):
        handler = handles(the_effect, ordered=True)

        became = [*named(handler, "a1", "a2"), *named(handler, "b1", key="b"), *named(handler, "a3")]

        assert became == [Outcome.STORED] * 4
        assert states("a1", "a2", "b1", "a3") == [State.RECEIVED, State.WAITING, State.RECEIVED, State.WAITING]
        assert not InboxMessage.objects.filter(state=State.WAITING, next_attempt_at__isnull=False).exists()

    def test_messages_without_a_key_do_not_wait_for_each_other(self, handles):
        handler = handles(the_effect, ordered=True)

        named(handler, "x1", "x2", key="")

        assert states("x1", "x2") == [State.RECEIVED, State.RECEIVED]
        assert not InboxMessage.objects.filter(ordered=True).exists()

    def test_duplicate_in_the_same_transaction_is_counted(self, handles):
        handler = handles(the_effect, ordered=True)
        first = a_message("a1")

        assert arrive(handler, first, a_message("a2"), first) == [Outcome.STORED, Outcome.STORED, Outcome.DUPLICATE]

        assert the_row(biz_id="a1").duplicates == 1
        drain()
        assert in_the_order_of_their_effects() == ["a1", "a2"]

    def test_message_after_a_duplicate_of_a_done_one_is_the_head_of_its_key(self, handles):
        handler = handles(the_effect, ordered=True)
        first = a_message("a1")
        arrive(handler, first)
        drain()

        assert arrive(handler, first, a_message("a2"), a_message("a3")) == [Outcome.DUPLICATE, Outcome.STORED, Outcome.STORED]

        assert states("a2", "a3") == [State.RECEIVED, State.WAITING]
        drain()
        assert in_the_order_of_their_effects() == ["a1", "a2", "a3"]

    def test_failed_storing_stores_none_of_the_messages(self, handles, monkeypatch):
        handler = handles(the_effect, ordered=True)
        monkeypatch.setattr(arrivals, "_headless", lambda places, taken: 1 / 0)

        with pytest.raises(ZeroDivisionError):
            named(handler, "a1", "a2")

        assert not InboxMessage.objects.exists()


@everywhere
class TestFailingHead:
    def test_failing_head_blocks_its_key_and_no_other_key(self, handles):
        handler = handles(Failing("a1"), ordered=True, name="ordered")
        named(handler, "a1", "a2", "a3")
        named(handler, "b1", "b2", key="b")

        drain()

        assert states("a1", "a2", "a3", "b1", "b2") == ["retrying", "waiting", "waiting", "done", "done"]
        assert in_the_order_of_their_effects() == ["b1", "b2"]

    def test_head_that_kills_its_process_runs_out_of_attempts_and_blocks_its_key(self, handles):
        handler = handles(the_effect, ordered=True)
        named(handler, "a1", "a2")
        for _ in range(OPTIONS.MAX_ATTEMPTS + 1):
            assert claim_next([handler], "default", OPTIONS)
            make_due()

        drain()

        assert states("a1", "a2") == ["dead", "waiting"]

    def test_head_whose_handler_commits_its_transaction_is_dead_and_blocks_its_key(self, handles):
        def commits(message):
            the_effect(message)
            connection.connection.commit()

        named(handles(commits, ordered=True, name="ordered"), "a1", "a2")

        drain()

        assert states("a1", "a2") == ["dead", "waiting"]


@everywhere
class TestOnDeadSkip:
    """Ordered(on_dead="skip"): a key continues after a dead letter."""

    def test_on_dead_skip_continues_the_key_after_a_dead_letter(self, handles):
        named(handles(Failing("a1"), ordered=Ordered(on_dead="skip"), name="ordered"), "a1", "a2", "a3")

        drain()
        assert states("a1", "a2", "a3") == ["retrying", "waiting", "waiting"]
        failed_out()

        assert states("a1", "a2", "a3") == ["dead", "done", "done"]
        assert in_the_order_of_their_effects() == ["a2", "a3"]

    def test_on_dead_skip_does_not_wait_for_a_refused_delivery(self, handles):
        handler = handles(the_effect, ordered=Ordered(on_dead="skip"))

        assert named(handler, "a1", refused="it cannot be read") == [Outcome.DEAD]
        named(handler, "a2")

        assert states("a2") == [State.RECEIVED]

    def test_on_dead_skip_lets_an_operator_retry_a_dead_letter_out_of_order(self, handles):
        handler = handles(Failing("a1"), ordered=Ordered(on_dead="skip"), name="ordered")
        named(handler, "a1", "a2")
        failed_out()
        mend(handler)

        assert decisions.retry("default", the_row(biz_id="a1").pk)
        drain()

        assert in_the_order_of_their_effects() == ["a2", "a1"]

    def test_changing_a_handler_to_on_dead_skip_continues_blocked_keys(self, handles, caplog):
        handler = handles(Failing("a1"), ordered=True, name="ordered")
        named(handler, "a1", "a2", "a3")
        failed_out()
        behaviour = handler.function
        registry.remove("ordered")
        handles(behaviour, ordered=Ordered(on_dead="skip"), name="ordered")

        drain()

        assert states("a1", "a2", "a3") == ["dead", "done", "done"]
        assert "1 dead letters" in caplog.text

    def test_on_dead_skip_continues_after_a_handler_that_commits_its_transaction(self, handles):
        def commits(message):
            the_effect(message)
            if message.biz_id == "a1":
                connection.connection.commit()

        named(handles(commits, ordered=Ordered(on_dead="skip"), name="ordered"), "a1", "a2")
        drain()

        drain()  # another runner, which sweeps at once

        assert states("a1", "a2") == ["dead", "done"]


@everywhere
class TestRefusedDelivery:
    """A message that cannot be read or is too old has its place in the order, as a dead letter."""

    def test_refused_delivery_blocks_the_later_messages_of_its_key(self, handles, caplog):
        handler = handles(the_effect, ordered=True)
        named(handler, "a1")
        assert named(handler, "a2", refused="it cannot be read") == [Outcome.DEAD]
        named(handler, "a3")

        drain()

        assert in_the_order_of_their_effects() == ["a1"]
        dead, waits = InboxMessage.objects.exclude(state=State.DONE).order_by("pk")
        assert (dead.state, waits.state) == (State.DEAD, State.WAITING)
        assert (dead.last_error, dead.key, dead.ordered) == ("it cannot be read", "a", True)
        assert "it cannot be read" in caplog.text

    def test_refused_delivery_that_is_retried_too_early_waits_for_its_turn(self, handles):
        handler = handles(Failing("a1"), ordered=True, name="ordered")
        old = a_message("a2", created_at=utcnow() - timedelta(days=400))
        arrive(handler, a_message("a1"), old, a_message("a3"))
        drain()
        assert states("a1", "a2", "a3") == ["retrying", "dead", "waiting"]
        assert the_row(biz_id="a2").quarantined
        assert not decisions.retry("default", the_row(biz_id="a2").pk)

        assert decisions.override_maximum_age("default", the_row(biz_id="a2").pk)

        assert states("a1", "a2", "a3") == ["retrying", "waiting", "waiting"]
        mend(handler)
        run_to_the_end()
        assert in_the_order_of_their_effects() == ["a1", "a2", "a3"]


@everywhere
class TestOperators:
    def test_operator_may_skip_a_waiting_message(self, handles):
        named(handles(Failing("a1"), ordered=True, name="ordered"), "a1", "a2", "a3")
        drain()

        assert decisions.skip("default", the_row(biz_id="a2").pk, "not wanted")
        assert states("a1", "a2", "a3") == ["retrying", "skipped", "waiting"]
        assert decisions.skip("default", the_row(biz_id="a1").pk, "not wanted")
        drain()

        assert in_the_order_of_their_effects() == ["a3"]

    def test_operator_cannot_retry_a_waiting_message(self, handles):
        named(handles(Failing("a1"), ordered=True, name="ordered"), "a1", "a2")

        assert not decisions.retry("default", the_row(biz_id="a2").pk)

    def test_retried_message_that_proves_a_duplicate_is_counted_and_its_key_continues(self, handles):
        """An unreadable delivery is retried after a deploy that can read it, and its biz-id is that of another row."""
        readable = []

        def biz_id(message):
            if not readable:
                raise LookupError("not yet")
            return message.payload["name"]

        handler = handles(the_effect, ordered=True, biz_id=biz_id, name="ordered")
        arrive(handler, a_message("a1"), a_message("x"))
        assert set(states_of_all()) == {"dead"}
        readable.append(True)
        arrive(handler, a_message("a1", key="elsewhere"))
        assert decisions.retry("default", InboxMessage.objects.order_by("pk")[0].pk)

        drain()

        assert states_of_all() == ["dead", "done"]
        assert the_row(state="done").duplicates == 1
        assert decisions.retry("default", the_row(state="dead").pk)
        drain()
        assert states_of_all() == ["done", "done"]


@everywhere
class TestChangedHandler:
    def test_messages_stored_before_a_handler_became_ordered_do_not_block_later_ones(self, handles):
        behaviour = Failing("a1")
        handler = handles(behaviour, name="changing")
        deliver(handler, a_message("a1"))
        registry.remove("changing")
        handler = handles(behaviour, ordered=True, name="changing")
        named(handler, "a2", "a3")

        drain()
        behaviour.names.clear()
        run_to_the_end()

        assert in_the_order_of_their_effects() == ["a2", "a3", "a1"]

    def test_messages_stored_before_a_handler_became_unordered_keep_their_order(self, handles):
        behaviour = Failing("a1")
        handler = handles(behaviour, ordered=True, name="changing")
        named(handler, "a1", "a2", "a3")
        drain()
        registry.remove("changing")
        handler = handles(behaviour, name="changing")
        deliver(handler, a_message("a4"))

        behaviour.names.clear()
        run_to_the_end()

        assert in_the_order_of_their_effects() == ["a4", "a1", "a2", "a3"]


@everywhere
class TestReleaseOfStuckKeys:
    def test_key_whose_messages_wait_without_a_head_is_released_and_reported(self, handles, caplog):
        handler = handles(the_effect, ordered=True)
        named(handler, "a1", "a2")
        named(handler, "b1", "b2", key="b")
        InboxMessage.objects.filter(biz_id="a1").delete()

        drain()

        assert sorted(in_the_order_of_their_effects()) == ["a2", "b1", "b2"]
        assert [r.levelno for r in caplog.records if "although no earlier message was open" in r.message] == [logging.ERROR]

    def test_keys_that_wait_behind_a_head_are_not_released(self, handles, caplog):
        handler = handles(Failing("a1"), ordered=True, name="ordered")
        named(handler, "a1", "a2")
        named(handler, "b1", key="b", refused="it cannot be read")
        named(handler, "b2", key="b")
        drain()

        drain()

        assert "although no earlier message was open" not in caplog.text
        assert sorted(states_of_all()) == ["dead", "retrying", "waiting", "waiting"]

    def test_stuck_keys_are_released_in_bounded_steps(self, handles, monkeypatch):
        monkeypatch.setattr(ordering, "_KEYS_AT_ONCE", 3)
        handler = handles(Failing(), ordered=True, name="ordered")
        for key in "abcdefg":
            named(handler, f"{key}1", f"{key}2", key=key)
        InboxMessage.objects.filter(biz_id__endswith="1").delete()

        found, up_to = [], None
        for _ in range(3):
            released = ordering.release_stuck("default", [], up_to)
            found.append(released.stuck)
            up_to = released.up_to

        assert found == [3, 3, 1]
        assert up_to is None
        assert set(states_of_all()) == {"received"}


@contextmanager
def paused(monkeypatch, module, name):
    """The first call of this function stops after it, until the test sets `go`."""
    original, first = getattr(module, name), threading.Lock()
    here, go = threading.Event(), threading.Event()

    def function(*args, **kwargs):
        mine = first.acquire(blocking=False)
        result = original(*args, **kwargs)
        if mine:
            here.set()
            assert go.wait(A_WHILE)
        return result

    monkeypatch.setattr(module, name, function)
    try:
        yield here, go
    finally:
        go.set()


class TestConcurrency:
    def test_running_head_does_not_block_the_storing_of_its_key(self, handles):
        behaviour = Waiting("a1")
        handler = handles(behaviour, ordered=True, name="ordered")
        first = a_message("a1")
        arrive(handler, first)
        with InAThread(drain):
            assert behaviour.began.wait(A_WHILE)

            became = arrive(handler, first, a_message("a2"), redelivered=True)

            assert became == [Outcome.DEFERRED, Outcome.STORED]
            assert states("a1", "a2") == ["received", "waiting"]
            behaviour.go.set()
        assert in_the_order_of_their_effects() == ["a1", "a2"]

    def test_keys_are_handled_concurrently(self, handles):
        behaviour = Waiting("a1")
        handler = handles(behaviour, ordered=True, name="ordered")
        named(handler, "a1", "a2")
        named(handler, "b1", "b2", key="b")
        with InAThread(drain):
            assert behaviour.began.wait(A_WHILE)

            drain()

            assert in_the_order_of_their_effects() == ["b1", "b2"]
            behaviour.go.set()

    def test_message_retried_out_of_order_never_runs_concurrently_with_its_key(self, handles):
        behaviour, failing = Waiting("a2"), Failing("a1")

        def handle(message):
            failing(message) if message.biz_id == "a1" else behaviour(message)

        handler = handles(handle, ordered=Ordered(on_dead="skip"), name="ordered")
        named(handler, "a1")
        failed_out()
        failing.names.clear()
        named(handler, "a2")
        with InAThread(drain):
            assert behaviour.began.wait(A_WHILE)
            assert decisions.retry("default", the_row(biz_id="a1").pk)
            asked_at = utcnow()

            drain()

            row = the_row(biz_id="a1")
            assert (row.state, row.attempts) == (State.RETRYING, 0)
            assert row.next_attempt_at > asked_at + timedelta(seconds=0.4), "it backs off"
            behaviour.go.set()
        make_due()
        drain()
        assert in_the_order_of_their_effects() == ["a2", "a1"]

    def test_message_that_is_being_skipped_does_not_block_its_successor(self, handles):
        named(handles(the_effect, ordered=True), "a1", "a2", "a3")
        row = the_row(biz_id="a2").pk
        skipped, go = threading.Event(), threading.Event()

        def skip():
            with transaction.atomic():
                assert decisions.skip("default", row, "not wanted")
                skipped.set()
                assert go.wait(A_WHILE)

        with InAThread(skip):
            assert skipped.wait(A_WHILE)
            with InAThread(drain):
                wait_until(lambda: lock_waits("locktype = 'transactionid'"))
                go.set()
        drain()

        assert in_the_order_of_their_effects() == ["a1", "a3"]

    def test_process_frozen_while_it_stores_blocks_its_keys_for_a_bounded_time(self, handles, monkeypatch):
        monkeypatch.setattr(ordering, "LONGEST_IDLE", timedelta(milliseconds=300))
        handler = handles(the_effect, ordered=True)
        named(handler, "a1")
        with paused(monkeypatch, arrivals, "_headless") as (frozen, go), suppress(DatabaseUnavailable):
            with InAThread(lambda: named(handler, "a2")) as frozen_process:
                assert frozen.wait(A_WHILE)

                drain()

                assert not frozen_process.ended
                assert in_the_order_of_their_effects() == ["a1"]
                assert named(handler, "a2") == [Outcome.STORED]
                go.set()
            assert frozen_process.answer == [Outcome.DUPLICATE]
        drain()
        assert in_the_order_of_their_effects() == ["a1", "a2"]

    @pytest.mark.long
    def test_concurrent_consumers_of_the_same_messages_store_each_once_and_in_order(self, handles):
        handler = handles(the_effect, ordered=True)
        messages = [a_message(f"{number}", key=f"key-{number % 5}") for number in range(100)]
        long_timeout = options(DUPLICATE_TIMEOUT=timedelta(minutes=1))

        def store_them(size):
            became = []
            for start in range(0, len(messages), size):
                became += arrive(handler, *messages[start : start + size], given=long_timeout)
            return Counter(became)

        became = sum(at_once([partial(store_them, size) for size in (1, 7, 10, 100)]), Counter())

        assert became == {Outcome.STORED: 100, Outcome.DUPLICATE: 300}
        rows = list(InboxMessage.objects.order_by("pk").values_list("key", "biz_id"))
        assert {key: [int(n) for k, n in rows if k == key] for key, _ in rows} == {
            f"key-{key}": list(range(key, 100, 5)) for key in range(5)
        }
        assert states_of_all().count("received") == 5


@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
class TestStricterIsolation:
    def test_message_stored_while_the_head_runs_is_handled_under_stricter_isolation(self, handles, level):
        behaviour = Waiting("a1")
        handler = handles(behaviour, ordered=True, name="ordered")
        with the_default_at(OPTIONS={"isolation_level": psycopg.IsolationLevel[level]}):
            named(handler, "a1")
            with InAThread(drain):
                assert behaviour.began.wait(A_WHILE)
                named(handler, "a2", "a3")
                behaviour.go.set()

            assert in_the_order_of_their_effects() == ["a1", "a2", "a3"]

    def test_skip_and_retry_keep_the_order_under_stricter_isolation(self, handles, level):
        handler = handles(Failing("a1"), ordered=True, name="ordered")
        with the_default_at(OPTIONS={"isolation_level": psycopg.IsolationLevel[level]}):
            named(handler, "a1", "a2", "a3")
            failed_out()
            assert decisions.skip("default", the_row(biz_id="a2").pk, "not wanted")
            mend(handler)
            assert decisions.retry("default", the_row(biz_id="a1").pk)
            drain()

            assert in_the_order_of_their_effects() == ["a1", "a3"]


@everywhere
class TestLocalTransport:
    @pytest.fixture(autouse=True)
    def local(self):
        with override_settings(OUTBOX={"BROKER_URL": "local://"}, INBOX={"BACKOFF": (timedelta(hours=1), timedelta(hours=2))}):
            yield

    def test_local_transport_handles_messages_of_a_key_in_order(self, handles):
        behaviour = Failing("3")
        handles(behaviour, ordered=True, name="ordered")
        with transaction.atomic():
            publish_many([Draft(TOPIC, {}, biz_id=f"{n}", key=f"key-{n % 3}", strict_order=True) for n in range(30)])

        call_command("outbox_relay", drain=True)

        assert states("0", "3", "6", "1") == ["done", "retrying", "waiting", "done"]
        behaviour.names.clear()
        run_to_the_end()
        found = [int(name) for name in in_the_order_of_their_effects()]
        assert {key: [n for n in found if n % 3 == key] for key in range(3)} == {
            key: list(range(key, 30, 3)) for key in range(3)
        }

    def test_local_transport_blocks_the_key_of_an_unreadable_message(self, handles):
        def biz_id(message):
            return message.payload["name"]

        handles(the_effect, ordered=True, biz_id=biz_id, name="ordered")
        with transaction.atomic():
            for payload in ({"name": "a1"}, {}, {"name": "a3"}):
                publish(TOPIC, payload, key="a")

        call_command("outbox_relay", drain=True)

        assert states_of_all() == ["done", "dead", "waiting"]


class TestRowsRead:
    """A full table: the number of rows that are read must not grow with the backlog."""

    @pytest.fixture
    def a_backlog(self, handles):
        """A thousand keys with a hundred messages each, one of each due."""
        handler = handles(the_effect, ordered=True)
        (row,) = [read(handler, a_message("a"), OPTIONS).row]
        executed(
            f"INSERT INTO {dialect.TABLE} (id, handler, topic, biz_id, message_id, key, ordered, state, next_attempt_at, "
            "content_type, body, digest, headers, source, correlation_id, causation_id, traceparent, received_at) "
            f"SELECT {NEXT_ID}, %s, %s, n::text, n::text, 'key-' || n %% 1000, true, CASE WHEN n < 1000 THEN 'received' "
            "ELSE 'waiting' END, CASE WHEN n < 1000 THEN now() + (n - 1000) * interval '1 ms' END, "
            "'application/json', '{}', '', '{}', '', '', '', '', now() "
            "FROM generate_series(0, 99999) n",
            [row.handler, row.topic],
        )
        executed(RECEIPTS)
        executed(f"VACUUM ANALYZE {dialect.TABLE}, {dialect.RECEIPTS}")
        return handler

    @pytest.mark.long
    def test_rows_read_do_not_grow_with_the_backlog(self, a_backlog):
        (due,) = InboxMessage.objects.filter(biz_id="500").values_list("pk", flat=True)
        fetched = rows_read(
            {
                "store": lambda: named(a_backlog, *(f"x{n}" for n in range(50)), key="key-7"),
                "run": lambda: run_stored(*claim_next([a_backlog], "default", OPTIONS), OPTIONS),
                "skip": lambda: decisions.skip("default", due, "not wanted"),
                "release": lambda: ordering.release_stuck("default", [], None),
            }
        )

        assert in_the_order_of_their_effects() == ["0"]
        assert states("1000", "1500") == ["received", "received"]
        assert fetched["store"] < 4 * 50, fetched
        assert fetched["run"] < 30, fetched
        assert fetched["skip"] < 30, fetched
        assert fetched["release"] <= 2 * 1000, fetched


def rows_read(actions):
    """By action, how many rows of the inbox the server fetched for its statements, by any scan."""
    fetched, doing = Counter(), ""

    def explain(execute, sql, params, many, context):
        if dialect.TABLE in sql and sql.lstrip().startswith(("WITH", "SELECT", "UPDATE", "INSERT")):
            raw = context["connection"].connection
            own = raw.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
            with raw.cursor() as cursor:
                cursor.execute("BEGIN" if own else "SAVEPOINT measuring")
                cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", params)
                fetched[doing] += sum(_rows(cursor.fetchone()[0][0]["Plan"]))
                cursor.execute("ROLLBACK" if own else "ROLLBACK TO measuring")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(explain):
        for doing, action in actions.items():  # noqa: B007 - explain uses it
            action()
    return fetched


def _rows(plan):
    if plan.get("Relation Name") == dialect.TABLE:
        yield (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
    for inner in plan.get("Plans", ()):
        yield from _rows(inner)
