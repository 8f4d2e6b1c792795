"""The inbox's trail: the transitions of a message with process and reason; by default not those of ordinary success."""

from datetime import timedelta
from functools import partial

import pytest
from django.core.management import call_command
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from exactly_once.process.clock import utcnow
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.identity import process_name
from inbox import Lease, RetryLater
from inbox.models import InboxMessage, TrailEntry
from inbox.receiving.reading import read
from inbox.states import State
from inbox.store import lease_rows, message_rows
from tests.support import decisions
from tests.support.deliveries import (
    OPTIONS,
    admitted,
    an_envelope,
    deliver,
    drain,
    fails,
    make_due,
    options,
    run_to_the_end,
    stored_due,
    the_effect,
    the_row,
)
from tests.support.inbox_rows import delete_messages

pytestmark = [pytest.mark.every_database, pytest.mark.django_db(transaction=True)]

HANDLER = "tests.reserve_stock"
BOOM = "ValueError: no stock"
LEASE = timedelta(hours=1)


def trail_of(message_id):
    """From-state, to-state and reason of each trail entry of the message, in order."""
    entries = TrailEntry.objects.filter(message_id=message_id).order_by("pk")
    assert {(entry.process, entry.handler) for entry in entries} <= {(process_name(), HANDLER)}
    return [(entry.was, entry.became, entry.reason) for entry in entries]


@pytest.fixture
def failing(handles):
    return partial(handles, fails, name=HANDLER)


class TestFailedAttempts:
    @pytest.mark.parametrize("redelivered", [False, True])
    def test_each_failed_attempt_is_recorded_with_its_error_until_the_message_is_dead(self, failing, redelivered):
        handler, envelope = failing(), an_envelope()

        deliver(handler, envelope, redelivered=redelivered)
        run_to_the_end()

        first = (State.RECEIVED if redelivered else "", State.RETRYING, BOOM)
        assert trail_of(envelope.id) == [first, (State.RETRYING, State.RETRYING, BOOM), (State.RETRYING, State.DEAD, BOOM)]

    @pytest.mark.parametrize("store", ["database", "redis"])
    def test_each_failed_attempt_under_a_lease_is_recorded(self, failing, store, request):
        given = options(LEASE_STORE="database" if store == "database" else request.getfixturevalue("redis_url"))
        handler, envelope = failing(lease=Lease(duration=LEASE)), an_envelope()

        deliver(handler, envelope, given=given)
        make_due()
        drain(given)

        assert trail_of(envelope.id) == [(State.RUNNING, State.RETRYING, BOOM)] * 2

    def test_retry_later_is_not_recorded_as_a_failed_attempt(self, handles):
        def later(message):
            raise RetryLater(LEASE)

        envelope = an_envelope()
        deliver(handles(later, name=HANDLER), envelope)
        make_due()
        drain()

        assert the_row().state == State.RETRYING
        assert trail_of(envelope.id) == []


class TestOtherTransitions:
    def test_quarantine_and_its_override_are_recorded_with_their_reasons(self, handles):
        handler, envelope = handles(the_effect, name=HANDLER), an_envelope(created_at=utcnow() - timedelta(days=400))
        deliver(handler, envelope)
        reason = the_row().last_error

        call_command("inbox_retry", envelope.id, override_maximum_age=True, verbosity=0)

        assert trail_of(envelope.id) == [
            ("", State.DEAD, reason),
            (State.DEAD, State.RETRYING, "the maximum message age was overridden; inbox_retry"),
        ]

    def test_operator_actions_are_recorded_with_the_operators_name(self, failing):
        handler, envelope = failing(), an_envelope()
        deliver(handler, envelope)

        decisions.retry("default", the_row().pk, reason="by ann in the admin")
        decisions.skip("default", the_row().pk, "sold out", by="by ann in the admin")
        assert not decisions.retry("default", the_row().pk, reason="too late")

        assert trail_of(envelope.id)[1:] == [
            (State.RETRYING, State.RETRYING, "by ann in the admin"),
            (State.RETRYING, State.SKIPPED, "sold out; by ann in the admin"),
        ]

    def test_shedding_is_recorded_with_its_reason(self, handles):
        handler, envelope = handles(the_effect, name=HANDLER), an_envelope()

        admitted(handler, envelope, shed="too many wait")

        assert trail_of(envelope.id) == [("", State.SHED, "too many wait")]

    def test_expired_lease_is_recorded_when_another_process_takes_it(self, handles):
        handler, envelope = handles(the_effect, name=HANDLER, lease=Lease(duration=LEASE)), an_envelope()
        row = read(handler, envelope, OPTIONS).row
        for take_over in (partial(deliver, handler, envelope), drain):
            delete_messages()
            TrailEntry.objects.all().delete()
            lease_rows.lease_fresh("default", row, LEASE, LEASE)
            InboxMessage.objects.update(next_attempt_at=DatabaseTime())

            take_over()

            assert the_row().state == State.DONE
            ((was, became, reason),) = trail_of(envelope.id)
            assert (was, became) == (State.RUNNING, State.RUNNING)
            assert "its lease had ended" in reason

    def test_message_whose_handler_committed_by_itself_is_recorded_as_dead_with_its_reason(self, handles):
        def commits_at_last(message):
            if message.attempt > 1:
                connection.connection.commit()
            raise ValueError("no stock")

        envelope = an_envelope()
        deliver(handles(commits_at_last, name=HANDLER), envelope)
        make_due()
        drain()

        assert trail_of(envelope.id)[1:] == [(State.RETRYING, State.DEAD, message_rows.ABANDONED)]

    def test_refused_message_of_an_ordered_handler_is_recorded_as_dead(self, handles):
        handler = handles(the_effect, name=HANDLER, ordered=True)
        good, old = an_envelope(key="k"), an_envelope(key="k", created_at=utcnow() - timedelta(days=400))

        admitted(handler, good, old)

        assert trail_of(good.id) == []
        assert trail_of(old.id) == [("", State.DEAD, the_row(message_id=old.id).last_error)]


@pytest.mark.parametrize("stored", [False, True])
def test_handled_message_is_not_recorded_and_costs_no_statement(handles, stored):
    handler, envelope = handles(the_effect, name=HANDLER), an_envelope()

    with CaptureQueriesContext(connection) as captured:
        deliver(handler, envelope, redelivered=stored)
        if stored:
            drain()

    assert the_row().state == State.DONE
    assert trail_of(envelope.id) == []
    assert captured.captured_queries
    assert not [query for query in captured.captured_queries if TrailEntry._meta.db_table in query["sql"]]


class TestTrailOfEverything:
    @pytest.fixture(autouse=True)
    def everything(self):
        with override_settings(INBOX={"TRAIL": "all"}):
            yield

    def test_stored_message_is_recorded_as_received_and_then_done(self, handles):
        handler, fresh, stored = handles(the_effect, name=HANDLER), an_envelope(), an_envelope()
        deliver(handler, fresh)
        deliver(handler, stored, redelivered=True)

        assert trail_of(fresh.id) == [("", State.DONE, "")]
        assert trail_of(stored.id) == [("", State.RECEIVED, ""), (State.RECEIVED, State.DONE, "")]

    @pytest.mark.parametrize("stored", [False, True])
    def test_leased_message_is_recorded_as_running_and_then_done(self, handles, stored):
        handler, envelope = handles(the_effect, name=HANDLER, lease=Lease(duration=LEASE)), an_envelope()
        if stored:
            stored_due(handler, envelope)
            drain()
        else:
            deliver(handler, envelope)

        begun = [("", State.RECEIVED, ""), (State.RECEIVED, State.RUNNING, "")] if stored else [("", State.RUNNING, "")]
        assert trail_of(envelope.id) == [*begun, (State.RUNNING, State.DONE, "")]

    def test_ordered_message_is_recorded_as_waiting_for_its_predecessor(self, handles):
        handler = handles(the_effect, name=HANDLER, ordered=True)
        first, second = an_envelope(key="k"), an_envelope(key="k")
        admitted(handler, first, second)
        drain()

        assert trail_of(first.id) == [("", State.RECEIVED, ""), (State.RECEIVED, State.DONE, "")]
        assert trail_of(second.id) == [
            ("", State.WAITING, ""),
            (State.WAITING, State.RECEIVED, ""),
            (State.RECEIVED, State.DONE, ""),
        ]
