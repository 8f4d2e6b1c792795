"""The days of the inbox's history: made and dropped by the processes that run handlers."""

from contextlib import ExitStack
from datetime import timedelta
from threading import Event

import pytest
from django.db import connection, transaction

from exactly_once.process.loop import StopRequest
from exactly_once.sql.days import day_of
from inbox.handlers.registry import registry
from inbox.housekeeping import HISTORY, Housekeeper
from inbox.models import InboxMessage
from inbox.receiving.reading import read
from inbox.states import Outcome
from inbox.store import receipts
from inbox.store.duplicates import count_duplicate
from tests.support.deliveries import OPTIONS, InAThread, Slow, an_envelope, deliver, the_effect
from tests.support.inbox_rows import make_older
from tests.support.sql import executed, fetched
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True)]

WEEK = timedelta(days=7)


@pytest.fixture
def days():
    """Those of the inbox, without what earlier tests have left."""
    kept = HISTORY.days
    for day in kept.existing("default"):
        kept.drop("default", day)
    yield kept
    for day in kept.existing("default"):
        kept.drop("default", day)


def long_ago(days, *names, weeks=2):
    """Messages of these handlers on a day with a partition."""
    day = day_of("default", weeks * WEEK)
    days.make("default", day)
    make_older(InboxMessage.objects.filter(handler__in=names), weeks * WEEK)
    return day


def waits_for_the_default():
    return executed("SELECT 1 FROM pg_locks WHERE relation = %s::regclass AND NOT granted", [HISTORY.days.default])


class TestDays:
    def test_old_day_is_dropped_and_the_days_ahead_are_made(self, handles, days):
        deliver(handles(the_effect, name="tests.done"))
        old, today = long_ago(days, "tests.done"), day_of("default")

        Housekeeper("default").drain(StopRequest())

        assert days.existing("default") == [today, today + 1, today + 2, today + 3]
        assert (InboxMessage.objects.count(), old < today) == (0, True)
        deliver(handles(the_effect, name="tests.new"))
        assert fetched(f"SELECT count(*) FROM {days.name(today)}") == 1

    def test_day_with_messages_of_another_service_stays_and_ours_of_that_day_are_deleted(self, handles, days):
        for name in ("tests.done", "tests.elsewhere"):
            deliver(handles(the_effect, name=name))
        old = long_ago(days, "tests.done", "tests.elsewhere")
        registry.remove("tests.elsewhere")

        Housekeeper("default").drain(StopRequest())

        assert old in days.existing("default")
        assert set(InboxMessage.objects.values_list("handler", flat=True)) == {"tests.elsewhere"}

    @pytest.mark.long
    def test_messages_of_a_day_that_cannot_be_dropped_for_long_are_deleted(self, handles, days):
        """A handler's transaction holds a lock of history, and there may be one at every moment."""
        deliver(handles(the_effect, name="tests.done"))
        old, slow = long_ago(days, "tests.done"), Slow()
        handler = handles(slow, name="tests.slow")
        with slow.inside(lambda: deliver(handler)):
            Housekeeper("default").drain(StopRequest())
            assert old in days.existing("default")
            assert not InboxMessage.objects.filter(handler="tests.done").exists()

        Housekeeper("default").drain(StopRequest())
        assert old not in days.existing("default")

    def test_delivery_that_waits_while_the_partition_of_its_day_is_made_is_handled_with_one_attempt(self, handles, days):
        """Its row was on its way into the default partition, which no longer takes it."""
        handler, today = handles(the_effect, name="tests.done"), day_of("default")
        with ExitStack() as afterwards, transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLE ONLY {days.history} IN SHARE UPDATE EXCLUSIVE MODE")
            cursor.execute(f"CREATE TABLE {days.name(today)} (LIKE {days.history} INCLUDING DEFAULTS INCLUDING CONSTRAINTS)")
            cursor.execute(f"LOCK TABLE {days.default} IN ACCESS EXCLUSIVE MODE")
            delivery = afterwards.enter_context(InAThread(lambda: deliver(handler)))
            wait_until(waits_for_the_default)
            bounds = f"FROM ({today}) TO ({today + 1})"
            cursor.execute(f"ALTER TABLE {days.history} ATTACH PARTITION {days.name(today)} FOR VALUES {bounds}")

        assert delivery.answer is Outcome.HANDLED
        assert InboxMessage.objects.get().attempts == 1


def test_message_that_is_being_deleted_is_not_taken_for_one_without_history(handles):
    """As a task that failed, or a parked delivery: it is deleted with its receipt, so its next delivery is handled."""
    handler, envelope = handles(the_effect), an_envelope()
    deliver(handler, envelope)
    row = read(handler, envelope, OPTIONS).row
    is_deleted, may_commit, statements = Event(), Event(), []

    def delete():
        with transaction.atomic():
            receipts.delete("default", "handler = %s", [handler.name])
            is_deleted.set()
            assert may_commit.wait(60)

    with InAThread(delete) as deletion:

        def commit_after_two(execute, *statement):
            statements.append(statement)
            if len(statements) > 2:
                may_commit.set()
                wait_until(lambda: deletion.ended)
            return execute(*statement)

        assert is_deleted.wait(60)
        with connection.execute_wrapper(commit_after_two):
            counted = count_duplicate("default", row)
        may_commit.set()

    assert counted is None
    assert deliver(handler, envelope) is Outcome.HANDLED
