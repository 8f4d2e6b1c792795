"""History is stored apart from live messages: partitions, concurrent sessions, unique messages and housekeeping."""

import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
from django.core.checks import run_checks
from django.db import OperationalError, connection, transaction
from django.test import override_settings

from exactly_once.process.loop import StopRequest
from exactly_once.sql.days import FIRST_DAY, LIVE, date_of, day_of
from exactly_once.sql.now import DatabaseTime
from outbox import Draft, cancel, publish, publish_many, publish_now, restore
from outbox.decisions import Outcome
from outbox.models import OutboxMessage, PendingCallback, TrailEntry, UniqueMessage
from outbox.operators.figures import count_states
from outbox.relay.housekeeping import Housekeeper, housekeepers
from outbox.states import CANCEL, RESTORE, ROLL_BACK, SETTLED, State
from outbox.store import claiming, decision_rows, history, looking, restoring, settling, transitions
from outbox.store.dialect import HISTORY, LIVE_PART, TABLE
from outbox.store.selecting import first_id_of
from outbox.store.settling import Settlement
from outbox.store.unique import delete_names_left_behind
from outbox.store.writing import NewRow, insert
from tests.support.deliveries import InAThread, at_once
from tests.support.http_api import HTTP, Api
from tests.support.lower_bounds import at_least
from tests.support.open_transactions import OpenTransaction
from tests.support.relaying import (
    SECONDS,
    TOPIC,
    in_state,
    in_threads,
    open_transaction,
    published,
    published_many,
    quick,
    relaying,
    row_of,
    set_columns,
    state_of,
)
from tests.support.sql import another_session, as_another_user, executed
from tests.support.waiting import wait_until

DAYS = history.HISTORY.days
pytestmark = pytest.mark.django_db(transaction=True)
every_database = pytest.mark.every_database

DAY = timedelta(days=1)


def settled(message):
    """Settle the message as a relay does."""
    with transaction.atomic():
        assert settling.settle("default", Settlement(published=[message.position])) == 1
    return message


def settled_before(days, state=State.PUBLISHED, **options):
    message = in_state(state, **options)
    set_columns(message, state=state, day=day_of("default") - days, settled_at=DatabaseTime(-days * DAY))
    return message


def part_of(message):
    [[name]] = executed(f"SELECT tableoid::regclass::text FROM {TABLE} WHERE message_id = %s", [message.id])
    return name


def a_history(count):
    """This many new messages are settled as published, and all that are ready."""
    published_many(count)
    with transaction.atomic():
        ready = OutboxMessage.objects.filter(state=State.READY).values_list("pk", flat=True)
        settling.settle("default", Settlement(published=list(ready)))


def rows_read(tables):
    """The rows that all statements so far have read of the tables whose names begin so."""
    executed("SELECT pg_stat_force_next_flush()")
    counts = "SELECT sum(seq_tup_read) + sum(idx_tup_fetch) FROM pg_stat_user_tables WHERE relname LIKE %s"
    [[count]] = executed(counts, [f"{tables}%"])
    return count


def other_sessions_have_ended():
    """Sessions of earlier tests count what they have read when they end, which may be after their test."""
    others = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'"
    return not executed(f"{others} AND pid <> pg_backend_pid()")


@contextmanager
def a_session(statement="SELECT 1"):
    """Another session with an open transaction that has executed the statement."""
    with another_session() as other:
        other.execute(statement)
        yield other
        other.rollback()


def a_session_waits():
    return bool(executed("SELECT 1 FROM pg_locks WHERE NOT granted"))


def a_session_waits_for(table):
    return bool(executed("SELECT 1 FROM pg_locks WHERE NOT granted AND relation = %s::regclass", [table]))


def housekeeper(**options):
    return Housekeeper("default", quick(**options))


def a_round(**options):
    housekeeper(**options).drain(StopRequest())


@pytest.fixture(autouse=True)
def _no_days():
    without_days()
    yield
    without_days()


def without_days():
    if connection.vendor == "postgresql":
        for day in DAYS.existing("default"):
            executed(f"DROP TABLE {TABLE}_{date_of(day):%Y_%m_%d}")


@pytest.fixture
def today():
    return day_of("default")


class TestWhereAMessageIs:
    @every_database
    @pytest.mark.parametrize("state", SETTLED)
    def test_settled_message_has_its_day_and_a_restored_message_has_none(self, state, today):
        message = published(delay=timedelta(hours=1))
        assert row_of(message).day == LIVE
        if state == State.CANCELLED:
            cancel(message.id)
        else:
            set_columns(message, state=State.PREPARED if state == State.ROLLED_BACK else State.READY)
            with transaction.atomic():
                settle_as(state, message)

        assert state_of(message) == state
        assert row_of(message).day in {today, today + 1}
        if state in {State.CANCELLED, State.EXPIRED}:
            assert restore(message.id)
            assert row_of(message).day == LIVE

    def test_message_moves_to_the_partition_of_its_day_and_back(self, today):
        DAYS.make("default", today)
        message = published()
        assert part_of(message) == LIVE_PART

        cancel(message.id)
        assert part_of(message) == f"{TABLE}_{date_of(today):%Y_%m_%d}"
        restore(message.id)
        assert part_of(message) == LIVE_PART

    @every_database
    @pytest.mark.parametrize("state", State)
    def test_state_that_is_changed_by_hand_without_its_day_is_refused(self, state):
        message = in_state(State.READY if state in SETTLED else State.PUBLISHED)

        with pytest.raises(Exception, match=r"outbox_(settled_has_day|history_is_settled)"), transaction.atomic():
            OutboxMessage.objects.filter(message_id=message.id).update(state=state)

    def test_ready_message_enters_four_indexes_and_a_published_one_two(self):
        """B-trees, by their definitions. The BRIN index of history is written once for many pages."""
        message = published(biz_id="order-1", key="customer-1")
        live = indexes_entered(LIVE_PART, message)
        settled(message)
        history_of_it = indexes_entered(f"{HISTORY}_default", message)

        assert sorted(columns for columns, _ in live) == ["(id)", "(message_id)", "(shard, id)", "(topic, biz_id)"]
        assert sorted(columns for columns, kind in history_of_it if kind == "btree") == ["(message_id)", "(topic, biz_id)"]
        assert [columns for columns, kind in history_of_it if kind != "btree"] == ["(id)"]

    def test_publishing_claiming_and_settling_use_the_live_partition_and_not_the_whole_table(self):
        """A statement that names all messages is planned with, and locks, every day of history."""
        for _ in range(3):
            published()
        seen = []

        def record(execute, sql, params, many, context):
            seen.append(sql)
            return execute(sql, params, many, context)

        with connection.execute_wrapper(record), transaction.atomic():
            publish(TOPIC, {})
            publish_many([Draft(TOPIC, {})] * 20)
            shards = looking.look("default").shards
            rows = claiming.claim_ready("default", shards, 500).rows
            settling.make_scheduled_ready("default", 10)
            settling.make_retrying_ready("default", 10)
            settling.release_waiting("default", keys=10, most=10)
            settling.settle("default", Settlement(published=[rows[0].position], waiting=[rows[1].position]))

        at_least(5, [sql for sql in seen if LIVE_PART in sql])
        named = [sql for sql in seen if f"FROM {TABLE} " in sql.replace('"', "") or f"INTO {TABLE} " in sql]
        assert [sql for sql in named if not sql.startswith(f"WITH {TABLE} AS (DELETE FROM {LIVE_PART} ")] == []

    @pytest.mark.parametrize(
        ("condition", "left_out"),
        [(f"day >= {FIRST_DAY}", LIVE_PART), ("state = 'ready'", HISTORY), ("state IN ('retrying', 'dead')", HISTORY)],
    )
    def test_history_is_read_without_live_messages_and_live_states_without_history(self, condition, left_out):
        assert left_out not in str(executed(f"EXPLAIN SELECT count(*) FROM {TABLE} WHERE {condition}"))


def settle_as(state, message):
    if state == State.ROLLED_BACK:
        assert decision_rows.decide("default", ROLL_BACK, [message.position])
    else:
        outcome = {"expired" if state == State.EXPIRED else "published": [message.position]}
        assert settling.settle("default", Settlement(**outcome)) == 1


def indexes_entered(table, message):
    """Columns and kind of the indexes of a table that the row of this message is in."""
    found = executed(
        "SELECT substring(pg_get_indexdef(indexrelid) from '(\\([^)]*\\))'), amname, "
        "COALESCE(pg_get_expr(indpred, indrelid), 'true') FROM pg_index JOIN pg_class c ON c.oid = indexrelid "
        "JOIN pg_am a ON a.oid = c.relam WHERE indrelid = %s::regclass",
        [table],
    )
    return [
        (columns, kind)
        for columns, kind, predicate in found
        if executed(f"SELECT 1 FROM {table} WHERE message_id = %s AND ({predicate})", [message.id])
    ]


class TestWhoWaits:
    def test_open_transaction_that_has_published_delays_neither_making_nor_dropping_a_day(self, today):
        """Also with the first INSERT of its session, for which PostgreSQL reads the definition of the table around it."""
        with open_transaction(lambda: (publish(TOPIC, {}), publish_many([Draft(TOPIC, {})] * 20))):
            DAYS.make("default", today)
            assert history.HISTORY.drop_day("default", today)

    def test_publisher_does_not_wait_while_making_a_day_waits_for_a_reader_of_history(self, today, monkeypatch):
        monkeypatch.setattr("exactly_once.sql.partitions.LONGEST_WAIT", timedelta(seconds=60))
        with a_session(f"SELECT count(*) FROM {TABLE}") as reader, in_threads(lambda: DAYS.make("default", today)):
            wait_until(lambda: a_session_waits_for(f"{HISTORY}_default"))
            published()
            published_many(20)
            assert a_session_waits_for(f"{HISTORY}_default")
            reader.rollback()
        assert DAYS.existing("default") == [today]

    @pytest.mark.parametrize("step", ["make", "drop"])
    def test_making_and_dropping_a_day_wait_for_a_reader_of_history_for_a_moment_only(self, today, step):
        DAYS.make("default", today)
        changes = {"make": lambda: DAYS.make("default", today + 1), "drop": lambda: history.HISTORY.drop_day("default", today)}
        with a_session(f"SELECT count(*) FROM {TABLE}"), pytest.raises(OperationalError, match="lock timeout"):
            changes[step]()
        changes[step]()

    @pytest.mark.long
    def test_relay_settles_after_making_a_day_timed_out_behind_a_reader_of_history(self, today):
        message = published()
        with a_session(f"SELECT count(*) FROM {TABLE}"):
            a_round(BATCH_DEADLINE=timedelta(seconds=0.1))
            settled(message)
        a_round()

        assert state_of(message) == State.PUBLISHED

    @pytest.mark.parametrize("end", ["commit", "rollback"])
    def test_cancel_waits_for_a_concurrent_settle_and_returns_the_resulting_state(self, end):
        """It waits for the lock of the row that is moved, and then finds the message in its new partition."""
        message = published()
        with a_settle_of(message) as settles, InAThread(lambda: cancel(message.id)) as cancelling:
            wait_until(a_session_waits)
            settles[end]()

        expected = {"commit": (Outcome.TOO_LATE, State.PUBLISHED), "rollback": (Outcome.CANCELLED, State.CANCELLED)}
        assert (cancelling.answer.outcome, cancelling.answer.state) == expected[end]


@contextmanager
def a_settle_of(message):
    """Another transaction that has moved the message to history: the functions that end it."""
    other = OpenTransaction()
    try:
        other.does(settling.settle, "default", Settlement(published=[message.position])).result(SECONDS)
        yield {"commit": other.commits, "rollback": other.rolls_back}
    finally:
        other.ends().shutdown()


class TestUnique:
    @override_settings(ROOT_URLCONF="tests.support.http_urls", OUTBOX={"HTTP": HTTP})
    def test_repeated_request_for_a_delayed_message_in_history_reads_few_rows(self):
        """It was published long before it was settled, so the positions around it in history are much higher."""

        def request():
            message = {"topic": TOPIC, "payload": {"order": "17"}, "biz_id": "order-17", "unique": True, "delay": 60}
            return Api().post("outbox/messages", message)

        first = request().json()
        a_history(3000)
        publish_now(first["id"])
        a_history(0)
        executed(f"ANALYZE {TABLE}")

        wait_until(other_sessions_have_ended)
        before = rows_read(TABLE)
        again = request()

        assert (again.status_code, again.json()["id"], again.json()["state"]) == (200, first["id"], "published")
        assert rows_read(TABLE) - before < 100

    @pytest.mark.parametrize("end", ["commit", "rollback"])
    def test_publish_finds_a_message_while_a_relay_settles_it(self, end):
        first = published(biz_id="order-1", unique=True)
        with a_settle_of(first) as settles:
            during = published(biz_id="order-1", unique=True)
            settles[end]()
        again = published(biz_id="order-1", unique=True)

        state = State.PUBLISHED if end == "commit" else State.READY
        assert (during.id, during.created, during.state) == (first.id, False, State.READY)
        assert (again.id, again.created, again.state) == (first.id, False, state)
        assert OutboxMessage.objects.count() == 1

    @pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
    @pytest.mark.parametrize("since", ["settled", "cancelled"])
    def test_unique_message_that_was_settled_since_the_snapshot_is_found_and_a_cancelled_one_replaced_once(self, level, since):
        first = published(biz_id="order-1", unique=True)
        with a_snapshot(level):
            at_once([lambda: settled(first) if since == "settled" else cancel(first.id)])
            assert state_of(first) == State.READY
            second, found = (publish(TOPIC, {}, biz_id="order-1", unique=True) for _ in range(2))

        assert second.created == (since == "cancelled")
        assert (found.id, found.created) == (second.id, False)
        assert (second.id == first.id) == (since == "settled")
        assert found.state == State.READY or since == "settled"
        assert OutboxMessage.objects.count() == 1 + second.created

    @pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
    def test_unique_message_written_and_settled_since_the_snapshot_is_a_serialization_failure(self, level):
        with a_snapshot(level):
            at_once([lambda: settled(published(biz_id="order-1", unique=True))])
            with pytest.raises(OperationalError, match="could not serialize"), transaction.atomic():
                publish(TOPIC, {}, biz_id="order-1", unique=True)

        assert OutboxMessage.objects.count() == 1

    @pytest.mark.long
    @pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
    def test_restore_leaves_the_message_that_was_replaced_since_the_snapshot(self, level):
        messages = [in_state(State.CANCELLED, biz_id=f"order-{n}", unique=True) for n in range(8)]
        with a_snapshot(level):
            at_once([lambda: published(biz_id="order-3", unique=True)])
            decided = decision_rows.decide("default", RESTORE, [message.position for message in messages])

        assert (len(decided.became), len(decided.left)) == (7, 1)
        assert [message.biz_id for message in messages if state_of(message) == State.CANCELLED] == ["order-3"]

    @pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
    def test_unique_message_with_a_new_biz_id_is_published_at_every_isolation_level(self, level):
        settled(published(biz_id="order-1", unique=True))
        with a_snapshot(level):
            assert publish(TOPIC, {}, biz_id="order-2", unique=True).created

        assert OutboxMessage.objects.filter(day=LIVE).count() == 1

    def test_restore_sees_a_message_published_and_settled_between_its_query_and_its_update(self, monkeypatch):
        message = in_state(State.CANCELLED, biz_id="order-1", unique=True)
        take_names = restoring.take_names

        def taken_late(*args):
            at_once([lambda: settled(published(biz_id="order-1", unique=True))])
            return take_names(*args)

        monkeypatch.setattr(restoring, "take_names", taken_late)
        decision = restore(message.id)

        assert (decision.state, "unique=True" in decision.why) == (State.CANCELLED, True)
        assert state_of(message) == State.CANCELLED

    @every_database
    def test_names_of_purged_messages_are_deleted_and_those_of_others_stay(self):
        old = [settled(published(biz_id=f"order-{n}", unique=True)) for n in range(5)]
        waiting = [published(biz_id=f"later-{n}", unique=True, delay=DAY) for n in range(2)]
        new = settled(published(biz_id="new", unique=True))
        tomorrow = day_of("default") + 1

        def names():
            return set(UniqueMessage.objects.values_list("message_id", flat=True))

        assert sum(delete_names_left_behind("default", tomorrow, chunk=2)) == 0
        OutboxMessage.objects.filter(pk__in=[message.position for message in old]).delete()
        assert sum(delete_names_left_behind("default", tomorrow - 2, chunk=2)) == 0, "young"
        assert sum(delete_names_left_behind("default", tomorrow, chunk=2)) == 5

        assert names() == {message.id for message in [*waiting, new]}
        UniqueMessage.objects.create(topic=TOPIC, biz_id="of last year", message_id=first_id_of(day_of("default") - 370))
        a_round()
        assert names() == {message.id for message in [*waiting, new]}
        assert published(biz_id="order-1", unique=True).created
        assert not published(biz_id="new", unique=True).created

    def test_message_of_another_protocol_with_a_message_id_in_history_is_not_inserted(self):
        first = settled(published())
        row = NewRow(first.id, TOPIC, "b", "", 0, b"{}", "{}", "", "", "", False, None, None, None, wire="{}")

        with transaction.atomic():
            assert insert("default", row) is None

        assert OutboxMessage.objects.count() == 1


@contextmanager
def a_snapshot(level):
    with transaction.atomic():
        executed(f"SET TRANSACTION ISOLATION LEVEL {level}")
        OutboxMessage.objects.count()
        yield


class TestHousekeeping:
    def test_cancel_that_waits_while_the_partition_of_its_day_is_made_moves_the_message_into_it(self, today):
        message = published()
        with ExitStack() as beside, transaction.atomic():
            executed(f"LOCK TABLE ONLY {DAYS.history} IN SHARE UPDATE EXCLUSIVE MODE")
            executed(f"CREATE TABLE {DAYS.name(today)} (LIKE {DAYS.history} INCLUDING DEFAULTS INCLUDING CONSTRAINTS)")
            executed(f"LOCK TABLE {DAYS.default} IN ACCESS EXCLUSIVE MODE")
            cancelling = beside.enter_context(InAThread(lambda: cancel(message.id)))
            wait_until(lambda: a_session_waits_for(DAYS.default))
            bounds = f"FROM ({today}) TO ({today + 1})"
            executed(f"ALTER TABLE {DAYS.history} ATTACH PARTITION {DAYS.name(today)} FOR VALUES {bounds}")

        assert (cancelling.answer.outcome, part_of(message)) == (Outcome.CANCELLED, DAYS.name(today))

    @pytest.mark.long
    def test_days_are_made_and_dropped_while_the_passes_of_relays_always_take_long(self, today, peer):
        """A broker that confirms late keeps every pass in its transaction, which has locked history."""
        DAYS.make("default", today - 20)

        def confirm_late(arrived):
            return [lambda: time.sleep(1.5), lambda: peer.ack(arrived)]

        peer.script = confirm_late
        for _ in range(30):
            published()
        with relaying(peer.url, relays=2, BATCH_SIZE=1):
            wait_until(lambda: peer.published)
            a_round()
            made = DAYS.existing("default")

        assert today + 1 in made
        assert today - 20 not in made

    def test_days_older_than_keep_history_are_dropped_and_younger_ones_stay(self, today):
        for day in (today - 9, today - 8, today - 7):
            DAYS.make("default", day)
        old, older = settled_before(8), settled_before(9)
        young = settled_before(7)

        a_round(KEEP_HISTORY=7 * DAY)

        assert set(OutboxMessage.objects.values_list("message_id", flat=True)) == {young.id}
        assert DAYS.existing("default")[0] == today - 7
        assert {old.position, older.position} & set(OutboxMessage.objects.values_list("pk", flat=True)) == set()

    def test_day_that_is_detached_during_a_purge_keeps_its_table(self, today):
        """As for an archive. The purge has listed it before."""
        for days_ago in (9, 8):
            DAYS.make("default", today - days_ago)
            settled_before(days_ago)
        detached, purge = DAYS.name(today - 8), history.HISTORY.purge("default", 7 * DAY)
        assert next(purge) == 1

        executed(f"ALTER TABLE {DAYS.history} DETACH PARTITION {detached}")
        assert list(purge) == []

        assert executed("SELECT to_regclass(%s) IS NOT NULL", [detached]) == [(True,)]
        executed(f"DROP TABLE {detached}")

    def test_table_of_a_detached_day_is_not_taken_for_its_partition(self, today, caplog):
        DAYS.make("default", today + 1)
        detached, keeping = DAYS.name(today + 1), housekeeper()
        executed(f"ALTER TABLE {DAYS.history} DETACH PARTITION {detached}")
        try:
            for _ in range(2):
                keeping.drain(StopRequest())
            assert DAYS.existing("default") == [today, today + 2, today + 3]
        finally:
            executed(f"DROP TABLE {detached}")
        [report] = [record.getMessage() for record in caplog.records if record.levelname in {"WARNING", "ERROR"}]
        assert f"the table {detached} exists, and is not a partition of the history of the outbox" in report

        keeping.drain(StopRequest())
        assert today + 1 in DAYS.existing("default")

    @every_database
    def test_old_rows_without_a_partition_are_deleted_in_small_transactions_and_the_old_trail_too(self, monkeypatch):
        monkeypatch.setattr("outbox.relay.housekeeping.CHUNK", 3)
        for _ in range(8):
            settled_before(9)
        young, dead = settled_before(6), in_state(State.DEAD)
        cancel(in_state(State.SCHEDULED).id)
        TrailEntry.objects.update(at=DatabaseTime(-31 * DAY))
        other = in_state(State.SCHEDULED)
        cancel(other.id)

        a_round(KEEP_HISTORY=7 * DAY)

        left = set(OutboxMessage.objects.exclude(state=State.CANCELLED).values_list("message_id", flat=True))
        assert left == {young.id, dead.id}
        assert set(TrailEntry.objects.values_list("message_id", flat=True)) == {other.id}

    @every_database
    def test_message_with_a_pending_callback_stays_with_its_day_and_is_reported(self, today, caplog):
        if connection.vendor == "postgresql":
            DAYS.make("default", today - 9)
        message = settled_before(9)
        before = DatabaseTime(-9 * DAY)
        PendingCallback.objects.create(message_id=message.id, event="published", settled_at=before, available_at=before)
        keeping = housekeeper(KEEP_HISTORY=7 * DAY)

        keeping.drain(StopRequest())
        keeping.drain(StopRequest())
        assert row_of(message)
        assert history.HISTORY.purgeable("default", 7 * DAY) == 0
        assert sum("callbacks of its messages are pending" in record.getMessage() for record in caplog.records) == 1

        PendingCallback.objects.all().delete()
        keeping.drain(StopRequest())
        assert not OutboxMessage.objects.exists()

    def test_concurrent_housekeepers_do_not_disturb_each_other(self, today, monkeypatch, caplog):
        monkeypatch.setattr(Housekeeper, "take_lease", lambda self: True)
        for day in range(today - 20, today - 10):
            DAYS.make("default", day)

        at_once([a_round] * 4)
        a_round()

        assert DAYS.existing("default") == [today, today + 1, today + 2, today + 3]
        assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text

    def test_rows_already_in_the_default_partition_stay_there(self, today):
        message = settled(published())

        a_round()

        assert today not in DAYS.existing("default")
        assert today + 1 in DAYS.existing("default")
        assert part_of(message) == f"{HISTORY}_default"

    def test_user_without_the_right_to_make_partitions_gets_the_remedy_and_does_not_read_all_history_in_every_round(
        self, caplog
    ):
        """The default partition has no index of days, and has all history of such a user."""
        old = settled_before(9)
        a_history(3000)
        executed(f"ANALYZE {TABLE}")
        with as_another_user():
            keeping = housekeeper(KEEP_HISTORY=7 * DAY)
            keeping.drain(StopRequest())
            wait_until(other_sessions_have_ended)
            before = rows_read(HISTORY)
            for _ in range(3):
                keeping.drain(StopRequest())
            read = rows_read(HISTORY) - before
            warnings = run_checks(databases=["default"])

        [report] = [
            record.getMessage() for record in caplog.records if "may not make or drop partitions" in record.getMessage()
        ]
        assert "owner of the tables" in report
        assert {"outbox.W007", "inbox.W008"} <= {warning.id for warning in warnings}
        assert not OutboxMessage.objects.filter(message_id=old.id).exists()
        assert read < 100

    def test_unexpected_failure_of_the_housekeeping_is_reported_once_and_tried_again(self, monkeypatch, caplog):
        def fail(*args):
            raise ZeroDivisionError

        keeping = housekeeper()
        with monkeypatch.context() as patch:
            patch.setattr("outbox.relay.housekeeping.last_day", fail)
            keeping.drain(StopRequest())
            keeping.drain(StopRequest())
        keeping.drain(StopRequest())

        assert sum(record.levelname == "ERROR" for record in caplog.records) == 1
        assert DAYS.existing("default")


@pytest.mark.django_db
def test_no_housekeeper_runs_in_the_transaction_of_a_test():
    assert housekeepers("default", quick()) == ()


class TestKeepNothing:
    @pytest.fixture(autouse=True)
    def _without_keep_history(self, settings):
        settings.OUTBOX = {"KEEP_HISTORY": None, "TRAIL": "all"}

    @every_database
    def test_without_keep_history_a_published_message_is_deleted_and_its_trail_stays(self):
        message = settled(published())

        assert not OutboxMessage.objects.exists()
        trail = TrailEntry.objects.filter(message_id=message.id).order_by("pk")
        assert list(trail.values_list("became", flat=True)) == ["ready", "published"]

    @every_database
    @pytest.mark.parametrize("state", [State.EXPIRED, State.CANCELLED, State.ROLLED_BACK])
    def test_without_keep_history_an_unpublished_message_stays_for_seven_days(self, state):
        message = in_state(State.PREPARED if state == State.ROLLED_BACK else State.READY)
        if state == State.CANCELLED:
            decision_rows.decide("default", CANCEL, [message.position])
        else:
            with transaction.atomic():
                settle_as(state, message)
        settled_before(9, state)

        a_round(KEEP_HISTORY=None)

        assert list(OutboxMessage.objects.values_list("message_id", "state")) == [(message.id, state)]

    @every_database
    def test_without_keep_history_a_message_stays_until_its_callback_was_called(self, add_callback):
        add_callback()
        settled(published())
        settled(published(topic="shop.other"))

        [row] = OutboxMessage.objects.all()
        assert (row.topic, row.state) == (TOPIC, State.PUBLISHED)
        assert PendingCallback.objects.get().message == row


class TestFigures:
    def test_states_are_counted_while_history_is_small_and_a_large_history_is_estimated(self, monkeypatch):
        a_history(500)
        published()
        executed(f"ANALYZE {TABLE}")

        counts = count_states("default")
        assert (counts.states["published"], counts.states["ready"], counts.estimated) == (500, 1, frozenset())

        monkeypatch.setattr("outbox.operators.figures.COUNTED_EXACTLY_BYTES", 0)
        counts = count_states("default")
        assert (counts.states["ready"], counts.estimated) == (1, set(SETTLED))
        assert counts.states["published"] == pytest.approx(500, rel=0.1)


class TestMidnight:
    def test_callback_of_a_message_settled_before_midnight_is_recorded_after_midnight(self, monkeypatch, today, add_callback):
        """The day changes between two statements of one transaction."""
        add_callback()
        message = published()
        DAYS.make("default", today - 1)
        monkeypatch.setattr(transitions, "_prepared", {})
        monkeypatch.setitem(transitions._EXPRESSIONS[connection.vendor], "{today}", str(today - 1))

        settled(message)

        assert row_of(message).day == today - 1
        assert PendingCallback.objects.get().message_id == message.id

    def test_messages_settled_before_and_after_midnight_in_one_transaction_move_to_their_days(self, today):
        for day in (today - 1, today):
            DAYS.make("default", day)
        first, second = published(), published()

        with transaction.atomic():
            settling.settle("default", Settlement(published=[first.position]))
            OutboxMessage.objects.filter(message_id=first.id).update(day=today - 1)  # before midnight
            settling.settle("default", Settlement(published=[second.position]))

        assert [part_of(message)[-2:] for message in (first, second)] == [f"{date_of(day):%d}" for day in (today - 1, today)]
