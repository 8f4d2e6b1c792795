"""What a handler's own `retry` says is what is done, in every way of running it; and for how long a message is deferred."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models import F

from inbox import Backoff, Lease, Retry
from inbox.models import InboxMessage, State
from inbox.receiving.outcomes import Received
from outbox.kernel.clock import utcnow
from tests.support.deliveries import OPTIONS, an_envelope, deliver, drain, effects, make_due, the_effect, the_row
from tests.support.loads import receive_together

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.every_database]

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


def time_until_retry(row):
    return row.next_attempt_at - utcnow()


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

    def test_one_attempt_means_that_the_first_failure_is_final(self, handles):
        assert deliver(handles(fail, retry=Retry(max_attempts=1))) is Received.DEAD

    def test_more_attempts_than_the_settings_have_are_made(self, handles):
        deliver(handles(fail, retry=Retry(max_attempts=OPTIONS.MAX_ATTEMPTS + 2)))
        for _ in range(OPTIONS.MAX_ATTEMPTS):
            run_again()
            assert the_row().state == State.RETRYING
        run_again()

        assert (the_row().state, the_row().attempts) == (State.DEAD, OPTIONS.MAX_ATTEMPTS + 2)

    @pytest.mark.parametrize("kind", [{}, {"lease": Lease()}], ids=["transaction", "lease"])
    def test_the_delays_are_those_of_the_handler(self, handles, kind):
        backoff = Backoff(base=A_MINUTE, factor=10, cap=timedelta(hours=5))
        deliver(handles(fail, retry=Retry(max_attempts=9, backoff=backoff), **kind))

        for nominal in (A_MINUTE, 10 * A_MINUTE, 100 * A_MINUTE, timedelta(hours=5)):
            assert nominal / 2 - timedelta(seconds=20) < time_until_retry(the_row()) <= nominal
            run_again()

    def test_handlers_of_one_topic_have_their_own_policies(self, handles):
        envelope = an_envelope()
        for handler in (handles(fail, retry=Retry(max_attempts=1)), handles(fail)):
            deliver(handler, envelope)

        assert set(InboxMessage.objects.values_list("state", flat=True)) == {State.DEAD, State.RETRYING}

    def test_a_message_whose_attempts_never_ended_is_dead_after_the_attempts_of_its_handler(self, handles):
        deliver(handles(the_effect, retry=Retry(max_attempts=1)))
        row = the_row()
        InboxMessage.objects.update(state=State.RECEIVED, attempts=1, settled_at=None, next_attempt_at=utcnow() - A_MINUTE)
        before = effects()

        drain()

        assert (the_row(pk=row.pk).state, effects()) == (State.DEAD, before)
        assert "never ended" in the_row().last_error
