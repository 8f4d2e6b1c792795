"""Duplicates are visible: each is counted by its cause, and one with other content is stored for an operator to compare."""

import re
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.urls import reverse

from exactly_once.conf.app_options import AlertOptions
from exactly_once.models import AuditEntry
from inbox.models import InboxMessage
from inbox.operators.conditions import conditions
from inbox.states import Outcome
from outbox.models import OutboxMessage
from outbox.states import RESTORE
from outbox.states import State as OutboxState
from outbox.store import decision_rows
from tests.support.admin_pages import said, staff_client
from tests.support.deliveries import (
    OPTIONS,
    TOPIC,
    an_envelope,
    deliver,
    drain,
    effects,
    run_to_the_end,
    the_effect,
    the_row,
)
from tests.support.inbox_rows import make_older
from tests.support.joins import TOPICS, comes, report
from tests.support.relaying import Queue, connected, one_pass, published, row_of, state_of
from tests.support.signals import recorded_signals
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, consuming, declare, send

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]


def causes(**lookup):
    row = the_row(**lookup)
    business = row.duplicates - row.redeliveries - row.resends - row.replays
    return {"redelivery": row.redeliveries, "resend": row.resends, "replay": row.replays, "business": business}


def only(**counted):
    return {"redelivery": 0, "resend": 0, "replay": 0, "business": 0, **counted}


def a_booking(night, booking=7, **attributes):
    return an_envelope({"booking": booking, "night": night}, **attributes)


@pytest.mark.every_database
class TestDuplicateCause:
    @pytest.mark.parametrize("redelivered", [False, True])
    def test_second_message_with_the_same_biz_id_counts_as_a_business_duplicate(self, handles, redelivered):
        handler = handles(the_effect)
        deliver(handler, an_envelope(biz_id="order-1"))

        deliver(handler, an_envelope(biz_id="order-1"), redelivered=redelivered)

        assert causes() == only(business=1)

    def test_duplicate_without_message_id_counts_as_business_unless_redelivered(self, handles):
        handler, envelope = handles(the_effect), an_envelope(id="", biz_id="order-1")
        deliver(handler, envelope)

        deliver(handler, envelope)
        deliver(handler, envelope, redelivered=True)

        assert causes() == only(redelivery=1, business=1)

    @pytest.mark.parametrize("redelivered", [False, True])
    def test_duplicate_of_an_unreadable_message_is_counted_by_its_cause(self, handles, redelivered):
        handler, envelope = handles(the_effect), an_envelope(body=b"not JSON")
        deliver(handler, envelope)

        assert deliver(handler, envelope, redelivered=redelivered) is Outcome.DUPLICATE

        assert causes() == only(**{"redelivery" if redelivered else "resend": 1})

    def test_every_duplicate_is_counted_under_exactly_one_cause(self, handles):
        handler, envelope = handles(the_effect), an_envelope(biz_id="order-1")
        deliver(handler, envelope)

        with recorded_signals("duplicate_suppressed", "conflicting_duplicate") as sent:
            for _ in range(2):
                assert deliver(handler, envelope, redelivered=True) is Outcome.DUPLICATE
                deliver(handler, envelope)
                deliver(handler, envelope._replace(replayed=True))
                deliver(handler, an_envelope(biz_id="order-1"))

        names = {"handler": handler.name, "topic": TOPIC, "message_id": envelope.id, "biz_id": envelope.biz_id}
        assert sent[0] == ("duplicate_suppressed", {**names, "cause": "redelivery"})
        assert [arguments["cause"] for _, arguments in sent] == ["redelivery", "resend", "replay", "business"] * 2
        assert causes() == {"redelivery": 2, "resend": 2, "replay": 2, "business": 2}
        row = the_row()
        assert (row.duplicates, row.conflicts, row.conflicting_id, row.conflicting_at) == (8, 0, "", None)
        assert effects() == 1


class TestOnTheWire:
    """With a real relay, a real broker and the real consumer."""

    def test_restored_dead_letter_that_reached_some_queues_counts_as_replay(self, handles, rabbitmq_url):
        """One of its two queues is full, so the broker refuses it, although the other queue has it."""
        handler, given = handles(the_effect), broker_options(rabbitmq_url)
        declare(handler, given)
        full = {"x-max-length": 1, "x-overflow": "reject-publish", "x-queue-type": "classic"}
        with connected(rabbitmq_url) as transport, consuming([handler], given):
            with Queue(rabbitmq_url, TOPIC, name="full", **full) as other:
                send(rabbitmq_url, TOPIC, {}, message_id="fills-it")
                wait_until(effects)
                message = published(biz_id="order-1", headers={"tenant": "acme"})
                one_pass(transport, MAX_ATTEMPTS=1)
                assert state_of(message) == OutboxState.DEAD
                wait_until(lambda: effects("order-1"))
                other.take_all()

            assert decision_rows.decide("default", RESTORE, [OutboxMessage.objects.get().pk])
            one_pass(transport)
            wait_until(lambda: the_row(biz_id="order-1").duplicates)

        assert state_of(message) == OutboxState.PUBLISHED
        assert causes(biz_id="order-1") == only(replay=1)
        assert effects("order-1") == 1


def test_replay_header_is_set_by_restoring_only_and_not_passed_to_the_handler(handles, settings):
    """The header belongs to the outbox and is not one of the publisher's."""
    got = []
    handles(got.append)
    settings.OUTBOX = {"BROKER_URL": "local://"}
    message = published(headers={"tenant": "acme"})
    assert row_of(message).headers == {"tenant": "acme"}
    OutboxMessage.objects.update(state=OutboxState.DEAD)
    assert decision_rows.decide("default", RESTORE, [OutboxMessage.objects.get().pk])
    assert row_of(message).headers == {"tenant": "acme", "cloudEvents:replay": "operator"}

    with connected("local://") as transport:
        one_pass(transport)
    (stored,) = InboxMessage.objects.all()
    assert drain() == 1

    assert (stored.message_id, stored.headers) == (str(message.id), {"tenant": "acme"})
    assert [(handled.id, handled.headers) for handled in got] == [(str(message.id), {"tenant": "acme"})]


class TestRunAsItsOwnMessage:
    """A message with the biz-id of an earlier one and other content may be another fact: an operator runs it."""

    @pytest.fixture
    def operator(self):
        return staff_client("view_inboxmessage", "run_conflicting_inboxmessage", "view_overview", "view_alert")

    @pytest.fixture
    def nights(self):
        """Those of the bookings that the handler was called with."""
        return []

    @pytest.fixture
    def handler(self, handles, nights):
        return handles(lambda message: nights.append(message.payload["night"]), biz_id="booking")

    def run_it(self, client, row, *, meanwhile=lambda: None):
        url, data = reverse("admin:inbox_inboxmessage_changelist"), {"action": "run_conflicting", "_selected_action": [row.pk]}
        asked = client.post(url, data).content.decode()
        hidden = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', asked))
        meanwhile()
        ((level, words),) = said(client.post(url, {**hidden, **data, "confirmed": "yes", "reason": "two nights"}, follow=True))
        return level, words

    def test_content_that_arrives_while_the_operator_is_asked_is_not_run(self, handler, nights, operator):
        for night in (1, 2):
            deliver(handler, a_booking(night))

        level, words = self.run_it(operator, the_row(), meanwhile=lambda: deliver(handler, a_booking(3)))
        drain()

        assert (level, "has arrived meanwhile" in words) == ("error", True)
        assert nights == [1]
        assert self.run_it(operator, the_row())[0] == "success"
        drain()
        assert nights == [1, 3]

    def test_other_fact_under_the_same_biz_id_is_run_once_with_its_own_headers(self, handles, operator):
        given = []
        handler = handles(given.append, biz_id="booking")
        deliver(handler, a_booking(1, headers={"tenant": "a"}))
        other = a_booking(2, headers={"tenant": "b"}, key="k")
        deliver(handler, other)
        row = the_row()
        assert [message.payload["night"] for message in given] == [1]

        assert self.run_it(operator, row)[0] == "success"
        drain()
        deliver(handler, other, redelivered=True)  # and the broker delivers it once more
        run_to_the_end()

        assert [message.payload["night"] for message in given] == [1, 2]
        assert (given[1].id, given[1].biz_id, given[1].key, given[1].headers) == (other.id, "7", "k", {"tenant": "b"})
        assert given[1].created_at == other.created_at
        entry = AuditEntry.objects.get()
        assert (entry.action, entry.object_id) == ("run_conflicting", row.message_id)

    def test_content_that_was_run_is_a_duplicate_when_its_publisher_resends_it(self, handler, operator, caplog):
        deliver(handler, a_booking(1))
        other = a_booking(2)
        deliver(handler, other)
        assert "correct biz_id= of the handler" in caplog.text
        self.run_it(operator, the_row())
        drain()
        caplog.clear()

        deliver(handler, other)
        deliver(handler, a_booking(2))
        run_to_the_end()

        own = the_row(biz_id__startswith="edited:")
        assert (own.duplicates, own.resends, own.conflicts) == (2, 1, 0)
        assert (the_row(biz_id="7").duplicates, the_row(biz_id="7").conflicts) == (0, 0)
        assert "other content" not in caplog.text

    def test_conflict_with_content_that_was_run_meanwhile_is_cleared_and_not_run_again(self, handler, nights, operator):
        """Its second delivery may be counted before the first decision is committed."""
        for night in (1, 2):
            deliver(handler, a_booking(night))
        conflicting = InboxMessage.objects.filter(pk=the_row().pk)
        (before,) = conflicting.values("conflicts", "duplicates", "conflicting_attributes")
        self.run_it(operator, the_row())
        drain()
        conflicting.update(**before)

        level, words = self.run_it(operator, conflicting.get())
        drain()

        assert (level, "it was run" in words) == ("warning", True)
        assert nights == [1, 2]
        assert conflicting.filter(conflicts=0, duplicates=0, conflicting_attributes__isnull=True).exists()
        assert the_row(biz_id__startswith="edited:").duplicates == 1

    def test_it_is_kept_beside_an_old_message_and_its_copies_have_no_second_effect(self, handler, nights, operator):
        deliver(handler, a_booking(1))
        make_older(InboxMessage.objects.all(), OPTIONS.RETENTION + timedelta(days=1))
        other = a_booking(2)
        deliver(handler, other)

        call_command("exactly_once_purge")
        assert self.run_it(operator, the_row(biz_id="7"))[0] == "success"
        drain()
        call_command("exactly_once_purge")
        deliver(handler, other, redelivered=True)
        run_to_the_end()
        assert nights == [1, 2]

        make_older(InboxMessage.objects.all(), OPTIONS.RETENTION + timedelta(days=1))
        call_command("exactly_once_purge")
        assert not InboxMessage.objects.filter(biz_id="7").exists()

    def test_ordered_handler_runs_it_after_the_open_messages_of_its_key(self, handles, nights, operator):
        handler = handles(lambda message: nights.append(message.payload["night"]), biz_id="booking", ordered=True)
        for booking, night in ((7, 1), (7, 2), (8, 3)):
            deliver(handler, a_booking(night, booking, key="k"))
        self.run_it(operator, the_row(biz_id="7"))
        run_to_the_end()

        assert nights == [1, 3, 2]

    def test_overview_and_alert_name_the_handler_until_it_is_run(self, handler, operator):
        for night in (1, 2):
            deliver(handler, a_booking(night))

        def needs_attention():
            overview = operator.get(reverse("admin:exactly_once_overview_changelist")).content.decode()
            return "got different content under its biz-id" in overview, bool(
                conditions("default", AlertOptions()).get(("conflicts", handler.name))
            )

        assert needs_attention() == (True, True)
        self.run_it(operator, the_row())
        assert needs_attention() == (False, False)

    def test_message_of_a_run_of_a_join_is_not_run_by_itself(self, handles, operator, joins):
        joins(report)
        comes(TOPICS[0], number=1)
        comes(TOPICS[0], number=2)
        level, words = self.run_it(operator, the_row(topic=TOPICS[0]))
        assert (level, "one message of each topic" in words) == ("error", True)
