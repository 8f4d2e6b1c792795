"""Many days of history: a statement about one message does not lock the partitions of all days."""

from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from exactly_once.models import Operation
from exactly_once.process.clock import utcnow
from exactly_once.process.loop import StopRequest
from exactly_once.sql.days import day_of
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.executing import Operations
from exactly_once.wire.identity import new_message_id
from inbox.contrib.joins.store import first_unhandled
from inbox.contrib.tasks.compat import TaskResultDoesNotExist
from inbox.contrib.tasks.models import Result
from inbox.housekeeping import HISTORY
from inbox.models import InboxMessage, Receipt
from inbox.operators.accounting import oldest_waiting
from inbox.operators.changes import RETRY, operations
from inbox.receiving.reading import read
from inbox.states import State
from inbox.store import receipts
from inbox.store.duplicates import count_duplicate
from outbox.models import OutboxMessage
from outbox.store import history as outbox_history
from outbox.testing import run_relay
from tests.support import many_days
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import OPTIONS, an_envelope, deliver, fails, options, the_effect
from tests.support.inbox_rows import make_older, settle, store_message
from tests.support.many_days import DAYS, FEW_PARTITIONS, partitions_locked
from tests.support.sql import executed

pytestmark = [pytest.mark.django_db(transaction=True)]


@pytest.fixture(scope="module")
def _made(django_db_setup, django_db_blocker):
    yield from many_days.made(HISTORY, django_db_blocker)


@pytest.fixture(scope="module")
def _made_in_the_outbox(django_db_setup, django_db_blocker):
    yield from many_days.made(outbox_history.HISTORY, django_db_blocker)


@pytest.fixture
def handler(handles, _made):
    return handles(the_effect)


def locked_by_each(action):
    """The most partitions that a statement of `action` has locked, and what it returned."""
    with transaction.atomic():
        found = action()
        return partitions_locked(HISTORY), found


@pytest.mark.parametrize("ago", [0, 1, 20, 45], ids="{} days".format)
@pytest.mark.parametrize("settled_later", [0, 5], ids=["settled when received", "settled days later"])
def test_duplicate_locks_a_few_partitions(handler, ago, settled_later):
    message = an_envelope()
    deliver(handler, message)
    make_older(InboxMessage.objects.all(), timedelta(days=ago))
    Receipt.objects.update(received_at=DatabaseTime(-timedelta(days=ago + settled_later)))
    row = read(handler, message, OPTIONS).row

    locked, earlier = locked_by_each(lambda: count_duplicate("default", row))

    assert earlier is not None
    assert InboxMessage.objects.get().duplicates == 1
    assert locked <= FEW_PARTITIONS
    assert Effect.objects.count() == 1


def test_duplicate_of_a_message_whose_history_was_dropped_locks_no_partition_for_long(handler):
    message = an_envelope()
    deliver(handler, message)
    InboxMessage.objects.all().delete()
    Receipt.objects.update(received_at=DatabaseTime(-timedelta(days=30)))
    row = read(handler, message, OPTIONS).row

    locked, earlier = locked_by_each(lambda: count_duplicate("default", row))

    assert (earlier.state, InboxMessage.objects.count()) == ("", 0)
    assert locked <= FEW_PARTITIONS


def test_duplicate_of_a_recent_message_is_counted_by_one_statement(handler):
    message = an_envelope()
    deliver(handler, message)
    row = read(handler, message, OPTIONS).row

    with CaptureQueriesContext(connection) as queries:
        assert count_duplicate("default", row)

    assert len(queries) == 1


def test_duplicates_of_a_day_are_counted_by_one_prepared_statement_that_locks_its_days(handler, monkeypatch):
    message = an_envelope()
    deliver(handler, message)
    row, today = read(handler, message, OPTIONS).row, day_of("default")
    for _ in range(9):  # then PostgreSQL keeps the plan
        count_duplicate("default", row)

    locked, _ = locked_by_each(lambda: count_duplicate("default", row))
    monkeypatch.setattr("exactly_once.sql.partitions.utcnow", lambda: utcnow() + timedelta(days=1))
    before, _ = prepared(), count_duplicate("default", row)

    assert (before, prepared()) == ([f"inbox_duplicate_{today}"], [f"inbox_duplicate_{today + 1}"])
    assert InboxMessage.objects.get().duplicates == 11
    assert locked <= FEW_PARTITIONS


def prepared():
    return [name for (name,) in executed("SELECT name FROM pg_prepared_statements WHERE name LIKE 'inbox_duplicate%'")]


@pytest.mark.usefixtures("_made")
@pytest.mark.parametrize("is_handled", [True, False])
def test_canary_locks_a_few_partitions(handles, is_handled):
    deliver(handles(fails), an_envelope(), given=options(MAX_ATTEMPTS=1))
    row = InboxMessage.objects.get()
    plan = Operation(action="retry", selection="one", sources=["dead"], requested_by="ann", is_canary=True)
    operation = operations.plan("default", plan, [row.pk])

    locked_by_wave, _ = locked_by_each(lambda: Operations("inbox", ["default"]).drain(StopRequest()))
    if is_handled:
        settle(InboxMessage.objects.all())
    locked, judged = locked_by_each(lambda: RETRY.canary.judge("default", [row.pk], DatabaseTime()))

    operation.refresh_from_db()
    assert operation.done == 1
    assert operation.wave_rows[0][1].startswith("ValueError")
    assert (judged.succeeded, judged.pending) == (([row.pk], []) if is_handled else ([], [row.pk]))
    assert max(locked_by_wave, locked) <= FEW_PARTITIONS


def test_longest_wait_is_measured_without_locking_all_days(handler):
    due = DatabaseTime(-timedelta(hours=1))
    store_message(handler=handler.name, topic="t", biz_id="1", body=b"", state=State.RETRYING, next_attempt_at=due)

    locked, since = locked_by_each(lambda: oldest_waiting("default"))

    assert since is not None
    assert locked <= FEW_PARTITIONS


@pytest.mark.usefixtures("_made")
def test_what_stays_is_read_before_history_is_locked():
    with CaptureQueriesContext(connection) as queries:
        assert HISTORY.drop_day("default", day_of("default", timedelta(days=DAYS)))

    statements = [query["sql"] for query in queries]
    locked = next(i for i, statement in enumerate(statements) if "ACCESS EXCLUSIVE" in statement)
    assert any("inbox_kepthandler" in statement for statement in statements[:locked])
    assert not [statement for statement in statements[locked:] if "inbox_kepthandler" in statement or "receipt" in statement]


def test_message_is_found_by_its_name_and_receipt_without_locking_all_days(handler):
    deliver(handler, an_envelope())
    make_older(InboxMessage.objects.all(), timedelta(days=40))
    row = InboxMessage.objects.get()

    locked, found = locked_by_each(lambda: receipts.named("default", row.handler, row.topic, row.biz_id).get())

    assert found == row
    assert locked <= FEW_PARTITIONS


@pytest.mark.usefixtures("_made", "_made_in_the_outbox")
def test_task_that_was_skipped_or_is_at_the_broker_or_unknown_is_found_without_locking_all_days(tasked, settings):
    for name in ("OUTBOX", "INBOX"):
        setattr(settings, name, {**getattr(settings, name, {}), "KEEP_HISTORY": timedelta(days=2 * DAYS)})
    at_the_broker, skipped = tasked.note.enqueue("a"), tasked.note.enqueue("b")
    run_relay()
    Effect.objects.all().delete()
    Result.objects.all().delete()
    InboxMessage.objects.filter(message_id=at_the_broker.id).delete()
    Receipt.objects.filter(message_id=at_the_broker.id).delete()
    settle(InboxMessage.objects.filter(message_id=skipped.id), State.SKIPPED, ago=timedelta(days=40))
    OutboxMessage.objects.update(day=day_of("default", timedelta(days=40)))

    def statuses():
        with pytest.raises(TaskResultDoesNotExist):
            tasked.note.get_result(str(new_message_id()))
        return [str(tasked.note.get_result(task.id).status) for task in (at_the_broker, skipped)]

    with transaction.atomic():
        assert statuses() == ["READY", "FAILED"]
        assert partitions_locked(HISTORY) <= FEW_PARTITIONS
        assert partitions_locked(outbox_history.HISTORY) <= FEW_PARTITIONS


@pytest.mark.usefixtures("_made")
def test_end_of_a_set_is_found_by_message_ids_without_locking_all_days(handles):
    handler = handles(the_effect, biz_id="order_id")
    message = an_envelope()
    deliver(handler, message)
    settle(InboxMessage.objects.all(), ago=timedelta(days=40))
    members = {str(message.id): message.biz_id}

    locked, found = locked_by_each(lambda: first_unhandled("default", handler, message.topic, members))
    assert (found, locked <= FEW_PARTITIONS) == (None, True)
    assert first_unhandled("default", handler, message.topic, {"other": "other"}) == ("other", "")
