"""Handlers under a lease, on both stores: one owner at a time, nothing lost, nothing settled by an owner that overslept."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from functools import partial

import pytest
import redis
from django.core.management import call_command
from django.db import connection, transaction

from inbox import Reject, RetryLater, signals, store
from inbox.conf import inbox_options
from inbox.errors import LeaseLost, StepInterrupted
from inbox.handlers import registry
from inbox.leasing.opening import lease_store
from inbox.leasing.operating import once_ended
from inbox.leasing.stores import LeaseStoreAway
from inbox.models import InboxMessage, LeaseMemory, State, Step
from inbox.outcomes import Received
from inbox.reading import read
from inbox.receiving import hand_over
from inbox.transactions import DatabaseAway
from outbox import publish
from outbox.kernel.clock import DatabaseTime, monotonic, utcnow
from outbox.models import OutboxMessage
from tests.support.aliases import the_default_at
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import (
    A_WHILE,
    InAThread,
    an_envelope,
    at_once,
    deliver,
    drain,
    effects,
    make_due,
    options,
    run_to_the_end,
    the_effect,
    the_row,
    wait_until,
)

pytestmark = [pytest.mark.every_database, pytest.mark.django_db(transaction=True)]

SHORT = timedelta(seconds=1)
"""For a lease that ends whatever happens. What is to be done before its end may come too late."""
LASTING = timedelta(seconds=6)
"""For one that is extended all the time, also by a machine that stands still for a while."""
LONG = timedelta(minutes=10)


@pytest.fixture(params=["database", "redis"])
def given(request):
    """The options that name the store."""
    if request.param == "database":
        return options(LEASE_STORE="database")
    return in_redis(request.getfixturevalue("redis_url"))


def in_redis(url):
    return options(LEASE_STORE=url)


def is_redis(given):
    return given.LEASE_STORE != "database"


def let_leases_end(given):
    """Those of running messages, at once, and nobody has noticed."""
    InboxMessage.objects.filter(state=State.RUNNING).update(next_attempt_at=DatabaseTime())
    if is_redis(given):
        client = redis.Redis.from_url(given.LEASE_STORE)
        for record in client.scan_iter("inbox:*", _type="hash"):
            if client.hexists(record, "until"):
                client.hset(record, "until", 0)


@pytest.fixture
def leased(handles):
    def register(function, lease=LONG, **arguments):
        return handles(function, mode="lease", lease=lease, **arguments)

    return register


@pytest.fixture
def told():
    """Which signals of the inbox were sent, with their arguments."""
    heard = []
    names = ["message_handled", "message_retrying", "message_dead", "duplicate_suppressed", "conflicting_duplicate"]
    receivers = {name: lambda sender, signal, name=name, **arguments: heard.append((name, arguments)) for name in names}
    for name, receiver in receivers.items():
        getattr(signals, name).connect(receiver)
    yield heard
    for name, receiver in receivers.items():
        getattr(signals, name).disconnect(receiver)


def names_of(told):
    return [name for name, _ in told]


class Slow:
    """A handler that has begun when it says so and ends when it is told to."""

    def __init__(self, error=None):
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.error = error
        self.runs = 0

    def __call__(self, message):
        self.runs += 1
        self.begun.set()
        assert self.go_on.wait(A_WHILE)
        if self.error:
            raise self.error
        the_effect(message)


def handed_over(handler, payload, **attributes):
    """As local:// does it: stored, to be run by a runner."""
    with transaction.atomic():
        hand_over(handler, read(handler, an_envelope(payload, **attributes), options()))


def once(error):
    """A handler whose first run fails."""

    def handle(message):
        if message.attempt == 1:
            raise error
        the_effect(message)

    return handle


class TestARun:
    def test_has_no_transaction_around_it(self, leased, given):
        seen = []
        handler = leased(lambda message: seen.append((connection.in_atomic_block, connection.get_autocommit(), message.fence)))

        assert deliver(handler, given=given) is Received.HANDLED

        ((in_atomic_block, autocommit, fence),) = seen
        assert (in_atomic_block, autocommit) == (False, True)
        assert fence >= 1

    def test_that_goes_well_is_written_down_where_the_leases_are(self, leased, given):
        assert deliver(leased(the_effect), given=given) is Received.HANDLED

        if is_redis(given):
            assert not InboxMessage.objects.exists()
        else:
            row = the_row()
            assert (row.state, row.attempts, row.fence, row.next_attempt_at) == (State.DONE, 1, 1, None)

    def test_may_open_transactions_and_publish_in_them(self, leased, given):
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

    def test_of_an_async_handler(self, leased, given):
        ran = []

        async def handle(message):
            ran.append(message.biz_id)

        assert deliver(leased(handle), given=given) is Received.HANDLED
        assert len(ran) == 1

    def test_that_leaves_a_transaction_open_has_failed(self, leased, given):
        def leave_it_open(message):
            connection.cursor().execute("BEGIN")
            the_effect(message)

        assert deliver(leased(leave_it_open), given=given) is Received.STORED

        assert "left a transaction open" in the_row().last_error
        assert effects() == 0
        assert the_row().state == State.RETRYING

    def test_that_leaves_an_atomic_block_open_has_failed(self, leased, given):
        blocks = []

        def leave_it_open(message):
            blocks.append(transaction.atomic())
            blocks[0].__enter__()
            the_effect(message)

        assert deliver(leased(leave_it_open), given=given) is Received.STORED

        assert "left a transaction open" in the_row().last_error
        assert effects() == 0

    @pytest.mark.parametrize(
        "begin", [lambda: connection.cursor().execute("BEGIN"), transaction.atomic().__enter__], ids=["sql", "atomic"]
    )
    def test_that_leaves_a_transaction_open_and_fails_is_stored(self, leased, given, begin):
        def leave_it_open(message):
            begin()
            the_effect(message)
            raise ValueError("on purpose")

        handler = leased(leave_it_open)
        with InAThread(lambda: deliver(handler, given=given)) as thread:
            pass

        assert thread.answer is Received.STORED
        assert the_row().state == State.RETRYING
        assert effects() == 0

    def test_of_a_message_that_a_relay_handed_over(self, leased, given):
        handed_over(leased(the_effect), {}, biz_id="local-1")
        drain(given)

        assert effects("local-1") == 1
        assert the_row().state == State.DONE


class TestADuplicate:
    def test_of_a_handled_message_is_acknowledged_and_told(self, leased, given, told):
        handler, envelope = leased(the_effect), an_envelope()
        deliver(handler, envelope, given=given)

        assert deliver(handler, envelope, given=given) is Received.DUPLICATE
        assert deliver(handler, envelope, given=given, redelivered=True) is Received.DUPLICATE

        assert effects() == 1
        suppressed = [arguments for name, arguments in told if name == "duplicate_suppressed"]
        assert [arguments["cause"] for arguments in suppressed] == ["resend", "redelivery"]

    def test_is_counted(self, leased, given):
        handler, envelope = leased(the_effect), an_envelope(id="first")
        deliver(handler, envelope, given=given)
        deliver(handler, envelope, given=given)
        deliver(handler, an_envelope(id="second", biz_id=envelope.biz_id), given=given)

        if is_redis(given):
            counts = lease_store(given).counts()[handler.name]
            assert counts == {"handled": 1, "duplicates": 2, "resend": 1, "business": 1}
        else:
            assert (the_row().duplicates, the_row().resends) == (2, 1)

    def test_that_says_something_else_is_told(self, leased, given, told):
        handler, envelope = leased(the_effect), an_envelope()
        deliver(handler, envelope, given=given)

        assert deliver(handler, an_envelope({"order_id": 2}, biz_id=envelope.biz_id), given=given) is Received.DUPLICATE

        assert names_of(told) == ["message_handled", "conflicting_duplicate", "duplicate_suppressed"]

    def test_while_it_runs_is_acknowledged_without_an_attempt_because_the_database_has_it(self, leased, given, told):
        slow = Slow()
        handler, envelope = leased(slow), an_envelope()
        with InAThread(lambda: deliver(handler, envelope, given=given)) as first:
            assert slow.begun.wait(A_WHILE)

            assert deliver(handler, envelope, given=given, redelivered=True) in {Received.STORED, Received.DUPLICATE}
            assert deliver(handler, envelope, given=given) is Received.DUPLICATE

            row = the_row()
            assert (row.state, row.attempts) == (State.RUNNING, 1)
            assert drain(given) == 0
            slow.go_on.set()

        assert first.answer is Received.HANDLED
        assert slow.runs == effects() == 1
        row = the_row()
        assert (row.state, row.duplicates, row.redeliveries, row.resends) == (State.DONE, 2, 1, 1)
        assert names_of(told) == ["duplicate_suppressed", "duplicate_suppressed", "message_handled"]

    def test_while_it_runs_does_not_lose_it_when_that_run_fails(self, leased, given):
        slow = Slow(error=ValueError("no"))
        handler, envelope = leased(slow), an_envelope()
        with InAThread(lambda: deliver(handler, envelope, given=given)) as first:
            assert slow.begun.wait(A_WHILE)
            deliver(handler, envelope, given=given)
            slow.go_on.set()

        assert first.answer is Received.STORED
        row = the_row()
        assert (row.state, row.attempts, row.last_error) == (State.RETRYING, 1, "ValueError: no")
        slow.error = None
        run_to_the_end(given)
        assert effects() == 1

    def test_with_other_content_while_it_runs_never_takes_its_place(self, leased, given, told):
        slow = Slow(error=ValueError("no"))
        handler, envelope = leased(slow), an_envelope({"order_id": 1})
        with InAThread(lambda: deliver(handler, envelope, given=given)):
            assert slow.begun.wait(A_WHILE)
            deliver(handler, an_envelope({"order_id": 2}, biz_id=envelope.biz_id), given=given)
            slow.go_on.set()

        row = the_row()
        assert bytes(row.body) == envelope.body
        assert (row.conflicts, bytes(row.conflicting_body)) == (1, b'{"order_id": 2}')
        assert row.conflicting_at is not None
        assert "conflicting_duplicate" in names_of(told)

    def test_that_is_stored_after_it_was_handled_is_settled_without_an_attempt(self, leased, given):
        handler, envelope = leased(the_effect), an_envelope()
        deliver(handler, envelope, given=given)
        with transaction.atomic():
            hand_over(handler, read(handler, envelope, given))

        assert drain(given) == (1 if is_redis(given) else 0), "with Redis only the lease knows that it was handled"
        assert (the_row().state, the_row().attempts, effects()) == (State.DONE, 0 if is_redis(given) else 1, 1)

    def test_of_a_dead_letter_does_not_run_it(self, leased, given):
        def refuse(message):
            raise Reject("never")

        handler, envelope = leased(refuse), an_envelope()
        assert deliver(handler, envelope, given=given) is Received.DEAD

        assert deliver(handler, envelope, given=given) is Received.DUPLICATE
        assert (the_row().state, the_row().attempts) == (State.DEAD, 1)

    def test_of_a_retrying_message_does_not_run_it_early(self, leased, given):
        handler, envelope = leased(once(ValueError("no"))), an_envelope()
        deliver(handler, envelope, given=given)

        assert deliver(handler, envelope, given=given) is Received.DUPLICATE
        assert effects() == 0

    def test_twenty_threads_and_one_biz_id(self, leased, given):
        running = []

        def handle(message):
            running.append("in")
            assert running.count("in") - running.count("out") == 1, "two at a time"
            the_effect(message)
            running.append("out")

        handler, envelope = leased(handle), an_envelope()

        received = at_once([lambda: deliver(handler, envelope, given=given)] * 20)
        run_to_the_end(given)

        assert received.count(Received.HANDLED) == 1
        assert Received.DEAD not in received
        assert effects() == 1
        assert not InboxMessage.objects.exclude(state=State.DONE).exists()


class TestAFailure:
    def test_frees_the_message_which_is_run_again(self, leased, given, told):
        assert deliver(leased(once(ValueError("no"))), given=given) is Received.STORED
        row = the_row()
        assert (row.state, row.attempts, row.last_error) == (State.RETRYING, 1, "ValueError: no")
        assert "ValueError" in row.traceback

        make_due()
        assert drain(given) == 1

        row = the_row()
        assert (row.state, row.attempts, row.last_error) == (State.DONE, 2, "")
        assert Effect.objects.get().detail == "2"
        assert names_of(told) == ["message_retrying", "message_handled"]

    def test_asked_for_counts_no_attempt(self, leased, given):
        def later(message):
            raise RetryLater(timedelta(hours=3))

        deliver(leased(later), given=given)

        assert (the_row().state, the_row().attempts) == (State.RETRYING, 0)

    def test_runs_out_of_attempts(self, leased, given):
        def fail(message):
            raise ValueError("always")

        deliver(leased(fail), given=given)
        run_to_the_end(given)

        assert (the_row().state, the_row().attempts) == (State.DEAD, 3)

    def test_that_is_final_is_run_again_when_an_operator_says_so(self, leased, given):
        fences = []

        def handle(message):
            fences.append(message.fence)
            if len(fences) == 1:
                raise Reject("not today")

        deliver(leased(handle), given=given)
        assert the_row().state == State.DEAD

        assert store.retry("default", the_row().pk)
        drain(given)

        assert the_row().state == State.DONE
        assert fences[0] < fences[1]

    def test_of_a_message_with_a_duplicate_afterwards_is_still_its_own(self, leased, given):
        handler, envelope = leased(once(ValueError("no"))), an_envelope()
        deliver(handler, envelope, given=given)
        make_due()
        drain(given)

        assert deliver(handler, envelope, given=given) is Received.DUPLICATE
        assert effects() == 1


class TestAnOperator:
    DECISIONS = (store.retry, partial(store.skip, reason="not wanted"))

    @pytest.fixture(autouse=True)
    def _the_settings(self, settings, given):
        settings.INBOX = {"LEASE_STORE": given.LEASE_STORE}

    @pytest.mark.parametrize("decide", DECISIONS, ids=["retry", "skip"])
    def test_decides_nothing_while_it_runs(self, leased, given, decide):
        slow = Slow()
        handler, envelope = leased(slow), an_envelope()
        with InAThread(lambda: deliver(handler, envelope, given=given)):
            assert slow.begun.wait(A_WHILE)
            deliver(handler, envelope, given=given)  # so that there is a row with every store
            assert not decide("default", the_row().pk)
            assert not once_ended(decide)("default", the_row().pk)
            slow.go_on.set()

        assert (the_row().state, the_row().attempts, slow.runs) == (State.DONE, 1, 1)

    @pytest.mark.parametrize("error", [None, ValueError("no")], ids=["done", "failed"])
    def test_skips_one_whose_lease_has_ended_and_its_owner_settles_nothing(self, leased, given, caplog, error):
        handler, envelope, slow, first = self.overtaken(leased, given, caplog, self.DECISIONS[1], error)

        assert (the_row().state, the_row().last_error) == (State.SKIPPED, "skipped: not wanted")
        assert first.answer is Received.STORED
        assert deliver(handler, envelope, given=given) is Received.DUPLICATE
        assert drain(given) == 0
        assert (the_row().state, slow.runs) == (State.SKIPPED, 1)

    @pytest.mark.parametrize("error", [None, ValueError("no")], ids=["done", "failed"])
    def test_retries_one_whose_lease_has_ended_and_its_owner_settles_nothing(self, leased, given, caplog, error):
        _, _, slow, first = self.overtaken(leased, given, caplog, self.DECISIONS[0], error)

        assert (the_row().state, the_row().attempts, the_row().last_error) == (State.RUNNING, 0, "")
        assert first.answer is Received.STORED
        slow.error = None
        assert drain(given) == 1
        assert (the_row().state, the_row().attempts, slow.runs) == (State.DONE, 1, 2)

    def overtaken(self, leased, given, caplog, decide, error):
        """A run outlasts its lease, an operator decides, and then it ends."""
        slow = Slow(error)
        handler, envelope = leased(slow), an_envelope()
        with InAThread(lambda: deliver(handler, envelope, given=given)) as first:
            assert slow.begun.wait(A_WHILE)
            deliver(handler, envelope, given=given)  # so that there is a row with every store
            let_leases_end(given)
            assert once_ended(decide)("default", the_row().pk)
            slow.go_on.set()
        assert "nothing was settled" in caplog.text
        return handler, envelope, slow, first

    @pytest.mark.parametrize("decide", DECISIONS, ids=["retry", "skip"])
    def test_waits_for_a_lease_that_redis_has_extended_and_the_row_knows_nothing_of(self, leased, given, decide):
        if not is_redis(given):
            pytest.skip("here the row is the lease")
        slow = Slow()
        handler, envelope = leased(slow), an_envelope()
        with InAThread(lambda: deliver(handler, envelope, given=given)):
            assert slow.begun.wait(A_WHILE)
            deliver(handler, envelope, given=given)
            InboxMessage.objects.update(next_attempt_at=DatabaseTime())
            assert not once_ended(decide)("default", the_row().pk)
            slow.go_on.set()

        assert (the_row().state, slow.runs) == (State.DONE, 1)

    def test_retries_nothing_that_redis_has_forgotten(self, leased, given, redis_server):
        if not is_redis(given):
            pytest.skip("the database forgets nothing")
        slow = Slow()
        handler, envelope = leased(slow), an_envelope()
        with InAThread(lambda: deliver(handler, envelope, given=given)):
            assert slow.begun.wait(A_WHILE)
            deliver(handler, envelope, given=given)
            redis_server.flush()
            slow.go_on.set()
        InboxMessage.objects.update(next_attempt_at=DatabaseTime())
        assert once_ended(store.retry)("default", the_row().pk)
        drain(given)

        assert (the_row().state, the_row().quarantined, slow.runs) == (State.DEAD, True, 1)

    def test_who_skips_the_head_of_a_key_lets_the_next_one_follow(self, leased, given):
        slow = Slow()
        handler = leased(slow, ordered=True)
        handed_over(handler, {}, key="k", biz_id="head")
        handed_over(handler, {}, key="k", biz_id="next")
        with InAThread(lambda: drain(given)):
            assert slow.begun.wait(A_WHILE)
            let_leases_end(given)
            assert once_ended(self.DECISIONS[1])("default", the_row(biz_id="head").pk)
            slow.go_on.set()

        assert [the_row(biz_id=name).state for name in ("head", "next")] == [State.SKIPPED, State.DONE]
        assert effects("next") == 1

    def test_is_told_when_the_store_is_away(self, leased, given, redis_server):
        if not is_redis(given):
            pytest.skip("a database that is away has no row to decide about")
        slow = Slow()
        handler, envelope = leased(slow), an_envelope()
        with InAThread(lambda: deliver(handler, envelope, given=given)):
            assert slow.begun.wait(A_WHILE)
            deliver(handler, envelope, given=given)
            slow.go_on.set()
        InboxMessage.objects.update(state=State.RUNNING, next_attempt_at=DatabaseTime())
        redis_server.stop()
        with pytest.raises(LeaseStoreAway):
            once_ended(store.retry)("default", the_row().pk)
        redis_server.start()

        assert the_row().state == State.RUNNING


class TestTheHeartbeat:
    def test_keeps_long_runs_alive_many_at_once(self, leased, given):
        def take_long(message):
            began_at = monotonic()
            wait_until(lambda: monotonic() > began_at + LASTING.total_seconds() + 0.5)
            the_effect(message)

        handler = leased(take_long, LASTING)
        with InAThread(lambda: at_once([lambda: deliver(handler, given=given)] * 8)) as all_of_them:
            wait_until(lambda: drain(given) or all_of_them.ended)

        assert all_of_them.answer == [Received.HANDLED] * 8
        assert effects() == 8

    def test_ends_at_the_limit_and_then_nothing_is_settled(self, leased, given, caplog):
        slow = Slow()
        handler, envelope = leased(slow, SHORT, lease_limit=2 * SHORT), an_envelope()
        with InAThread(lambda: deliver(handler, envelope, given=given)) as first:
            wait_until(lambda: "lease is lost" in caplog.text)
            slow.go_on.set()

        assert first.answer is Received.STORED
        assert "nothing was settled" in caplog.text
        row = the_row()
        assert (row.state, row.attempts) == (State.RUNNING, 1)
        registry.remove(handler.name)
        leased(slow, name=handler.name)
        run_to_the_end(given)
        assert (the_row().state, the_row().attempts, effects()) == (State.DONE, 2, 2)

    def test_of_a_lost_lease_lets_no_step_be_taken(self, leased, given, caplog):
        outcome = []

        def take_a_step(message):
            if message.attempt == 1:
                wait_until(lambda: "lease is lost" in caplog.text)
                try:
                    message.step("charge", lambda: outcome.append("charged"))
                except LeaseLost as error:
                    outcome.append(str(error))

        assert deliver(leased(take_a_step, SHORT, lease_limit=SHORT), given=given) is Received.STORED

        assert len(outcome) == 1
        assert "was not taken" in outcome[0]


class TestSteps:
    def test_are_taken_once(self, leased, given):
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

    def test_that_fail_were_not_taken(self, leased, given):
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

    def test_that_must_not_be_repeated_stop_loudly_when_they_fail(self, leased, given):
        taken = []

        def charge():
            taken.append("try")
            raise OSError("no answer")

        deliver(leased(lambda message: message.step("charge", charge, repeatable=False)), given=given)

        row = the_row()
        assert (row.state, row.attempts) == (State.DEAD, 1)
        assert "'charge'" in row.last_error
        assert "no answer" in row.last_error
        assert "Find out" in row.last_error

    def test_that_must_not_be_repeated_are_taken_when_a_person_retries(self, leased, given):
        taken = []

        def charge():
            taken.append("try")
            if len(taken) == 1:
                raise OSError("no answer")

        deliver(leased(lambda message: message.step("charge", charge, repeatable=False)), given=given)
        assert the_row().state == State.DEAD
        store.retry("default", the_row().pk)
        drain(given)

        assert (the_row().state, len(taken)) == (State.DONE, 2)

    @pytest.mark.parametrize("error", [RetryLater(timedelta(hours=1)), Reject("closed")], ids=["later", "reject"])
    def test_that_say_that_nothing_happened_are_taken_again(self, leased, given, error):
        taken = []

        def charge():
            taken.append("try")
            if len(taken) == 1:
                raise error

        deliver(leased(lambda message: message.step("charge", charge, repeatable=False)), given=given)
        store.retry("default", the_row().pk)
        drain(given)

        assert (the_row().state, len(taken)) == (State.DONE, 2)

    def test_that_were_interrupted_stop_the_message_though_its_handler_catches_that(self, leased, given):
        def swallow(message):
            with suppress(StepInterrupted):
                message.step("charge", lambda: 1 / 0, repeatable=False)

        assert deliver(leased(swallow), given=given) is Received.DEAD

    def test_whose_result_json_cannot_hold_stop_loudly(self, leased, given):
        taken = []
        handler = leased(lambda message: message.step("charge", lambda: taken.append("try") or object()))

        assert deliver(handler, given=given) is Received.DEAD

        assert taken == ["try"]
        assert "cannot be remembered" in the_row().last_error

    def test_inside_a_transaction_are_refused_before_anything_happens(self, leased, given):
        taken = []

        def handle(message):
            with transaction.atomic():
                message.step("charge", lambda: taken.append("try"))

        deliver(leased(handle), given=given)

        assert taken == []
        assert "transaction.atomic()" in the_row().last_error

    def test_of_a_transactional_handler_are_refused_with_a_reason(self, handles):
        taken = []
        deliver(handles(lambda message: message.step("charge", lambda: taken.append("try"))))

        assert taken == []
        assert "mode='lease'" in the_row().last_error

    def test_of_an_async_handler(self, leased, given):
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

    def test_of_the_wrong_colour_are_refused_before_anything_happens(self, leased, given):
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
    def test_need_a_name_that_fits(self, leased, given, name):
        deliver(leased(lambda message: message.step(name, print)), given=given)

        assert "cannot be a step's" in the_row().last_error

    def test_go_with_their_message_when_it_is_purged(self, leased, given):
        def handle(message):
            message.step("lock", lambda: 7)
            if message.attempt == 1:
                raise ValueError("no")

        deliver(leased(handle), given=given)
        assert Step.objects.count() == 1
        run_to_the_end(given)

        assert sum(store.purge_settled("default", timedelta(seconds=-1))) == 1
        assert (InboxMessage.objects.count(), Step.objects.count()) == (0, 0)


class TestOrder:
    def test_the_next_one_follows_when_the_head_is_handled(self, leased, given):
        handled = []
        handler = leased(lambda message: handled.append(message.payload["n"]), ordered=True)
        for number in range(5):
            handed_over(handler, {"n": number}, key="one", biz_id=f"n{number}")
        drain(given)

        assert handled == [0, 1, 2, 3, 4]
        assert set(InboxMessage.objects.values_list("state", flat=True)) == {State.DONE}

    def test_a_head_that_fails_holds_the_others_back(self, leased, given):
        handled = []

        def handle(message):
            if message.payload["n"] == 0 and message.attempt == 1:
                raise ValueError("no")
            handled.append(message.payload["n"])

        handler = leased(handle, ordered=True)
        for number in range(3):
            handed_over(handler, {"n": number}, key="one", biz_id=f"n{number}")
        drain(given)
        assert handled == []
        run_to_the_end(given)

        assert handled == [0, 1, 2]

    def test_a_dead_head_is_passed_over_when_the_handler_says_so(self, leased, given):
        handled = []

        def handle(message):
            if message.payload["n"] == 0:
                raise Reject("never")
            handled.append(message.payload["n"])

        handler = leased(handle, ordered=True, on_dead="skip")
        for number in range(3):
            handed_over(handler, {"n": number}, key="one", biz_id=f"n{number}")
        drain(given)

        assert handled == [1, 2]

    def test_one_that_lost_its_place_does_not_run_beside_another_of_its_key(self, leased, given):
        slow, handled = Slow(), []

        def handle(message):
            if message.payload["n"] == 0 and not handled:
                handled.append("failed")
                raise Reject("not now")
            if message.payload["n"] == 1:
                slow(message)
            handled.append(message.payload["n"])

        handler = leased(handle, ordered=True, on_dead="skip")
        for number in range(2):
            handed_over(handler, {"n": number}, key="one", biz_id=f"n{number}")
        with InAThread(lambda: drain(given)):
            assert slow.begun.wait(A_WHILE)
            store.retry("default", the_row(biz_id="n0").pk)
            drain_for_a_moment(given)
            assert handled == ["failed"]
            assert the_row(biz_id="n0").attempts == 0
            slow.go_on.set()
        run_to_the_end(given)

        assert handled == ["failed", 1, 0]


def drain_for_a_moment(given):
    """As long as a key that is busy has its messages rest."""
    until = monotonic() + 1.2
    while monotonic() < until:
        drain(given)


class TestAStoreThatIsAway:
    @pytest.fixture
    def gone(self, redis_server, redis_url):
        redis_server.kill()
        yield in_redis(redis_url)
        redis_server.start()

    def test_has_nothing_run(self, leased, gone):
        handler = leased(the_effect)

        with pytest.raises(LeaseStoreAway):
            deliver(handler, given=gone)

        assert effects() == 0
        assert not InboxMessage.objects.exists()

    def test_burns_no_attempt_of_what_is_stored(self, leased, redis_server, redis_url):
        given = in_redis(redis_url)
        deliver(leased(once(ValueError("no"))), given=given)
        redis_server.kill()
        make_due()

        drain(given)

        row = the_row()
        assert (row.state, row.attempts, row.last_error) == (State.RETRYING, 1, "ValueError: no")
        redis_server.start()
        run_to_the_end(given)
        assert (the_row().state, effects()) == (State.DONE, 1)

    def test_does_not_stop_other_handlers(self, leased, handles, redis_server, redis_url):
        given = in_redis(redis_url)
        deliver(leased(once(ValueError("no"))), given=given)
        deliver(handles(once(ValueError("no")), name="tests.transactional"), given=given)
        redis_server.kill()
        make_due()

        drain(given)

        assert the_row(handler="tests.transactional").state == State.DONE
        redis_server.start()

    def test_when_a_run_ends_is_waited_for_as_long_as_the_lease_lasts(self, leased, redis_server, redis_url, caplog):
        def outlive_it(message):
            the_effect(message)
            redis_server.kill()

        handler, envelope = leased(outlive_it), an_envelope()
        with InAThread(lambda: deliver(handler, envelope, given=in_redis(redis_url))) as first:
            wait_until(lambda: "cannot be written down yet" in caplog.text)
            redis_server.start()

        assert first.answer is Received.HANDLED
        assert deliver(handler, envelope, given=in_redis(redis_url)) is Received.DUPLICATE
        assert effects() == 1

    def test_for_longer_than_the_lease_decides_nothing(self, leased, redis_server, redis_url):
        def outlive_it(message):
            the_effect(message)
            if message.attempt == 1:
                redis_server.kill()

        # As long as it takes to kill a server, and more.
        handler, envelope = leased(outlive_it, LASTING), an_envelope()
        with pytest.raises(LeaseStoreAway):
            deliver(handler, envelope, given=in_redis(redis_url))
        redis_server.start()
        let_leases_end(in_redis(redis_url))

        assert deliver(handler, envelope, given=in_redis(redis_url), redelivered=True) is Received.HANDLED
        assert Effect.objects.last().detail == "2"

    @pytest.mark.skipif(connection.vendor != "postgresql", reason="a file does not go away")
    def test_that_is_the_database_has_nothing_run_and_is_waited_for(self, leased, mortal_postgres, caplog):
        def outlive_it(message):
            ran.append(message.attempt)
            mortal_postgres.kill()

        ran = []
        handler, envelope = leased(outlive_it), an_envelope()
        name = mortal_postgres.create_database().rpartition("/")[2]
        with the_default_at(NAME=name, PORT=mortal_postgres.port):
            call_command("migrate", verbosity=0)
            with InAThread(lambda: deliver(handler, envelope)) as first:
                wait_until(lambda: "cannot be written down yet" in caplog.text)
                with pytest.raises(DatabaseAway):
                    deliver(handler, an_envelope())
                mortal_postgres.start()
            assert first.answer is Received.HANDLED
            assert deliver(handler, envelope) is Received.DUPLICATE
        assert ran == [1]


def test_the_status_tells_what_has_left_no_row(leased, redis_server, redis_url, settings, capsys):
    settings.INBOX = {"LEASE_STORE": redis_url}
    handler, envelope = leased(the_effect), an_envelope()
    deliver(handler, envelope, given=inbox_options())
    deliver(handler, envelope, given=inbox_options())

    call_command("inbox_status", "--json")
    told = json.loads(capsys.readouterr().out)
    call_command("inbox_status")
    drawn = capsys.readouterr().out
    redis_server.kill()
    call_command("inbox_status")
    redis_server.start()

    assert told["without_rows"] == {handler.name: {"handled": 1, "duplicates": 1, "resend": 1}}
    assert "under leases, without a row: handled" in drawn
    assert "does not answer" in capsys.readouterr().out


class TestALostMemory:
    """Redis is emptied, or comes back from an older state."""

    @pytest.fixture
    def given(self, redis_url):
        return in_redis(redis_url)

    @pytest.fixture
    def remembers(self, redis_url):
        return redis.Redis.from_url(redis_url)

    def test_at_the_first_use_is_none(self, leased, given):
        handler = leased(the_effect)

        assert deliver(handler, an_envelope(created_at=utcnow() - timedelta(days=3)), given=given) is Received.HANDLED
        assert LeaseMemory.objects.get().remembers_since is None

    def test_quarantines_what_was_created_before_it(self, leased, given, redis_server, caplog, told):
        handler, envelope = leased(the_effect), an_envelope()
        deliver(handler, envelope, given=given)
        redis_server.flush()

        assert deliver(handler, envelope, given=given) is Received.DEAD

        row = the_row()
        assert (row.state, row.quarantined, effects()) == (State.DEAD, True, 1)
        assert "lost its memory" in row.last_error
        assert caplog.text.count("has lost its memory. Messages") == 1
        assert names_of(told) == ["message_handled", "message_dead"]
        assert deliver(handler, envelope, given=given) is Received.DUPLICATE

    def test_lets_what_was_created_after_it_run(self, leased, given, redis_server):
        handler = leased(the_effect)
        deliver(handler, given=given)
        redis_server.flush()
        deliver(handler, an_envelope(created_at=utcnow() - timedelta(hours=1)), given=given)

        assert deliver(handler, an_envelope(created_at=utcnow() + timedelta(seconds=1)), given=given) is Received.HANDLED

    def test_without_a_time_only_what_the_broker_delivers_again_is_in_doubt(self, leased, given, redis_server):
        handler = leased(the_effect)
        deliver(handler, given=given)
        redis_server.flush()

        assert deliver(handler, an_envelope(created_at=None), given=given) is Received.HANDLED
        assert deliver(handler, an_envelope(created_at=None), given=given, redelivered=True) is Received.DEAD

    def test_is_overridden_by_an_operator(self, leased, given, redis_server):
        handler, envelope = leased(the_effect), an_envelope()
        deliver(handler, envelope, given=given)
        redis_server.flush()
        deliver(handler, envelope, given=given)

        assert not store.retry("default", the_row().pk)
        assert store.override_age_fence("default", the_row().pk)
        drain(given)

        assert (the_row().state, effects()) == (State.DONE, 2)

    def test_does_not_touch_what_has_failed_because_the_database_knows_it_with_its_steps(self, leased, given, redis_server):
        taken = []

        def handle(message):
            message.step("lock", lambda: taken.append("lock"))
            if message.attempt == 1:
                raise ValueError("no")

        deliver(leased(handle), given=given)
        redis_server.flush()
        run_to_the_end(given)

        assert (the_row().state, taken) == (State.DONE, ["lock"])

    def test_under_a_running_handler_lets_it_settle_nothing(self, leased, given, redis_server, caplog):
        slow = Slow()
        handler, envelope = leased(slow), an_envelope()
        with InAThread(lambda: deliver(handler, envelope, given=given)) as first:
            assert slow.begun.wait(A_WHILE)
            redis_server.flush()
            slow.go_on.set()

        assert first.answer is Received.STORED
        assert "nothing was settled" in caplog.text
        run_to_the_end(given)
        assert (the_row().state, the_row().quarantined, slow.runs) == (State.DEAD, True, 1)

    def test_of_the_latest_writes_only_is_noticed_too(self, leased, given, remembers, caplog):
        """As after a restart from a snapshot, or a failover to a replica that lags behind."""
        handler, old, envelope = leased(the_effect), an_envelope(), an_envelope()
        deliver(handler, old, given=given)
        before = snapshot(remembers)
        deliver(handler, envelope, given=given)
        restore(remembers, before)

        assert deliver(handler, old, given=given) is Received.DUPLICATE, "what it still knows is known"
        assert deliver(handler, envelope, given=given) is Received.DEAD
        assert effects() == 2
        assert "has lost its memory. Messages" in caplog.text

    def test_of_how_a_run_ended_is_noticed_too(self, leased, given, remembers):
        """The older state still has it running, and its lease has ended meanwhile."""
        states = []

        def handle(message):
            states.append(snapshot(remembers))
            the_effect(message)

        handler, envelope = leased(handle), an_envelope()
        assert deliver(handler, envelope, given=given) is Received.HANDLED
        restore(remembers, states[0])

        assert deliver(handler, envelope, given=given) is Received.STORED, "it found it running"
        let_leases_end(given)
        run_to_the_end(given)
        assert (the_row().state, effects()) == (State.DEAD, 1)

    def test_is_told_of_when_it_may_come(self, leased, redis_server, redis_url, caplog):
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
