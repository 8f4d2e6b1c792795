"""The connection is lost with the answer to a commit: a count may be wrong, but no effect is lost or doubled."""

import pytest

from inbox import Retry
from inbox.models import InboxMessage, TrailEntry
from inbox.operators import accounting
from inbox.receiving.in_hand import quarantine
from inbox.receiving.reading import read
from inbox.receiving.receive import receive
from inbox.states import Outcome, State
from inbox.store import arrivals, claims, sentinel
from tests.support.deliveries import (
    OPTIONS,
    admitted,
    an_envelope,
    deliver,
    drain,
    effects,
    in_the_order_of_their_effects,
    make_due,
    run_to_the_end,
    the_effect,
    the_row,
)
from tests.support.lost_answers import losing_the_answer
from tests.support.signals import recorded_signals

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


@pytest.mark.parametrize(
    ("most", "became", "signal"),
    [(3, State.RETRYING, "message_retrying"), (2, State.DEAD, "message_dead")],
    ids=["retrying", "dead"],
)
def test_failure_of_a_retry_that_was_not_confirmed_is_recorded_and_announced_once(
    handles, process_environment, most, became, signal
):
    def fails_again(message):
        raise ValueError(f"attempt {message.attempt}")

    handler = handles(fails_again, retry=Retry(max_attempts=most))

    def run_it():
        make_due()
        with recorded_signals(signal) as said:
            drain()
        return said

    said = losing_the_answer(
        process_environment,
        before=lambda: deliver(handler),
        call=run_it,
        written="SELECT 1 FROM inbox_inboxmessage WHERE last_error = 'ValueError: attempt 2'",
        after=(claims, "as_failed"),
    )

    row = the_row()
    assert (row.state, row.attempts, row.last_error) == (became, 2, "ValueError: attempt 2")
    assert [attempt["attempt"] for attempt in row.failures] == [1, 2]
    assert (len(said), TrailEntry.objects.filter(reason="ValueError: attempt 2").count()) == (1, 1)


class TestClaimThatWasNotConfirmed:
    """With `max_attempts=1`, a message that was never called must not be a dead letter."""

    @pytest.fixture
    def handler(self, handles):
        return handles(the_effect, ordered=True, retry=Retry(max_attempts=1))

    @staticmethod
    def store_two(handler, names):
        assert admitted(handler, *(an_envelope(biz_id=name, key="k") for name in names)) == [Outcome.STORED] * 2

    def lose(self, handler, environment, *, claimed, after):
        def prepare():
            self.store_two(handler, "01")
            drain()
            self.store_two(handler, "ab")

        written = f"SELECT 1 FROM inbox_inboxmessage WHERE biz_id = '{claimed}' AND attempts = 1"
        losing_the_answer(environment, before=prepare, call=drain, written=written, after=after)

    def test_of_a_successor_is_given_back(self, handler, process_environment):
        self.lose(handler, process_environment, claimed="b", after=(sentinel, "can_commit"))

        assert [*InboxMessage.objects.values_list("state", "attempts").order_by("id")] == [(State.DONE, 1)] * 4
        assert in_the_order_of_their_effects() == ["0", "1", "a", "b"]

    def test_of_a_due_message_gives_it_another_attempt(self, handler, process_environment):
        self.lose(handler, process_environment, claimed="a", after=(quarantine, "take"))
        run_to_the_end()

        assert the_row(biz_id="a").attempts == 2
        assert in_the_order_of_their_effects() == ["0", "1", "a", "b"]
