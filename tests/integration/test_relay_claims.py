"""Many relays on one PostgreSQL: nothing skipped, nothing held twice, nothing settled by a relay that overslept."""

import re
import threading
from collections import Counter
from datetime import timedelta

import psycopg
import pytest
from django.db import DatabaseError, InterfaceError, connection, connections, transaction

from outbox import Draft, publish, publish_many, store
from outbox.kernel.clock import DatabaseTime, monotonic
from outbox.kernel.faults import is_outage
from outbox.models import OutboxMessage, State
from outbox.relay import passes
from outbox.store import Failure, Settlement
from tests.fakes.amqp_peer import FakeAmqpPeer
from tests.relaying import (
    TOPIC,
    connected,
    drained,
    eventually,
    ids,
    in_threads,
    one_pass,
    published,
    relaying,
    row_of,
    state_of,
    states,
    waiting,
)

pytestmark = pytest.mark.django_db(transaction=True)

A_LOT = 400
HOUR = timedelta(hours=1)


@pytest.fixture
def peer():
    with FakeAmqpPeer() as peer:
        yield peer


def a_backlog(count=A_LOT, keys=20):
    with transaction.atomic():
        return publish_many([Draft(TOPIC, {"n": n}, key=f"key-{n % keys}" if n % 2 else "") for n in range(count)])


def test_transactions_that_commit_in_the_reverse_order_of_their_ids_are_all_published(peer):
    """A high-water mark would skip the second one for ever."""
    first_has_its_id, second_has_committed = threading.Event(), threading.Event()
    written = {}

    def slow():
        with transaction.atomic():
            written["slow"] = publish(TOPIC, {})
            first_has_its_id.set()
            assert second_has_committed.wait(30)

    with relaying(peer.url), in_threads(slow):
        assert first_has_its_id.wait(30)
        written["fast"] = published()
        eventually(lambda: state_of(written["fast"]) == State.PUBLISHED)
        second_has_committed.set()
        eventually(lambda: states() == [State.PUBLISHED] * 2)

    assert written["slow"].position < written["fast"].position
    assert ids(peer.published) == ids([written["fast"], written["slow"]])


def test_several_relays_never_have_the_same_row_in_hand():
    a_backlog()
    guard, in_hand, overlaps, rounds = threading.Lock(), Counter(), [], []

    def claim_and_settle():
        while True:
            with transaction.atomic():
                rows = store.claim_ready("default", 25)
                taken = [row.position for row in rows]
                with guard:
                    in_hand.update(taken)
                    overlaps.extend(position for position in taken if in_hand[position] > 1)
                    rounds.append(len(taken))
                    others = sum(in_hand.values()) > len(taken)
                if others:  # hold on to it while the others look for something to take
                    with connection.cursor() as cursor:
                        cursor.execute("SELECT pg_sleep(0.005)")
                store.settle("default", Settlement(published=taken))
                with guard:
                    in_hand.subtract(taken)
            if not taken and not OutboxMessage.objects.filter(state=State.READY).exists():
                return

    with in_threads(*[claim_and_settle] * 4):
        pass

    assert overlaps == []
    assert sum(rounds) == A_LOT, "every row was taken exactly once"
    assert sum(1 for taken in rounds if taken) > 4


def test_a_shard_in_somebodys_hands_is_passed_over_and_the_others_are_not():
    one, other = published(key="a"), published(key="b")
    assert row_of(one).shard != row_of(other).shard
    with transaction.atomic():
        assert {row.position for row in store.claim_ready("default", 500)} == {one.position, other.position}
        late = published_elsewhere(key="c")
        seen = claimed_elsewhere()

    assert seen == {late.position}
    assert claimed_elsewhere() == {one.position, other.position, late.position}, "the locks went with the transaction"


def published_elsewhere(**options):
    """In a transaction of another connection."""
    answers = []
    with in_threads(lambda: answers.append(published(**options))):
        pass
    return answers[0]


def claimed_elsewhere():
    claimed = set()

    def claim():
        with transaction.atomic():
            claimed.update(row.position for row in store.claim_ready("default", 500))

    with in_threads(claim):
        pass
    return claimed


def test_two_concurrent_relays_publish_every_message_once(peer):
    messages = a_backlog()

    with relaying(peer.url, relays=2, BATCH_SIZE=20) as relays:
        eventually(lambda: not waiting())

    assert Counter(ids(peer.published)) == Counter(ids(messages))
    assert sum(relay.published for relay in relays) == A_LOT
    assert peer.connections == 2


def test_two_concurrent_relays_keep_the_order_of_every_key(peer):
    messages = a_backlog()

    with relaying(peer.url, relays=2, BATCH_SIZE=7):
        eventually(lambda: not waiting())

    position = {str(message.id): message.position for message in messages}
    by_key = {}
    for arrived in list(peer.published):
        if key := arrived.headers.get("cloudEvents:orderingkey"):
            by_key.setdefault(key, []).append(position[arrived.properties["message_id"]])
    assert len(by_key) == 10
    for positions in by_key.values():
        assert positions == sorted(positions)


def test_publishing_while_relays_run_loses_nothing(peer):
    def produce():
        for n in range(40):
            with transaction.atomic():
                publish(TOPIC, {}, key=f"k{n % 3}")
                publish_many([Draft(TOPIC, {}), Draft(TOPIC, {})])
                transaction.set_rollback(n % 4 == 0)

    with relaying(peer.url, relays=2), in_threads(produce, produce):
        pass
    drained(peer.url)

    assert len(peer.published) == len(set(ids(peer.published))) == 2 * 30 * 3
    assert set(states()) == {State.PUBLISHED}


class TestARelayThatOverslept:
    def test_settles_nothing_because_the_server_has_ended_its_transaction(self):
        message = published()
        shard, woken = row_of(message).shard, []

        def its_shard_is_free():
            with psycopg.connect(**connection_parameters()) as other:
                locks = other.execute("SELECT pg_try_advisory_xact_lock(%s, %s)", [store._LOCK_SPACE, shard])
                return locks.fetchone()[0]

        def oversleep():
            try:
                with transaction.atomic():
                    store.bound_transaction("default", timedelta(milliseconds=100))
                    [row] = store.claim_ready("default", 10)
                    assert not its_shard_is_free()
                    eventually(its_shard_is_free)
                    store.settle("default", Settlement(published=[row.position]))
            except (DatabaseError, InterfaceError) as error:
                woken.append(error)

        with in_threads(oversleep):
            pass

        assert [is_outage(error) for error in woken] == [True], "nobody's fault: it begins again"
        assert state_of(message) == State.READY

    def test_leaves_no_bounds_on_the_session(self):
        with transaction.atomic():
            store.bound_transaction("default", timedelta(seconds=3))
            assert shown("statement_timeout") == shown("lock_timeout") == "3s"

        assert shown("statement_timeout") == shown("idle_in_transaction_session_timeout") == "0"


def connection_parameters():
    settings = connections["default"].settings_dict
    return {
        "host": settings["HOST"],
        "port": settings["PORT"],
        "user": settings["USER"],
        "password": settings["PASSWORD"] or None,
        "dbname": settings["NAME"],
    }


def shown(name):
    with connection.cursor() as cursor:
        cursor.execute(f"SHOW {name}")
        return cursor.fetchone()[0]


class TestCancelling:
    """What an operator does to a row while a relay may have it in hand."""

    def cancelled_beside_a_pass(self, message, settlement):
        """Cancel while a pass has the message; the pass ends only once the cancel waits for it."""
        answers = []

        def cancel():
            answers.append(store.cancel("default", message.position))

        with transaction.atomic():
            assert message.position in {row.position for row in store.claim_ready("default", 10)}
            thread = threading.Thread(target=lambda: (cancel(), connections.close_all()))
            thread.start()
            eventually(somebody_waits_for_an_advisory_lock)
            assert not answers, "it waits for the pass"
            store.settle("default", settlement)
        thread.join()
        return answers[0]

    def test_waits_for_the_pass_and_is_too_late_when_it_published(self):
        message = published()

        assert not self.cancelled_beside_a_pass(message, Settlement(published=[message.position]))
        assert state_of(message) == State.PUBLISHED

    def test_waits_for_the_pass_and_succeeds_when_it_did_not_publish(self):
        message = published()

        assert self.cancelled_beside_a_pass(message, Settlement())
        assert state_of(message) == State.CANCELLED

    def test_waits_for_the_pass_and_cancels_what_will_be_retried(self):
        message = published()
        failure = Failure(position=message.position, error="nack", retry_after=HOUR)

        assert self.cancelled_beside_a_pass(message, Settlement(failed=[failure]))
        assert state_of(message) == State.CANCELLED

    def test_in_an_open_transaction_keeps_relays_away_until_it_is_decided(self):
        message = published()
        for decided in (False, True):
            with transaction.atomic():
                assert store.cancel("default", message.position)
                assert claimed_elsewhere() == set()
                transaction.set_rollback(not decided)
            assert claimed_elsewhere() == (set() if decided else {message.position})

    def test_leaves_the_callers_own_timeouts_as_they_were(self):
        message = published()
        with transaction.atomic():
            before = shown("lock_timeout")
            store.cancel("default", message.position)

            assert shown("lock_timeout") == before

    def test_of_a_row_that_is_gone_is_too_late(self):
        assert not store.cancel("default", 10**9)


def somebody_waits_for_an_advisory_lock():
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        return cursor.fetchone()[0]


class TestTheIndexes:
    """The work of a pass must not grow with what has been published before."""

    @pytest.fixture
    def published_before(self):
        with transaction.atomic():
            publish_many([Draft(TOPIC, {}, key=f"k{n % 500}" if n % 2 else "") for n in range(20_000)])
            OutboxMessage.objects.update(state=State.PUBLISHED, settled_at=DatabaseTime(), attempts=1)
        with transaction.atomic():
            publish_many([Draft(TOPIC, {}, key=f"k{n % 20}") for n in range(50)])
        analyse()

    def test_find_what_is_ready(self, published_before):
        with transaction.atomic():
            plans = explained(lambda: store.claim_ready("default", 500))

        assert len(plans) == 2
        for plan in plans:
            assert "outbox_ready" in plan
            assert "Seq Scan on outbox_outboxmessage" not in plan
        assert "Sort Key: m.priority" not in plans[1], "the index gives the order"

    def test_find_what_holds_a_key(self, published_before):
        held = OutboxMessage.objects.filter(state=State.PUBLISHED).exclude(key="").order_by("pk")
        OutboxMessage.objects.filter(pk__in=held.values_list("pk", flat=True)[:200]).update(state=State.DEAD)
        analyse()
        with transaction.atomic():
            plans = explained(lambda: store.claim_ready("default", 500))

        assert "outbox_holding" in plans[1]
        assert "Seq Scan on outbox_outboxmessage" not in plans[1]

    def test_find_what_is_due(self, published_before):
        [plan] = explained(lambda: store.promote_due("default", 1_000))

        assert "outbox_due" in plan
        assert "Seq Scan on outbox_outboxmessage" not in plan

    def test_find_what_is_due_without_reading_what_is_not(self, published_before):
        """A relay asks many times a second; a million messages scheduled for tomorrow must not be read each time."""
        OutboxMessage.objects.filter(state=State.PUBLISHED).update(
            state=State.SCHEDULED, available_at=DatabaseTime(HOUR), settled_at=None
        )
        analyse()

        [plan] = explained(lambda: store.promote_due("default", 1_000))

        assert re.search(r"Index Scan using outbox_due [^\n]*\n\s+Index Cond: \(?.*available_at <= ", plan), plan

    def test_find_what_may_be_purged_without_reading_what_may_not(self, published_before):
        plans = explained(lambda: list(store.purge_settled("default", HOUR)))

        assert re.search(r"outbox_settled[^\n]*\n\s+Index Cond: \(?.*settled_at < ", plans[0]), plans[0]

    def test_settle_by_primary_key(self, published_before):
        positions = list(OutboxMessage.objects.filter(state=State.READY).values_list("pk", flat=True))

        [plan] = explained(lambda: store.settle("default", Settlement(published=positions)))

        assert "Seq Scan on outbox_outboxmessage" not in plan


def analyse():
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE outbox_outboxmessage")


def explained(action):
    """The plan of every statement that touches the outbox."""
    plans = []

    def explain(execute, sql, params, many, context):
        if "outbox_outboxmessage" in sql and sql.lstrip().startswith(("WITH", "SELECT", "UPDATE", "DELETE")):
            with psycopg_cursor(context["connection"]) as cursor:
                cursor.execute(f"EXPLAIN {sql}", params)
                plans.append("\n".join(line for (line,) in cursor.fetchall()))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(explain):
        action()
    return plans


def psycopg_cursor(wrapper):
    """A cursor the wrapper above does not see, on the same connection and in the same transaction."""
    return wrapper.connection.cursor()


class TestBehindDeadHeads:
    """Messages that may not be sent must not hide those that may."""

    def test_what_is_free_goes_out_however_many_shards_are_held(self, peer):
        with transaction.atomic():
            publish_many([Draft(TOPIC, {}, key=f"key-{n}") for n in range(400)])
            OutboxMessage.objects.update(state=State.DEAD)
            publish_many([Draft(TOPIC, {}, key=f"key-{n}") for n in range(400)])
        free = published()

        drained(peer.url)

        assert ids(peer.published) == ids([free])
        assert Counter(states()) == {State.DEAD: 400, State.READY: 400, State.PUBLISHED: 1}


def test_a_relay_frozen_between_claim_and_send_sends_nothing_stale(peer, monkeypatch):
    """It wakes with its transaction ended, and others may have decided about its messages meanwhile."""
    published()
    claim = store.claim_ready

    def claim_and_freeze(*arguments):
        rows = claim(*arguments)
        asleep = monotonic() + 60
        monkeypatch.setattr(passes, "monotonic", lambda: asleep)
        return rows

    monkeypatch.setattr(store, "claim_ready", claim_and_freeze)
    with connected(peer.url) as transport:
        one_pass(transport)

    assert peer.published == []
    assert states() == [State.READY]
