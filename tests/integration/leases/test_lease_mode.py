"""Handlers under a lease, on both stores: one owner at a time, no message lost, nothing settled after its lease has ended."""

import json
import os
import signal
from contextlib import contextmanager, suppress
from datetime import timedelta
from decimal import Decimal
from functools import partial

import pytest
import redis
from django.core.management import call_command
from django.db import connection, transaction

from exactly_once.conf.app_options import AlertOptions
from exactly_once.process.clock import monotonic, utcnow
from exactly_once.sql.connections import lock_timeout
from exactly_once.sql.days import LIVE
from exactly_once.sql.now import DatabaseTime
from inbox import Lease, Ordered, Reject, RetryLater
from inbox.conf import inbox_options
from inbox.errors import LeaseLost, StepInterrupted
from inbox.handlers.registry import registry
from inbox.leases.stores import LeaseStoreUnavailable, lease_store
from inbox.models import InboxMessage, LeaseMemory, Step
from inbox.operators.conditions import conditions
from inbox.operators.decisions import decide_many, retrying
from inbox.operators.editing import conflict_token, replace_message, run_conflicting
from inbox.receiving import receive as receiving
from inbox.states import Outcome, State
from outbox import publish
from outbox.models import OutboxMessage
from tests.support import decisions
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import (
    InAThread,
    Slow,
    an_envelope,
    at_once,
    deliver,
    drain,
    effects,
    handed_over,
    make_due,
    options,
    run_to_the_end,
    the_effect,
    the_row,
)
from tests.support.inbox_rows import make_older
from tests.support.loads import a_delivery, receive_load
from tests.support.servers import FaultProxy
from tests.support.signals import recorded_signals
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, consuming, declare, send

pytestmark = pytest.mark.django_db(transaction=True)

SHORT = timedelta(seconds=1)
"""For a lease that ends whatever happens. What is to be done before its end may come too late."""
LASTING = timedelta(seconds=6)
"""For one that is extended all the time, also by a slow machine."""
LONG = timedelta(minutes=10)


@pytest.fixture(params=[pytest.param("database", marks=pytest.mark.every_database), "redis"])
def given(request):
    """The options that name the store. Redis behaves the same beside each database."""
    if request.param == "database":
        return options(LEASE_STORE="database")
    return in_redis(request.getfixturevalue("redis_url"))


def in_redis(url):
    return options(LEASE_STORE=url)


def is_redis(given):
    return given.LEASE_STORE != "database"


def let_leases_end(given):
    """End the leases of running messages now, without their owners noticing."""
    InboxMessage.objects.filter(state=State.RUNNING).update(next_attempt_at=DatabaseTime())
    if is_redis(given):
        client = redis.Redis.from_url(given.LEASE_STORE)
        for record in client.scan_iter("inbox:*", _type="hash"):
            if client.hexists(record, "until"):
                client.hset(record, "until", 0)


@pytest.fixture
def leased(handles):
    def register(function, duration=LONG, *, limit=timedelta(hours=1), **arguments):
        return handles(function, lease=Lease(duration=duration, limit=limit), **arguments)

    return register


@pytest.fixture
def signals_sent():
    """Which signals of the inbox were sent, with their arguments."""
    names = ("message_handled", "message_retrying", "message_dead", "duplicate_suppressed", "conflicting_duplicate")
    with recorded_signals(*names) as sent:
        yield sent


def names_of(signals_sent):
    return [name for name, _ in signals_sent]


def failing_once(error):
    """A handler whose first run fails."""

    def handle(message):
        if message.attempt == 1:
            raise error
        the_effect(message)

    return handle


class TestRun:
    def test_handler_runs_outside_a_transaction(self, leased, given):
        seen = []
        handler = leased(lambda message: seen.append((connection.in_atomic_block, connection.get_autocommit(), message.fence)))

        assert deliver(handler, given=given) is Outcome.HANDLED

        ((in_atomic_block, autocommit, fence),) = seen
        assert (in_atomic_block, autocommit) == (False, True)
        assert fence >= 1

    def test_handler_may_open_transactions_and_publish_in_them(self, leased, given):
        def handle(message):
            with transaction.atomic():
                publish("stock.reserved", {}, biz_id="r1")
            with suppress(ZeroDivisionError), transaction.atomic():
                publish("stock.lost", {}, biz_id="r2")
                raise ZeroDivisionError

        envelope = an_envelope()
        deliver(leased(handle), envelope, given=given)

        published = OutboxMessage.objects.get()
        assert (published.topic, published.causation_id) == ("stock.reserved", envelope.id)

    @pytest.mark.parametrize(
        "begin", [lambda: connection.cursor().execute("BEGIN"), transaction.atomic().__enter__], ids=["sql", "atomic"]
    )
    @pytest.mark.parametrize("error", [None, ValueError("on purpose")], ids=["returns", "fails"])
    def test_handler_that_leaves_a_transaction_open_fails_and_is_retried(self, leased, given, begin, error):
        def leave_it_open(message):
            begin()
            the_effect(message)
            if error:
                raise error

        handler = leased(leave_it_open)
        assert at_once([lambda: deliver(handler, given=given)]) == [Outcome.STORED]

        assert (the_row().state, effects()) == (State.RETRYING, 0)
        assert ("on purpose" if error else "with an open transaction") in the_row().last_error


class TestDuplicate:
    def test_duplicate_of_a_handled_message_is_acknowledged_and_signalled(self, leased, given, signals_sent):
        handler, envelope = leased(the_effect), an_envelope()
        deliver(handler, envelope, given=given)

        assert deliver(handler, envelope, given=given) is Outcome.DUPLICATE
        assert deliver(handler, envelope, given=given, redelivered=True) is Outcome.DUPLICATE

        assert effects() == 1
        suppressed = [arguments for name, arguments in signals_sent if name == "duplicate_suppressed"]
        assert [arguments["cause"] for arguments in suppressed] == ["resend", "redelivery"]

    def test_duplicates_are_counted_by_cause_and_one_with_another_payload_is_signalled(self, leased, given, signals_sent):
        handler, envelope = leased(the_effect), an_envelope(id="first")
        deliver(handler, envelope, given=given)
        deliver(handler, envelope, given=given)
        deliver(handler, an_envelope({"order_id": 2}, id="second", biz_id=envelope.biz_id), given=given)

        assert names_of(signals_sent)[2:] == ["conflicting_duplicate", "duplicate_suppressed"]
        if is_redis(given):
            counts = lease_store(given).counts()[handler.name]
            assert counts == {"handled": 1, "duplicates": 2, "resend": 1, "business": 1, "conflicts": 1}
        else:
            assert (the_row().duplicates, the_row().resends) == (2, 1)

    def test_duplicate_of_a_running_message_is_stored_and_uses_no_attempt(self, leased, given, signals_sent):
        slow = Slow()
        handler, envelope = leased(slow), an_envelope()
        with slow.inside(lambda: deliver(handler, envelope, given=given)) as first:
            assert deliver(handler, envelope, given=given, redelivered=True) is (
                Outcome.STORED if is_redis(given) else Outcome.DUPLICATE
            ), "with Redis only the lease is known until then"
            assert deliver(handler, envelope, given=given) is Outcome.DUPLICATE

            row = the_row()
            assert (row.state, row.attempts) == (State.RUNNING, 1)
            assert drain(given) == 0

        assert first.answer is Outcome.HANDLED
        assert slow.runs == effects() == 1
        row = the_row()
        assert (row.state, row.duplicates, row.redeliveries, row.resends) == (State.DONE, 2, 1, 1)
        assert names_of(signals_sent) == ["duplicate_suppressed", "duplicate_suppressed", "message_handled"]

    def test_duplicate_of_a_running_message_that_fails_does_not_prevent_its_retry(self, leased, given):
        slow = Slow(error=ValueError("no"))
        handler, envelope = leased(slow), an_envelope()
        with slow.inside(lambda: deliver(handler, envelope, given=given)) as first:
            deliver(handler, envelope, given=given)

        assert first.answer is Outcome.STORED
        row = the_row()
        assert (row.state, row.attempts, row.last_error) == (State.RETRYING, 1, "ValueError: no")
        slow.error = None
        run_to_the_end(given)
        assert effects() == 1

    def test_conflicting_duplicate_of_a_running_message_replaces_nothing_raises_an_alert_and_is_run_by_an_operator(
        self, leased, given, signals_sent
    ):
        slow = Slow(error=ValueError("no"))
        handler, envelope = leased(slow), an_envelope({"order_id": 1})
        with slow.inside(lambda: deliver(handler, envelope, given=given)):
            deliver(handler, an_envelope({"order_id": 2}, biz_id=envelope.biz_id), given=given)

        row = the_row()
        assert bytes(row.body) == envelope.body
        assert (row.conflicts, bytes(row.conflicting_body)) == (1, b'{"order_id": 2}')
        assert row.conflicting_at is not None
        assert "conflicting_duplicate" in names_of(signals_sent)
        slow.error = None
        run_to_the_end(given)
        assert ("conflicts", handler.name) in conditions("default", AlertOptions())
        assert run_conflicting("default", row.pk, confirmed=[conflict_token(row)], by="operator")
        run_to_the_end(given)
        assert effects() == 2

    def test_duplicate_stored_after_its_message_was_handled_uses_no_attempt(self, leased, given):
        handler, envelope = leased(the_effect), an_envelope()
        deliver(handler, envelope, given=given)
        handed_over(handler, envelope)

        assert drain(given) == (1 if is_redis(given) else 0), "with Redis only the lease knows that it was handled"
        assert (the_row().state, the_row().attempts, effects()) == (State.DONE, 0 if is_redis(given) else 1, 1)

    def test_one_of_twenty_concurrent_duplicates_is_handled(self, leased, given):
        running = []

        def handle(message):
            running.append("in")
            assert running.count("in") - running.count("out") == 1, "two at a time"
            the_effect(message)
            running.append("out")

        handler, envelope = leased(handle), an_envelope()

        received = at_once([lambda: deliver(handler, envelope, given=given)] * 20)
        run_to_the_end(given)

        assert received.count(Outcome.HANDLED) == 1
        assert Outcome.DEAD not in received
        assert effects() == 1
        assert not InboxMessage.objects.exclude(state=State.DONE).exists()


class TestFailure:
    def test_failed_message_is_retried(self, leased, given, signals_sent):
        assert deliver(leased(failing_once(ValueError("no"))), given=given) is Outcome.STORED
        row = the_row()
        assert (row.state, row.attempts, row.last_error) == (State.RETRYING, 1, "ValueError: no")
        assert "ValueError" in row.traceback

        make_due()
        assert drain(given) == 1

        row = the_row()
        assert (row.state, row.attempts, row.last_error) == (State.DONE, 2, "")
        assert Effect.objects.get().detail == "2"
        assert names_of(signals_sent) == ["message_retrying", "message_handled"]

    def test_fence_grows_with_every_run_whatever_operators_do(self, leased, given):
        fences = []

        def handle(message):
            fences.append(message.fence)
            raise RetryLater if len(fences) % 2 else Reject("not today")

        handed_over(leased(handle))
        for number in range(3):
            drain(given)
            make_due()
            drain(given)
            # A corrected message has the biz-id of the first.
            again = partial(replace_message, text=f'{{"corrected": {number}}}', by="an operator") if number else decisions.retry
            assert again("default", InboxMessage.objects.latest("pk").pk)
        drain(given)

        assert len(fences) == 7
        assert fences == sorted({*fences})


class TestOperator:
    DECISIONS = (decisions.retry, partial(decisions.skip, reason="not wanted"))

    @pytest.fixture(autouse=True)
    def _the_settings(self, settings, given):
        settings.INBOX = {"LEASE_STORE": given.LEASE_STORE}

    @pytest.mark.parametrize("decide", DECISIONS, ids=["retry", "skip"])
    def test_operator_cannot_retry_or_skip_a_running_message(self, leased, given, decide):
        slow = Slow()
        handler, envelope = leased(slow), an_envelope()
        with slow.inside(lambda: deliver(handler, envelope, given=given)):
            deliver(handler, envelope, given=given)  # so that there is a row with every store
            assert not decide("default", the_row().pk)
            if is_redis(given):  # which holds an extended lease
                InboxMessage.objects.update(next_attempt_at=DatabaseTime())
                assert not decide("default", the_row().pk)

        assert (the_row().state, the_row().attempts, slow.runs) == (State.DONE, 1, 1)

    @pytest.mark.parametrize("error", [None, ValueError("no")], ids=["done", "failed"])
    def test_owner_of_a_message_skipped_after_its_lease_settles_nothing(self, leased, given, caplog, error):
        handler, envelope, slow, first = self.decided_after_the_lease(leased, given, caplog, self.DECISIONS[1], error)

        assert (the_row().state, the_row().last_error) == (State.SKIPPED, "skipped: not wanted")
        assert first.answer is Outcome.STORED
        assert deliver(handler, envelope, given=given) is Outcome.DUPLICATE
        assert drain(given) == 0
        assert (the_row().state, slow.runs) == (State.SKIPPED, 1)

    @pytest.mark.parametrize("error", [None, ValueError("no")], ids=["done", "failed"])
    def test_owner_of_a_message_retried_after_its_lease_settles_nothing(self, leased, given, caplog, error):
        _, _, slow, first = self.decided_after_the_lease(leased, given, caplog, self.DECISIONS[0], error)

        assert (the_row().state, the_row().attempts, the_row().last_error) == (State.RUNNING, 0, "")
        assert first.answer is Outcome.STORED
        slow.error = None
        assert drain(given) == 1
        assert (the_row().state, the_row().attempts, slow.runs) == (State.DONE, 1, 2)

    def decided_after_the_lease(self, leased, given, caplog, decide, error):
        """A run whose lease ends, after which an operator decides, and then the run ends."""
        slow = Slow(error)
        handler, envelope = leased(slow), an_envelope()
        with slow.inside(lambda: deliver(handler, envelope, given=given)) as first:
            deliver(handler, envelope, given=given)  # so that there is a row with every store
            let_leases_end(given)
            assert decide("default", the_row().pk)
        assert "its outcome was not stored" in caplog.text
        return handler, envelope, slow, first

    @pytest.mark.parametrize("given", ["redis"], indirect=True)
    def test_retry_of_a_message_that_redis_has_lost_quarantines_it(self, leased, given, redis_server):
        slow = Slow()
        handler, envelope = leased(slow), an_envelope()
        with slow.inside(lambda: deliver(handler, envelope, given=given)):
            deliver(handler, envelope, given=given)
            redis_server.flush()
        InboxMessage.objects.update(next_attempt_at=DatabaseTime())
        assert decisions.retry("default", the_row().pk)
        drain(given)

        assert (the_row().state, the_row().quarantined, slow.runs) == (State.DEAD, True, 1)

    def test_skipping_the_head_of_a_key_lets_the_next_message_follow(self, leased, given):
        slow = Slow()
        handler = leased(slow, ordered=True)
        handed_over(handler, an_envelope({}, key="k", biz_id="head"))
        handed_over(handler, an_envelope({}, key="k", biz_id="next"))
        with slow.inside(lambda: drain(given)):
            let_leases_end(given)
            assert self.DECISIONS[1]("default", the_row(biz_id="head").pk)

        assert [the_row(biz_id=name).state for name in ("head", "next")] == [State.SKIPPED, State.DONE]
        assert effects("next") == 1

    @pytest.mark.parametrize("given", ["redis"], indirect=True)
    def test_operator_gets_an_error_when_the_lease_store_is_unavailable(self, leased, given, redis_server):
        slow = Slow()
        handler, envelope = leased(slow), an_envelope()
        with slow.inside(lambda: deliver(handler, envelope, given=given)):
            deliver(handler, envelope, given=given)
        InboxMessage.objects.update(state=State.RUNNING, day=LIVE, next_attempt_at=DatabaseTime())
        redis_server.stop()
        with pytest.raises(LeaseStoreUnavailable):
            decisions.retry("default", the_row().pk)
        redis_server.start()

        assert the_row().state == State.RUNNING

    @pytest.mark.long
    @pytest.mark.parametrize("given", ["redis"], indirect=True)
    @pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
    def test_no_row_is_locked_while_a_frozen_redis_is_asked(self, leased, handles, given, redis_server, many):
        slow = Slow()
        handler, envelope = leased(slow), an_envelope()
        failing = handles(failing_once(ValueError("no")))
        deliver(failing, given=given)
        with slow.inside(lambda: deliver(handler, envelope, given=given)):
            deliver(handler, envelope, given=given)
        InboxMessage.objects.filter(handler=handler.name).update(state=State.RUNNING, day=LIVE, next_attempt_at=DatabaseTime())
        rows = list(InboxMessage.objects.filter(handler=handler.name).values_list("pk", flat=True))
        rows += [the_row(handler=failing.name).pk] if many else []
        with frozen(redis_server), InAThread(lambda: decide_many("default", rows, retrying())) as deciding:
            while not deciding.ended:
                with transaction.atomic(), lock_timeout("default", timedelta(seconds=2)):  # less than Redis is waited for
                    assert len(InboxMessage.objects.filter(pk__in=rows).select_for_update()) == len(rows)

        outcomes = {outcome.row: outcome for outcome in deciding.answer}
        assert outcomes[rows[0]].is_error


@pytest.mark.long
class TestHeartbeat:
    def test_heartbeat_extends_the_leases_of_many_long_runs(self, leased, given):
        def take_long(message):
            began_at = monotonic()
            wait_until(lambda: monotonic() > began_at + LASTING.total_seconds() + 0.5)
            the_effect(message)

        handler = leased(take_long, LASTING)
        with InAThread(lambda: at_once([lambda: deliver(handler, given=given)] * 8)) as all_of_them:
            wait_until(lambda: drain(given) or all_of_them.ended)

        assert all_of_them.answer == [Outcome.HANDLED] * 8
        assert effects() == 8

    def test_run_past_its_lease_limit_settles_nothing(self, leased, given, caplog):
        slow = Slow()
        handler, envelope = leased(slow, SHORT, limit=2 * SHORT), an_envelope()
        with InAThread(lambda: deliver(handler, envelope, given=given)) as first:
            wait_until(lambda: "lease is lost" in caplog.text)
            slow.go_on.set()

        assert first.answer is Outcome.STORED
        assert "its outcome was not stored" in caplog.text
        row = the_row()
        assert (row.state, row.attempts) == (State.RUNNING, 1)
        registry.remove(handler.name)
        leased(slow, name=handler.name)
        run_to_the_end(given)
        assert (the_row().state, the_row().attempts, effects()) == (State.DONE, 2, 2)

    @pytest.mark.parametrize("raised", [None, ValueError("no")], ids=["handled", "failed"])
    def test_run_that_was_frozen_past_its_lease_settles_if_its_message_was_not_taken_over(self, leased, given, raised):
        def is_frozen(message):
            let_leases_end(given)
            assert message.step("charge", lambda: let_leases_end(given) or "paid") == "paid"
            let_leases_end(given)
            the_effect(message)
            if raised:
                raise raised

        deliver(leased(is_frozen), given=given)
        drain(given)

        assert effects() == 1
        if raised:
            assert (the_row().state, the_row().last_error) == (State.RETRYING, "ValueError: no")

    def test_step_after_a_lost_lease_is_refused(self, leased, given, caplog):
        outcome = []

        def take_a_step(message):
            if message.attempt == 1:
                wait_until(lambda: "lease is lost" in caplog.text)
                try:
                    message.step("charge", lambda: outcome.append("charged"))
                except LeaseLost as error:
                    outcome.append(str(error))

        assert deliver(leased(take_a_step, SHORT, limit=SHORT), given=given) is Outcome.STORED

        assert len(outcome) == 1
        assert "was not taken" in outcome[0]


class TestSteps:
    def test_step_runs_once_over_all_attempts(self, leased, given):
        taken = []

        def handle(message):
            lock = message.step("lock", lambda: taken.append("lock") or {"lock": Decimal("7.50"), "of": ("a", "b")})
            nothing = message.step("nothing", lambda: taken.append("nothing"))
            assert (lock, nothing) == ({"lock": "7.50", "of": ["a", "b"]}, None), "as JSON has it, in the first run too"
            if message.attempt < 3:
                raise ValueError("no")
            message.step("last", lambda: taken.append("last"))

        deliver(leased(handle), given=given)
        run_to_the_end(given)

        assert taken == ["lock", "nothing", "last"]
        assert the_row().state == State.DONE

    def test_failed_step_is_taken_again(self, leased, given):
        taken = []

        def charge():
            taken.append("try")
            if len(taken) == 1:
                raise OSError("no answer")
            return "paid"

        paid = []
        deliver(leased(lambda message: paid.append(message.step("charge", charge))), given=given)
        run_to_the_end(given)

        assert (taken, paid) == (["try", "try"], ["paid"])

    @pytest.mark.parametrize(
        ("error", "becomes"),
        [(OSError("no answer"), State.DEAD), (RetryLater(timedelta(hours=1)), State.RETRYING), (Reject("closed"), State.DEAD)],
        ids=["error", "RetryLater", "Reject"],
    )
    def test_failed_unrepeatable_step_makes_a_dead_letter_and_is_taken_again_when_an_operator_retries(
        self, leased, given, error, becomes
    ):
        taken = []

        def charge():
            taken.append("try")
            if len(taken) == 1:
                raise error

        deliver(leased(lambda message: message.step("charge", charge, repeatable=False)), given=given)
        row = the_row()
        assert row.state == becomes
        if isinstance(error, OSError):
            assert row.attempts == 1
            assert all(words in row.last_error for words in ("'charge'", "no answer", "Check whether it has happened"))
        decisions.retry("default", row.pk)
        drain(given)

        assert (the_row().state, len(taken)) == (State.DONE, 2)

    def test_handler_that_catches_step_interrupted_still_makes_a_dead_letter(self, leased, given):
        def swallow(message):
            with suppress(StepInterrupted):
                message.step("charge", lambda: 1 / 0, repeatable=False)

        assert deliver(leased(swallow), given=given) is Outcome.DEAD

    @pytest.mark.parametrize("result", [object(), "\ud83d", "a\0"], ids=["object", "lone surrogate", "NUL"])
    def test_step_with_a_result_that_is_not_json_makes_a_dead_letter(self, leased, given, result):
        taken = []
        handler = leased(lambda message: message.step("charge", lambda: taken.append("try") or result))

        assert deliver(handler, given=given) is Outcome.DEAD

        assert taken == ["try"]
        assert "cannot be stored as JSON" in the_row().last_error

    def test_step_inside_a_transaction_is_refused_before_it_is_taken(self, leased, given):
        taken = []

        def handle(message):
            with transaction.atomic():
                message.step("charge", lambda: taken.append("try"))

        deliver(leased(handle), given=given)

        assert taken == []
        assert "transaction.atomic()" in the_row().last_error

    def test_step_of_a_transactional_handler_is_refused_and_names_lease_mode(self, handles):
        taken = []
        deliver(handles(lambda message: message.step("charge", lambda: taken.append("try"))))

        assert taken == []
        assert "@leased_handler" in the_row().last_error

    def test_async_step_runs_once_over_all_attempts(self, leased, given):
        taken, results = [], []

        async def charge():
            taken.append("try")
            return {"paid": True}

        async def handle(message):
            results.append(await message.astep("charge", charge, repeatable=False))
            if message.attempt == 1:
                raise ValueError("no")

        deliver(leased(handle), given=given)
        run_to_the_end(given)

        assert (taken, results) == (["try"], [{"paid": True}] * 2)

    def test_step_and_astep_refuse_the_other_kind_of_function_before_it_is_called(self, leased, given):
        taken = []

        async def charge():
            taken.append("try")

        async def handle(message):
            message.step("charge", lambda: taken.append("try"))

        for handler in (leased(handle), leased(lambda message: message.step("charge", charge))):
            deliver(handler, given=given)
            assert "message.astep" in the_row(handler=handler.name).last_error
        deliver(leased(lambda message: message.step("charge", lambda: [charge()][0]), name="tests.lambda"), given=given)
        assert "message.astep" in the_row(handler="tests.lambda").last_error
        assert taken == []

    @pytest.mark.parametrize("name", ["", "two\nlines", "x" * 300])
    def test_step_name_that_is_empty_long_or_has_line_breaks_is_refused(self, leased, given, name):
        deliver(leased(lambda message: message.step(name, print)), given=given)

        assert "is not a valid name of a step" in the_row().last_error

    def test_purging_a_message_deletes_its_steps(self, leased, given):
        def handle(message):
            message.step("lock", lambda: 7)
            if message.attempt == 1:
                raise ValueError("no")

        deliver(leased(handle), given=given)
        assert Step.objects.count() == 1
        run_to_the_end(given)

        make_older(InboxMessage.objects.all(), timedelta(days=31))
        Step.objects.update(taken_at=DatabaseTime(-timedelta(days=31)))
        call_command("exactly_once_purge", app="inbox")
        assert (InboxMessage.objects.count(), Step.objects.count()) == (0, 0)


class TestOrder:
    @pytest.mark.parametrize(
        ("ordered", "error", "handled_first", "handled_in_the_end"),
        [(True, ValueError("no"), [], [0, 1, 2]), (Ordered(on_dead="skip"), Reject("never"), [1, 2], [1, 2])],
        ids=["retrying", "dead and skipped"],
    )
    def test_failing_head_blocks_its_key_under_leases_unless_it_is_dead_and_skipped(
        self, leased, given, ordered, error, handled_first, handled_in_the_end
    ):
        handled = []

        def handle(message):
            if message.payload["n"] == 0 and message.attempt == 1:
                raise error
            handled.append(message.payload["n"])

        handler = leased(handle, ordered=ordered)
        for number in range(3):
            handed_over(handler, an_envelope({"n": number}, key="one", biz_id=f"n{number}"))
        drain(given)
        assert handled == handled_first
        run_to_the_end(given)

        assert handled == handled_in_the_end

    @pytest.mark.long
    def test_message_retried_out_of_order_does_not_run_concurrently_with_its_key_under_leases(self, leased, given):
        slow, handled = Slow(), []

        def handle(message):
            if message.payload["n"] == 0 and not handled:
                handled.append("failed")
                raise Reject("not now")
            if message.payload["n"] == 1:
                slow(message)
            handled.append(message.payload["n"])

        handler = leased(handle, ordered=Ordered(on_dead="skip"))
        for number in range(2):
            handed_over(handler, an_envelope({"n": number}, key="one", biz_id=f"n{number}"))
        with slow.inside(lambda: drain(given)):
            decisions.retry("default", the_row(biz_id="n0").pk)
            drain_for_a_moment(given)
            assert handled == ["failed"]
            assert the_row(biz_id="n0").attempts == 0
        run_to_the_end(given)

        assert handled == ["failed", 1, 0]


def drain_for_a_moment(given):
    """For longer than the backoff of a message whose key is busy."""
    until = monotonic() + 1.2
    while monotonic() < until:
        drain(given)


@contextmanager
def frozen(server):
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.long
class TestUnavailableStore:
    @pytest.mark.timeout(300)
    def test_lease_whose_answer_was_lost_is_used_by_the_next_try(self, leased, redis_server, redis_url):
        handler, envelope = leased(the_effect), an_envelope()
        with FaultProxy("127.0.0.1", redis_server.port) as proxy:
            given = in_redis(proxy.through(redis_url))
            deliver(handler, given=given)
            proxy.drop_server_to_client()
            with pytest.raises(LeaseStoreUnavailable):
                deliver(handler, envelope, given=given)
            proxy.cut()
            with redis.Redis.from_url(redis_url) as client:
                # The counts, the state, and a record of each of the two messages.
                assert client.dbsize() == 4

            assert deliver(handler, envelope, given=given, redelivered=True) is Outcome.HANDLED
        assert effects() == 2

    @pytest.mark.timeout(300)
    def test_message_whose_consumer_gave_up_while_redis_hung_is_run_at_once_by_another(self, leased, redis_server, redis_url):
        handler, envelope = leased(the_effect), an_envelope()
        deliver(handler, given=in_redis(redis_url))
        with frozen(redis_server), pytest.raises(LeaseStoreUnavailable):
            deliver(handler, envelope, given=in_redis(redis_url))

        another = options(LEASE_STORE=redis_url, DUPLICATE_TIMEOUT=timedelta(seconds=9))
        assert lease_store(another) is not lease_store(in_redis(redis_url))
        assert deliver(handler, envelope, given=another, redelivered=True) is Outcome.HANDLED
        assert effects() == 2

    @pytest.mark.timeout(300)
    def test_handlers_without_leases_run_while_redis_hangs(
        self, leased, handles, redis_server, redis_url, rabbitmq_url, caplog
    ):
        given = broker_options(rabbitmq_url, LEASE_STORE=redis_url, CONCURRENCY=4)
        held = leased(the_effect, name="tests.leased", topic="tests.held")
        plain = handles(the_effect, name="tests.plain")
        for handler in (held, plain):
            declare(handler, given)
        with consuming([held, plain], given):
            send(rabbitmq_url, held.topics[0], {}, message_id="before")
            wait_until(lambda: effects() == 1)
            with frozen(redis_server):
                for number in range(8):
                    for handler in (held, plain):
                        send(rabbitmq_url, handler.topics[0], {}, message_id=f"{handler.name}-{number}")
                wait_until(lambda: effects() == 9)
                assert "Timeout" not in caplog.text, "before a thread has given up"

    def test_unavailable_lease_store_uses_no_attempt_and_stops_no_transactional_handler(
        self, leased, handles, redis_server, redis_url
    ):
        given = in_redis(redis_url)
        deliver(leased(failing_once(ValueError("no")), name="tests.leased"), given=given)
        deliver(handles(failing_once(ValueError("no")), name="tests.transactional"), given=given)
        redis_server.kill()
        make_due()

        drain(given)

        assert the_row(handler="tests.transactional").state == State.DONE
        row = the_row(handler="tests.leased")
        assert (row.state, row.attempts, row.last_error) == (State.RETRYING, 1, "ValueError: no")
        redis_server.start()
        run_to_the_end(given)
        assert (the_row(handler="tests.leased").state, effects()) == (State.DONE, 2)

    def test_settlement_waits_for_an_unavailable_store_while_the_lease_lasts(self, leased, redis_server, redis_url, caplog):
        def handle_and_kill_the_store(message):
            the_effect(message)
            redis_server.kill()

        handler, envelope = leased(handle_and_kill_the_store), an_envelope()
        with InAThread(lambda: deliver(handler, envelope, given=in_redis(redis_url))) as first:
            wait_until(lambda: "cannot be stored now" in caplog.text)
            redis_server.start()

        assert first.answer is Outcome.HANDLED
        assert deliver(handler, envelope, given=in_redis(redis_url)) is Outcome.DUPLICATE
        assert effects() == 1

    def test_run_is_repeated_when_the_store_is_unavailable_past_its_lease(self, leased, redis_server, redis_url):
        def handle_and_kill_the_store(message):
            the_effect(message)
            if message.attempt == 1:
                redis_server.kill()

        # As long as it takes to kill a server, and more.
        handler, envelope = leased(handle_and_kill_the_store, LASTING), an_envelope()
        with pytest.raises(LeaseStoreUnavailable):
            deliver(handler, envelope, given=in_redis(redis_url))
        redis_server.start()
        let_leases_end(in_redis(redis_url))

        assert deliver(handler, envelope, given=in_redis(redis_url), redelivered=True) is Outcome.HANDLED
        assert Effect.objects.last().detail == "2"


def test_status_reports_counts_of_messages_without_rows(leased, redis_server, redis_url, settings, capsys):
    settings.INBOX = {"LEASE_STORE": redis_url}
    handler, envelope = leased(the_effect), an_envelope()
    deliver(handler, envelope, given=inbox_options())
    deliver(handler, envelope, given=inbox_options())

    call_command("exactly_once_status", "--json")
    reported = json.loads(capsys.readouterr().out)
    call_command("exactly_once_status")
    printed = capsys.readouterr().out
    redis_server.kill()
    call_command("exactly_once_status")
    redis_server.start()

    assert reported["inbox"]["without_rows"] == {handler.name: {"handled": 1, "duplicates": 1, "resend": 1}}
    assert "under leases, without a row: handled" in printed
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("lease store")]
    assert line.split() == ["lease", "store", "unavailable"]


class TestLostRedisData:
    """Redis is emptied, or restarts from an older state."""

    @pytest.fixture
    def given(self, redis_url):
        return in_redis(redis_url)

    @pytest.fixture
    def client(self, redis_url):
        return redis.Redis.from_url(redis_url)

    def test_first_use_of_an_empty_redis_is_not_data_loss(self, leased, given):
        handler = leased(the_effect)

        assert deliver(handler, an_envelope(created_at=utcnow() - timedelta(days=3)), given=given) is Outcome.HANDLED
        assert LeaseMemory.objects.get().remembers_since is None

    def test_message_created_before_a_data_loss_is_quarantined_and_an_operator_may_override_that(
        self, leased, given, redis_server, caplog, signals_sent
    ):
        handler, envelope = leased(the_effect), an_envelope()
        deliver(handler, envelope, given=given)
        redis_server.flush()

        assert deliver(handler, envelope, given=given) is Outcome.DEAD

        row = the_row()
        assert (row.state, row.quarantined, effects()) == (State.DEAD, True, 1)
        assert "has lost data" in row.last_error
        assert caplog.text.count("Redis has lost data. Messages") == 1
        assert names_of(signals_sent) == ["message_handled", "message_dead"]
        assert deliver(handler, envelope, given=given) is Outcome.DUPLICATE
        assert not decisions.retry("default", row.pk)
        assert decisions.override_maximum_age("default", row.pk)
        drain(given)
        assert (the_row().state, effects()) == (State.DONE, 2)

    def test_message_created_after_a_data_loss_or_without_a_time_is_handled_unless_it_is_redelivered(
        self, leased, given, redis_server
    ):
        handler = leased(the_effect)
        deliver(handler, given=given)
        redis_server.flush()
        deliver(handler, an_envelope(created_at=utcnow() - timedelta(hours=1)), given=given)

        assert deliver(handler, an_envelope(created_at=utcnow() + timedelta(seconds=1)), given=given) is Outcome.HANDLED
        assert deliver(handler, an_envelope(created_at=None), given=given) is Outcome.HANDLED
        assert deliver(handler, an_envelope(created_at=None), given=given, redelivered=True) is Outcome.DEAD

    @pytest.mark.parametrize("created_at", [utcnow(), None], ids=["with a time", "without a time"])
    def test_redelivery_that_only_its_body_identifies_is_quarantined_after_a_data_loss(
        self, leased, given, redis_server, created_at
    ):
        handler = leased(the_effect, biz_id=lambda message: message.payload["order_id"])
        deliver(handler, an_envelope({"order_id": 7}, created_at=created_at), given=given)
        redis_server.flush()
        deliver(handler, an_envelope({"order_id": 8}, created_at=created_at), given=given)

        redelivered = an_envelope({"order_id": 7}, created_at=created_at)
        assert deliver(handler, redelivered, given=given, redelivered=True) is Outcome.DEAD

        row = the_row(biz_id="7")
        assert (row.quarantined, effects("7")) == (True, 1)
        assert "has lost data" in row.last_error

    def test_failed_message_keeps_its_steps_over_a_data_loss(self, leased, given, redis_server):
        taken = []

        def handle(message):
            message.step("lock", lambda: taken.append("lock"))
            if message.attempt == 1:
                raise ValueError("no")

        deliver(leased(handle), given=given)
        redis_server.flush()
        run_to_the_end(given)

        assert (the_row().state, taken) == (State.DONE, ["lock"])

    def test_data_loss_during_a_run_lets_it_settle_nothing(self, leased, given, redis_server, caplog):
        slow = Slow()
        handler, envelope = leased(slow), an_envelope()
        with slow.inside(lambda: deliver(handler, envelope, given=given)) as first:
            redis_server.flush()

        assert first.answer is Outcome.STORED
        assert "its outcome was not stored" in caplog.text
        run_to_the_end(given)
        assert (the_row().state, the_row().quarantined, slow.runs) == (State.DEAD, True, 1)

    def test_loss_of_the_end_of_a_run_is_detected(self, leased, given, client):
        """The older state still has it running, and its lease has ended meanwhile."""
        states = []

        def handle(message):
            states.append(snapshot(client))
            the_effect(message)

        handler, envelope = leased(handle), an_envelope()
        assert deliver(handler, envelope, given=given) is Outcome.HANDLED
        restore(client, states[0])

        assert deliver(handler, envelope, given=given) is Outcome.STORED, "it found it running"
        let_leases_end(given)
        run_to_the_end(given)
        assert (the_row().state, effects()) == (State.DEAD, 1)

    def test_redis_that_may_evict_leases_is_reported(self, leased, redis_server, redis_url, caplog):
        client = redis.Redis.from_url(redis_url)
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            deliver(leased(the_effect), given=options(LEASE_STORE=redis_url, RETENTION=timedelta(days=29)))
            assert "maxmemory-policy is allkeys-lru" in caplog.text
        finally:
            client.config_set("maxmemory", "0")
            client.config_set("maxmemory-policy", "noeviction")


def snapshot(client):
    return {key: client.dump(key) for key in client.scan_iter("inbox:*")}


def restore(client, dumped):
    client.flushdb()
    for key, value in dumped.items():
        client.restore(key, 0, value)


def test_unexpected_error_after_the_acknowledgement_leaves_the_message_running_and_answered_once(handles, monkeypatch):
    def fails(*given):
        raise RuntimeError("unexpected")

    monkeypatch.setattr(receiving, "run_leased", fails)

    assert receive_load([a_delivery(handles(the_effect, lease=Lease()))], options(LEASE_STORE="database")) == [Outcome.STORED]
    assert (the_row().state, effects()) == (State.RUNNING, 0)
