"""Processes that run handlers delete what is older than its retention, without a scheduled command."""

from datetime import timedelta
from functools import partial

import pytest
from django.core.management import call_command
from django.test import override_settings

from exactly_once.models import AuditEntry
from exactly_once.process.clock import monotonic
from exactly_once.process.loop import StopRequest
from exactly_once.sql.now import DatabaseTime
from exactly_once.wire.formats import CELERY_TOPICS, WEBHOOK_HANDLERS
from exactly_once.wire.text import NAME_LENGTH
from inbox import Retry
from inbox.conf import inbox_options
from inbox.handlers.registry import registry
from inbox.housekeeping import HISTORY, Housekeeper
from inbox.models import InboxMessage, KeptHandler, Receipt, TrailEntry
from inbox.operators.editing import conflict_token, run_conflicting
from inbox.states import Outcome, State
from inbox.store import handler_rows
from tests.support.apps.effects.models import Effect
from tests.support.decisions import retry, skip
from tests.support.deliveries import an_envelope, at_once, deliver, drain, fails, the_effect
from tests.support.inbox_rows import delete_messages, make_older, settle

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.every_database]

WEEK, YEARS = timedelta(days=7), timedelta(days=1000)


@pytest.fixture
def old(handles):
    """A message that is done, one that an operator has skipped and one that is retrying, all from years ago."""
    deliver(handles(the_effect, name="tests.done"))
    deliver(handles(fails, name="tests.skipped"))
    skip("default", InboxMessage.objects.get(handler="tests.skipped").pk, "defect")
    deliver(handles(fails, name="tests.retrying"))
    make_older(InboxMessage.objects.all(), YEARS)
    TrailEntry.objects.update(at=DatabaseTime(-YEARS))
    handler_rows.record_periods("default", receipts())


def states():
    return set(InboxMessage.objects.values_list("state", flat=True))


def receipts():
    return set(Receipt.objects.values_list("handler", flat=True))


@pytest.mark.parametrize("name", ["inbox_consume", "outbox_relay"])
def test_settled_messages_and_the_trail_past_their_retention_are_deleted_by_a_running_process(command, old, name):
    with command(name, OUTBOX={"BROKER_URL": "local://"}) as process:
        process.until(lambda: receipts() == {"tests.retrying"} and not TrailEntry.objects.exists())

    assert not AuditEntry.objects.exists(), "no operator has done it"


def test_messages_within_their_retention_stay(handles):
    deliver(handles(the_effect))
    make_older(InboxMessage.objects.all(), inbox_options().KEEP_HISTORY - timedelta(hours=1))
    Housekeeper("default").drain(StopRequest())

    assert states() == {State.DONE}


def test_receipt_of_a_message_whose_history_was_dropped_makes_a_copy_a_duplicate_until_its_own_retention(handles, settings):
    settings.OUTBOX = {"BROKER_URL": "local://"}
    handler, message = handles(the_effect), an_envelope()
    deliver(handler, message)
    make_older(InboxMessage.objects.all(), inbox_options().KEEP_HISTORY + timedelta(days=2))
    call_command("inbox_consume", drain=True)
    assert (states(), len(receipts())) == (set(), 1)

    assert deliver(handler, message) is Outcome.DUPLICATE
    assert (Effect.objects.count(), states()) == (1, set())

    Receipt.objects.update(received_at=DatabaseTime(-inbox_options().RETENTION))
    call_command("inbox_consume", drain=True)
    assert receipts() == set()


def test_one_process_at_a_time_deletes_in_small_transactions(handles, old, monkeypatch):
    monkeypatch.setattr("inbox.housekeeping.CHUNK", 1)
    another = Housekeeper("default")
    assert another.take_lease()

    Housekeeper("default").drain(StopRequest())
    assert states() == {State.DONE, State.SKIPPED, State.RETRYING}

    another.release_lease()
    stopped = StopRequest()
    stopped.set()
    Housekeeper("default").drain(stopped)
    assert len(states()) == 2, "it ends after one small transaction"
    Housekeeper("default").drain(StopRequest())
    assert states() == {State.RETRYING}


def another_service_keeps(*handlers, for_=2 * YEARS, ago=timedelta()):
    """Another service has recorded that it keeps the rows of these handlers, and stopped so long ago."""
    with override_settings(INBOX={"RETENTION": for_, "KEEP_HISTORY": for_}):
        handler_rows.record_periods("default", handlers)
    KeptHandler.objects.filter(handler__in=handlers).update(confirmed_at=DatabaseTime(-ago))


@pytest.mark.parametrize("name", ["tests.elsewhere", f"{CELERY_TOPICS}shop.charge", f"{WEBHOOK_HANDLERS}shop"])
def test_service_with_a_short_retention_keeps_what_a_stopped_service_keeps_for_longer(handles, settings, name):
    settings.INBOX = {"RETENTION": timedelta(days=365), "KEEP_HISTORY": timedelta(days=365)}
    handler, message = handles(the_effect, name=name), an_envelope()
    Housekeeper("default").drain(StopRequest())
    deliver(handler, message)
    make_older(InboxMessage.objects.all(), timedelta(days=100))
    KeptHandler.objects.update(confirmed_at=DatabaseTime(-timedelta(days=100)))

    registry.remove(name)
    settings.INBOX = {"RETENTION": timedelta(days=2), "KEEP_HISTORY": timedelta(days=1)}
    Housekeeper("default").drain(StopRequest())
    call_command("exactly_once_purge", app="inbox", older_than="0d")
    registry.add(handler)

    assert (states(), receipts()) == ({State.DONE}, {name})
    assert deliver(handler, message) is Outcome.DUPLICATE
    assert Effect.objects.count() == 1


def test_rows_of_another_service_are_deleted_after_its_own_periods(old):
    for name in ("tests.skipped", "tests.done"):
        registry.remove(name)
    another_service_keeps("tests.skipped", for_=YEARS / 2, ago=YEARS)
    another_service_keeps("tests.done", ago=YEARS)

    Housekeeper("default").drain(StopRequest())

    assert states() == {State.DONE, State.RETRYING}
    assert receipts() == {"tests.done", "tests.retrying"}


def test_rows_of_a_handler_that_no_service_has_recorded_stay(old):
    registry.remove("tests.skipped")
    KeptHandler.objects.filter(handler="tests.skipped").delete()

    call_command("exactly_once_purge", app="inbox")

    assert (states(), receipts()) == ({State.SKIPPED, State.RETRYING}, {"tests.skipped", "tests.retrying"})


def test_longer_of_two_periods_counts_until_the_rows_of_its_time_have_ended(old):
    """Of two services that run a handler, or of one that has lengthened or shortened its own."""
    another_service_keeps("tests.skipped", ago=YEARS)
    Housekeeper("default").drain(StopRequest())
    assert receipts() == {"tests.skipped", "tests.retrying"}

    KeptHandler.objects.filter(retention=2 * YEARS).update(confirmed_at=DatabaseTime(-3 * YEARS))
    call_command("exactly_once_purge", app="inbox")
    assert receipts() == {"tests.retrying"}


def test_periods_are_confirmed_once_an_hour(old, settings):
    def confirmed():
        return set(KeptHandler.objects.filter(handler="tests.done").values_list("retention", "confirmed_at"))

    handler_rows.record_periods("default", ["tests.done"])
    first = confirmed()
    handler_rows.record_periods("default", ["tests.done"])
    assert confirmed() == first

    KeptHandler.objects.update(confirmed_at=DatabaseTime(-timedelta(hours=2)))
    handler_rows.record_periods("default", ["tests.done"])
    assert len(confirmed()) == 1
    assert KeptHandler.objects.filter(confirmed_at__gt=DatabaseTime(-timedelta(hours=1))).exists()


@pytest.mark.parametrize("group", ["config", "c" * NAME_LENGTH], ids=["of both services", "long"])
def test_housekeeping_of_another_service_with_any_group_does_not_replace_that_of_this_one(old, settings, group):
    settings.INBOX = {"GROUP": group}
    ours = registry.get("tests.skipped")
    registry.remove(ours.name)
    assert Housekeeper("default").take_lease()
    registry.add(ours)

    Housekeeper("default").drain(StopRequest())

    assert states() == {State.RETRYING}


def test_receipts_that_are_left_to_another_service_are_not_read_again_in_each_round(old, monkeypatch):
    """Its deduplication window may be longer, with all receipts of that time behind those to be deleted."""
    registry.remove("tests.skipped")
    another_service_keeps("tests.skipped")
    another_service_keeps("tests.behind", "tests.before", for_=YEARS / 2)
    keeper = Housekeeper("default")
    keeper.drain(StopRequest())
    assert receipts() == {"tests.skipped", "tests.retrying"}
    delete_messages()
    Receipt.objects.create(handler="tests.behind", received_at=DatabaseTime(-YEARS))
    Receipt.objects.create(id=1, handler="tests.before", received_at=DatabaseTime(-YEARS))

    keeper.drain(StopRequest())
    assert receipts() == {"tests.before"}, "only what is behind those that were read"

    monkeypatch.setattr("inbox.housekeeping.monotonic", lambda: monotonic() + 3600)
    keeper.drain(StopRequest())
    assert receipts() == set(), "all of them once an hour"


def test_receipt_of_an_old_dead_letter_is_kept_for_its_retention_after_it_was_retried(handles, settings):
    settings.OUTBOX = {"BROKER_URL": "local://"}
    broken = [True]

    def handle(message):
        if broken:
            raise ValueError("not yet")

    deliver(handles(handle, name="tests.dead", retry=Retry(max_attempts=1)))
    make_older(InboxMessage.objects.all(), YEARS)
    broken.clear()
    assert retry("default", InboxMessage.objects.get().pk)
    drain()
    settle(InboxMessage.objects.all(), ago=2 * WEEK)

    call_command("inbox_consume", drain=True)

    assert (states(), receipts()) == (set(), {"tests.dead"})


def test_receipts_behind_those_of_many_retried_dead_letters_are_deleted(handles, monkeypatch):
    """Also behind one of an instant that the clock has not reached: it was ahead then."""
    monkeypatch.setattr("inbox.housekeeping.CHUNK", 4)
    dead, done = handles(fails, name="tests.dead", retry=Retry(max_attempts=1)), handles(the_effect, name="tests.done")
    for _ in range(10):
        deliver(dead)
    for _ in range(12):
        deliver(done)
    make_older(InboxMessage.objects.all(), YEARS)
    ahead = Receipt.objects.filter(handler="tests.done").first()
    Receipt.objects.filter(pk=ahead.pk).update(received_at=DatabaseTime(YEARS))
    for pk in InboxMessage.objects.filter(handler="tests.dead").values_list("pk", flat=True):
        assert retry("default", pk)

    Housekeeper("default").drain(StopRequest())

    assert Receipt.objects.filter(handler="tests.dead").count() == 10
    assert Receipt.objects.get(handler="tests.done") == ahead


class TestConflictWithoutHistory:
    @pytest.fixture
    def handler(self, handles):
        handler = handles(the_effect, name="tests.done")
        deliver(handler, an_envelope(biz_id="7"))
        make_older(InboxMessage.objects.all(), YEARS)
        Receipt.objects.update(received_at=DatabaseTime())
        list(HISTORY.purge("default", WEEK))
        assert not InboxMessage.objects.exists()
        return handler

    def test_other_content_is_not_run_and_is_shown_in_a_row(self, handler):
        other = an_envelope({"order_id": 8}, biz_id="7")
        assert deliver(handler, other) is Outcome.DUPLICATE

        row = InboxMessage.objects.get()
        assert (row.state, row.biz_id, row.conflicts, row.conflicting_id) == (State.DONE, "7", 1, other.id)
        assert bytes(row.conflicting_body) == other.body
        assert "history has been dropped" in row.last_error
        assert Effect.objects.count() == 1

        assert deliver(handler, other) is Outcome.DUPLICATE
        assert InboxMessage.objects.get().conflicts == 2

    def test_two_at_the_same_moment_are_shown_in_one_row(self, handler):
        others = [an_envelope({"order_id": number}, biz_id="7") for number in (8, 9)]

        def delivered(other):
            while deliver(handler, other) is Outcome.DEFERRED:
                pass

        at_once([partial(delivered, other) for other in others])

        assert (InboxMessage.objects.get().conflicts, Effect.objects.count()) == (2, 1)

    def test_it_can_be_run_as_its_own_message(self, handler):
        deliver(handler, an_envelope({"order_id": 8}, biz_id="7"))
        row = InboxMessage.objects.get()

        assert run_conflicting("default", row.pk, confirmed=[conflict_token(row)], by="by anna")
        drain()

        assert Effect.objects.count() == 2
