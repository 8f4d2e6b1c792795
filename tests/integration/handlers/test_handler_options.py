"""What a handler's own `retry` says is what is done, in every way of running it; and for how long a message is deferred."""

from datetime import timedelta

import pytest
from django.db.models import F

from exactly_once.process.clock import utcnow
from exactly_once.sql.days import LIVE
from inbox import Backoff, Lease, Retry, RetryLater
from inbox.errors import NotCallable
from inbox.models import InboxMessage, TrailEntry
from inbox.states import Outcome, State
from tests.support import decisions
from tests.support.deliveries import (
    OPTIONS,
    an_envelope,
    deliver,
    drain,
    effects,
    make_due,
    options,
    stored_due,
    the_effect,
    the_row,
    time_until_retry,
)
from tests.support.loads import receive_together

pytestmark = pytest.mark.django_db(transaction=True)

A_MINUTE = timedelta(minutes=1)
KINDS = {
    "single": {},
    "ordered": {"ordered": True},
    "group_commit": {"group_commit": 5},
    "batch": {"size": 5},
    "lease": {"lease": Lease()},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


def fail(message):
    raise ValueError("no")


def arrived_before(time):
    """As if the message had arrived that long before it did."""
    InboxMessage.objects.update(received_at=F("received_at") - time)


def run_again():
    make_due()
    return drain()


class TestRetry:
    @every_kind
    def test_a_message_is_dead_after_the_attempts_of_its_handler(self, handles, kind):
        receive_together(handles(fail, retry=Retry(max_attempts=2), **kind), [an_envelope(key="customer-4")])

        while the_row().state != State.DEAD:
            run_again()

        assert (the_row().attempts, OPTIONS.MAX_ATTEMPTS) == (2, 3)

    @pytest.mark.parametrize("kind", [{}, {"lease": Lease()}], ids=["transaction", "lease"])
    def test_the_delays_are_those_of_the_handler(self, handles, kind):
        backoff = Backoff(base=A_MINUTE, factor=10, cap=timedelta(hours=5))
        deliver(handles(fail, retry=Retry(max_attempts=9, backoff=backoff), **kind))

        for nominal in (A_MINUTE, 10 * A_MINUTE, 100 * A_MINUTE, timedelta(hours=5)):
            assert nominal / 2 - timedelta(seconds=20) < time_until_retry(the_row()) <= nominal
            run_again()

    def test_a_message_whose_attempts_never_ended_is_dead_after_one_more_than_its_handler_has(self, handles):
        deliver(handles(the_effect, retry=Retry(max_attempts=1)))
        row = the_row()
        InboxMessage.objects.update(
            state=State.RECEIVED, day=LIVE, attempts=2, settled_at=None, next_attempt_at=utcnow() - A_MINUTE
        )
        before = effects()

        drain()

        assert (the_row(pk=row.pk).state, effects()) == (State.DEAD, before)
        assert "never ended" in the_row().last_error


class TestRetryOfAMessage:
    @every_kind
    def test_a_message_has_the_attempts_that_the_function_returns_for_it(self, handles, kind):
        handler = handles(fail, retry=lambda message: Retry(max_attempts=message.payload["attempts"]), **kind)
        few, many = an_envelope({"attempts": 1}, key="a"), an_envelope({"attempts": 5}, key="b")
        receive_together(handler, [few])
        receive_together(handler, [many])
        while InboxMessage.objects.exclude(state=State.DEAD).exists():
            run_again()

        assert [the_row(message_id=one.id).attempts for one in (few, many)] == [1, 5]

    @pytest.mark.parametrize("kind", [{}, {"lease": Lease()}], ids=["transaction", "lease"])
    def test_attempts_that_never_ended_are_bounded_by_it(self, handles, kind):
        handler = handles(the_effect, retry=lambda message: Retry(max_attempts=1), **kind)
        stored_due(handler)
        InboxMessage.objects.update(attempts=2)
        drain()

        assert (the_row().state, effects()) == (State.DEAD, 0)

    @pytest.mark.parametrize("returned", [None, KeyError("attempts"), SystemExit()], ids=repr)
    def test_the_settings_apply_and_a_line_says_so_if_the_function_fails(self, handles, caplog, returned):
        def retry(message):
            if returned is not None:
                raise returned

        deliver(handles(fail, retry=retry))
        while the_row().state != State.DEAD:
            run_again()

        assert the_row().attempts == OPTIONS.MAX_ATTEMPTS
        assert f"retry= failed for message {the_row().message_id}, and the settings of INBOX apply" in caplog.text

    def test_an_async_function_is_refused(self, handles):
        async def retry(message): ...

        with pytest.raises(NotCallable, match=r"The retry .*retry.* is async"):
            handles(fail, retry=retry)


class TestExceptions:
    @pytest.fixture
    def raising(self, handles):
        """A handler that raises the exceptions of this list, the last one again and again, and the messages it gets alone."""

        def register(*errors, retry, **kind):
            left = list(errors)

            def handle(given):
                raise left.pop(0) if len(left) > 1 else left[0]

            return handles(handle, retry=retry, **kind)

        return register

    @every_kind
    def test_a_message_is_dead_at_once_after_an_exception_of_dead_on(self, raising, kind):
        handler = raising(KeyError("no such order"), retry=Retry(max_attempts=9, dead_on=[LookupError]), **kind)

        receive_together(handler, [an_envelope(key="customer-4")])
        run_again()

        assert (the_row().state, the_row().attempts, the_row().last_error) == (State.DEAD, 1, "KeyError: 'no such order'")

    @every_kind
    def test_an_exception_of_retry_on_has_its_own_attempts_and_delays(self, raising, kind):
        timeouts = Retry(max_attempts=4, backoff=Backoff(base=timedelta(hours=50)))
        handler = raising(ConnectionResetError(), retry=Retry(max_attempts=2, retry_on={ConnectionError: timeouts}), **kind)

        receive_together(handler, [an_envelope(key="customer-4")])
        run_again()
        waits = time_until_retry(the_row())
        while the_row().state != State.DEAD:
            run_again()

        assert waits > timedelta(hours=20)
        assert the_row().attempts == 4

    def test_a_message_that_fails_with_another_exception_has_the_attempts_of_its_handler(self, raising):
        retry = Retry(max_attempts=3, retry_on={TimeoutError: Retry(max_attempts=9)})
        deliver(raising(TimeoutError(), TimeoutError(), ValueError("other"), retry=retry))

        run_again()
        run_again()

        assert (the_row().state, the_row().attempts) == (State.DEAD, 3)

    def test_a_message_whose_attempts_never_ended_has_one_more_than_the_most_attempts_of_all_policies(self, raising):
        deliver(raising(TimeoutError(), retry=Retry(max_attempts=1, retry_on={TimeoutError: Retry(max_attempts=3)})))
        InboxMessage.objects.update(attempts=4, next_attempt_at=utcnow() - A_MINUTE)

        drain()

        assert (the_row().state, the_row().attempts) == (State.DEAD, 4)


class TestDeferral:
    @pytest.fixture
    def later(self, handles):
        """A handler that always raises RetryLater with these arguments."""

        def register(*arguments, kind=None, **options):
            def handle(message):
                raise RetryLater(*arguments, **options)

            return handles(handle, name="tests.later", **(kind or {}))

        return register

    @pytest.mark.parametrize("kind", [{}, {"lease": Lease()}], ids=["transaction", "lease"])
    def test_the_error_says_how_long_ago_the_message_arrived(self, later, caplog, kind):
        caplog.set_level("INFO", logger="inbox")
        deliver(later(A_MINUTE, "out of stock", kind=kind))
        assert the_row().last_error == "deferred: out of stock"

        arrived_before(timedelta(hours=26, seconds=0.5))
        run_again()

        assert the_row().last_error.startswith("deferred, 1 day, 2:00:0")
        assert the_row().last_error.endswith(" after it arrived: out of stock")
        assert the_row().last_error in caplog.text

    @pytest.mark.parametrize("kind", [{}, {"lease": Lease()}], ids=["transaction", "lease"])
    def test_a_message_is_given_up_when_it_arrived_too_long_ago(self, later, kind):
        deliver(later(A_MINUTE, "out of stock", give_up_after=timedelta(hours=2), kind=kind))
        arrived_before(timedelta(hours=1))
        run_again()
        assert (the_row().state, the_row().attempts) == (State.RETRYING, 0)

        arrived_before(timedelta(hours=1))
        run_again()

        row = the_row()
        assert row.state == State.DEAD
        assert row.last_error.startswith("given up 2:00:0")
        assert "give_up_after=datetime.timedelta(seconds=7200)" in row.last_error
        assert row.last_error.endswith(": out of stock")
        assert TrailEntry.objects.get(became=State.DEAD).reason == row.last_error

    def test_the_last_delay_ends_when_the_time_is_over(self, later):
        deliver(later(timedelta(hours=5), give_up_after=timedelta(hours=6)))
        arrived_before(timedelta(hours=5))

        run_again()

        assert timedelta(minutes=59) < time_until_retry(the_row()) <= timedelta(hours=1)

    def test_a_fresh_message_is_deferred_even_for_longer_than_it_may_wait(self, later):
        assert deliver(later(timedelta(hours=5), give_up_after=A_MINUTE)) is Outcome.STORED

        assert timedelta(seconds=50) < time_until_retry(the_row()) <= A_MINUTE

    def test_a_retry_by_an_operator_runs_it_again(self, handles):
        answers = [RetryLater(give_up_after=A_MINUTE), RetryLater(give_up_after=A_MINUTE)]

        def handle(message):
            if answers:
                raise answers.pop()
            the_effect(message)

        deliver(handles(handle))
        arrived_before(timedelta(hours=1))
        run_again()
        assert the_row().state == State.DEAD

        assert decisions.retry("default", the_row().pk)
        drain()

        assert (the_row().state, effects()) == (State.DONE, 1)

    def test_the_delay_of_a_deferral_without_one_is_that_of_the_handler(self, handles):
        def handle(message):
            raise RetryLater

        deliver(
            handles(handle, retry=Retry(backoff=Backoff(base=A_MINUTE))),
            given=options(BACKOFF=(timedelta(hours=9), timedelta(hours=9))),
        )

        assert timedelta(seconds=20) < time_until_retry(the_row()) <= A_MINUTE

    @pytest.mark.parametrize("wrong", [30, "1 day", timedelta(), -A_MINUTE], ids=repr)
    def test_an_invalid_bound_is_a_failed_attempt_that_says_why(self, later, wrong):
        deliver(later(A_MINUTE, give_up_after=wrong))

        assert (the_row().state, the_row().attempts) == (State.RETRYING, 1)
        assert "give_up_after" in the_row().last_error
