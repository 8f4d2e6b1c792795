"""The row of a fresh message is inserted as done, and the last statement of the transaction proves that it is still its own."""

import time
from datetime import timedelta

import psycopg
import pytest
from django.core.management import call_command
from django.db import connection, transaction

from inbox.errors import TransactionEnded
from inbox.models import InboxMessage, Receipt
from inbox.receiving.parking import park
from inbox.receiving.reading import read
from inbox.states import Outcome, State
from inbox.store import arrivals, duplicates, sentinel
from inbox.store.message_rows import ABANDONED
from tests.support.aliases import the_default_at
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import OPTIONS, InAThread, an_envelope, deliver, drain, make_due, the_effect
from tests.support.servers import PostgresServer
from tests.support.sql import executed, fetched

pytestmark = [pytest.mark.django_db(transaction=True)]


def commits_by_the_driver(message):
    the_effect(message)
    connection.connection.commit()


def prepares_a_transaction(message):
    the_effect(message)
    connection.connection.cursor().execute("PREPARE TRANSACTION 'of_a_handler'")


def versions_in(table):
    """How many versions of rows a table has in the partitions that have rows, dead ones included."""
    executed("CREATE EXTENSION IF NOT EXISTS pageinspect")
    return fetched(
        f"SELECT count(*) FROM (SELECT DISTINCT tableoid::regclass AS name FROM {table}) part, "
        "generate_series(0, pg_relation_size(part.name) / 8192 - 1) page, "
        "heap_page_items(get_raw_page(part.name::text, page::int)) WHERE t_ctid IS NOT NULL AND lp_len > 0"
    )


@pytest.mark.parametrize("kept", [timedelta(days=7), None])
def test_fresh_message_is_one_version_of_one_row(handles, settings, kept):
    settings.INBOX = {"KEEP_HISTORY": kept}
    executed("TRUNCATE inbox_receipt, inbox_inboxmessage CASCADE")
    assert deliver(handles(the_effect)) is Outcome.HANDLED
    row = InboxMessage.objects.get()
    assert (row.state, row.attempts, row.settled_at is not None, row.next_attempt_at) == (State.DONE, 1, True, None)
    assert (versions_in("inbox_receipt"), versions_in("inbox_inboxmessage")) == (1, 1)
    assert bool(row.body) == (kept is not None)


class TestTransactionThatEnded:
    def test_duplicate_that_is_counted_between_such_a_commit_and_a_failure_changes_nothing(self, handles):
        envelope = an_envelope()

        def handler(message):
            commits_by_the_driver(message)
            with InAThread(lambda: duplicates.count_duplicate("default", read(registered, envelope, OPTIONS).row)) as copy:
                pass
            assert copy.answer.state == State.DONE
            raise ValueError("half done")

        registered = handles(handler)
        assert deliver(registered, envelope) is Outcome.DEAD
        row = InboxMessage.objects.get()
        assert (row.state, row.last_error, row.duplicates) == (State.DEAD, ABANDONED, 1)

    def test_two_phase_commit_by_a_handler_that_the_server_refuses_is_a_failed_attempt(self, handles):
        """As PostgreSQL does by default (max_prepared_transactions = 0)."""
        assert deliver(handles(prepares_a_transaction)) is Outcome.STORED
        assert (InboxMessage.objects.get().state, Effect.objects.count()) == (State.RETRYING, 0)


@pytest.fixture(scope="module")
def two_phase_server():
    with PostgresServer(max_prepared_transactions="10", fsync="off") as server:
        yield server


@pytest.fixture
def two_phase(two_phase_server, transactional_db):
    """The default database on a server that allows two-phase commit. Statements on it, outside Django's connection."""
    with the_default_at(NAME="test", PORT=two_phase_server.port):
        call_command("migrate", verbosity=0)
        with psycopg.connect(two_phase_server.url, autocommit=True) as session:
            yield session
            for (prepared,) in session.execute("SELECT format('ROLLBACK PREPARED %L', gid) FROM pg_prepared_xacts").fetchall():
                session.execute(prepared)
        call_command("flush", verbosity=0, interactive=False)


@pytest.mark.long
class TestTwoPhaseCommit:
    """On a server with max_prepared_transactions > 0: PREPARE TRANSACTION by the driver ends the transaction of the inbox."""

    @pytest.mark.parametrize("redelivered", [False, True], ids=["fresh", "redelivered"])
    def test_prepared_transaction_that_another_session_commits_makes_its_message_a_dead_letter(
        self, handles, two_phase, redelivered
    ):
        def handler(message):
            prepares_a_transaction(message)
            two_phase.execute("COMMIT PREPARED 'of_a_handler'")

        assert deliver(handles(handler), redelivered=redelivered) is Outcome.DEAD
        row = InboxMessage.objects.get()
        assert (row.state, row.last_error, Effect.objects.count()) == (State.DEAD, ABANDONED, 1)

    @pytest.mark.parametrize("ended_by", ["COMMIT", "ROLLBACK"])
    def test_prepared_transaction_delays_its_message_until_an_operator_ends_it(self, handles, two_phase, ended_by):
        calls = []

        def handler(message):
            calls.append(message)
            (the_effect if calls[1:] else prepares_a_transaction)(message)

        handler, envelope = handles(handler), an_envelope()
        began_at = time.monotonic()
        assert deliver(handler, envelope) is Outcome.DEFERRED, "not acknowledged"
        assert time.monotonic() - began_at < 10, "bounded by DUPLICATE_TIMEOUT"
        assert park(handler, read(handler, envelope, OPTIONS), OPTIONS) is Outcome.STORED
        make_due()
        drain()
        assert (len(calls), InboxMessage.objects.get().state) == (1, State.RECEIVED), "not run before the transaction ends"

        two_phase.execute(f"{ended_by} PREPARED 'of_a_handler'")
        make_due()
        drain()
        assert (len(calls), Effect.objects.count()) == ({"COMMIT": 1, "ROLLBACK": 2}[ended_by], 1)
        row = InboxMessage.objects.get()
        assert (row.state, row.duplicates) == (State.DONE, {"COMMIT": 1, "ROLLBACK": 0}[ended_by])


class TestSubtransactions:
    def test_row_that_was_inserted_in_a_savepoint_is_proved_by_another_savepoint(self, handles):
        rows = [read(handles(the_effect), an_envelope(biz_id=name), OPTIONS).row for name in ("kept", "undone")]
        with transaction.atomic(), transaction.atomic():
            sentinel.finish(arrivals.begin_fresh("default", rows[:1], OPTIONS.DUPLICATE_TIMEOUT))
        with transaction.atomic():
            executed("SAVEPOINT of_a_handler")
            guard = arrivals.begin_fresh("default", rows[1:], OPTIONS.DUPLICATE_TIMEOUT)
            executed("ROLLBACK TO SAVEPOINT of_a_handler")
            with pytest.raises(TransactionEnded):
                sentinel.finish(guard)
        assert [*InboxMessage.objects.values_list("biz_id", "state")] == [("kept", State.DONE)]

    def test_handler_that_deletes_its_own_row_is_found_by_the_sentinel(self, handles):
        def deletes(message):
            Receipt.objects.all().delete()

        assert deliver(handles(deletes)) is Outcome.DEAD
        assert InboxMessage.objects.get().last_error.startswith("TransactionEnded")


class TestMany:
    def test_rows_of_many_messages_are_inserted_as_done_and_proved_together(self, handles):
        handler = handles(the_effect)
        rows = [read(handler, an_envelope(biz_id=name), OPTIONS).row for name in ("a", "b", "a")]
        with transaction.atomic():
            guard = arrivals.begin_fresh("default", rows, OPTIONS.DUPLICATE_TIMEOUT)
            sentinel.finish(guard)
        assert (len(guard.rows), [rows[index].biz_id for index in guard.begun]) == (2, ["a", "b"])
        assert set(InboxMessage.objects.values_list("state", "attempts")) == {(State.DONE, 1)}

    def test_missing_one_of_many_rows_is_found(self, handles):
        handler = handles(the_effect)
        rows = [read(handler, an_envelope(biz_id=name), OPTIONS).row for name in ("a", "b")]
        with transaction.atomic():
            guard = arrivals.begin_fresh("default", rows, OPTIONS.DUPLICATE_TIMEOUT)
            Receipt.objects.filter(biz_id="b").delete()
            with pytest.raises(TransactionEnded):
                sentinel.finish(guard)
