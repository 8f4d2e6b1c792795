"""Several relays on one PostgreSQL: no message skipped, none claimed twice, none settled after the transaction has ended."""

import re
import threading
from collections import Counter
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import pairwise
from random import Random
from statistics import median

import psycopg
import pytest
from django.db import DatabaseError, InterfaceError, connection, transaction
from hypothesis import given, settings
from hypothesis import strategies as st

from exactly_once.process.clock import monotonic
from exactly_once.sql.days import DAY_OF_NOW, LIVE
from exactly_once.sql.faults import is_outage
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.prepared_statements import KEEP_PLANS
from outbox import Draft, pause, publish, publish_many, publish_now, resume
from outbox.models import SHARDS, OutboxMessage, PausedTopic
from outbox.relay import floors, passes
from outbox.relay.floors import Floors
from outbox.states import CANCEL, RESTORE, SETTLED, State
from outbox.store import claiming, decision_rows, looking, paused_topics, reading, scheduling, settling, writing
from outbox.store.claiming import Bounds
from outbox.store.dialect import EVER, LOCK_SPACE
from outbox.store.looking import BusyShard
from outbox.store.messages import RelayedMessage
from outbox.store.scheduling import Offset
from outbox.store.settling import Failure, Settlement
from outbox.transports import amqp
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import InAThread, at_once
from tests.support.plans import explained, measured, nodes, of_the_table
from tests.support.relaying import (
    SECONDS,
    TOPIC,
    a_backlog,
    connected,
    ids,
    in_hand,
    in_threads,
    one_pass,
    open_transaction,
    published,
    published_many,
    relaying,
    row_of,
    set_columns,
    state_of,
    states,
    waiting,
)
from tests.support.sql import another_session, executed, fetched
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

A_LOT = 400
HOUR = timedelta(hours=1)


def test_claim_skips_shards_locked_by_another_transaction_and_takes_the_others():
    one, other = published(key="a"), published(key="b")
    assert row_of(one).shard != row_of(other).shard
    with transaction.atomic():
        assert {row.position for row in in_hand(500)} == {one.position, other.position}
        late = published_elsewhere(key="c")
        seen = claimed_elsewhere()

    assert seen == {late.position}
    assert claimed_elsewhere() == {one.position, other.position, late.position}, "the locks ended with the transaction"


def published_elsewhere(**options):
    """In a transaction of another connection."""
    return at_once([lambda: published(**options)])[0]


def claimed_elsewhere():
    def claim():
        with transaction.atomic():
            return {row.position for row in in_hand(500)}

    return at_once([claim])[0]


def test_two_concurrent_relays_publish_every_message_once_and_keep_the_order_of_every_key(peer):
    messages = a_backlog(A_LOT)

    with relaying(peer.url, relays=2, BATCH_SIZE=7) as relays:
        wait_until(lambda: peer.connections == 2)
        wait_until(lambda: not waiting())

    assert Counter(ids(peer.published)) == Counter(ids(messages))
    assert sum(relay.published for relay in relays) == A_LOT
    assert peer.connections == 2
    position = {str(message.id): message.position for message in messages}
    by_key = {}
    for arrived in list(peer.published):
        if key := arrived.headers.get("cloudEvents:orderingkey"):
            by_key.setdefault(key, []).append(position[arrived.properties["message_id"]])
    assert len(by_key) == 10
    for positions in by_key.values():
        assert positions == sorted(positions)


class TestTransactionBounds:
    @pytest.mark.long
    def test_relay_frozen_past_its_transaction_bound_settles_nothing(self):
        message = published()
        shard, woken = row_of(message).shard, []

        def shown_locks():
            with connection.cursor() as cursor:
                locks = "SELECT classid, objid FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
                cursor.execute(locks)
                return cursor.fetchall()

        def its_shard_is_free():
            locks = other.execute("SELECT pg_try_advisory_xact_lock(%s, %s)", [LOCK_SPACE, shard])
            return locks.fetchone()[0]

        def oversleep():
            try:
                with transaction.atomic():
                    [row] = in_hand(10, limits=Bounds(timedelta(seconds=3), is_repeatable=True))
                    # Asked in the transaction: after a stall of three seconds, this fails as the settling below does.
                    assert shown_locks() == [(LOCK_SPACE, shard)]
                    wait_until(its_shard_is_free)
                    settling.settle("default", Settlement(published=[row.position]))
            except (DatabaseError, InterfaceError) as error:
                woken.append(error)

        with another_session(autocommit=True) as other, in_threads(oversleep):
            pass

        assert [is_outage(error) for error in woken] == [True], "an outage, after which the relay begins again"
        assert state_of(message) == State.READY

    def test_transaction_bounds_do_not_outlast_the_transaction(self):
        with transaction.atomic():
            in_hand(limits=Bounds(timedelta(seconds=3), is_repeatable=True))
            assert (shown("statement_timeout"), shown("lock_timeout"), shown("synchronous_commit")) == ("3s", "1s", "off")

        names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
        assert {shown(name) for name in names} == {"0"}
        assert shown("synchronous_commit") == "on"


def shown(name):
    return fetched(f"SHOW {name}")


class TestCancelling:
    """What an operator does to a row that a relay may have claimed."""

    @pytest.fixture(autouse=True)
    def long_operators_wait(self, monkeypatch):
        monkeypatch.setattr(decision_rows, "OPERATORS_WAIT", timedelta(seconds=SECONDS))

    @pytest.mark.parametrize(
        ("outcome", "state"),
        [
            (lambda position: {"published": [position]}, State.PUBLISHED),
            (lambda position: {}, State.CANCELLED),
            (lambda position: {"failed": [Failure(positions=[position], error="nack", retry_after=HOUR)]}, State.CANCELLED),
        ],
        ids=["published", "left ready", "to be retried"],
    )
    def test_cancel_waits_for_the_pass_and_fails_only_if_it_published_the_message(self, outcome, state):
        message = published()
        with ExitStack() as beside, transaction.atomic():
            assert message.position in {row.position for row in in_hand(10)}
            cancel = partial(decision_rows.decide, "default", CANCEL, [message.position])
            cancelling = beside.enter_context(InAThread(cancel))
            wait_until(a_session_waits_for_a_row)
            assert not cancelling.ended, "it waits for the pass"
            settling.settle("default", Settlement(**outcome(message.position)))

        assert (bool(cancelling.answer), state_of(message)) == (state == State.CANCELLED, state)

    def test_cancel_in_an_open_transaction_holds_back_its_key_and_not_its_shard_until_it_ends(self):
        message, of_its_key, another = published(key="k"), published(key="k"), published()
        OutboxMessage.objects.update(shard=7)
        for decided in (False, True):
            with transaction.atomic():
                assert decision_rows.decide("default", CANCEL, [message.position])
                assert claimed_elsewhere() == {another.position}
                transaction.set_rollback(not decided)
            free = {of_its_key.position, another.position}
            assert claimed_elsewhere() == (free if decided else {message.position, *free})

    def test_message_changed_after_its_row_was_read_is_claimed_by_the_next_pass_only(self, monkeypatch):
        message, of_its_key, another = published(key="k", expires_in=HOUR), published(key="k"), published()
        lock_rows, decided = claiming._lock_rows, []

        def decide_before(*args):
            if not decided:
                decided.extend(at_once([lambda: publish_now(message.id)]))
            return lock_rows(*args)

        monkeypatch.setattr(claiming, "_lock_rows", decide_before)

        assert claimed_elsewhere() == {another.position}
        assert decided[0]
        assert claimed_elsewhere() == {message.position, of_its_key.position, another.position}

    def test_cancel_restores_the_lock_timeout_of_the_caller(self):
        message = published()
        with transaction.atomic():
            executed("SET LOCAL lock_timeout = '1234ms'")
            assert decision_rows.decide("default", CANCEL, [message.position])

            assert shown("lock_timeout") == "1234ms"


@pytest.mark.long
@pytest.mark.parametrize("before", ["", "ANALYZE", "VACUUM ANALYZE"])
def test_plans_that_were_kept_when_the_table_was_empty_find_a_backlog_by_the_right_index(before, peer):
    """With a plan that reads the whole table, or all messages of a state, a sudden backlog would stop the relay."""
    published()
    connection.close()
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE outbox_outboxmessage_live")
        cursor.execute(f"{before} outbox_outboxmessage_live" if before else "")
    published(key="k")
    with connected(peer.url) as transport:
        one_pass(transport)
    filled(State.READY, 5_000, key="'k' || n % 50")
    filled(State.READY, 5_000, is_secondary=True)
    filled(State.DEAD, 5_000, key="'k' || n % 500")

    kept = {
        "outbox_look ('{1}', '{9}', 'now')": ["outbox_stream", "outbox_made_ready", "outbox_retrying"],
        "outbox_read ('{1}', '{9}', 16, 16000, '{}', '[]')": ["outbox_stream", "outbox_ready_secondary", "outbox_holding"],
        "outbox_lock_rows ('{}', '{}')": ["Tid Scan"],
        "outbox_confirm ('{}')": ["Tid Scan"],
    }
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"SELECT {KEEP_PLANS}")
        plans = {statement: explained_run(cursor, statement) for statement in kept}
        cursor.execute("SELECT sum(custom_plans) FROM pg_prepared_statements")
        assert cursor.fetchone() == (0,)
    for statement, plan in plans.items():
        scans = {line.partition(" on ")[0] for line in plan if re.search(r"Scan .*on outbox_outboxmessage_live", line)}
        assert [scan for scan in scans if not any(name in scan for name in kept[statement])] == []
        assert [name for name in kept[statement] if not any(name in scan for scan in scans)] == []
        for index in ("outbox_stream", "outbox_ready_secondary", "outbox_made_ready"):
            conditions = [after for line, after in pairwise(plan) if index in line]
            assert all("Index Cond: (" in condition and "shard" in condition for condition in conditions)
        assert not any("Sort" in line for line in plan)


def explained_run(cursor, statement):
    cursor.execute(f"EXPLAIN EXECUTE {statement}")
    return [line for (line,) in cursor.fetchall()]


def a_session_waits_for_a_row():
    return fetched("SELECT count(*) FROM pg_locks WHERE transactionid = pg_current_xact_id()::xid AND NOT granted")


@pytest.mark.long
class TestIndexes:
    """The work of a pass must not grow with what has been published before."""

    @pytest.fixture
    def published_before(self):
        filled("published", 20_000, key="CASE WHEN n % 2 = 1 THEN 'k' || n % 500 ELSE '' END")
        filled("dead", 20_000)  # which stay where the ready ones are
        published_many(50, key=lambda n: f"k{n % 20}")
        analyse()

    @pytest.mark.parametrize("analysed", [True, False], ids=["fresh statistics", "stale statistics"])
    def test_paused_messages_of_a_topic_are_found_by_index(self, published_before, analysed):
        published_many(5_000, topic=lambda n: f"topic.{n % 5}")
        OutboxMessage.objects.filter(state=State.READY).update(state=State.PAUSED)
        if analysed:
            analyse()
        with transaction.atomic():
            for topic in ("topic.1", "empty"):
                pause(topic)
        resume("topic.1")
        PausedTopic.objects.filter(topic="empty").update(mode="refused", probe_at=DatabaseTime(-HOUR))

        plans = explained(lambda: paused_topics.resume_some("default", "topic.1", 500))
        plans += explained(lambda: paused_topics.begin_trial("default", "empty", 5, 1.0))
        plans += explained(lambda: paused_topics.resume_stranded("default"))

        assert not PausedTopic.objects.filter(topic="empty").exists()
        assert sum("outbox_paused" in plan for plan in plans) >= 4, plans
        for plan in plans:
            assert "Seq Scan on outbox_outboxmessage" not in plan, plan

    def test_indexes_are_used_when_the_statistics_are_of_an_empty_table(self):
        analyse()
        filled("published", 20_000)
        filled("ready", 20_000)
        filled("ready", 20_000, key="'key-' || n % 500")
        filled("scheduled", 100_000, due="now() + interval '1 day'")  # where reading all of it is not what is cheapest

        pages_by_statement(by_index=True, may_sort=OF_WHAT_IS_DUE)

    @pytest.mark.parametrize("statistics", ["of an empty table", "of its rows"])
    def test_many_skipped_messages_are_looked_up_in_a_hash_table_and_nothing_is_sorted(self, statistics):
        analyse()
        filled("ready", 5_000)
        if statistics == "of its rows":
            analyse()
        skipped = dict.fromkeys(OutboxMessage.objects.order_by("pk").values_list("pk", flat=True)[:4_000], "")
        shards = [BusyShard(number, 0) for number in range(SHARDS)]
        read = []

        with transaction.atomic():
            plans = measured(lambda: read.extend(reading.read_ready(connection, shards, 500, skipped)))

        assert len(read) == 1_000
        (plan,) = [plan for plan in plans if of_the_table(plan) or any(map(of_the_table, nodes(plan)))]
        assert "hashed SubPlan" in str(plan)
        assert not any(map(sorts_a_backlog, nodes(plan)))

    @pytest.mark.long
    def test_pages_read_per_statement_do_not_grow_with_a_table_of_over_a_million_rows(self):
        """The cost of a pass depends on the messages it publishes and not on the other rows."""
        filled("ready", 2_000, key="'key-' || n % 500")
        filled("ready", 200, is_secondary=True)
        filled("scheduled", 200, due="now() - interval '1 s'")
        analyse()
        small = pages_by_statement()

        OutboxMessage.objects.all().delete()
        filled("published", OF_EACH_KIND)
        filled("scheduled", OF_EACH_KIND, due="now() + interval '1 day'")
        filled("ready", OF_EACH_KIND, key="CASE WHEN n % 2 = 0 THEN 'key-' || n % 5000 ELSE '' END")
        filled("dead", 20, key="'key-' || n")
        filled("waiting", 200, key="'key-' || n % 20 + 1")
        filled("ready", 200, is_secondary=True)
        filled("scheduled", 200, due="now() - interval '1 s'")
        analyse()
        large = pages_by_statement(by_index=True)

        assert large.keys() == small.keys()
        # Such an index is some pages deeper; a part of the table is more than a thousand pages.
        assert {name: count for name, count in large.items() if count > 3 * small[name] + 600} == {}, (small, large)


OF_EACH_KIND = 400_000
"""Enough rows that a statement which reads all rows of one state, or all of one index, reads more than a thousand pages."""


def filled(state, count, *, key="''", due="now()", is_secondary=False):
    """Insert this many rows by one statement in the server."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT COALESCE(max(id), 0) FROM outbox_outboxmessage")
        [already] = cursor.fetchone()
        cursor.execute(
            "INSERT INTO outbox_outboxmessage (message_id, topic, biz_id, is_unique, key, shard, priority, state, body, "
            "headers, correlation_id, causation_id, traceparent, attempts, last_error, created_at, available_at, settled_at, "
            "ready_position, day) "
            f"SELECT lpad(to_hex({already} + n), 32, '0')::uuid, '{TOPIC}', n::text, false, {key}, n % 64, 0, '{state}', "
            f"'{{}}', '{{}}', '', '', '', 0, '', now(), {due}, {'now()' if state in SETTLED else 'NULL'}, "
            f"{f'{already} + n' if is_secondary else 0}, "
            f"{DAY_OF_NOW['postgresql'] if state in SETTLED else LIVE} "
            f"FROM generate_series(1, {count}) n"
        )


OF_WHAT_IS_DUE = {"promote what is due", "promote what is due again", "upcoming", "newly scheduled"}
"""Statements that sort due rows if the statistics know of none."""


def pages_by_statement(*, by_index=False, may_sort=frozenset()):
    """The number of pages that each statement of a relay reads; with `by_index` it must find its rows in order by an index."""
    with transaction.atomic():
        shards = looking.look("default").shards
        rows = claiming.claim_ready("default", shards, 500).rows
    assert len(rows) == 500
    positions = [row.position for row in rows]
    above = dict.fromkeys(range(64), max(positions))
    failure = Failure(positions=positions[400:450], error="nack", retry_after=HOUR)
    settlement = Settlement(published=positions[:300], expired=positions[300:400], waiting=positions[450:], failed=[failure])
    statements = {
        "look": lambda: looking.look("default"),
        "look above floors": lambda: looking.look("default", above),
        "read": lambda: claiming.claim_ready("default", shards, 500),
        "settle": lambda: settling.settle("default", settlement),
        "promote what is due": lambda: settling.make_scheduled_ready("default", 1000),
        "promote what is due again": lambda: settling.make_retrying_ready("default", 1000),
        "scheduled topics": lambda: scheduling.scheduled_topics("default"),
        "upcoming": lambda: scheduling.upcoming("default", {TOPIC: Offset("", 0, 500)}, HOUR),
        "newly scheduled": lambda: scheduling.newly_scheduled("default", max(positions), positions[:9], HOUR, HOUR, 500),
        "fire": lambda: scheduling.fire("default", dict.fromkeys(positions[:50], "")),  # some pages for each
        "room": lambda: scheduling.count_secondary_ready("default", 2000),
        "release": lambda: settling.release_waiting("default", keys=1000, most=2000),
    }
    pages = {}
    for name, action in statements.items():
        with transaction.atomic():
            plans = measured(action)
            transaction.set_rollback(True)
        assert plans, name
        pages[name] = sum(map(pages_of, plans))
        if by_index:
            for node in (node for plan in plans for node in nodes(plan)):
                assert node["Node Type"] != "Seq Scan" or not of_the_table(node), name
                assert name in may_sort or not sorts_a_backlog(node), (name, node)
    assert pages["look"] < 3_000, pages
    return pages


def sorts_a_backlog(node):
    """A handful is sorted when the statistics say that it is one."""
    return node["Node Type"] == "Sort" and any(map(of_the_table, nodes(node))) and node["Plans"][0]["Actual Rows"] > 500


def pages_of(plan):
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


@pytest.mark.long
class TestPinnedVacuumHorizon:
    """While an old transaction is open, vacuum cannot remove the row versions that were ready before."""

    @pytest.fixture
    def pinned(self):
        with another_session() as reader:
            reader.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            reader.execute("SELECT count(*) FROM outbox_outboxmessage")
            yield reader

    def pages_by_pass(self, passes, *, with_floors, write=lambda number: None):
        """The pages read by each pass for finding work and reading rows. Each pass publishes the rows that it reads.

        Args:
            write: called before each pass, with its number.
        """
        clock = [0.0]
        floors = Floors(range(64), partial(looking.writers, "default"), lambda: clock[0])
        floors.end(looking.look("default", from_the_start=floors.begin()))
        costs, since = [], [EVER]
        for number in range(passes):
            write(number)
            clock[0] += 0.6
            floors._look_from_the_start_at = clock[0] + 1  # those are rare, and measured on their own
            with transaction.atomic():
                rows = []

                def look():
                    known = {"floors": floors.now, "retries_since": since[-1]} if with_floors else {}
                    found = looking.look("default", from_the_start=floors.begin(), **known)
                    floors.end(found)
                    since.append(found.retries_since)
                    return found

                def look_and_claim(rows=rows, look=look):
                    found = look()
                    if found.retry_in <= 0:
                        settling.make_retrying_ready("default", 500, since=found.retries_since)
                        found = look()
                    rows += claiming.claim_ready("default", found.shards, 500).rows

                costs.append(sum(map(pages_of, measured(look_and_claim))))
                settling.settle("default", Settlement(published=[row.position for row in rows]))
            floors.saw(max(max(row.position, row.ready_position) for row in rows))
        return costs

    @pytest.mark.parametrize("kind", ["backlog", "prioritised_backlog", "prioritised", "delayed", "retried"])
    def test_pages_read_per_pass_do_not_grow_with_the_number_of_messages(self, pinned, kind):
        costs = self.pages_by_pass(40, with_floors=True, write=KINDS[kind])

        assert median(costs[-10:]) < 1.5 * median(costs[5:15]), costs

    @pytest.mark.parametrize("kind", ["backlog", "prioritised", "delayed", "retried"])
    def test_pages_read_per_pass_grow_without_floors_with_the_number_of_messages(self, pinned, kind):
        costs = self.pages_by_pass(40, with_floors=False, write=KINDS[kind])

        assert median(costs[-10:]) > 2 * median(costs[5:15]), costs

    def test_pages_read_per_sweep_of_recent_messages_do_not_grow_with_those_made_ready_and_of_all_do(self, pinned):
        """Before each sweep of the timer, 500 more messages that were due a minute ago become ready."""
        filled("scheduled", 1, due="now() + interval '1 hour'")
        recent, every = [], []
        for _ in range(20):
            filled("scheduled", 500, due="now() - interval '1 minute'")
            fire_what_is_scheduled(available_at__lt=DatabaseTime())
            for costs, since in ((recent, timedelta(seconds=5)), (every, None)):
                offsets = {TOPIC: Offset("", 0, 500)}
                sweep = partial(scheduling.upcoming, "default", offsets, -timedelta(seconds=0.2), since=since)
                with transaction.atomic():
                    costs.append(sum(map(pages_of, measured(sweep))))

        assert median(recent[-5:]) < 1.5 * median(recent[5:10]), recent
        assert median(every[-5:]) > 1.5 * median(every[5:10]), every


def fire_what_is_scheduled(**which):
    scheduled = OutboxMessage.objects.filter(state=State.SCHEDULED, **which).values_list("pk", flat=True)
    scheduling.fire("default", dict.fromkeys(scheduled, ""))


def at_first(write):
    return lambda number: write() if number == 0 else None


KINDS = {
    "backlog": at_first(partial(filled, "ready", 20_500)),
    "prioritised_backlog": at_first(partial(filled, "ready", 20_500, is_secondary=True)),
    "prioritised": lambda number: published_many(300, priority=lambda n: 1 + n % 9),
    "delayed": lambda number: (filled("scheduled", 500), fire_what_is_scheduled()),
    "retried": at_first(partial(filled, "retrying", 20_000, due="now() - interval '1 hour' + make_interval(secs => n / 500)")),
}
"""What is written before each pass, by its number."""


def test_autovacuum_is_triggered_by_a_number_of_dead_rows_not_a_share():
    given = fetched("SELECT reloptions FROM pg_class WHERE relname = 'outbox_outboxmessage_live'")
    options = dict(option.split("=") for option in given)

    assert float(options["autovacuum_vacuum_scale_factor"]) == 0
    assert 0 < int(options["autovacuum_vacuum_threshold"]) <= 10_000
    assert float(options["autovacuum_vacuum_cost_delay"]) == 0


BACKLOGS = {
    "due": {"delay": timedelta(seconds=0.01)},
    "due, with keys": {"delay": timedelta(seconds=0.01), "key": lambda n: f"key-{n % 7}"},
    "due, with large bodies": {"delay": timedelta(seconds=0.01), "payload": "x" * 400_000},
    "prioritised": {"priority": 5},
}


@pytest.mark.every_database
@pytest.mark.parametrize("key", ["", "fresh"])
@pytest.mark.parametrize("backlog", BACKLOGS)
def test_new_message_is_in_the_next_pass_beside_a_backlog_of_messages_that_were_made_ready(peer, transport, backlog, key):
    published_many(120, **BACKLOGS[backlog])
    wait_until(lambda: settling.make_scheduled_ready("default", 120) == 0 and State.SCHEDULED not in states())
    fresh = published(key=key)
    due = published(key=key and "key-0")

    one_pass(transport, limit=20)

    assert state_of(fresh) == State.PUBLISHED
    assert states().count(State.PUBLISHED) >= 10
    if "keys" in backlog and key:
        assert state_of(due) == State.READY, "behind the due messages of its key"


@pytest.mark.every_database
def test_message_that_was_made_ready_is_in_the_next_pass_beside_a_backlog_of_new_ones(peer, transport):
    published_many(120, key=lambda n: f"key-{n}")
    due = published(delay=timedelta(seconds=0.01))
    wait_until(lambda: settling.make_scheduled_ready("default", 1) == 1)

    one_pass(transport, limit=20)

    assert state_of(due) == State.PUBLISHED
    assert states().count(State.PUBLISHED) == 20


def analyse():
    executed("VACUUM ANALYZE outbox_outboxmessage")


@st.composite
def ready_rows_of_a_shard(draw):
    """Ready messages of one shard, some of them in the secondary ready index, and how many to read of each index at most."""
    rows = [
        a_ready_row(
            position,
            key=(key := draw(st.sampled_from(["", "", "a", "b", "c"]))),
            ready_position=(ready_position := draw(st.integers(0, 1))),
            priority=draw(st.integers(0, 2)) if ready_position and not key else 0,
        )
        for position in range(1, draw(st.integers(1, 25)))
    ]
    return rows, draw(st.integers(1, 10))


def a_ready_row(position, **values):
    return RelayedMessage(**{**dict.fromkeys(RelayedMessage._fields, ""), "position": position, "shard": 0, **values})


@pytest.mark.long
@given(ready_rows_of_a_shard())
@settings(max_examples=500, deadline=None)
def test_partial_reads_of_both_ready_indexes_never_overtake_within_a_key(given_rows):
    rows, each = given_rows
    secondary = sorted((row for row in rows if row.ready_position), key=lambda row: (-row.priority, row.position))
    stream = [row for row in rows if not row.ready_position]

    def first_unread(keys):
        left = {key: [row.position for row in secondary if row.key == key and row.position > keys[key]] for key in keys}
        return {key: positions[0] for key, positions in left.items() if positions}

    read = reading._without_overtakers([*secondary[:each], *stream[:each]], each, first_unread)
    claimed = claiming._fair_part(sorted(read, key=lambda row: (-row.priority, row.position)), each)

    in_hand = {row.position for row in claimed}
    for row in claimed:
        earlier = {other.position for other in rows if row.key and other.key == row.key and other.position < row.position}
        assert earlier <= in_hand
    assert claimed or not rows, "and at least one message is claimed"
    half_of_each = min(each // 2, len(secondary), len([row for row in stream if not row.key]))
    assert half_of_each <= len(claimed) <= each


def test_a_relay_frozen_between_claim_and_send_sends_nothing_stale(peer, monkeypatch):
    """When it wakes, its transaction has ended and its messages may have been published or cancelled meanwhile."""
    published()
    claim = claiming.claim_ready

    def claim_and_freeze(*arguments):
        rows = claim(*arguments)
        asleep = monotonic() + 60
        monkeypatch.setattr(passes, "monotonic", lambda: asleep)
        return rows

    monkeypatch.setattr(claiming, "claim_ready", claim_and_freeze)
    with connected(peer.url) as transport:
        one_pass(transport)

    assert peer.published == []
    assert states() == [State.READY]


class TestFloors:
    """With `never_from_the_start` no test is saved by a read from the start, which finds every ready row in the end."""

    @pytest.fixture
    def never_from_the_start(self, monkeypatch):
        monkeypatch.setattr(floors, "_LOOK_FROM_THE_START_SECONDS", 10_000.0)

    def passed(self, relays, message):
        """Are the floors of all relays above this message?"""
        return all(relay._floors.now.get(row_of(message).shard, 0) >= message.position for relay in relays)

    def passed_by_publishing(self, relays, message):
        """Publish until the floors of all relays are above this message."""

        def condition():
            published()
            return self.passed(relays, message)

        wait_until(condition)

    @pytest.mark.long
    def test_floors_stay_below_a_transaction_that_commits_after_thousands_of_later_ones(self, peer, never_from_the_start):
        """A high-water mark would never find its message."""
        with relaying(peer.url) as relays:
            with open_transaction(partial(publish, TOPIC, {})) as late:
                a_backlog(3000)
                wait_until(lambda: OutboxMessage.objects.filter(state=State.PUBLISHED).count() == 3000)
                later = published()
                wait_until(lambda: state_of(later) == State.PUBLISHED)
            wait_until(lambda: state_of(late) == State.PUBLISHED)
            self.passed_by_publishing(relays, late)

    @pytest.mark.parametrize("of", ["retry", "restore", "release", "promotion"])
    def test_message_that_becomes_ready_below_the_floor_is_published(self, peer, never_from_the_start, of):
        message = published(key="k" if of == "release" else "", delay=HOUR if of == "promotion" else None)
        state = {"retry": State.RETRYING, "restore": State.DEAD, "release": State.WAITING, "promotion": State.SCHEDULED}[of]
        set_columns(message, state=State.CANCELLED if of == "release" else state, available_at=DatabaseTime(HOUR))
        with relaying(peer.url) as relays:
            self.passed_by_publishing(relays, message)
            if of == "restore":
                assert decision_rows.decide("default", RESTORE, [message.position])
            else:
                set_columns(message, state=state, available_at=DatabaseTime())
            wait_until(lambda: state_of(message) == State.PUBLISHED)

    def test_message_with_an_unknown_outcome_is_sent_again_in_spite_of_the_floor(self, peer, never_from_the_start, monkeypatch):
        monkeypatch.setattr(amqp, "_LATEST_SECONDS", 0.5)
        with relaying(peer.url, BATCH_DEADLINE=timedelta(milliseconds=200)) as relays:
            self.passed_by_publishing(relays, published())
            peer.hold()
            unknown = published()
            wait_until(lambda: str(unknown.id) in ids(list(peer.published)))
            peer.ack_all_automatically = True
            wait_until(lambda: state_of(unknown) == State.PUBLISHED)

        assert ids(peer.published).count(str(unknown.id)) > 1

    @pytest.mark.long
    def test_row_made_ready_by_sql_below_the_floor_is_published(self, peer):
        """An UPDATE past our functions leaves it below the floor; a read from the start finds it."""
        message = published()
        with relaying(peer.url) as relays:
            self.passed_by_publishing(relays, message)
            set_columns(message, state=State.READY, settled_at=None)
            wait_until(lambda: state_of(message) == State.PUBLISHED)

        assert ids(peer.published).count(str(message.id)) == 2

    @pytest.mark.long
    def test_floors_of_three_relays_skip_no_message_and_keep_the_order_of_keys(self, peer, never_from_the_start):
        """Each writer has a key of its own and transactions of different durations."""

        def write(writer):
            dice = Random(writer)
            for n in range(60):
                with transaction.atomic():
                    publish(TOPIC, {}, biz_id=f"{writer}-{n}", key=f"writer-{writer}")
                    if dice.random() < 0.3:
                        executed("SELECT pg_sleep(%s)", [dice.random() * 0.1])

        with relaying(peer.url, relays=3, BATCH_SIZE=20) as relays:
            at_once([partial(write, writer) for writer in range(6)])
            wait_until(lambda: not waiting())
            wait_until(lambda: any(relay._floors.now for relay in relays))

        sent = [message.headers["cloudEvents:bizid"] for message in peer.published]
        assert len(sent) == len(set(sent)) == 360
        for writer in range(6):
            assert [name for name in sent if name.startswith(f"{writer}-")] == [f"{writer}-{n}" for n in range(60)]


class TestWriters:
    """Floors wait for them, so a writer must be seen from when it has a position until its rows are visible."""

    @pytest.mark.parametrize(
        ("write", "seen"),
        [
            (partial(publish, TOPIC, {}), 1),
            (partial(publish_many, [Draft(TOPIC, {})] * 3), 1),
            (partial(publish_many, [Draft(TOPIC, {})] * 30), 1),
            (OutboxMessage.objects.count, 0),
            (partial(Effect.objects.create, name="elsewhere"), 0),
        ],
        ids=["publish", "a few", "many", "read", "another table"],
    )
    def test_writers_are_the_other_open_transactions_that_have_published(self, write, seen):
        with open_transaction(write):
            assert len(looking.writers("default")) == seen
        with transaction.atomic():
            publish(TOPIC, {})
            assert looking.writers("default") == frozenset(), "the asking transaction is none of them"

    def test_writers_include_a_transaction_with_positions_drawn_before_its_copy(self, monkeypatch):
        drawn, go_on = threading.Event(), threading.Event()

        def interrupted(positions):
            drawn.set()
            assert go_on.wait(60)
            return sorted(positions)

        monkeypatch.setattr(writing, "sorted", interrupted, raising=False)
        with in_threads(partial(a_backlog, 20)):
            try:
                assert drawn.wait(30)
                assert len(looking.writers("default")) == 1
            finally:
                go_on.set()
