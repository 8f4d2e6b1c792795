"""The trail: an entry for every recorded transition, with the old state, the new state, the process and the reason."""

from datetime import timedelta
from functools import partial

import pytest
from django.db import connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.identity import process_name
from outbox import cancel, publish_now, reschedule
from outbox.models import TrailEntry
from outbox.states import State
from outbox.store import settling
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.relaying import connected, in_state, one_pass, published, published_many, row_of, set_columns, state_of

pytestmark = [pytest.mark.every_database, pytest.mark.django_db(transaction=True)]

HOUR = timedelta(hours=1)


def trail_of(message):
    """The old state, the new state and the reason of each of its entries, in order."""
    entries = TrailEntry.objects.filter(message_id=message.id).order_by("pk")
    assert {entry.process for entry in entries} <= {process_name()}
    assert all(entry.at <= timezone.now() for entry in entries)
    return [(entry.was, entry.became, entry.reason) for entry in entries]


class TestDecisions:
    def test_each_decision_of_one_transaction_is_recorded(self):
        message = published(delay=HOUR)

        with transaction.atomic():
            reschedule(message.id, delay=2 * HOUR)
            publish_now(message.id, by="a clerk")
            cancel(message.id)

        assert trail_of(message) == [
            (State.SCHEDULED, State.SCHEDULED, "reschedule(); due in 2:00:00"),
            (State.SCHEDULED, State.READY, "publish_now() by a clerk; due now"),
            (State.READY, State.CANCELLED, "cancel()"),
        ]


def settled(**outcome):
    return settling.settle("default", settling.Settlement(**outcome))


def failure(*messages, retry_after=None, **options):
    positions = [row_of(message).pk for message in messages]
    return settling.Failure(positions=positions, error="no such queue", retry_after=retry_after, **options)


class TestRelay:
    def test_retry_death_and_expiry_are_recorded(self):
        retried, dead, expired = published(), published(), published()

        settled(failed=[failure(retried, retry_after=HOUR), failure(dead)], expired=[row_of(expired).pk])

        assert trail_of(retried) == [(State.READY, State.RETRYING, "no such queue")]
        assert trail_of(dead) == [(State.READY, State.DEAD, "no such queue")]
        assert trail_of(expired) == [(State.READY, State.EXPIRED, "")]

    def test_publishing_waiting_and_promotion_leave_no_entry_by_default(self):
        """By default publishing costs no more statements than without a trail."""
        with CaptureQueriesContext(connection) as captured:
            message, waiting, due = published(), published(), in_state(State.SCHEDULED)
            settled(published=[row_of(message).pk], waiting=[row_of(waiting).pk])
            settling.make_scheduled_ready("default", 10)

        assert state_of(message) == State.PUBLISHED
        assert state_of(due) == State.READY
        assert not [query for query in captured.captured_queries if TrailEntry._meta.db_table in query["sql"]]
        changing = ("UPDATE", "WITH moved AS (DELETE")
        assert len([query for query in captured.captured_queries if query["sql"].startswith(changing)]) == 4

    def test_attempts_past_max_attempts_leave_no_entry(self):
        message = published()
        with FakeAmqpPeer() as peer, connected(peer.url) as transport:
            peer.script = lambda sent: [partial(peer.return_message, sent), partial(peer.ack, sent)]
            for attempts in (0, 1, 2, 500):
                set_columns(message, state=State.READY, attempts=attempts)
                one_pass(transport, MAX_ATTEMPTS=2)

        assert row_of(message).attempts == 501
        assert [(was, became) for was, became, _ in trail_of(message)] == [(State.READY, State.RETRYING)] * 2


class TestTrailAll:
    @pytest.fixture(autouse=True)
    def everything(self):
        with override_settings(OUTBOX={"TRAIL": "all"}):
            yield

    def test_trail_all_records_every_transition_of_a_message(self):
        message = published(delay=HOUR)
        set_columns(message, available_at=DatabaseTime())
        settling.make_scheduled_ready("default", 10)
        settled(failed=[failure(message, retry_after=timedelta(), matters=False)])
        settling.make_retrying_ready("default", 10)
        settled(waiting=[row_of(message).pk])
        set_columns(message, key="k")
        settling.release_waiting("default", keys=10, most=10)
        settled(published=[row_of(message).pk])

        assert trail_of(message) == [
            ("", State.SCHEDULED, ""),
            (State.SCHEDULED, State.READY, ""),
            (State.READY, State.RETRYING, "no such queue"),
            (State.RETRYING, State.READY, ""),
            (State.READY, State.WAITING, ""),
            (State.WAITING, State.READY, ""),
            (State.READY, State.PUBLISHED, ""),
        ]

    def test_trail_all_records_every_message_of_publish_many(self):
        messages = published_many(12, delay=lambda n: HOUR if n % 2 else None)

        for n, message in enumerate(messages):
            assert trail_of(message) == [("", State.SCHEDULED if n % 2 else State.READY, "")]
