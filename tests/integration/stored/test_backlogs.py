"""Finding what is due costs the same whatever else is stored, and the backlog of one handler does not stop the others."""

import pytest
from django.db import OperationalError, connection

from exactly_once.sql.faults import SERIALIZATION_FAILURE
from inbox.consumer.runner import Runner
from inbox.models import InboxMessage
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import OPTIONS, an_envelope, drain, effects, handed_over, the_effect
from tests.support.inbox_rows import NEXT_ID, RECEIPTS
from tests.support.refused_rows import cleared, refused
from tests.support.sql import another_session, executed
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

MANY = 20_000
"""Rows on more than 500 pages, with as many entries in their indexes."""
FEW = 20
MOST_PAGES = 150
"""Of the table and its indexes, for all that happens to one message."""
MOST_PAGES_PAST_LOCKS = 1500
"""The same, when some that are locked have to be tried first."""

INSERT = f"""
INSERT INTO inbox_inboxmessage (id, handler, topic, biz_id, message_id, key, content_type, body, digest, headers, source,
    correlation_id, causation_id, traceparent, ordered, state, day, attempts, received_at, settled_at, next_attempt_at)
SELECT {NEXT_ID}, %(handler)s, 'shop.order.placed', concat_ws(' ', %(name)s, n), '', 'key', 'application/json', '{{}}', '',
    '{{}}', '', '', '', '', %(state)s IN ('waiting', 'dead'), %(state)s,
    (%(state)s = 'done')::int, 0, now() - interval '1 hour',
    CASE WHEN %(state)s IN ('done', 'dead') THEN now() END, now() + %(due)s::interval + n * interval '1 microsecond'
FROM generate_series(1, %(count)s) n
"""

OTHER_SESSIONS = """
SELECT FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
    AND state <> 'idle in transaction'
"""

BESIDE = {
    "due messages of a handler with a rate limit": ("tests.limited", "received", "-1 hour"),
    "due messages of a handler that this process does not know": ("tests.elsewhere", "received", "-1 hour"),
    "messages of the same handler that are not due yet": ("tests.free", "retrying", "1 hour"),
    "messages of the same handler that run under a lease": ("tests.free", "running", "1 hour"),
    "messages of the same handler that wait behind another": ("tests.free", "waiting", None),
    "dead letters of the same handler": ("tests.free", "dead", None),
    "due messages of the same handler that another session has locked": ("tests.free", "received", "-1 hour"),
    "due messages of another handler that another session has locked": ("tests.another", "received", "-1 hour"),
    "handled messages of the same handler": ("tests.free", "done", None),
}


def insert(name, handler, state, due, count):
    executed(INSERT, {"name": name, "handler": handler, "state": state, "due": due, "count": count})
    executed(RECEIPTS)


@pytest.fixture
def operator():
    """A session that has changed many messages and not committed that."""
    with another_session() as session:
        yield session
        session.rollback()


def lock_some_of_it(operator):
    operator.execute("UPDATE inbox_inboxmessage SET last_error = 'looked at' WHERE biz_id LIKE '%has locked%'")


def insert_beside(*kinds):
    # All of one key, so whatever waits, waits behind this.
    insert("head", "tests.free", "dead", None, count=1)
    for kind in kinds:
        insert(kind, *BESIDE[kind], count=MANY)


@pytest.fixture
def table():
    """The inbox's table, which no autovacuum reads or analyses meanwhile."""
    partitions = ("inbox_inboxmessage_live", "inbox_inboxmessage_history_default")
    for partition in partitions:
        executed(f"ALTER TABLE {partition} SET (autovacuum_enabled = off)")
        # Earlier tests have analysed it, in other states.
        executed(f"TRUNCATE {partition}")
        executed(f"DELETE FROM pg_statistic WHERE starelid = '{partition}'::regclass")
    yield
    for partition in partitions:
        executed(f"ALTER TABLE {partition} RESET (autovacuum_enabled)")


def pages_read():
    """How many pages of the inbox's partitions and their indexes all sessions have read, cached or not."""
    # A session reports what it has counted before it leaves this list.
    wait_until(lambda: not executed(OTHER_SESSIONS))
    executed("SELECT pg_stat_force_next_flush()")
    ((pages,),) = executed(
        "SELECT sum(heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit) FROM pg_statio_user_tables "
        "WHERE relname LIKE 'inbox_inboxmessage%'"
    )
    return int(pages)


@pytest.mark.parametrize("statistics", ["analysed", "never analysed"])
@pytest.mark.parametrize("beside", BESIDE)
def test_running_a_message_reads_few_pages_beside(beside, statistics, handles, table, operator):
    handles(the_effect, name="tests.free")
    handles(the_effect, name="tests.another")
    handles(the_effect, name="tests.limited", rate_limit="1/h")
    insert_beside(beside)
    insert("ours", "tests.free", "received", "-1 minute", count=FEW)
    if statistics == "analysed":
        executed("ANALYZE inbox_inboxmessage")
    lock_some_of_it(operator)
    before = pages_read()

    runner = Runner(OPTIONS)
    while Effect.objects.filter(name__startswith="ours ").count() < FEW:
        runner.turn()

    most = MOST_PAGES_PAST_LOCKS if "has locked" in beside else MOST_PAGES
    assert pages_read() - before < FEW * most


def test_polls_that_find_nothing_read_few_pages_beside_all_of_it(handles, table, operator):
    handles(the_effect, name="tests.free")
    handles(the_effect, name="tests.another")
    handles(the_effect, name="tests.limited", rate_limit="1/h")
    insert_beside(*BESIDE)
    executed("ANALYZE inbox_inboxmessage")
    lock_some_of_it(operator)
    runner = Runner(OPTIONS)
    while runner.turn():
        pass
    before = pages_read()

    for _ in range(FEW):
        assert runner.turn() == 0

    assert pages_read() - before < FEW * MOST_PAGES_PAST_LOCKS


def test_oldest_message_is_run_soon_beside_forty_that_are_locked_and_many_newer_ones(handles, operator, monkeypatch):
    """As beside forty runs of the same handler that take long."""
    monkeypatch.setattr("inbox.consumer.runner._SUCCESSORS_SECONDS", 0)  # one message a turn
    handles(the_effect, name="tests.free")
    insert("has locked", "tests.free", "received", "-2 hours", count=40)
    lock_some_of_it(operator)
    insert("old", "tests.free", "received", "-1 hour", count=300)
    insert("new", "tests.free", "received", "-1 minute", count=2000)
    runner = Runner(OPTIONS)
    ran = sum(runner.turn() for _ in range(300))

    assert ran == 300
    assert Effect.objects.filter(name="old 1").exists()


@pytest.mark.every_database
def test_backlog_of_one_handler_does_not_delay_the_messages_of_another(handles, monkeypatch):
    monkeypatch.setattr("inbox.consumer.runner._SUCCESSORS_SECONDS", 0)  # one message a turn
    ran = []
    backlogged, other = (
        handles(lambda message: ran.append(message.biz_id), name=f"tests.{topic}", topic=topic)
        for topic in ("backlogged", "other")
    )
    for handler, age, count in ((backlogged, "old", 100), (other, "new", 3)):
        for n in range(count):
            handed_over(handler, an_envelope(topic=handler.topics[0], biz_id=f"{age} {n}"))

    drain()

    assert len(ran) == 103
    assert [name for name in ran[:8] if name.startswith("new")] == ["new 0", "new 1", "new 2"]
    assert [name for name in ran if name.startswith("old")] == [f"old {n}" for n in range(100)]


def test_claim_that_collides_with_another_transaction_is_repeated_and_not_taken_for_nothing_due(handles):
    insert("due", handles(the_effect).name, "received", "-1 hour", 1)

    def clear_after(execute, *statement):
        try:
            return execute(*statement)
        except OperationalError:
            cleared()
            raise

    table = "inbox_inboxmessage_live"
    with refused(SERIALIZATION_FAILURE, where="true", table=table), connection.execute_wrapper(clear_after):
        assert drain() == 1

    assert (InboxMessage.objects.get().attempts, effects()) == (1, 1)
