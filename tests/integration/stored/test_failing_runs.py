"""A stored message that fails is locked until its failure is in its row, however long it ran."""

from datetime import timedelta

import pytest

from exactly_once.process.clock import utcnow
from inbox import Ordered, Reject, RetryLater
from inbox.models import InboxMessage
from inbox.states import State
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import (
    InAThread,
    Slow,
    admitted,
    an_envelope,
    drain,
    make_due,
    options,
    run_to_the_end,
    stored_due,
    the_effect,
    the_row,
)
from tests.support.open_transactions import lock_waits
from tests.support.sql import another_session, executed
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True)]

OVERDUE = options(REDELIVERY_AFTER=timedelta(milliseconds=1))
"""The claim of a run has ended as soon as it has begun."""


class TestRowOfARunThatFails:
    @pytest.fixture
    def row_when_it_is_free(self, handles):
        """The row as the first transaction finds it that waits for the end of a run: state, attempts, has it an error?"""

        def found(error, **ordered):
            slow = Slow(error)
            admitted(handles(slow, **ordered), *(an_envelope(biz_id=name, key="k") for name in "ab"))
            sql = "SELECT state, attempts, last_error <> '' FROM inbox_inboxmessage WHERE biz_id = 'a' FOR UPDATE"
            with (
                another_session(autocommit=True) as beside,
                slow.inside(lambda: drain(OVERDUE)),
                InAThread(lambda: beside.execute(sql).fetchone()) as waiting,
            ):
                wait_until(lambda: lock_waits("locktype = 'transactionid'"))
                slow.go_on.set()
            return waiting.answer

        return found

    def test_has_the_error(self, row_when_it_is_free):
        assert row_when_it_is_free(ValueError("no stock")) == (State.RETRYING, 1, True)

    def test_is_a_dead_letter_that_its_key_passes(self, row_when_it_is_free):
        assert row_when_it_is_free(Reject("no stock"), ordered=Ordered(on_dead="skip")) == (State.DEAD, 1, True)
        assert the_row(biz_id="b").attempts == 1

    def test_is_deferred_without_an_attempt(self, row_when_it_is_free):
        assert row_when_it_is_free(RetryLater(timedelta(hours=1))) == (State.RETRYING, 0, True)


def test_retry_later_gives_up_by_the_age_of_the_message_after_a_failed_statement(handles):
    def waits_after_an_error(message):
        try:
            executed("SELECT 1 / 0")
        except Exception as error:
            raise RetryLater(give_up_after=timedelta(hours=1)) from error

    stored_due(handles(waits_after_an_error))
    InboxMessage.objects.update(received_at=utcnow() - timedelta(hours=2))
    drain()
    assert (the_row().state, "given up 2:00:0" in the_row().last_error) == (State.DEAD, True)


@pytest.mark.every_database
def test_failure_is_stored_without_the_effect_of_its_run_and_the_next_run_has_it(handles):
    def fails_twice(message):
        the_effect(message)
        if message.attempt < 3:
            raise ValueError(f"attempt {message.attempt}")

    stored_due(handles(fails_twice))
    drain()
    assert (the_row().state, the_row().last_error, Effect.objects.count()) == (State.RETRYING, "ValueError: attempt 1", 0)
    make_due()
    run_to_the_end()
    assert (the_row().state, [*Effect.objects.values_list("detail", flat=True)]) == (State.DONE, ["3"])
