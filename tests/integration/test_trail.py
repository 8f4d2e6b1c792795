"""The trail: every transition that matters to a person, from which state, to which, in whose hands and why."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.management import call_command
from django.db import transaction
from django.utils import timezone

from outbox import cancel, publish_now, reschedule, store
from outbox.kernel.identity import process_name
from outbox.models import State, TrailEntry
from tests.relaying import published, row_of, set_columns

pytestmark = [pytest.mark.every_database, pytest.mark.django_db(transaction=True)]

HOUR = timedelta(hours=1)


def trail_of(message):
    """From, to and reason of each of its entries, in their order."""
    entries = TrailEntry.objects.filter(message_id=message.id).order_by("pk")
    assert {entry.process for entry in entries} <= {process_name()}
    assert all(entry.at <= timezone.now() for entry in entries)
    return [(entry.was, entry.became, entry.reason) for entry in entries]


def in_state(state, **options):
    message = published(**options)
    set_columns(message, state=state)
    return message


class TestWhatOthersDecide:
    @pytest.mark.parametrize("state", store.CANCELLABLE)
    def test_cancelling_tells_which_state_it_was(self, state):
        message = in_state(state)

        cancel(message.id)

        assert trail_of(message) == [(state, State.CANCELLED, "cancel() by the business")]

    def test_several_decisions_in_one_transaction_each_leave_theirs(self):
        message = published(delay=HOUR)

        with transaction.atomic():
            reschedule(message.id, delay=2 * HOUR)
            publish_now(message.id)
            cancel(message.id)

        assert trail_of(message) == [
            (State.SCHEDULED, State.SCHEDULED, "reschedule() by the business; due in 2:00:00"),
            (State.SCHEDULED, State.READY, "publish_now() by the business; due now"),
            (State.READY, State.CANCELLED, "cancel() by the business"),
        ]

    def test_what_is_rolled_back_leaves_nothing(self):
        message = published(delay=HOUR)

        with transaction.atomic():
            cancel(message.id)
            transaction.set_rollback(True)

        assert trail_of(message) == []

    def test_what_is_too_late_leaves_nothing(self):
        message = in_state(State.PUBLISHED)

        assert not cancel(message.id)
        assert not reschedule(message.id, delay=HOUR)
        assert not store.requeue("default", row_of(message).pk)

        assert trail_of(message) == []

    @pytest.mark.parametrize("state", store.REQUEUEABLE)
    def test_requeueing_tells_who_did_it(self, state):
        message = in_state(state)

        call_command("outbox_requeue", str(message.id), "--retrying", verbosity=0)

        assert trail_of(message) == [(state, State.READY, "outbox_requeue")]
