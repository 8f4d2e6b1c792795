"""With strict_order the positions of one key's messages are in the order of the commits that brought them."""

import threading
import time
import zlib
from functools import partial
from itertools import pairwise
from random import Random

import pytest
from asgiref.sync import async_to_sync
from django.db import OperationalError, connection, transaction

from outbox import Draft, apublish, apublish_many, publish, publish_many
from outbox.models import OutboxMessage
from outbox.store import writing
from outbox.store.dialect import LOCK_SPACE
from tests.support.apps.effects.models import Effect
from tests.support.open_transactions import KEY, OpenTransaction, lock_waits
from tests.support.relaying import SECONDS, TOPIC, in_threads, published, row_of
from tests.support.sql import executed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

OTHER = "customer-2"


def rolled_back_in_a_savepoint(what):
    """Call `what` in a savepoint and roll that back."""
    with transaction.atomic():
        what()
        transaction.set_rollback(True)


@pytest.fixture
def begun():
    """Begin transactions; all of them end with the test."""
    transactions = []

    def begin():
        transactions.append(OpenTransaction())
        return transactions[-1]

    yield begin
    # All are asked to end before the first is waited for: they may be waiting for each other.
    for thread in [begun.ends() for begun in transactions]:
        thread.shutdown()


def waiting():
    """How many transactions wait for the order of a key."""
    return lock_waits("locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())")


def waits(future):
    wait_until(lambda: waiting() or future.done())
    return not future.done()


def done(future):
    return future.result(SECONDS)


in_order = partial(publish, TOPIC, {}, key=KEY, strict_order=True)


def few(**options):
    return publish_many([Draft(TOPIC, {}, **options)])[0]


def many(**options):
    return publish_many([Draft(TOPIC, {}, **options)] * 20)[0]


async def async_few(**options):
    return (await apublish_many([Draft(TOPIC, {}, **options)]))[0]


def test_without_strict_order_positions_and_commits_of_a_key_may_differ_in_order(begun):
    """What strict_order is for: a relay that looks in between publishes the later message first."""
    early, late = begun(), begun()
    first, second = done(early.publishes(strict_order=False)), done(late.publishes(strict_order=False))

    late.commits()
    seen_in_between = OutboxMessage.objects.get()
    early.commits()

    assert seen_in_between.message_id == second.id
    assert first.position < second.position


class TestSecondTransaction:
    @pytest.mark.parametrize(
        "way",
        [partial(publish, TOPIC, {}), few, many, async_to_sync(partial(apublish, TOPIC, {})), async_to_sync(async_few)],
        ids=["publish", "publish_many", "copied", "apublish", "apublish_many"],
    )
    def test_second_transaction_of_a_key_waits_until_the_first_has_committed(self, begun, way):
        one, other = begun(), begun()
        first = done(one.publishes())
        second = other.does(way, key=KEY, strict_order=True)

        assert waits(second)
        one.commits()
        done(second)
        other.commits()

        assert first.position < done(second).position
        assert row_of(first).created_at < row_of(done(second)).created_at, "the clock is read after the wait"

    @pytest.mark.parametrize("way", [few, many], ids=["publish_many", "copied"])
    def test_second_transaction_of_a_key_waits_for_a_first_that_published_many(self, begun, way):
        one, other = begun(), begun()
        done(one.does(way, key=KEY, strict_order=True))
        second = other.publishes()

        assert waits(second)
        one.commits()
        assert done(second).position > OutboxMessage.objects.latest("pk").pk

    def test_rolling_back_the_only_message_to_a_savepoint_frees_the_order_of_its_key(self, begun):
        """A savepoint that is rolled back takes its rows along, so there is nothing left to be in order with."""
        one, other = begun(), begun()
        done(one.does(rolled_back_in_a_savepoint, in_order))
        second = done(other.publishes())
        again = one.publishes()

        assert waits(again)
        other.commits()
        assert done(again).position > second.position

    def test_rolling_back_a_later_message_to_a_savepoint_keeps_the_order_of_its_key(self, begun):
        one, other = begun(), begun()
        done(one.does(in_order))
        done(one.does(rolled_back_in_a_savepoint, in_order))

        assert waits(other.publishes())

    def test_second_transaction_of_a_key_waits_across_topics(self, begun):
        """An order is that of a key, whatever its messages are about."""
        one, other = begun(), begun()
        done(one.publishes())

        assert waits(other.publishes(topic="other.topic"))

    @pytest.mark.parametrize(
        "way",
        [
            partial(publish, TOPIC, {}, key=OTHER, strict_order=True),
            partial(publish, TOPIC, {}, key=KEY),
            partial(publish_many, []),
            partial(publish_many, [Draft(TOPIC, {}, key=KEY)]),
        ],
        ids=["another key", "without strict_order", "many, but none", "many without strict_order"],
    )
    def test_publishing_of_another_key_or_without_strict_order_does_not_wait(self, begun, way):
        one, other = begun(), begun()
        done(one.publishes())

        done(other.does(way))
        assert done(one.publishes()).created, "the first transaction does not wait for itself"


class TestSeveralKeys:
    def test_keys_taken_in_opposite_orders_by_two_calls_end_in_one_deadlock_error(self, begun):
        one, other = begun(), begun()
        done(one.publishes(KEY))
        done(other.publishes(OTHER))
        crossed = [one.publishes(OTHER), other.publishes(KEY)]

        # Not the first that is done: PostgreSQL lets the other one go on before the loser's error has been raised here.
        wait_until(lambda: any(call.done() and call.exception() for call in crossed))
        [lost] = [place for place, call in enumerate(crossed) if call.done() and call.exception()]

        with pytest.raises(OperationalError, match="deadlock"):
            done(crossed[lost])
        (one, other)[lost].rolls_back()
        assert done(crossed[1 - lost]).created

    def test_keys_of_one_call_are_locked_in_one_order_whatever_their_order_in_the_call(self, begun):
        """The first key in lock order is held while both calls arrive: in the order of the arguments they would deadlock."""
        first, second = sorted([KEY, OTHER], key=lambda key: zlib.crc32(key.encode()))
        holder, one, other = begun(), begun(), begun()
        done(holder.publishes(first))

        forwards = one.does(writing.hold_order, "default", [first, second])
        wait_until(lambda: waiting() == 1)
        backwards = other.does(writing.hold_order, "default", [second, first])
        wait_until(lambda: waiting() == 2)
        holder.commits()
        done(forwards)
        one.commits()

        assert done(backwards) is None

    def test_publish_many_locks_its_keys_before_it_writes_the_first_row(self, begun):
        one, other = begun(), begun()
        done(one.publishes(OTHER))
        drafts = [Draft(TOPIC, {}, key=KEY, unique=True, biz_id="u"), Draft(TOPIC, {}, key=OTHER, strict_order=True)]

        later = other.does(publish_many, drafts)
        assert waits(later)
        while_it_waits = published(key=KEY, biz_id="u", unique=True)
        one.commits()

        assert while_it_waits.created
        assert not done(later)[0].created


def test_order_locks_are_outside_the_lock_space_of_shards(begun):
    done(begun().publishes())

    spaces = executed(
        "SELECT DISTINCT classid::bigint FROM pg_locks WHERE locktype = 'advisory' AND granted "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    assert spaces == [(writing.ORDER_SPACE % 2**32,)]
    assert writing.ORDER_SPACE % 2**32 != LOCK_SPACE % 2**32


@pytest.mark.every_database
def test_strict_order_writes_the_same_row():
    rows = [row_of(published(payload={"n": 1}, key=KEY, biz_id="b", strict_order=strict)) for strict in (False, True)]

    for name in ("topic", "key", "shard", "state", "priority"):
        assert getattr(rows[0], name) == getattr(rows[1], name)
    assert bytes(rows[0].body) == bytes(rows[1].body)


class Writer:
    """Transactions of all kinds, one after the other. Each that commits is numbered for every key it wrote.

    The number comes from a row per key that is locked last, so the numbers of a key are in the order of its commits.
    """

    KEYS = ("customer-1", "customer-2", "global")
    TRANSACTIONS = 12

    def __init__(self, name, seed, start):
        self.name, self._random, self._start = name, Random(f"{seed} {name}"), start
        self.numbers = {}

    def run(self):
        connection.ensure_connection()
        self._start.wait(SECONDS)
        for turn in range(self.TRANSACTIONS):
            if connection.vendor == "sqlite":
                connection.transaction_mode = self._random.choice(["IMMEDIATE", "DEFERRED"])
            self._transaction(f"{self.name}-{turn}")

    def _transaction(self, name):
        kind = self._random.choice([self._one, self._one, self._many, self._one_after_a_rollback])
        with transaction.atomic():
            keys = kind(name)
            self._pause()
            numbers = {(key, name): self._number(key) for key in sorted(keys)}
            undone = self._random.random() < 0.2
            transaction.set_rollback(undone)
        if not undone:
            self.numbers |= numbers

    def _one(self, name):
        key = self._random.choice(self.KEYS)
        publish(TOPIC, {}, key=key, biz_id=name, strict_order=True)
        return {key}

    def _many(self, name):
        keys = self._random.choices(self.KEYS, k=self._random.choice([1, 3, 15]))
        publish_many([Draft(TOPIC, {}, key=key, biz_id=name, strict_order=True) for key in keys])
        return set(keys)

    def _one_after_a_rollback(self, name):
        rolled_back_in_a_savepoint(partial(self._one, "rolled back"))
        self._pause()
        return self._one(name)

    def _pause(self):
        time.sleep(self._random.choice([0, 0, 0.001, 0.005, 0.02]))

    def _number(self, key):
        row = Effect.objects.filter(name=key)
        row.update(name=key)
        number = int(row.get().detail) + 1
        row.update(detail=str(number))
        return number


@pytest.mark.every_database
@pytest.mark.parametrize("seed", range(4))
def test_positions_of_a_key_follow_its_commits_with_many_concurrent_writers(seed):
    Effect.objects.bulk_create(Effect(name=key, detail="0") for key in Writer.KEYS)
    start = threading.Barrier(6)
    writers = [Writer(f"writer-{n}", seed, start) for n in range(6)]

    with in_threads(*(writer.run for writer in writers)):
        pass

    numbers = {name: number for writer in writers for name, number in writer.numbers.items()}
    for key in Writer.KEYS:
        commits = [numbers[key, row.biz_id] for row in OutboxMessage.objects.filter(key=key).order_by("pk")]
        assert len(set(commits)) >= 5, "too few messages to have an order"
        assert all(earlier <= later for earlier, later in pairwise(commits))
