"""`inbox.result()`: what is known of one message in a handler."""

from datetime import timedelta

import pytest
from django.db import connection

from inbox import Reject, result
from inbox.models import InboxMessage, Receipt
from inbox.states import State
from inbox.store import claims
from tests.support.deliveries import (
    OPTIONS,
    Slow,
    an_envelope,
    deliver,
    drain,
    fails,
    make_due,
    options,
    run_to_the_end,
    stored_due,
    the_effect,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.every_database]


def test_result_of_a_message_says_what_became_of_it_from_its_arrival_to_its_end(handles):
    handler = handles(the_effect)
    message = stored_due(handler)

    arrived = result(message.id)
    drain()
    done = result(message.id, handler=handler.name)

    assert (arrived.state, arrived.is_running, arrived.attempts) == (State.RECEIVED, False, 0)
    assert (arrived.last_attempt_at, arrived.settled_at, arrived.errors) == (None, None, ())
    assert (done.handler, done.id, done.biz_id, done.topic) == (handler.name, message.id, message.biz_id, message.topic)
    assert (done.state, done.is_running, done.attempts, done.last_error) == (State.DONE, False, 1, "")
    assert done.received_at <= done.settled_at == done.last_attempt_at


def test_result_of_a_failing_message_has_each_of_its_errors(handles):
    message = an_envelope()
    deliver(handles(fails), message)
    failing = result(message.id)
    run_to_the_end()
    dead = result(message.id)

    assert (failing.state, failing.is_running, failing.attempts) == (State.RETRYING, False, 1)
    assert failing.last_attempt_at == failing.errors[0].at
    assert (dead.state, dead.attempts, dead.error_class) == (State.DEAD, 3, "ValueError")
    assert [(one.attempt, one.error_class, one.error) for one in dead.errors] == [
        (number, "ValueError", "ValueError: no stock") for number in (1, 2, 3)
    ]
    assert all("raise ValueError" in traceback for traceback in (dead.traceback, dead.errors[0].traceback))
    assert dead.settled_at is not None


@pytest.mark.parametrize("options", [{}, {"lease": None}], ids=["in a transaction", "under a lease"])
def test_message_is_running_while_its_handler_runs(handles, options):
    slow = Slow()
    message = stored_due(handles(slow, **options))
    with slow.inside(drain):
        during = result(message.id)

    assert (during.is_running, during.attempts) == (True, 1)
    assert (result(message.id).is_running, result(message.id).state) == (False, State.DONE)


def test_retry_is_running_while_it_is_claimed_and_not_while_it_waits(handles):
    message, handler = an_envelope(), handles(fails)
    deliver(handler, message)

    assert not result(message.id).is_running
    make_due()
    assert not result(message.id).is_running
    assert claims.claim_due("default", [handler.name], OPTIONS.REDELIVERY_AFTER)
    assert result(message.id).is_running


def test_run_that_is_longer_than_its_claim_is_running_if_the_database_says_who_locks_a_row(handles):
    slow = Slow()
    message = stored_due(handles(slow))
    with slow.inside(lambda: drain(options(REDELIVERY_AFTER=timedelta(microseconds=1)))):
        assert result(message.id).is_running == (connection.vendor == "postgresql")

    assert not result(message.id).is_running


def test_message_of_several_handlers_needs_the_name_of_one(handles):
    def refuses(message):
        raise Reject("no")

    message = an_envelope()
    one, other = handles(the_effect), handles(refuses)
    deliver(one, message)
    deliver(other, message)

    with pytest.raises(ValueError, match=rf"Several handlers .*: {one.name}, {other.name}\."):
        result(message.id)
    assert result(message.id, handler=one.name).state is State.DONE
    dead = result(message.id, handler=other.name)
    assert (dead.state, dead.last_error) == (State.DEAD, "rejected: no")
    assert dead.settled_at is not None  # also on its first delivery, whose row is inserted as dead


def test_message_without_history_is_known_by_its_receipt_if_that_has_its_id(handles):
    handler, named, own = handles(the_effect), an_envelope(), an_envelope(biz_id="")
    deliver(handler, named)
    deliver(handler, own)
    InboxMessage.objects.all().delete()

    assert result(named.id) is None
    known = result(own.id)
    assert (known.handler, known.state, known.attempts) == (handler.name, None, 0)
    assert known.received_at == Receipt.objects.get(biz_id=own.id).received_at


def test_message_of_which_one_handler_has_only_a_receipt_is_that_of_several(handles):
    one, other, message = handles(the_effect), handles(fails, on_dead=the_effect), an_envelope(biz_id="")
    for handler in (one, other):
        deliver(handler, message)
    InboxMessage.objects.filter(handler=one.name).delete()

    with pytest.raises(ValueError, match=rf": {one.name}, {other.name}\."):
        result(message.id)
    run_to_the_end()
    InboxMessage.objects.all().delete()
    assert result(message.id, handler=other.name).state is None


@pytest.mark.parametrize("message_id", ["", "unknown"])
def test_nothing_is_known_of_a_message_that_has_not_arrived(handles, message_id):
    deliver(handles(the_effect), an_envelope())
    assert result(message_id) is None
