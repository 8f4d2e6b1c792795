"""Every message that is shed because too many wait has a row, and no other message is dropped."""

import logging
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import transaction

from inbox import Shed
from inbox.consumer.reception import Reception
from inbox.limits.shedder import shedder_of
from inbox.models import InboxMessage
from inbox.receiving.reading import read
from inbox.states import Outcome, State
from inbox.store.arrivals import begin_fresh
from tests.support.deliveries import (
    OPTIONS,
    TOPIC,
    admitted,
    an_envelope,
    at_once,
    deliver,
    effects,
    options,
    the_effect,
    the_row,
)
from tests.support.loads import a_delivery, receive_load
from tests.support.signals import recorded_signals
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, consuming, declare, length_of, send_burst

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

every_database = pytest.mark.every_database

REASON = "130 messages waited, and shedding keeps them below 100"


def shed(handler, *envelopes, given=OPTIONS, redelivered=False):
    return admitted(handler, *envelopes, given=given, redelivered=redelivered, shed=REASON)


def states():
    return dict(InboxMessage.objects.values_list("biz_id", "state"))


@contextmanager
def being_handled_elsewhere(handler, envelope):
    """Another transaction is handling this message."""
    with transaction.atomic():
        begin_fresh("default", [read(handler, envelope, OPTIONS).row], OPTIONS.DUPLICATE_TIMEOUT)
        yield


@every_database
class TestShedMessage:
    def test_each_shed_message_has_a_row_with_the_reason_and_no_effect(self, handles):
        handler = handles(the_effect)
        envelopes = [an_envelope(biz_id=f"b{number}") for number in range(3)]

        with recorded_signals("message_shed") as sent:
            assert shed(handler, *envelopes) == [Outcome.SHED] * 3

        assert effects() == 0
        for envelope in envelopes:
            row = the_row(message_id=envelope.id)
            assert (row.state, row.last_error, row.attempts, row.next_attempt_at) == (State.SHED, REASON, 0, None)
            assert row.settled_at >= row.received_at
            assert bytes(row.body) == envelope.body
        names = {"handler": handler.name, "topic": TOPIC, "reason": REASON}
        assert sent == [("message_shed", {**names, "message_id": one.id, "biz_id": one.biz_id}) for one in envelopes]

    def test_number_of_shed_messages_is_logged_in_summary_and_not_per_message(self, handles, caplog):
        handler = handles(the_effect, name="tests.views", shed=Shed(above=10))

        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                shed(handler, an_envelope())
            shedder_of(handler).record_lag(20)
            shed(handler, an_envelope(), an_envelope())
            shedder_of(handler).record_lag(20)
            shedder_of(handler).record_lag(0)
            shedder_of(handler).record_lag(0)

        assert [record.getMessage() for record in caplog.records if "shed;" in record.getMessage()] == [
            "handler tests.views: 3 messages shed; each is stored in the state shed.",
            "handler tests.views: 2 messages shed; each is stored in the state shed.",
        ]

    def test_duplicates_of_a_shed_message_are_counted_by_their_cause_and_not_run(self, handles):
        handler, envelope = handles(the_effect), an_envelope()
        shed(handler, envelope)

        assert shed(handler, envelope, redelivered=True) == [Outcome.DUPLICATE]
        assert shed(handler, envelope) == [Outcome.DUPLICATE]
        for redelivered in (False, True):
            assert deliver(handler, envelope, redelivered=redelivered) is Outcome.DUPLICATE

        assert (the_row().redeliveries, the_row().resends) == (2, 2)
        assert (effects(), the_row().state) == (0, State.SHED)

    def test_unreadable_message_is_a_dead_letter_and_not_shed(self, handles):
        handler, broken, fresh = handles(the_effect), an_envelope(body=b"{"), an_envelope()

        assert shed(handler, broken, fresh) == [Outcome.DEAD, Outcome.SHED]

        assert dict(InboxMessage.objects.values_list("message_id", "state")) == {broken.id: State.DEAD, fresh.id: State.SHED}
        assert "is not JSON" in the_row(message_id=broken.id).last_error

    def test_copies_shed_concurrently_have_one_row_per_message(self, handles):
        handler, envelopes = handles(the_effect), [an_envelope() for _ in range(40)]

        became = at_once([lambda: shed(handler, *envelopes), lambda: shed(handler, *reversed(envelopes))] * 2)

        counted = [received for part in became for received in part]
        # Of two that count at the same row at once, one is deferred.
        assert counted.count(Outcome.SHED) == 40
        assert set(counted) <= {Outcome.SHED, Outcome.DUPLICATE, Outcome.DEFERRED}
        assert set(states().values()) == {State.SHED}
        assert sum(row.duplicates for row in InboxMessage.objects.all()) == counted.count(Outcome.DUPLICATE)


def test_shedding_defers_only_the_message_being_handled_elsewhere(handles):
    handler, busy, fresh = handles(the_effect, shed=Shed(above=1)), an_envelope(), an_envelope()
    given = options(DUPLICATE_TIMEOUT=timedelta(milliseconds=50))
    shedder_of(handler).record_lag(100)
    load = [a_delivery(handler, envelope) for envelope in (fresh, busy)]

    with being_handled_elsewhere(handler, busy):
        (became,) = at_once([lambda: receive_load(load, given, by=Reception.check)])

    # A copy of the message is stored until it is known whether that is handled.
    assert became == [Outcome.SHED, Outcome.STORED]
    assert the_row(message_id=fresh.id).state == State.SHED


def test_rate_limit_does_not_delay_shedding(handles, rabbitmq_url, rabbitmq_server):
    handler = handles(the_effect, shed=Shed(above=10), rate_limit="1/h")
    given = broker_options(rabbitmq_url)
    declare(handler, given)
    send_burst(rabbitmq_url, TOPIC, ["view"] * 200)
    wait_until(lambda: length_of(rabbitmq_server, handler, given) == 200)

    with consuming([handler], given):
        wait_until(lambda: InboxMessage.objects.filter(state=State.SHED).count() >= 120)

    assert effects() <= 2
