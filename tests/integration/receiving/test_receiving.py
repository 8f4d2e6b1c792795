"""One delivery, one handler, one transaction: the outcome of the delivery, and that its effect happens once."""

import contextlib
import json
import re
import threading
import uuid
from datetime import UTC, timedelta
from decimal import Decimal

import kombu
import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from exactly_once.process.clock import utcnow
from inbox import Reject, RetryLater, signals
from inbox.consumer.reception import envelope_of
from inbox.errors import NotCallable
from inbox.handlers.registry import registry
from inbox.models import InboxMessage, Receipt
from inbox.receiving.reading import read
from inbox.receiving.receive import receive
from inbox.states import DUE, Outcome, State
from inbox.store import claims, message_rows
from inbox.transactions.running import TRIES_AT_ONCE, DatabaseUnavailable
from outbox import publish
from outbox.models import OutboxMessage
from tests.support import decisions
from tests.support.apps.effects.models import Effect, Unique
from tests.support.deliveries import (
    OPTIONS,
    TOPIC,
    InAThread,
    Slow,
    an_envelope,
    at_once,
    deliver,
    drain,
    effects,
    fails,
    make_due,
    options,
    run_to_the_end,
    stored_due,
    the_effect,
    the_row,
    time_until_retry,
    until_decided,
)
from tests.support.signals import listening, recorded_signals
from tests.support.sql import another_session, executed, fetched
from tests.support.waiting import A_WHILE, wait_until

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

A_MINUTE, A_DAY = timedelta(minutes=1), timedelta(days=1)


def fails_times(count):
    """A handler that fails `count` times and then succeeds."""
    left = [count]

    def handle(message):
        the_effect(message)
        if left[0]:
            left[0] -= 1
            raise ValueError("not yet")

    return handle


@pytest.mark.every_database
class TestFreshDelivery:
    def test_fresh_delivery_is_handled_and_its_row_is_done(self, handles):
        handler = handles(the_effect)
        envelope = an_envelope({"order_id": 7}, key="customer-1", headers={"tenant": "acme"}, correlation_id="c")

        assert deliver(handler, envelope) is Outcome.HANDLED

        row = the_row()
        assert effects(envelope.biz_id) == 1
        assert (row.state, row.attempts, row.last_error, row.next_attempt_at) == (State.DONE, 1, "", None)
        assert (row.handler, row.topic, row.biz_id, row.message_id) == (handler.name, TOPIC, envelope.biz_id, envelope.id)
        assert (row.key, row.headers, row.correlation_id) == ("customer-1", {"tenant": "acme"}, "c")
        assert bytes(row.body) == envelope.body
        assert row.settled_at >= row.received_at

    def test_first_statement_of_a_fresh_delivery_inserts_the_inbox_row(self, handles):
        handler, table = handles(the_effect), Receipt._meta.db_table
        deliver(handler)

        with CaptureQueriesContext(connection) as captured:
            assert deliver(handler) is Outcome.HANDLED

        begin, first, *_ = [query["sql"] for query in captured]
        assert begin.startswith("BEGIN")
        before, _, after = first.partition(f"INSERT INTO {table} (")
        assert after, first
        assert f"FROM {table}" not in before, "the statement that inserts does not read the table first"

    def test_handler_gets_the_message_as_it_was_sent(self, handles):
        got = []
        envelope = an_envelope({"total": "9.90"}, key="k", headers={"n": 1}, correlation_id="c", causation_id="d")

        deliver(handles(got.append), envelope)

        (message,) = got
        assert (message.id, message.topic, message.key, message.biz_id) == (envelope.id, TOPIC, "k", envelope.biz_id)
        assert (message.payload, message.headers, message.created_at) == ({"total": "9.90"}, {"n": 1}, envelope.created_at)
        assert (message.attempt, message.redelivered) == (1, False)
        assert (message.correlation_id, message.causation_id) == ("c", "d")

    def test_message_handled_is_signalled_after_the_commit_and_a_receiver_that_raises_changes_no_outcome(self, handles):
        seen = []

        def listen(handler, topic, message_id, biz_id, **_):
            seen.append((handler, topic, message_id, biz_id, connection.in_atomic_block, effects()))
            raise ValueError("of the receiver")

        handler, envelope = handles(the_effect), an_envelope()
        with listening(signals.message_handled, listen):
            assert deliver(handler, envelope) is Outcome.HANDLED

        assert seen == [(handler.name, TOPIC, envelope.id, envelope.biz_id, False, 1)]
        assert (the_row().state, effects()) == (State.DONE, 1)

    def test_async_handler_commits_with_its_row(self, handles):
        async def handle(message):
            await Effect.objects.acreate(name=message.biz_id)
            await sync_to_async(the_effect)(message)

        assert deliver(handles(handle)) is Outcome.HANDLED

        assert (the_row().state, effects()) == (State.DONE, 2)

    def test_async_handler_that_fails_leaves_no_effect(self, handles):
        async def handle(message):
            await Effect.objects.acreate(name=message.biz_id)
            raise ValueError("no stock")

        assert deliver(handles(handle)) is Outcome.STORED

        assert effects() == 0

    def test_handler_and_inbox_row_use_the_database_named_by_using(self, handles):
        def handle(message):
            assert connection.in_atomic_block is False
            Effect.objects.using("other").create(name=message.biz_id)

        assert deliver(handles(handle, using="other")) is Outcome.HANDLED

        assert Effect.objects.using("other").count() == 1
        assert InboxMessage.objects.using("other").get().state == State.DONE
        assert not InboxMessage.objects.exists()


def test_first_prepared_statement_of_a_fresh_delivery_inserts_the_inbox_row(handles, tmp_path):
    """Django's cursors do not see prepared statements, so this one reads what libpq sends."""
    handler = handles(the_effect)
    deliver(handler)
    statement = fetched("SELECT statement FROM pg_prepared_statements WHERE name = 'inbox_begin'")

    pgconn = connection.connection.pgconn
    with (tmp_path / "trace").open("w") as trace:
        pgconn.trace(trace.fileno())
        pgconn.set_trace_flags(psycopg.pq.Trace.SUPPRESS_TIMESTAMPS)
        try:
            assert deliver(handler) is Outcome.HANDLED
        finally:
            pgconn.untrace()

    sent = [line for line in (tmp_path / "trace").read_text().splitlines() if re.match(r"F\s.*\s(Query|Parse|Bind)\s", line)]
    parsed_begin, bound_begin, insert = sent[:3]
    assert '"BEGIN"' in parsed_begin
    assert '"" ""' in bound_begin
    assert '"inbox_begin"' in insert
    assert re.search(
        rf" AS WITH bound AS MATERIALIZED \([^)]*\)[^)]*\) \), receipt AS \( INSERT INTO {Receipt._meta.db_table} ",
        " ".join(statement.split()),
    )


@pytest.mark.every_database
class TestDuplicates:
    @pytest.mark.long
    def test_twenty_threads_with_one_biz_id_run_the_handler_once(self, handles):
        handler = handles(the_effect)
        copies = [an_envelope(biz_id="order-1") for _ in range(20)]

        received = at_once([lambda envelope=envelope: until_decided(handler, envelope) for envelope in copies])

        assert sorted(received, key=str) == [Outcome.DUPLICATE] * 19 + [Outcome.HANDLED]
        assert effects() == 1
        row = the_row()
        assert (row.state, row.attempts, row.duplicates, row.conflicts) == (State.DONE, 1, 19, 0)

    def test_a_resend_by_the_business_is_recognised_by_its_biz_id(self, handles):
        handler = handles(the_effect, biz_id=lambda message: message.payload["order_id"])
        deliver(handler, an_envelope({"order_id": 17}, biz_id=""))

        assert deliver(handler, an_envelope({"order_id": 17}, biz_id="")) is Outcome.DUPLICATE

        assert (effects(), the_row().biz_id) == (1, "17")

    def test_latest_content_that_differs_is_stored_beside_the_first_logged_and_signalled_as_a_conflict(self, handles, caplog):
        handler, first = handles(the_effect), an_envelope({"total": 1}, biz_id="order-1")
        deliver(handler, first)

        with recorded_signals("conflicting_duplicate", "duplicate_suppressed") as said:
            for total in (2, 3):
                latest = an_envelope({"total": total}, biz_id="order-1")
                assert deliver(handler, latest) is Outcome.DUPLICATE
        assert deliver(handler, first) is Outcome.DUPLICATE, "an agreeing copy leaves it"

        row = the_row()
        assert (row.duplicates, row.conflicts, effects()) == (3, 2, 1)
        assert (row.conflicting_id, bytes(row.conflicting_body), bytes(row.body)) == (latest.id, latest.body, first.body)
        assert row.conflicting_at >= row.received_at
        assert [name for name, _ in said] == ["conflicting_duplicate", "duplicate_suppressed"] * 2
        assert said[2][1] == {"handler": handler.name, "topic": TOPIC, "message_id": latest.id, "biz_id": "order-1"}
        assert "set biz_id= of the handler" in caplog.text

    def test_same_biz_id_under_another_topic_is_not_a_duplicate(self, handles):
        """As when a handler is moved to another topic under the same name."""
        assert deliver(handles(the_effect, name="tests.same"), an_envelope(biz_id="1")) is Outcome.HANDLED
        registry.remove("tests.same")
        moved = handles(the_effect, name="tests.same", topic="other")

        assert deliver(moved, an_envelope(biz_id="1", topic="other")) is Outcome.HANDLED

        assert effects("1") == 2

    def test_redelivery_of_a_retrying_message_does_not_run_it(self, handles):
        """A redelivery must neither count an attempt nor shorten the backoff."""
        handler, envelope = handles(fails), an_envelope()
        deliver(handler, envelope)
        before = the_row()

        assert deliver(handler, envelope, redelivered=True) is Outcome.DUPLICATE

        row = the_row()
        assert (row.state, row.attempts, row.next_attempt_at) == (State.RETRYING, 1, before.next_attempt_at)


@pytest.mark.every_database
class TestFailedAttempt:
    def test_failed_message_is_stored_with_error_traceback_and_next_attempt(self, handles, caplog):
        handler, envelope = handles(fails), an_envelope()

        with recorded_signals("message_retrying", "message_dead") as said:
            assert deliver(handler, envelope) is Outcome.STORED

        row = the_row()
        assert (row.state, row.attempts, row.settled_at) == (State.RETRYING, 1, None)
        assert row.last_error == "ValueError: no stock"
        assert "in fails" in row.traceback
        assert timedelta(minutes=25) < time_until_retry(row) <= timedelta(hours=1)
        assert bytes(row.body) == envelope.body
        assert effects() == 0
        assert [(name, arguments["message_id"], arguments["handler"]) for name, arguments in said] == [
            ("message_retrying", envelope.id, handler.name)
        ]
        (line,) = [record.getMessage() for record in caplog.records if "is tried again in" in record.getMessage()]
        assert re.search(r"ValueError: no stock \(.*deliveries\.py:fails:\d+\)$", line)

    def test_failed_message_is_run_again_when_due_and_not_before(self, handles):
        deliver(handles(fails_times(1)))

        assert drain() == 0
        assert effects() == 0
        make_due()
        assert drain() == 1

        row = the_row()
        assert (row.state, row.attempts, row.last_error, row.traceback) == (State.DONE, 2, "", "")
        assert Effect.objects.get().detail == "2"

    def test_message_out_of_attempts_is_a_dead_letter_and_signalled(self, handles):
        handler, envelope = handles(fails), an_envelope()
        with recorded_signals("message_dead", "message_retrying") as said:
            deliver(handler, envelope)
            run_to_the_end()

        row = the_row()
        assert (row.state, row.attempts, row.next_attempt_at) == (State.DEAD, OPTIONS.MAX_ATTEMPTS, None)
        assert row.settled_at is not None
        assert [name for name, _ in said] == ["message_retrying", "message_retrying", "message_dead"]
        names = {"handler": handler.name, "topic": TOPIC, "message_id": envelope.id, "biz_id": envelope.biz_id}
        assert said[-1][1] == {**names, "error": "ValueError: no stock"}

    @pytest.mark.parametrize(
        ("error", "given", "said"),
        [
            pytest.param(ValueError("no stock"), options(MAX_ATTEMPTS=1), "ValueError: no stock", id="one attempt"),
            pytest.param(Reject("the customer is unknown"), OPTIONS, "rejected: the customer is unknown", id="rejected"),
        ],
    )
    def test_final_failure_is_a_dead_letter_at_once_with_its_reason(self, handles, error, given, said):
        def handle(message):
            the_effect(message)
            raise error

        with recorded_signals("message_dead") as sent:
            assert deliver(handles(handle), given=given) is Outcome.DEAD

        row = the_row()
        assert (row.state, row.attempts, row.last_error, effects(), len(sent)) == (State.DEAD, 1, said, 0, 1)

    def test_retry_later_waits_as_long_as_asked_and_costs_no_attempt(self, handles):
        def handle(message):
            the_effect(message)
            raise RetryLater(timedelta(hours=5), "the shop is closed")

        assert deliver(handles(handle)) is Outcome.STORED

        row = the_row()
        assert (row.state, row.attempts, effects()) == (State.RETRYING, 0, 0)
        assert "the shop is closed" in row.last_error
        assert timedelta(hours=4, minutes=59) < time_until_retry(row) < timedelta(hours=5, minutes=1)

    def test_retry_later_never_runs_out_of_attempts(self, handles):
        left = [3 * OPTIONS.MAX_ATTEMPTS]

        def handle(message):
            if left[0]:
                left[0] -= 1
                raise RetryLater
            the_effect(message)

        deliver(handles(handle))
        for _ in range(3 * OPTIONS.MAX_ATTEMPTS):
            assert the_row().state == State.RETRYING
            make_due()
            drain()

        row = the_row()
        assert (row.state, row.attempts, effects()) == (State.DONE, 1, 1)

    @pytest.mark.parametrize("delay", [30, 0.5, "1 min", timedelta.max, timedelta(days=4_000_000)], ids=str)
    def test_retry_later_with_an_invalid_delay_is_a_failed_attempt(self, handles, delay):
        def handle(message):
            raise RetryLater(delay)

        assert deliver(handles(handle)) is Outcome.STORED

        row = the_row()
        assert (row.state, row.attempts) == (State.RETRYING, 1)
        assert row.last_error.startswith(("TypeError: RetryLater", "ValueError: RetryLater"))
        assert timedelta(minutes=25) < time_until_retry(row) <= timedelta(hours=1)

    @pytest.mark.parametrize("delay", [timedelta(), -timedelta(days=9_000)], ids=str)
    def test_retry_later_without_delay_waits_at_least_a_moment(self, handles, delay):
        """Else it would run again at once for ever, and before all others: what has been due longest is run first."""

        def handle(message):
            raise RetryLater(delay)

        begun = utcnow()
        deliver(handles(handle))
        drain()

        row = the_row()
        assert (row.state, row.attempts) == (State.RETRYING, 0)
        # SQLite has milliseconds.
        assert row.next_attempt_at - begun >= timedelta(seconds=0.99)


@pytest.mark.every_database
class TestCarefulPath:
    """A delivery that the broker has sent before may have killed a process."""

    def test_attempt_of_a_redelivery_is_committed_before_the_handler_runs(self, handles):
        seen = []

        def handle(message):
            with InAThread(the_row) as other:
                pass
            seen.append((message.attempt, other.answer.attempts, other.answer.state))
            the_effect(message)

        assert deliver(handles(handle), redelivered=True) is Outcome.HANDLED

        assert seen == [(1, 1, State.RECEIVED)]
        assert the_row().state == State.DONE

    def test_unsettled_claim_is_due_again_with_its_attempt_counted(self, handles):
        """A process that is killed in the middle of the handler leaves such a claim."""
        handler = handles(the_effect)
        stored_due(handler)
        claimed = claims.claim_due(handler.using, [handler.name], OPTIONS.REDELIVERY_AFTER)

        row = the_row()
        assert (claimed.pk, row.attempts, row.state) == (row.pk, 1, State.RECEIVED)
        assert timedelta() < time_until_retry(row) <= OPTIONS.REDELIVERY_AFTER
        assert drain() == 0
        make_due()
        assert drain() == 1

        assert (the_row().attempts, the_row().state, effects()) == (2, State.DONE, 1)

    def test_expired_claim_can_no_longer_settle(self, handles):
        """Another worker has claimed the message: the failure of the slow one must not overwrite its outcome."""
        handler = handles(the_effect)
        stored_due(handler)
        slow = claims.claim_due(handler.using, [handler.name], timedelta())
        make_due()
        fresh = claims.claim_due(handler.using, [handler.name], OPTIONS.REDELIVERY_AFTER)
        failure = message_rows.Failure(error="stale", retry_after=None, attempts=1)

        assert not claims.fail_stored(handler.using, slow, failure)
        with transaction.atomic():
            assert claims.begin_stored(handler.using, slow) is None
        with transaction.atomic():
            assert claims.begin_stored(handler.using, fresh) is not None
            transaction.set_rollback(True)
        assert the_row().last_error == ""


class TestConcurrentDuplicate:
    """A copy arrives while the handler of the first is still running. (PostgreSQL only: SQLite has one writer.)"""

    @pytest.fixture
    def running_message(self, handles):
        """A handler and the message that it is running until the end of the test."""
        slow = Slow()
        handler, envelope = handles(slow), an_envelope()
        with slow.inside(lambda: deliver(handler, envelope)) as first:
            yield handler, envelope
        assert first.answer is Outcome.HANDLED
        assert (effects(), the_row().attempts) == (1, 1)

    @pytest.mark.parametrize("redelivered", [False, True])
    def test_concurrent_duplicate_is_deferred_and_no_attempt_is_counted(self, running_message, redelivered):
        handler, envelope = running_message

        assert deliver(handler, envelope, redelivered=redelivered) is Outcome.DEFERRED

        assert not InboxMessage.objects.exists()  # there is only the uncommitted row of the first copy

    def test_duplicate_of_a_stored_message_being_run_is_deferred(self, handles):
        slow = Slow()
        handler, envelope = handles(lambda message: 1 / 0 if message.attempt == 1 else slow(message)), an_envelope()
        deliver(handler, envelope)
        make_due()
        with slow.inside(drain):
            assert deliver(handler, envelope) is Outcome.DEFERRED
            assert deliver(handler, envelope, redelivered=True) is Outcome.DEFERRED
            assert drain() == 0

        assert (the_row().attempts, the_row().state, effects()) == (2, State.DONE, 1)

    def test_concurrent_duplicate_of_a_failing_message_leaves_one_effect(self, handles):
        """The first copy rolls back. Either it is stored for retry or the second copy runs meanwhile."""
        handler, envelope = handles(fails_times(1)), an_envelope()

        received = at_once([lambda: until_decided(handler, envelope) for _ in range(2)])
        assert set(received) in ({Outcome.STORED, Outcome.DUPLICATE}, {Outcome.HANDLED, Outcome.DUPLICATE})
        run_to_the_end()

        assert (the_row().state, effects()) == (State.DONE, 1)

    @pytest.mark.parametrize("redelivered", [False, True])
    def test_handler_runs_with_the_lock_timeout_of_its_session(self, handles, redelivered):
        seen = []
        executed("SET lock_timeout = '1234ms'")
        try:
            deliver(handles(lambda message: seen.append(fetched("SHOW lock_timeout"))), redelivered=redelivered)
        finally:
            connection.close()

        assert seen == ["1234ms"]


class TestCollisions:
    """The database asks to repeat the transaction: it is repeated at once, and no attempt is counted."""

    def test_serialization_failure_is_retried_at_once_and_costs_no_attempt(self, handles):
        Unique.objects.create(name="stock 0")
        attempts = []

        def handle(message):
            attempts.append(message.attempt)
            if len(attempts) == 1:
                with another_session() as rival:
                    rival.execute("UPDATE testapp_unique SET name = 'stock 1'")
            Unique.objects.update(name="stock 2")
            the_effect(message)

        connection.ensure_connection()
        connection.connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        try:
            assert deliver(handles(handle)) is Outcome.HANDLED
        finally:
            connection.close()

        assert attempts == [1, 1]
        assert (the_row().attempts, effects(), Unique.objects.get().name) == (1, 1, "stock 2")

    def test_lost_connection_is_retried_at_once_and_costs_no_attempt(self, handles):
        attempts = []

        def handle(message):
            attempts.append(message.attempt)
            if len(attempts) == 1:
                with another_session() as operator:
                    operator.execute("SELECT pg_terminate_backend(%s)", [fetched("SELECT pg_backend_pid()")])
            the_effect(message)

        assert deliver(handles(handle)) is Outcome.HANDLED

        assert attempts == [1, 1]
        assert (the_row().attempts, effects()) == (1, 1)

    def test_handler_that_breaks_its_transaction_is_blamed_although_a_connection_was_lost_before(self, handles):
        """Django would name the lost connection as the cause, for as long as the process lives."""
        self.test_lost_connection_is_retried_at_once_and_costs_no_attempt(handles)

        def end(message):
            transaction.set_rollback(True)

        assert deliver(handles(end)) is Outcome.STORED

        row = the_row(handler__endswith="1")
        assert row.attempts == 1
        assert row.last_error.startswith("TransactionBroken")

    def test_repeated_serialization_failure_is_stored_for_retry_and_costs_no_attempt(self, handles):
        attempts = []

        def handle(message):
            attempts.append(message.attempt)
            executed("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$")

        assert deliver(handles(handle)) is Outcome.STORED

        assert attempts == [1] * TRIES_AT_ONCE
        assert (the_row().state, the_row().attempts) == (State.RETRYING, 0)
        assert "collided with other transactions" in the_row().last_error


class TestMaximumMessageAge:
    """What becomes of a late message, and of its copies: see test_maximum_message_age."""

    @pytest.mark.parametrize(
        ("after", "outcome", "reason"),
        [
            pytest.param({"created_at": -OPTIONS.oldest_run - A_MINUTE}, Outcome.DEAD, "deduplication window", id="too old"),
            pytest.param({"created_at": -OPTIONS.oldest_run + A_MINUTE}, Outcome.HANDLED, "", id="old"),
            pytest.param({"created_at": OPTIONS.age_margin + A_MINUTE}, Outcome.DEAD, "future", id="in the future"),
            pytest.param({"created_at": -400 * A_DAY, "deliver_at": -A_MINUTE}, Outcome.HANDLED, "", id="delayed"),
            pytest.param({"deliver_at": 3650 * A_DAY}, Outcome.DEAD, "future", id="to be delivered in the far future"),
            pytest.param({"created_at": None}, Outcome.HANDLED, "", id="without a creation time"),
        ],
    )
    def test_message_outside_the_window_is_a_dead_letter_with_that_reason(self, handles, after, outcome, reason):
        instants = {name: None if time is None else utcnow() + time for name, time in after.items()}

        assert deliver(handles(the_effect), an_envelope(**instants)) is outcome

        assert effects() == (outcome is Outcome.HANDLED)
        assert reason in the_row().last_error

    def test_reason_gives_short_ages_in_a_unit_that_shows_them(self, handles):
        envelope = an_envelope(created_at=utcnow() - 100 * A_MINUTE)

        deliver(handles(the_effect), envelope, given=options(RETENTION=80 * A_MINUTE))

        assert the_row().last_error.startswith("It is 100 min old, past the deduplication window of 60 min")


class TestUnreadableMessage:
    """A message that cannot be handled is stored as a dead letter with its reason, so that it can be acknowledged."""

    @pytest.mark.parametrize("redelivered", [False, True])
    @pytest.mark.parametrize(
        ("envelope", "reason"),
        [
            pytest.param(an_envelope(body=b"{not json"), "is not JSON", id="not JSON"),
            pytest.param(an_envelope(body=b"[" * 100_000), "is not JSON", id="nested too deeply"),
            pytest.param(an_envelope(body=b"1" * 5_000), "is not JSON", id="number with too many digits"),
            pytest.param(an_envelope(content_type="text/plain", body=b"{}"), "not accepted", id="plain text"),
            pytest.param(an_envelope(id="", biz_id=""), "no identity", id="no identity"),
            pytest.param(an_envelope(topic="shop.order.cancelled"), "shop.order.cancelled", id="other topic"),
            pytest.param(an_envelope(topic=""), "topic", id="no topic"),
        ],
    )
    def test_unreadable_message_is_a_dead_letter_with_its_reason(self, handles, envelope, reason, redelivered):
        with recorded_signals("message_dead") as said:
            assert deliver(handles(the_effect), envelope, redelivered=redelivered) is Outcome.DEAD

        row = the_row()
        assert (row.state, effects()) == (State.DEAD, 0)
        assert reason in row.last_error
        assert bytes(row.body) == envelope.body
        assert len(said) == 1

    def test_pickle_is_refused_even_when_an_operator_retries_it(self, handles):
        handler = handles(the_effect)
        deliver(handler, an_envelope(content_type="application/x-python-serialize", body=b"cos\nsystem\n."))

        assert decisions.retry("default", the_row().pk)
        run_to_the_end()

        assert (the_row().state, effects()) == (State.DEAD, 0)
        assert "not accepted" in the_row().last_error

    def test_any_json_media_type_is_decoded(self, handles):
        envelope = an_envelope(content_type="application/vnd.shop.order+json")

        assert deliver(handles(the_effect), envelope) is Outcome.HANDLED


class TestIdentity:
    def test_message_whose_biz_id_function_raises_is_dead_and_runs_once_after_the_fix(self, handles):
        broken = handles(the_effect, name="tests.h", biz_id=lambda message: message.payload["orderid"])
        envelope = an_envelope({"order_id": 5})

        assert deliver(broken, envelope) is Outcome.DEAD
        assert "KeyError" in the_row().last_error
        assert decisions.retry("default", the_row().pk)
        run_to_the_end()
        assert the_row().state == State.DEAD

        fixed = handles(the_effect, name="tests.h", biz_id=lambda message: message.payload["order_id"])
        assert decisions.retry("default", the_row().pk)
        run_to_the_end()

        row = the_row()
        assert (row.state, row.biz_id, effects("5")) == (State.DONE, "5", 1)
        assert deliver(fixed, envelope) is Outcome.DUPLICATE
        assert effects() == 1

    def test_biz_id_found_by_an_attempt_that_outlasted_its_claim_does_not_replace_the_one_under_which_it_was_handled(
        self, handles
    ):
        calls, frozen, thawed = [], threading.Event(), threading.Event()

        def identify(message):
            calls.append(message)
            if len(calls) == 1:
                raise ValueError("not yet")
            if len(calls) > 2:
                return "now"
            frozen.set()
            thawed.wait(A_WHILE)
            return "formerly"

        handler, envelope = handles(the_effect, biz_id=identify), an_envelope()
        deliver(handler, envelope)
        assert decisions.retry("default", the_row().pk)
        with InAThread(drain):
            assert frozen.wait(A_WHILE)
            make_due()
            assert drain() == 1
            assert (the_row().state, the_row().biz_id) == (State.DONE, "now")
            thawed.set()

        assert the_row().biz_id == "now"
        assert deliver(handler, envelope) is Outcome.DUPLICATE
        assert effects() == 1

    @pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError])
    def test_biz_id_function_that_raises_a_base_exception_makes_a_dead_letter(self, handles, error):
        def identify(message):
            raise error

        handler = handles(the_effect, biz_id=identify)
        with contextlib.suppress(error):  # it would end the worker's thread
            assert deliver(handler) is Outcome.DEAD

        assert error.__name__ in the_row().last_error

    @pytest.mark.parametrize("nothing", [None, "", False, 1.5, {}, object()], ids=lambda value: type(value).__name__)
    def test_biz_id_function_without_a_usable_value_makes_dead_letters_and_no_duplicates(self, handles, nothing):
        """Else every message without one would be a duplicate of the first, and lost."""
        handler = handles(the_effect, biz_id=lambda message: nothing)

        received = [deliver(handler, an_envelope({"order_id": number})) for number in range(2)]

        assert received == [Outcome.DEAD, Outcome.DEAD]
        assert InboxMessage.objects.filter(state=State.DEAD).count() == 2

    def test_async_biz_id_function_is_refused_at_decoration(self, handles):
        async def identify(message):
            return message.payload["order_id"]

        with pytest.raises(NotCallable, match="async"):
            handles(the_effect, biz_id=identify)

    def test_biz_id_function_that_returns_a_coroutine_makes_a_dead_letter(self, handles):
        async def identify(message):
            return message.payload["order_id"]

        assert deliver(handles(the_effect, biz_id=lambda message: (identify(message), message)[0])) is Outcome.DEAD

        assert "biz_id of tests.handler0 failed" in the_row().last_error
        assert effects() == 0

    @pytest.mark.parametrize(
        "value", [17, 0, uuid.UUID(int=7), "x" * 10_000, "nul \x00", "lone \ud800", Decimal("1.50")], ids=repr
    )
    def test_biz_id_of_any_other_type_identifies_the_message(self, handles, value):
        handler = handles(the_effect, biz_id=lambda message: value)

        assert deliver(handler) is Outcome.HANDLED
        assert deliver(handler, an_envelope()) is Outcome.DUPLICATE

        assert len(the_row().biz_id.encode()) <= 255
        assert effects() == 1

    def test_long_biz_ids_with_the_same_beginning_stay_different(self, handles):
        handler = handles(the_effect, biz_id=lambda message: "x" * 10_000 + message.payload)

        assert [deliver(handler, an_envelope(end)) for end in "ab"] == [Outcome.HANDLED] * 2

    def test_biz_id_equal_to_that_of_an_unidentified_message_is_not_a_duplicate(self, handles):
        handler = handles(the_effect)
        deliver(handler, an_envelope(body=b"{"))
        forged = the_row().biz_id

        assert deliver(handler, an_envelope(biz_id=forged)) is Outcome.HANDLED


class TestPublishingHandler:
    """The outbox row of a message that a handler publishes commits with the effect or not at all."""

    @pytest.mark.parametrize("path", ["fresh", "redelivered", "retried"])
    def test_message_published_on_any_path_has_the_same_causation_id(self, handles, path):
        handle = fails_times(1 if path == "retried" else 0)
        envelope = an_envelope(correlation_id="first", traceparent="t")

        def publishes(message):
            publish("stock.reserved", {})
            handle(message)

        deliver(handles(publishes), envelope, redelivered=path == "redelivered")
        run_to_the_end()

        row = OutboxMessage.objects.get()
        assert (row.causation_id, row.correlation_id, row.traceparent, effects()) == (envelope.id, "first", "t", 1)

    def test_message_published_by_a_failing_handler_is_rolled_back(self, handles):
        def handle(message):
            publish("stock.reserved", {})
            raise ValueError("no")

        deliver(handles(handle))
        run_to_the_end()

        assert (the_row().state, the_row().attempts) == (State.DEAD, OPTIONS.MAX_ATTEMPTS)
        assert not OutboxMessage.objects.exists()


names = st.text(max_size=40) | st.sampled_from(
    [f"{prefix}{name}" for prefix in ("cloudEvents:", "cloudEvents_") for name in ("id", "type", "time", "deliverat", "bizid")]
)
instants = st.datetimes(timezones=st.timezones() | st.just(UTC)).map(lambda instant: instant.isoformat())
surrogates = st.text(st.characters(codec=None, categories=None), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | surrogates | st.binary(max_size=20) | instants | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(surrogates, inner, max_size=3),
    max_leaves=6,
)
bodies = st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.floats() | surrogates,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(surrogates, inner, max_size=3),
    max_leaves=6,
).map(lambda payload: json.dumps(payload).encode())
properties = st.fixed_dictionaries(
    {},
    optional={
        "message_id": values,
        "content_type": st.sampled_from(["application/json", "application/cloudevents+json", "text/plain"]) | surrogates,
        "correlation_id": values,
        "timestamp": st.integers() | st.datetimes() | values,
    },
)
HOSTILE_HEADERS = {
    "NUL and lone surrogates": {"a\x00b": "c\x00d", "\ud800": "\udfff"},
    "long name and value": {"x" * 255: "y" * 100_000},
    "long identity": {"cloudEvents:id": "x" * 10_000, "cloudEvents:bizid": "\x00" * 10_000},
    "time before year 1": {"cloudEvents:id": "1", "cloudEvents:time": "0001-01-01T00:00:00+14:00"},
    "time after year 9999": {"cloudEvents:id": "1", "cloudEvents:time": "9999-12-31T23:59:59-14:00"},
    "delivery time after year 9999": {"cloudEvents:id": "1", "cloudEvents:deliverat": "9999-12-31T23:59:59-14:00"},
    "huge numbers": {"cloudEvents:id": "1", "cloudEvents:time": 10**30, "huge": 10**4_000, "nan": float("nan")},
    "500 headers": {f"h{number}": "v" * 1_000 for number in range(500)},
}


@pytest.mark.every_database
@pytest.mark.long
class TestArbitraryDelivery:
    @pytest.mark.parametrize("headers", HOSTILE_HEADERS.values(), ids=HOSTILE_HEADERS)
    @pytest.mark.parametrize(
        ("handle", "received"), [(the_effect, Outcome.HANDLED), (fails, Outcome.STORED)], ids=["handled", "failing"]
    )
    def test_delivery_with_hostile_headers_is_stored_and_can_be_read(self, handles, headers, handle, received):
        assert self.arrives(handles(handle), {"message_id": "m"}, headers, b"{}") is received

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(properties=properties, headers=st.dictionaries(names | surrogates, values, max_size=5), body=bodies)
    @example(properties={"message_id": "m"}, headers={}, body=b'"\\u0000\\ud800"')
    def test_arbitrary_delivery_is_stored_and_can_be_read(self, handles, properties, headers, body):
        """Nothing raises and nothing is deferred: a delivery that cannot be stored would be redelivered for ever."""
        self.arrives(handles(the_effect), properties, headers, body)

    def arrives(self, handler, properties, headers, body):
        content_type = properties.get("content_type", "application/json")
        message = kombu.Message(
            body=body,
            headers=headers,
            properties={name: value for name, value in properties.items() if name != "content_type"},
            content_type=content_type,
            content_encoding="utf-8",
            delivery_info={"routing_key": TOPIC},
        )
        arrival = read(handler, envelope_of(message), OPTIONS)

        (received,) = receive(handler, [arrival], OPTIONS)

        assert received in {Outcome.HANDLED, Outcome.DUPLICATE, Outcome.STORED, Outcome.DEAD}
        row = InboxMessage.objects.get(handler=handler.name, biz_id=arrival.row.biz_id)
        assert bytes(row.body) == body or "cloudevents+json" in content_type
        decisions.retry("default", row.pk)
        drain()
        row.refresh_from_db()
        assert row.state not in DUE or row.next_attempt_at is not None
        return received


def test_handler_slower_than_its_claim_is_not_run_concurrently_with_itself(handles):
    """Its row is due again and locked while it runs, so no runner takes it. (PostgreSQL only: SQLite has one writer.)"""
    slow = Slow()
    handler, given = handles(slow), options(REDELIVERY_AFTER=timedelta(milliseconds=50))
    with slow.inside(lambda: deliver(handler, given=given, redelivered=True)) as run:
        wait_until(lambda: time_until_retry(the_row()) < timedelta())
        assert drain(given) == 0

    assert run.answer is Outcome.HANDLED
    assert (the_row().state, the_row().attempts, effects()) == (State.DONE, 1, 1)


def test_unavailable_database_leaves_the_delivery_undecided(handles, monkeypatch):
    """Its connection is refused, which raises DatabaseUnavailable, so that the consumer does not acknowledge."""
    handler = handles(the_effect)
    envelope = an_envelope()
    connection.close()
    monkeypatch.setitem(connection.settings_dict, "PORT", "1")

    with pytest.raises(DatabaseUnavailable):
        deliver(handler, envelope)
    with pytest.raises(DatabaseUnavailable):
        deliver(handler, envelope, redelivered=True)

    monkeypatch.undo()
    assert deliver(handler, envelope) is Outcome.HANDLED


def test_autocommit_left_off_by_a_hook_loses_no_later_message(handles):
    """On such a connection atomic() ends without a commit and without an exception."""

    def leave_it_off(message):
        the_effect(message)
        transaction.on_commit(lambda: transaction.set_autocommit(False))

    deliver(handles(leave_it_off, name="tests.careless"), an_envelope(id=str(uuid.uuid4())))
    later = an_envelope()

    assert deliver(handles(the_effect, name="tests.careful"), later) is Outcome.HANDLED

    connection.close()
    assert effects(later.biz_id) == 1
