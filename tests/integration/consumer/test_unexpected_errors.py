"""An unexpected error in our own code: no delivery is lost, and none is redelivered for ever without being seen."""

import pytest

from inbox.consumer import reception
from inbox.consumer.answers import Unanswered
from inbox.models import InboxMessage
from inbox.states import Outcome, State
from tests.support.deliveries import (
    an_envelope,
    effects,
    effects_by_name,
    make_due,
    options,
    run_to_the_end,
    the_effect,
    the_row,
)
from tests.support.loads import a_delivery, receive_load

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.every_database]


class Unexpected(BaseException):
    pass


@pytest.fixture(params=[Unexpected, ZeroDivisionError], ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


@pytest.fixture
def breaks(monkeypatch, kind):
    """`breaks(name)`: the function of that name raises when a worker calls it, before or `after` its work."""

    def breaks(name, *, after=False):
        work = getattr(reception, name)

        def broken(*arguments, **given):
            if after:
                work(*arguments, **given)
            raise kind("unexpected")

        monkeypatch.setattr(reception, name, broken)

    return breaks


@pytest.mark.parametrize("redelivered", [False, True], ids=["first delivery", "redelivery"])
def test_unexpected_error_is_stored_as_a_failed_attempt_with_its_traceback(handles, breaks, kind, redelivered):
    handler = handles(the_effect)
    breaks("receive")

    assert receive_load([a_delivery(handler, redelivered=redelivered)]) == [Outcome.STORED]

    row = the_row()
    assert (row.state, row.attempts, row.last_error) == (State.RETRYING, 1, f"{kind.__name__}: unexpected")
    assert "in broken" in row.traceback
    run_to_the_end()
    assert (the_row().state, effects()) == (State.DONE, 1)


def test_unexpected_error_at_the_last_attempt_makes_a_dead_letter(handles, breaks):
    breaks("receive")

    assert receive_load([a_delivery(handles(the_effect))], options(MAX_ATTEMPTS=1)) == [Outcome.DEAD]

    assert the_row().state == State.DEAD


def test_unexpected_error_after_the_commit_changes_nothing(handles, breaks):
    breaks("receive", after=True)

    assert receive_load([a_delivery(handles(the_effect))]) == [Outcome.DUPLICATE]

    assert (the_row().state, effects(), make_due()) == (State.DONE, 1, 0)


def test_unexpected_error_in_a_load_stores_every_delivery(handles, breaks):
    handler = handles(the_effect, group_commit=5)
    breaks("receive")

    load = [a_delivery(handler, an_envelope(biz_id=name)) for name in "abc"]

    assert receive_load(load) == [Outcome.STORED] * 3
    run_to_the_end()
    assert effects_by_name() == dict.fromkeys("abc", 1)


def test_delivery_whose_failure_cannot_be_stored_is_neither_acknowledged_nor_requeued(handles, breaks):
    breaks("receive")
    breaks("store_failure")

    assert receive_load([a_delivery(handles(the_effect))]) == [Outcome.UNSTORED]

    assert not InboxMessage.objects.exists()


def test_unexpected_error_in_an_ordered_load_leaves_the_load_undecided(handles, breaks):
    handler = handles(the_effect, ordered=True)
    load = [a_delivery(handler, an_envelope(biz_id=name, key="key")) for name in "abc"]
    breaks("admit")

    with pytest.raises(Unanswered) as left:
        receive_load(load)

    assert left.value.load == load
    assert left.value.seconds > 0
