"""The connection is lost with the answer to a commit: a count may be wrong, but no effect is lost or doubled."""

import pytest

from inbox.operators import accounting
from inbox.receiving.reading import read
from inbox.receiving.receive import receive
from inbox.states import Outcome, State
from inbox.store import arrivals, claims, sentinel
from tests.support.deliveries import OPTIONS, an_envelope, deliver, drain, effects, make_due, the_effect, the_row
from tests.support.lost_answers import losing_the_answer

pytestmark = [pytest.mark.django_db(transaction=True)]


def test_handled_message_whose_commit_was_not_confirmed_is_done(handles, process_environment):
    handler = handles(the_effect)
    answer = losing_the_answer(
        process_environment,
        before=lambda: deliver(handler, an_envelope(biz_id="first")),
        call=lambda: deliver(handler, an_envelope(biz_id="second")),
        written="SELECT 1 FROM inbox_inboxmessage WHERE biz_id = 'second'",
        after=(sentinel, "can_commit"),
    )

    assert answer is Outcome.DUPLICATE
    assert (the_row(biz_id="second").state, effects("second")) == (State.DONE, 1)


def test_batch_whose_commit_was_not_confirmed_is_done(handles, process_environment):
    handler = handles(lambda messages: [the_effect(message) for message in messages] and None, size=10)

    def receive_together(names):
        return receive(handler, [read(handler, an_envelope(biz_id=name), OPTIONS) for name in names], OPTIONS)

    losing_the_answer(
        process_environment,
        before=lambda: receive_together("xyz"),
        call=lambda: receive_together("abc"),
        written="SELECT 1 FROM inbox_inboxmessage WHERE biz_id = 'a'",
        after=(sentinel, "can_commit"),
    )

    assert {the_row(biz_id=name).state for name in "abc"} == {State.DONE}
    assert [effects(name) for name in "abc"] == [1, 1, 1]


def test_a_redelivery_whose_stored_row_was_not_confirmed_is_counted_as_its_own_duplicate(handles, process_environment):
    """The message is in the database, so it is acknowledged. Its row counts one duplicate, which is the message itself."""
    handler = handles(the_effect)
    answer = losing_the_answer(
        process_environment,
        before=lambda: deliver(handler, an_envelope(biz_id="first")),
        call=lambda: deliver(handler, an_envelope(biz_id="second"), redelivered=True),
        written="SELECT 1 FROM inbox_inboxmessage WHERE biz_id = 'second'",
        after=(arrivals, "admit"),
    )

    assert answer is Outcome.DUPLICATE
    assert (the_row(biz_id="second").state, effects("second")) == (State.RECEIVED, 0)
    assert drain() == 1
    row = the_row(biz_id="second")
    assert (row.state, row.attempts, effects("second")) == (State.DONE, 1, 1)
    assert (row.duplicates, row.redeliveries) == (1, 1)
    assert accounting.balance("default").delivered == 2 + 1


def test_failure_of_a_retry_that_was_not_confirmed_leaves_it_to_be_retried(handles, process_environment):
    def fails_again(message):
        raise ValueError(f"attempt {message.attempt}")

    handler = handles(fails_again)

    def run_it():
        make_due()
        return drain()

    losing_the_answer(
        process_environment,
        before=lambda: deliver(handler),
        call=run_it,
        written="SELECT 1 FROM inbox_inboxmessage WHERE last_error = 'ValueError: attempt 2'",
        after=(claims, "as_failed"),
    )

    assert (the_row().state, the_row().attempts, the_row().last_error) == (State.RETRYING, 2, "ValueError: attempt 2")
