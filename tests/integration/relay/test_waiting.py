"""Messages behind the failed head of their key become waiting, cost later passes nothing, and are then sent in order."""

import random
import threading
from datetime import timedelta
from functools import partial

import pytest
from django.db import connection, transaction

from exactly_once.process.logs import Reminder
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.prepared_statements import KEEP_PLANS
from outbox import pause
from outbox.models import OutboxMessage
from outbox.relay import releasing
from outbox.states import CANCEL, State
from outbox.store import decision_rows, settling
from tests.support.plans import measured, nodes, of_the_table
from tests.support.relaying import (
    TOPIC,
    all_published,
    connected,
    drained,
    in_hand,
    in_threads,
    one_pass,
    published,
    published_many,
    relaying,
    set_columns,
    state_of,
    states,
)
from tests.support.sql import another_session, executed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)
NEVER = {"BACKOFF": (HOUR, HOUR)}
"""A failed head is not retried within the test."""


def some(*names, key="k", **options):
    return [published(biz_id=name, key=key, **options) for name in names]


def many(count):
    return published_many(count, biz_id=str, key="k")


def arrived(peer):
    """The biz-ids of the messages that reached the broker, in order."""
    return [message.headers["cloudEvents:bizid"] for message in list(peer.published)]


def answering(peer, **by_biz_id):
    peer.script = lambda message: [partial(getattr(peer, by_biz_id.get(message.headers["cloudEvents:bizid"], "ack")), message)]


def behind_a_failed_head(peer, transport, *names, key="k"):
    """The head has failed, and the others are waiting."""
    head, *others = some("head", *names, key=key)
    answering(peer, head="nack")
    one_pass(transport, **NEVER)
    one_pass(transport, **NEVER)
    assert states() == [State.RETRYING, *[State.WAITING] * len(others)]
    answering(peer)
    peer.published.clear()
    return head, others


def release(most=100):
    return settling.release_waiting("default", keys=100, most=most)[0]


def move(head, state):
    """Put the head into a state in which it no longer holds its key, as an operator or the clock does."""
    settled = {} if state == State.READY else {"settled_at": DatabaseTime()}
    set_columns(head, state=state, available_at=DatabaseTime(), **settled)


@pytest.mark.every_database
class TestEndOfWaiting:
    @pytest.mark.parametrize("state", [State.READY, State.PUBLISHED, State.EXPIRED, State.CANCELLED])
    def test_waiting_messages_go_on_in_order_once_their_head_is_ready_or_settled(self, peer, transport, state):
        head, _ = behind_a_failed_head(peer, transport, "a", "b", "c")
        assert release() == 0, "not before"

        move(head, state)
        drained(peer.url)

        assert arrived(peer) == [*(["head"] if state == State.READY else []), "a", "b", "c"]

    @pytest.mark.parametrize("state", [State.RETRYING, State.DEAD])
    def test_waiting_messages_stay_while_their_head_is_retrying_or_dead(self, peer, transport, state):
        head, others = behind_a_failed_head(peer, transport, "a")
        set_columns(head, state=state)

        assert release() == 0
        assert state_of(others[0]) == State.WAITING

    def test_dead_message_among_waiting_ones_holds_only_those_behind_it(self, peer, transport):
        """The messages before it are released."""
        head, (a, dead, b) = behind_a_failed_head(peer, transport, "a", "dead", "b")
        set_columns(dead, state=State.DEAD, settled_at=DatabaseTime())
        move(head, State.READY)

        drained(peer.url)
        assert arrived(peer) == ["head", "a"]
        assert [state_of(message) for message in (a, dead, b)] == [State.PUBLISHED, State.DEAD, State.WAITING]

        assert decision_rows.decide("default", CANCEL, [dead.position])
        drained(peer.url)
        assert arrived(peer) == ["head", "a", "b"]


@pytest.mark.every_database
class TestReleasing:
    def test_release_in_chunks_keeps_the_order_of_a_key(self, peer):
        many(100)
        OutboxMessage.objects.update(state=State.WAITING)

        with connected(peer.url) as transport:
            while release(7):
                one_pass(transport)
                published(biz_id=f"late-{len(peer.published)}", key="k")  # while messages are being published
                one_pass(transport)
                assert State.READY not in states(), "released messages are sent, and new ones wait"

        sent = arrived(peer)
        late = [name for name in sent if name.startswith("late")]
        assert sent == [*map(str, range(100)), *late]
        assert len(late) >= 100 // 7
        assert set(states()) == {State.PUBLISHED}

    def test_walk_along_300_held_keys_looks_at_a_part_of_them_at_a_time_and_finds_a_free_one_behind_them(self):
        published_many(300, key=lambda n: f"held-{n:03}")
        OutboxMessage.objects.update(state=State.DEAD, settled_at=DatabaseTime())
        published_many(300, key=lambda n: f"held-{n:03}")
        free = published(key="later")
        OutboxMessage.objects.filter(state=State.READY).update(state=State.WAITING)

        reached, released = [""], []
        while reached[-1] or not released:
            count, after = settling.release_waiting("default", reached[-1], keys=100, most=100)
            released.append(count)
            reached.append(after)

        assert reached == ["", "held-099", "held-199", "held-299", ""]
        assert released == [0, 0, 0, 1]
        assert state_of(free) == State.READY

    def test_releases_concurrent_with_sending_keep_the_order_of_every_key(self, peer):
        """Sending locks the shard of the key; releasing does not."""
        published_many(120, biz_id=str, key=lambda n: f"key-{n % 3}")
        OutboxMessage.objects.update(state=State.WAITING)
        done = threading.Event()

        def release_all():
            while not done.is_set():
                release(random.randint(1, 15))

        with relaying(peer.url, BATCH_SIZE=4), in_threads(release_all, release_all):
            try:
                wait_until(lambda: set(states()) == {State.PUBLISHED})
            finally:
                done.set()

        for key in range(3):
            assert [int(name) for name in arrived(peer) if int(name) % 3 == key] == list(range(key, 120, 3))


def test_messages_behind_a_waiting_one_that_another_session_has_locked_are_not_released():
    head, *_ = some("a", "b")
    OutboxMessage.objects.update(state=State.WAITING)
    with another_session() as other:
        other.execute("SELECT FROM outbox_outboxmessage WHERE id = %s FOR UPDATE", [head.position])
        assert release() == 0

    assert release() == 2


class TestManyHeldKeys:
    @pytest.fixture
    def many_held_keys(self, monkeypatch):
        """Fifty parts of a walk."""
        monkeypatch.setattr(releasing, "_KEYS", 10)
        published_many(500, key=lambda n: f"held-{n:03}")
        OutboxMessage.objects.update(state=State.PAUSED)
        with transaction.atomic():
            pause(TOPIC)

    def test_messages_behind_a_head_are_released_beside_many_held_keys(self, peer, many_held_keys):
        keys = [f"z-{n}" for n in range(20)]
        heads = [published(topic="another", key=key) for key in keys]
        waiting = [published(topic="another", key=key) for key in keys]
        OutboxMessage.objects.filter(pk__in=[message.position for message in waiting]).update(state=State.WAITING)

        with relaying(peer.url, relays=2):
            wait_until(lambda: all_published([*heads, *waiting]))

    def test_backlog_of_a_key_is_released_before_the_walk_goes_on(self, many_held_keys):
        backlog = published_many(250, topic="another", key="a")
        OutboxMessage.objects.filter(pk__in=[message.position for message in backlog]).update(state=State.WAITING)
        walk, released = releasing.Release("default", Reminder()), []
        while sum(released) < 250:
            walk._due_at = 0.0
            released.append(walk.step(0.0))

        assert released == [100, 100, 50]

    def test_drain_walks_to_the_last_of_many_held_keys(self, peer, many_held_keys):
        free = published(topic="another", key="z")
        set_columns(free, state=State.WAITING)

        drained(peer.url)

        assert state_of(free) == State.PUBLISHED

    def test_rows_read_by_one_step_do_not_grow_with_the_held_keys(self, many_held_keys):
        few = rows_read(partial(settling.release_waiting, "default", keys=10, most=10))
        published_many(5_000, key=lambda n: f"more-{n}")
        OutboxMessage.objects.update(state=State.PAUSED)
        executed("VACUUM ANALYZE outbox_outboxmessage")

        assert 0 < rows_read(partial(settling.release_waiting, "default", keys=10, most=10)) <= few


class TestDrain:
    @pytest.mark.long
    def test_drain_publishes_every_waiting_message_that_can_be_released(self, peer):
        published_many(1500, key=lambda n: f"key-{n}")
        OutboxMessage.objects.update(state=State.WAITING)

        drained(peer.url)

        assert set(states()) == {State.PUBLISHED}


class TestCostOfWaiting:
    """Measured by the rows that PostgreSQL counts."""

    def test_later_passes_read_no_waiting_rows(self, peer, transport):
        published_many(100, key=lambda n: f"key-{n}")
        OutboxMessage.objects.update(state=State.DEAD, settled_at=DatabaseTime())
        before = rows_read(in_hand)
        published_many(5000, key=lambda n: f"key-{n % 100}")
        while one_pass(transport).claimed:
            pass
        assert states().count(State.WAITING) == 5000

        assert rows_read(in_hand) == before

    @pytest.mark.long
    def test_rows_read_by_a_release_grow_with_the_keys_and_not_with_the_messages(self):
        def cost(messages):
            OutboxMessage.objects.all().delete()
            published_many(20, key=lambda n: f"key-{n}")
            OutboxMessage.objects.update(state=State.DEAD, settled_at=DatabaseTime())
            published_many(messages, key=lambda n: f"key-{n % 20}")
            OutboxMessage.objects.filter(state=State.READY).update(state=State.WAITING)
            executed("VACUUM ANALYZE outbox_outboxmessage")
            return rows_read(release)

        few, many = cost(400), cost(8000)

        assert 0 < many <= 2 * few


def rows_read(action):
    """How many rows of the outbox the server fetched, by any scan, for the statements of `action`."""
    with transaction.atomic():
        # A relay's statements have these plans, whether the table has been analysed or not.
        executed(f"SELECT {KEEP_PLANS}")
        plans = measured(action)
    connection.close()
    assert plans, "no statement of it read the outbox"
    return sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in (node for plan in plans for node in nodes(plan))
        if of_the_table(node)
    )
