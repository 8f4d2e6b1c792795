"""Many workers on a real broker: never more than `CONCURRENCY`, and every effect once, whatever fails meanwhile."""

import random
import select
import socket
import threading
import uuid
from collections import Counter
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import kombu
import psycopg
import pytest
from amqp.exceptions import PreconditionFailed
from django.core.management import CommandError, call_command
from django.db import connections, transaction

from exactly_once.process.clock import monotonic
from inbox.consumer.answers import Unanswered
from inbox.consumer.pool import Pool
from inbox.consumer.reception import Reception
from inbox.consumer.runner import Runner
from inbox.consumer.topology import declare as declare_queues
from inbox.consumer.topology import queue_name
from inbox.models import InboxMessage
from inbox.receiving import parking
from inbox.receiving.in_hand import in_hand
from inbox.receiving.reading import parked_row, read
from inbox.receiving.receive import receive
from inbox.states import Outcome, State
from inbox.store import arrivals, sentinel
from tests.support.aliases import the_default_at
from tests.support.apps.effects.models import Effect, Unique
from tests.support.apps.workshop import (
    BATCHED,
    BOUNDED,
    EXIT,
    EXITS_AFTER,
    EXITS_ALWAYS,
    EXITS_BEFORE,
    GROUPED,
    SINGLE,
    TOPICS,
)
from tests.support.deliveries import (
    A_WHILE,
    OPTIONS,
    TOPIC,
    an_envelope,
    at_once,
    deliver,
    drain,
    effects,
    effects_by_name,
    in_the_order_of_their_effects,
    make_due,
    options,
    the_effect,
    the_row,
)
from tests.support.loads import a_delivery
from tests.support.servers.private import free_port
from tests.support.sql import executed, fetched
from tests.support.waiting import wait_until
from tests.support.workers import (
    broker_options,
    consuming,
    declare,
    handler_of_the_workers,
    mark_redelivered,
    send,
    send_all,
)

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

SHORT = timedelta(milliseconds=200)


def undelivered(url, handler):
    """How many messages of the queue the broker has not delivered yet."""
    with closing(kombu.Connection(url)) as connection:
        return connection.default_channel.queue_declare(queue_name(handler, broker_options(url)), passive=True).message_count


def names(count, prefix="m"):
    return [f"{prefix}{number}" for number in range(count)]


class Gate:
    """A handler that reports when it has begun, and waits until it is opened."""

    def __init__(self):
        self._open = threading.Event()
        self._opened = set()
        self._changed = threading.Condition()
        self.inside = []
        self.begun = []
        self.most = 0

    def __call__(self, message):
        with self._changed:
            self.inside.append(message.biz_id)
            self.begun.append(message.biz_id)
            self.most = max(self.most, len(self.inside))
            assert self._changed.wait_for(lambda: self._open.is_set() or message.biz_id in self._opened, A_WHILE)
            self.inside.remove(message.biz_id)
        the_effect(message)

    def open(self, *some):
        with self._changed:
            self._opened |= set(some)
            if not some:
                self._open.set()
            self._changed.notify_all()


def store(handler, names):
    """Have messages of `handler` in the table, due now."""
    for name in names:
        arrival = read(handler, an_envelope(biz_id=name), OPTIONS)
        assert arrivals.store_due("default", arrival.row, OPTIONS.DUPLICATE_TIMEOUT)


@contextmanager
def held_in_hand(row):
    """This process is handling that message."""
    held = in_hand.take([row])
    yield
    in_hand.end(held)


@contextmanager
def running_stored(*, size, runner=None):
    """Threads of this process that run what is stored, as `inbox_consume` does with local://."""
    pool = Pool(runner or Runner(OPTIONS), size=size)
    pool.start()
    try:
        yield pool
    finally:
        pool.close()
        wait_until(lambda: not pool.alive)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open()


class TestConcurrency:
    def test_concurrency_is_the_number_of_handlers_running_each_on_its_own_connection(self, handling, rabbitmq_url, gate):
        servers = set()

        def handle(message):
            servers.add(fetched("SELECT pg_backend_pid()"))
            gate(message)

        handler, options = handling(handle), broker_options(rabbitmq_url, CONCURRENCY=5)
        send_all(rabbitmq_url, TOPIC, [(name, {}) for name in names(15)])

        with consuming([handler], options):
            wait_until(lambda: len(gate.inside) == 5)
            gate.open()
            wait_until(lambda: effects() == 15)

        assert (gate.most, len(servers)) == (5, 5)

    @pytest.mark.parametrize(
        ("given", "fetched"),
        [({}, 7), ({"group_commit": 5}, 10), ({"size": 5, "wait": timedelta(minutes=1)}, 10)],
        ids=["single", "group_commit", "batch"],
    )
    def test_no_more_deliveries_are_fetched_than_prefetch_and_load_size_allow(
        self, handling, rabbitmq_url, gate, given, fetched
    ):
        handle = (lambda messages: [gate(message) for message in messages]) if "size" in given else gate
        handler, options = handling(handle, **given), broker_options(rabbitmq_url, CONCURRENCY=2, PREFETCH=7)
        send_all(rabbitmq_url, TOPIC, [(name, {}) for name in names(25)])

        with consuming([handler], options) as consumer:
            wait_until(lambda: len(gate.inside) == 2)
            wait_until(lambda: consumer._subscriptions.unanswered == fetched)
            assert undelivered(rabbitmq_url, handler) == 25 - fetched
            gate.open()
            wait_until(lambda: effects() == 25)

    def test_concurrency_option_of_inbox_consume_overrides_the_setting(self, workshop, rabbitmq_url):
        with workshop("--concurrency", "3", CONCURRENCY=9) as process:
            # One of the three threads is left to the other handlers.
            send_all(rabbitmq_url, SINGLE, [(name, {"do": "wait for the word"}) for name in names(3)])
            process.until(lambda: Effect.objects.using("other").filter(name__startswith="begun").count() == 2)
            process.until(lambda: undelivered(rabbitmq_url, handler_of(SINGLE)) == 0)
            assert Effect.objects.using("other").count() == 2
            Unique.objects.create(name="go")
            process.until(lambda: effects() == 3)

    def test_inbox_consume_refuses_a_concurrency_below_one(self):
        with pytest.raises(CommandError, match="must be 1 or more"):
            call_command("inbox_consume", concurrency=0)


class TestConcurrencyOfAHandler:
    """`concurrency=2`: no more than two threads of a process run this handler."""

    @pytest.mark.parametrize("given", [{}, {"group_commit": 2}, {"size": 2}], ids=["single", "group_commit", "batch"])
    def test_handler_has_no_more_threads_than_its_concurrency_and_the_others_are_free(
        self, handling, rabbitmq_url, gate, given
    ):
        handle = (lambda messages: [gate(message) for message in messages]) if "size" in given else gate
        limited = handling(handle, name="tests.limited", concurrency=2, **given)
        other = handling(the_effect, name="tests.other", topic="other")
        for topic in (TOPIC, "other"):
            send_all(rabbitmq_url, topic, [(name, {}) for name in names(12, topic)])

        with consuming([limited, other], broker_options(rabbitmq_url, CONCURRENCY=4)):
            wait_until(lambda: len(gate.inside) == 2)
            wait_until(lambda: effects() == 12)
            assert len(gate.inside) == 2
            gate.open()
            wait_until(lambda: effects() == 24)

        assert gate.most == 2

    def test_ordered_handler_runs_no_more_keys_at_a_time_than_its_concurrency(self, handling, rabbitmq_url, gate):
        handler, options = handling(gate, concurrency=2, ordered=True), broker_options(rabbitmq_url, CONCURRENCY=4)
        for number in range(6):
            send(rabbitmq_url, TOPIC, {}, message_id=f"m{number}", headers={"cloudEvents:orderingkey": f"key {number}"})

        with consuming([handler], options):
            wait_until(lambda: InboxMessage.objects.count() == 6)
            wait_until(lambda: len(gate.inside) == 2)
            gate.open()
            wait_until(lambda: effects() == 6)

        assert gate.most == 2

    def test_deliveries_and_stored_messages_of_a_handler_get_its_only_slot_in_turn(self, handling, rabbitmq_url, gate):
        handler, options = handling(gate, concurrency=1), broker_options(rabbitmq_url, CONCURRENCY=3)
        store(handler, names(8, "stored"))
        send_all(rabbitmq_url, TOPIC, [(name, {}) for name in names(8, "sent")])

        with consuming([handler], options) as consumer:
            wait_until(lambda: consumer._subscriptions.unanswered == 8)  # both are there before the first of either ends
            for _ in range(10):
                [one] = wait_until(lambda: list(gate.inside))
                gate.open(one)
                wait_until(lambda one=one: one not in gate.inside)
            gate.open()
            wait_until(lambda: effects() == 16)

        assert gate.most == 1
        kinds = ["stored" if name.startswith("stored") else "sent" for name in gate.begun[:10]]
        assert min(kinds.count("stored"), kinds.count("sent")) >= 3, kinds

    def test_slot_of_a_failed_attempt_is_free_for_the_next_message(self, handling, rabbitmq_url):
        def handle(message):
            if message.payload.get("fails"):
                raise ValueError("no")
            the_effect(message)

        handler, options = handling(handle, concurrency=1), broker_options(rabbitmq_url, CONCURRENCY=2)
        send_all(rabbitmq_url, TOPIC, [(name, {"fails": number % 2 == 0}) for number, name in enumerate(names(10))])

        with consuming([handler], options):
            wait_until(lambda: effects() == 5)
            wait_until(lambda: InboxMessage.objects.filter(state=State.RETRYING).count() == 5)
            make_due()
            wait_until(lambda: InboxMessage.objects.filter(attempts=2).count() == 5)
            send_all(rabbitmq_url, TOPIC, [(name, {}) for name in names(3, "later")])
            wait_until(lambda: effects() == 8)


class TestAcknowledging:
    def test_each_delivery_is_acknowledged_only_after_its_own_handler_has_ended(self, handling, rabbitmq_url, gate, length):
        handler, options = handling(gate), broker_options(rabbitmq_url, CONCURRENCY=8)
        send_all(rabbitmq_url, TOPIC, [(name, {}) for name in names(8)])
        order = names(8)
        random.Random(3).shuffle(order)

        with consuming([handler], options):
            wait_until(lambda: len(gate.inside) == 8)
            for ended, name in enumerate(order, 1):
                gate.open(name)
                wait_until(lambda name=name: effects(name) == 1)
                wait_until(lambda ended=ended: length(handler) == 8 - ended)

        assert effects_by_name() == dict.fromkeys(order, 1)

    def test_broker_connection_cut_while_all_workers_are_busy_has_each_effect_once(
        self, handling, rabbitmq_url, proxy, gate, length
    ):
        handler, options = handling(gate), broker_options(proxy.through(rabbitmq_url), CONCURRENCY=4)
        send_all(rabbitmq_url, TOPIC, [(name, {}) for name in names(10)])

        with consuming([handler], options) as consumer:
            wait_until(lambda: len(gate.inside) == 4)
            first = consumer._connection
            proxy.cut()
            wait_until(lambda: consumer._connection not in {None, first} and consumer._subscriptions.unanswered == 10)
            gate.open()
            wait_until(lambda: length(handler) == 0 and effects() == 10)
            wait_until(lambda: InboxMessage.objects.count() == 10)

        assert effects_by_name() == dict.fromkeys(names(10), 1)
        assert sorted(gate.begun) == sorted(names(10))
        assert set(InboxMessage.objects.values_list("state", flat=True)) == {State.DONE}

    @pytest.mark.parametrize("redelivered", [False, True], ids=["fresh", "redelivered"])
    @pytest.mark.parametrize("by_payload", [False, True], ids=["biz-id of the message", "biz-id in the payload"])
    def test_sixty_copies_of_a_running_message_delay_no_other_message(
        self, handling, rabbitmq_url, gate, length, redelivered, by_payload
    ):
        """No worker waits for the first copy: with this DUPLICATE_TIMEOUT none of them would be free again."""
        gate.open(*names(40))
        named = {"biz_id": lambda message: message.payload["name"]} if by_payload else {}
        handler, other = handling(gate, **named), handling(gate, topic="other", **named)
        options = broker_options(rabbitmq_url, CONCURRENCY=2, DUPLICATE_TIMEOUT=timedelta(hours=1))
        slow = ("slow", {"name": "slow"})
        send_all(rabbitmq_url, TOPIC, [slow] * (61 if redelivered else 1))
        if redelivered:
            mark_redelivered(handler, options)

        with consuming([handler, other], options):
            wait_until(lambda: gate.inside == ["slow"])
            if not redelivered:
                send_all(rabbitmq_url, TOPIC, [slow] * 60)
            send_all(rabbitmq_url, TOPIC, [(name, {"name": name}) for name in names(40)[:20]])
            send_all(rabbitmq_url, other.topics[0], [(name, {"name": name}) for name in names(40)[20:]])
            wait_until(lambda: effects() == 40)
            # One that was delivered before is acknowledged as soon as it is stored, when a runner takes it.
            wait_until(lambda: length(handler) <= 1)
            assert gate.inside == ["slow"]
            gate.open()
            wait_until(lambda: length(handler) == 0 and InboxMessage.objects.count() == 41)

        assert effects_by_name() == dict.fromkeys([*names(40), "slow"], 1)
        assert (the_row(message_id="slow").duplicates, the_row(message_id="slow").attempts) == (60, 1)

    def test_copies_of_a_message_that_another_process_handles_occupy_one_worker_at_most(
        self, handling, rabbitmq_url, gate, length
    ):
        """With this DUPLICATE_TIMEOUT the one that waits for the first copy is free again when that has ended, not before."""
        gate.open()
        handler, other = handling(gate), handling(gate, topic="other")
        options = broker_options(rabbitmq_url, CONCURRENCY=2, DUPLICATE_TIMEOUT=timedelta(hours=1))
        row = read(handler, an_envelope(biz_id="slow", id="slow"), OPTIONS).row

        with consuming([handler, other], options):
            with transaction.atomic():
                guard = arrivals.begin_fresh("default", [row], OPTIONS.DUPLICATE_TIMEOUT)
                send_all(rabbitmq_url, TOPIC, [("slow", {})] * 60)
                send_all(rabbitmq_url, other.topics[0], [(name, {}) for name in names(20)])
                wait_until(lambda: effects() == 20)
                wait_until(lambda: length(handler) == 1)
                sentinel.finish(guard)
            wait_until(lambda: length(handler) == 0 and InboxMessage.objects.count() == 21)

        assert effects_by_name() == dict.fromkeys(names(20), 1)
        assert the_row(biz_id="slow").duplicates == 60

    def test_copy_of_a_message_that_another_process_still_handles_is_deferred_without_waiting_again(self, handles):
        handler = handles(the_effect)
        envelope = an_envelope(biz_id="slow", id="slow")
        short, long = timedelta(seconds=1), timedelta(seconds=20)

        with transaction.atomic():
            arrivals.begin_fresh("default", [read(handler, envelope, OPTIONS).row], OPTIONS.DUPLICATE_TIMEOUT)
            (first,) = at_once([lambda: deliver(handler, envelope, given=options(DUPLICATE_TIMEOUT=short))])
            begun_at = monotonic()
            (second,) = at_once([lambda: deliver(handler, envelope, given=options(DUPLICATE_TIMEOUT=long))])
            waited = monotonic() - begun_at

        assert (first, second) == (Outcome.DEFERRED, Outcome.DEFERRED)
        assert waited < long.total_seconds() / 2

    def test_copy_is_decided_about_when_the_running_message_has_ended(self, handles, monkeypatch):
        """Not only when its deferral is over, which grows up to half a minute."""
        monkeypatch.setattr(parking, "_SHORTEST_DEFERRAL", timedelta(hours=1))
        handler, envelope = handles(the_effect), an_envelope()
        arrival = read(handler, envelope, OPTIONS)

        with held_in_hand(arrival.row):
            assert parking.park(handler, arrival, OPTIONS) is Outcome.STORED
            assert receive(handler, [arrival], OPTIONS) == [Outcome.DEFERRED]
            assert drain() == 0
        assert drain() == 1, "it was identified, and run"

        assert (the_row().state, effects()) == (State.DONE, 1)

    def test_copy_is_not_run_while_this_process_handles_its_message(self, handles):
        """Also before that has a row, as when its transaction is begun again."""
        handler, envelope = handles(the_effect), an_envelope()
        arrival = read(handler, envelope, OPTIONS)
        assert arrivals.store_due("default", parked_row(handler, envelope, redelivered=False), OPTIONS.DUPLICATE_TIMEOUT)

        with held_in_hand(arrival.row):
            assert drain() == 1
            assert (the_row().state, the_row().attempts, effects()) == (State.RECEIVED, 0, 0)
        make_due()
        assert drain() == 1, "it was identified, and run"

        assert (the_row().state, effects()) == (State.DONE, 1)

    def test_copies_of_a_running_message_are_counted_by_their_cause(self, handling, rabbitmq_url, gate, length):
        handler, options = handling(gate), broker_options(rabbitmq_url, CONCURRENCY=2)
        bizid = {"headers": {"cloudEvents:bizid": "one"}}
        send(rabbitmq_url, TOPIC, {}, message_id="first", **bizid)

        with consuming([handler], options):
            wait_until(lambda: gate.inside == ["one"])
            for name, payload in [*[("first", {})] * 3, *[("again", {})] * 4, *[("other", {"says": "something else"})] * 5]:
                send(rabbitmq_url, TOPIC, payload, message_id=name, **bizid)
            wait_until(lambda: length(handler) == 1)
            gate.open()
            wait_until(lambda: InboxMessage.objects.count() == 1)

        row = the_row()
        assert (row.duplicates, row.resends, row.redeliveries, row.conflicts) == (12, 3, 0, 5)
        assert (row.conflicting_id, effects()) == ("other", 1)


@pytest.fixture
def other_database_outage():
    """The other database refuses connections until `.end()`."""
    other = connections["other"]
    before = other.settings_dict["PORT"]

    def end():
        other.close()
        other.settings_dict["PORT"] = before

    other.close()
    other.settings_dict["PORT"] = str(free_port())
    yield SimpleNamespace(end=end)
    end()


def effect_on_the_other_database(message):
    Effect.objects.using("other").create(name=message.biz_id)


class TestUnavailableDatabase:
    @pytest.fixture
    def unavailable(self, handling, rabbitmq_url, request):
        """A handler on the other database, with ten messages."""
        given = getattr(request, "param", {})
        handler = handling(effect_on_the_other_database, name="tests.away", topic="away", using="other", **given)
        send_all(rabbitmq_url, "away", [(name, {}) for name in names(10, "waits ")])
        return handler

    @pytest.mark.parametrize("unavailable", [{}, {"group_commit": 3}], ids=["single", "group_commit"], indirect=True)
    def test_unavailable_database_takes_no_thread_from_handlers_of_another_database(
        self, handling, rabbitmq_url, caplog, length, other_database_outage, unavailable
    ):
        here = handling(the_effect, name="tests.here")

        with consuming([unavailable, here], broker_options(rabbitmq_url, CONCURRENCY=2)) as consumer:
            wait_until(lambda: consumer._reception._outages.is_ongoing("other"))
            send_all(rabbitmq_url, TOPIC, [(name, {}) for name in names(20)])
            wait_until(lambda: effects() == 20)
            assert length(unavailable) == 10
            # The runner also asks this database, and logs the outage for itself.
            assert 1 <= caplog.text.count("The database 'other' is unavailable") <= 2
            assert "is available again" not in caplog.text
            other_database_outage.end()
            wait_until(lambda: length(unavailable) == 0)

        handled = Effect.objects.using("other").values_list("name", flat=True)
        assert Counter(handled) == dict.fromkeys(names(10, "waits "), 1)
        assert set(InboxMessage.objects.using("other").values_list("state", "attempts", "duplicates")) == {(State.DONE, 1, 0)}
        assert 1 <= caplog.text.count("The database 'other' is available again") <= 2

    def test_attempt_interrupted_by_an_unavailable_database_is_refunded_before_the_next_try(
        self, handles, other_database_outage
    ):
        port, ran = connections["other"].settings_dict["PORT"], []

        def handle(message):
            ran.append(message.attempt)
            if len(ran) == 1:
                connections["other"].settings_dict["PORT"] = port
                executed("SELECT pg_terminate_backend(pg_backend_pid())", using="other")

        handler = handles(handle, using="other")
        runner = Runner(OPTIONS)
        reception = Reception(OPTIONS, runner, lambda *_: None)
        other_database_outage.end()
        with pytest.raises(Unanswered) as left:
            reception.receive([a_delivery(handler, redelivered=True)])
        runner.turn()
        assert (left.value.seconds, runner.can_store("other")) == (0.0, False)
        other_database_outage.end()

        drain()
        assert ran == [1, 1]

    def test_stale_deliveries_of_an_unavailable_database_occupy_no_storing_thread(
        self, unavailable, rabbitmq_url, length, other_database_outage
    ):
        options = broker_options(rabbitmq_url, CONCURRENCY=1, ACK_TIMEOUT=timedelta(seconds=1))
        with consuming([unavailable], options) as consumer:
            wait_until(lambda: consumer._reception._outages.is_ongoing("other"))
            passed = monotonic() + options.longest_silence
            wait_until(lambda: monotonic() > passed and consumer._ticked_at > passed)
            assert not consumer._pool._storing.is_alive()
            other_database_outage.end()
            wait_until(lambda: length(unavailable) == 0)

        assert InboxMessage.objects.using("other").count() == 10


@pytest.mark.parametrize("known", [False, True], ids=["at the start", "in an outage"])
def test_database_that_never_answers_occupies_only_one_thread_of_the_runner(handles, other_database_outage, known):
    """Its port accepts connections and never answers."""
    handles(effect_on_the_other_database, name="tests.away", using="other")
    here, runner = handles(the_effect, name="tests.here"), Runner(OPTIONS)
    if known:
        runner.turn()
        assert runner.outages.is_ongoing("other")
    with (
        running_stored(size=2, runner=runner),
        ExitStack() as accepted,
        socket.create_server(("127.0.0.1", int(connections["other"].settings_dict["PORT"]))) as silent,
    ):
        accepted.enter_context(silent.accept()[0])
        store(here, names(20))
        wait_until(lambda: effects() == 20)


def test_ordered_queue_that_cannot_be_stored_takes_no_thread_from_other_handlers(handling, rabbitmq_url, caplog, length):
    stuck, here = handling(the_effect, name="tests.stuck", topic="stuck", ordered=True), handling(the_effect, name="tests.here")
    options = broker_options(rabbitmq_url, CONCURRENCY=1)
    concurrent = read(stuck, an_envelope(topic="stuck", biz_id="/tests#1"), options).row
    headers = {"cloudEvents:source": "/tests", "cloudEvents:type": "stuck", "cloudEvents:orderingkey": "key"}
    with transaction.atomic():
        assert arrivals.store_due("default", concurrent, options.DUPLICATE_TIMEOUT)
        for number in "123":
            send(rabbitmq_url, "stuck", {}, headers={**headers, "cloudEvents:id": number})
        with ExitStack() as stack:
            stack.enter_context(consuming([stuck, here], options))
            wait_until(lambda: "has had one of these messages in hand" in caplog.text)
            send_all(rabbitmq_url, TOPIC, [(name, {}) for name in names(20)])
            wait_until(lambda: effects() == 20)
            assert length(stuck) == 3
            consumer = stack.pop_all()
        transaction.set_rollback(True)
    with consumer:
        wait_until(lambda: effects() == 23)

    assert in_the_order_of_their_effects()[-3:] == ["/tests#1", "/tests#2", "/tests#3"]


class TestConsumerTimeout:
    def test_handler_that_outlasts_consumer_timeout_costs_the_channel_and_no_second_effect(
        self, handling, rabbitmq_url, gate, length, consumer_timeout
    ):
        handler, options = handling(gate), broker_options(rabbitmq_url, CONCURRENCY=3)
        consumer_timeout(3000)
        send_all(rabbitmq_url, TOPIC, [("slow", {})])

        with consuming([handler], options) as consumer:
            wait_until(lambda: gate.inside == ["slow"])
            first = consumer._connection
            # The broker has delivered it again, and the copy is stored until the first one has ended.
            wait_until(lambda: consumer._connection not in {None, first} and InboxMessage.objects.exists())
            send_all(rabbitmq_url, TOPIC, [("next", {})])
            gate.open()
            wait_until(lambda: effects("next") == 1 and length(handler) == 0)
            # The second delivery has a row of its own until it has been decided about.
            wait_until(lambda: InboxMessage.objects.filter(state=State.DONE).count() == InboxMessage.objects.count() == 2)

        assert (effects("slow"), gate.begun.count("slow")) == (1, 1)
        assert (the_row(message_id="slow").state, the_row(message_id="slow").attempts) == (State.DONE, 1)

    def test_consumer_timeout_of_another_channel_is_not_taken_for_a_queue_mismatch(
        self, handling, rabbitmq_url, consumer_timeout
    ):
        handler, options = handling(the_effect), broker_options(rabbitmq_url)
        consumer_timeout(1000)
        send(rabbitmq_url, TOPIC, {})
        came = []

        with closing(kombu.Connection(rabbitmq_url)) as connection:
            queue = kombu.Queue(queue_name(handler, options), no_declare=True)
            with kombu.Consumer(connection.channel(), [queue], on_message=came.append):
                while not came:
                    connection.drain_events(timeout=A_WHILE)
                # The broker has closed that channel, and the client has not read it yet.
                assert select.select([connection.connection.sock], [], [], A_WHILE)[0]

                with pytest.raises(PreconditionFailed, match="timed out"):
                    declare_queues(connection, handler, options)

        assert len(came) == 1

    def test_incomplete_batch_is_handled_before_the_ack_timeout(self, handling, rabbitmq_url, length):
        handler = handling(lambda messages: [the_effect(message) for message in messages], size=50, wait=timedelta(hours=1))
        options = broker_options(rabbitmq_url, ACK_TIMEOUT=timedelta(seconds=2))
        send_all(rabbitmq_url, TOPIC, [(name, {}) for name in names(5)])

        with consuming([handler], options):
            wait_until(lambda: length(handler) == 0)
            wait_until(lambda: effects() == 5)

        assert effects_by_name() == dict.fromkeys(names(5), 1)
        assert set(InboxMessage.objects.values_list("state", "attempts", "duplicates")) == {(State.DONE, 1, 0)}

    def test_deliveries_waiting_for_a_worker_are_stored_before_the_ack_timeout(self, handling, rabbitmq_url, gate, length):
        """All workers are busy for longer than the ack timeout."""
        handler, options = handling(gate), broker_options(rabbitmq_url, CONCURRENCY=2)
        send_all(rabbitmq_url, TOPIC, [(name, {}) for name in names(10)])

        with consuming([handler], options) as consumer:
            wait_until(lambda: len(gate.inside) == 2)
            # Set only now: with a short timeout from the start, a stall would make the two running messages stale as well.
            consumer._options = consumer._reception._options = consumer._subscriptions._options = replace(
                options, ACK_TIMEOUT=timedelta(seconds=2)
            )
            wait_until(lambda: length(handler) == 2)
            assert InboxMessage.objects.filter(state=State.RECEIVED).count() == 8
            gate.open()
            wait_until(lambda: length(handler) == 0)
            wait_until(lambda: effects() == 10)

        assert effects_by_name() == dict.fromkeys(names(10), 1)
        assert gate.most == 2


class TestCrashQuarantine:
    def test_messages_suspected_of_a_crash_run_one_at_a_time(self, handles, gate):
        """Two that run together would crash together again, until the harmless one is out of attempts as well."""
        suspects, others = names(4, "suspect"), names(4, "other")
        handler = handles(gate)
        store(handler, suspects)
        InboxMessage.objects.update(attempts=1)
        store(handler, others)

        with running_stored(size=6):
            for _ in suspects:
                (one,) = wait_until(lambda: [name for name in gate.inside if name in suspects])
                wait_until(lambda: set(others) < set(gate.inside))
                assert [name for name in gate.inside if name in suspects] == [one]
                gate.open(one)
                wait_until(lambda one=one: effects(one) == 1)
            gate.open()
            wait_until(lambda: effects() == 8)

        assert effects_by_name() == dict.fromkeys([*suspects, *others], 1)
        assert dict(InboxMessage.objects.values_list("biz_id", "attempts")) == {
            **dict.fromkeys(suspects, 2),
            **dict.fromkeys(others, 1),
        }

    def test_messages_that_only_failed_run_concurrently(self, handles, gate):
        store(handles(gate), names(4))
        InboxMessage.objects.update(state=State.RETRYING, attempts=1)

        with running_stored(size=4):
            wait_until(lambda: len(gate.inside) == 4)
            gate.open()
            wait_until(lambda: effects() == 4)

        assert effects_by_name() == dict.fromkeys(names(4), 1)
        assert set(InboxMessage.objects.values_list("state", "attempts")) == {(State.DONE, 2)}


@pytest.fixture
def workshop(a_process, rabbitmq_url):
    """Start `inbox_consume` with the handlers of `tests.support.apps.workshop`."""
    for topic in TOPICS:
        declare(handler_of(topic), broker_options(rabbitmq_url))
    return partial(a_process, "inbox_consume", app="workshop", BACKOFF=(SHORT, SHORT))


def handler_of(topic):
    return handler_of_the_workers(topic, topic)  # each is named as its topic


def all_empty(length):
    return all(length(handler_of(topic)) == 0 for topic in TOPICS)


def none_to_be_decided():
    """Copies that came while their message was being handled have rows of their own until they are counted."""
    return not InboxMessage.objects.exclude(state=State.DONE).exists()


def begun():
    return Effect.objects.using("other").filter(name__startswith="begun").count()


class TestProcesses:
    def test_sigterm_finishes_running_handlers_and_returns_the_rest_to_the_queues(self, workshop, rabbitmq_url, length):
        with workshop(CONCURRENCY=4, PREFETCH=10) as process:
            waits = {"do": "wait for the word"}
            send_all(rabbitmq_url, SINGLE, [("s0", waits), ("s1", waits)])
            process.until(lambda: begun() == 2)
            send_all(rabbitmq_url, GROUPED, [("g0", waits)])
            process.until(lambda: begun() == 3)
            send_all(rabbitmq_url, BATCHED, [("b0", waits)])
            process.until(lambda: begun() == 4)
            for topic in (SINGLE, GROUPED, BATCHED):
                send_all(rabbitmq_url, topic, [(f"{topic} later {n}", {}) for n in range(5)])
            process.until(lambda: not any(undelivered(rabbitmq_url, handler_of(topic)) for topic in TOPICS))
            process.terminate()
            process.until(lambda: "consumer: stopping" in process.said())
            Unique.objects.create(name="go")
            assert process.ends() == 0

            assert effects_by_name() == dict.fromkeys(["s0", "s1", "g0", "b0"], 1)
            assert {topic: length(handler_of(topic)) for topic in TOPICS} == {SINGLE: 5, GROUPED: 5, BATCHED: 5, BOUNDED: 0}
            process.start()
            process.until(lambda: all_empty(length) and effects() >= 19)

        later = [f"{topic} later {n}" for topic in (SINGLE, GROUPED, BATCHED) for n in range(5)]
        assert effects_by_name() == dict.fromkeys(["s0", "s1", "g0", "b0", *later], 1)

    @pytest.mark.parametrize("topic", [SINGLE, GROUPED, BATCHED])
    def test_message_that_kills_its_process_costs_no_other_message_its_effect(self, workshop, rabbitmq_url, length, topic):
        sent = {
            **{name: {} for name in names(15)},
            "before": {"do": EXITS_BEFORE},
            "after": {"do": EXITS_AFTER},
            "always": {"do": EXITS_ALWAYS},
            **{name: {} for name in names(15, "n")},
        }
        with workshop(CONCURRENCY=3, MAX_ATTEMPTS=4, REDELIVERY_AFTER=SHORT) as process:
            send_all(rabbitmq_url, topic, sent.items())
            process.restarted_until(lambda: InboxMessage.objects.filter(state=State.DEAD).exists() and all_empty(length))
            process.restarted_until(lambda: InboxMessage.objects.filter(state=State.DONE).count() == len(sent) - 1)
            # Copies that came while their message was being handled have been counted by then.
            process.restarted_until(lambda: InboxMessage.objects.count() == len(sent))

        assert set(process.exits) == {EXIT}
        assert effects_by_name() == dict.fromkeys(set(sent) - {"always"}, 1)
        dead = the_row(message_id="always")
        # One more than MAX_ATTEMPTS, because the answer to the last claim might have been lost.
        assert (dead.state, dead.attempts, "died" in dead.last_error) == (State.DEAD, 5, True)

    def test_database_restarted_under_load_costs_no_effect_and_no_attempt(
        self, workshop, rabbitmq_url, length, mortal_postgres
    ):
        name = f"mortal_{uuid.uuid4().hex[:8]}"
        mortal_postgres.create_database(name)
        url = mortal_postgres.url_of(name)
        sent = {topic: names(300, f"{topic} ") for topic in (SINGLE, GROUPED, BATCHED)}
        with the_default_at(HOST="127.0.0.1", PORT=mortal_postgres.port, NAME=name, USER="postgres", PASSWORD=""):
            call_command("migrate", verbosity=0)
            connections.close_all()
            for topic, its in sent.items():
                send_all(rabbitmq_url, topic, [(one, {}) for one in its])
            with workshop(variables={"DATABASE_URL": url}, CONCURRENCY=3, PREFETCH=20) as process:
                for _ in range(2):
                    seen, outages = effects_at(url), process.said().count("The database 'default' is unavailable")
                    process.until(lambda seen=seen: effects_at(url) >= min(seen + 50, 900))
                    mortal_postgres.stop()
                    process.until(
                        lambda outages=outages: process.said().count("The database 'default' is unavailable") > outages
                    )
                    mortal_postgres.start()
                process.until(lambda: all_empty(length) and effects_at(url) >= 900 and none_to_be_decided())
                assert process.end() == 0

            assert effects_by_name() == dict.fromkeys([one for its in sent.values() for one in its], 1)
            assert set(InboxMessage.objects.values_list("state", "attempts")) == {(State.DONE, 1)}
            connections.close_all()

    def test_drain_does_not_wait_for_batches_to_fill(self, workshop, rabbitmq_url, length):
        with workshop("--drain") as process:
            assert process.ends() == 0
            for topic in (SINGLE, GROUPED, BATCHED):
                send_all(rabbitmq_url, topic, [(f"{topic} {n}", {}) for n in range(7)])
            assert process.start().ends() == 0

        assert all_empty(length)
        assert (len(effects_by_name()), set(effects_by_name().values())) == (21, {1})


def effects_at(url):
    with psycopg.connect(url) as straight:
        return straight.execute("SELECT count(*) FROM testapp_effect").fetchone()[0]


@pytest.mark.long
def test_handler_waiting_for_its_rate_limit_delays_no_other_handler_on_redis(handles, redis_url):
    """On one channel, deliveries of all queues would share its prefetch."""
    slow = handles(the_effect, name="tests.slow", topic="slow", rate_limit="1/h")
    quick = handles(the_effect, name="tests.quick", topic="quick")
    options = broker_options(redis_url, PREFETCH=3)
    for handler in (slow, quick):
        declare(handler, options)
        send_all(redis_url, handler.topics[0], [(name, {}) for name in names(10, handler.topics[0])])

    with consuming([slow, quick], options):
        wait_until(lambda: Effect.objects.filter(name__startswith="quick").count() == 10)

    assert Effect.objects.filter(name__startswith="slow").count() <= 1
