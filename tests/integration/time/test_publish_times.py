"""Delay, instant and expiry: by the database's clock, never early."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from django.db import NotSupportedError, transaction

from exactly_once.process.clock import utcnow
from exactly_once.sql.now import DatabaseTime
from outbox import publish
from outbox.models import OutboxMessage
from outbox.states import State
from outbox.store import settling
from tests.support.relaying import TOPIC, in_hand, published, row_of, set_columns, state_of
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.every_database, pytest.mark.django_db]

A_MILLISECOND = timedelta(milliseconds=1)
HOUR = timedelta(hours=1)


def database_now():
    """The instant, as the database sees it."""
    OutboxMessage.objects.update(settled_at=DatabaseTime())
    return OutboxMessage.objects.first().settled_at


def next_year():
    """In milliseconds, which is as exact as every database can be."""
    return utcnow().replace(microsecond=123_000) + timedelta(days=365)


def promote():
    return settling.make_scheduled_ready("default", 1_000)


class TestDelay:
    def test_delayed_message_is_scheduled_for_now_plus_the_delay_or_its_deliver_at_and_expires_after_that(self):
        instant, minutes = next_year(), timedelta(minutes=5)
        row = row_of(published(delay=timedelta(hours=48), expires_in=minutes))
        at_its_instant = row_of(published(deliver_at=instant, expires_in=minutes))
        at_once = row_of(published(expires_in=minutes))

        assert row.state == at_its_instant.state == State.SCHEDULED
        assert row.available_at == row.deliver_at
        assert timedelta(hours=48) - A_MILLISECOND <= row.available_at - row.created_at <= timedelta(hours=48, minutes=1)
        assert at_its_instant.deliver_at == at_its_instant.available_at == instant
        for each in (row, at_its_instant, at_once):
            assert abs(each.expires_at - each.available_at - minutes) <= 5 * A_MILLISECOND

    def test_delay_counts_from_the_publish_call_and_not_from_the_start_of_the_transaction(self):
        with transaction.atomic():
            first = publish(TOPIC, {}, delay=HOUR)
            wait_until(lambda: database_now() > row_of(first).created_at + 20 * A_MILLISECOND)
            second = publish(TOPIC, {}, delay=HOUR)

        assert row_of(second).available_at - row_of(first).available_at >= 19 * A_MILLISECOND

    @pytest.mark.parametrize(
        "given", [{"delay": timedelta(milliseconds=150)}, {"deliver_at": datetime(1999, 1, 1, tzinfo=UTC)}]
    )
    def test_delayed_message_is_due_at_its_time_and_never_early(self, given):
        message = published(**given)
        available_at = row_of(message).available_at

        wait_until(promote)

        assert database_now() >= available_at
        assert state_of(message) == State.READY

    def test_most_overdue_message_is_promoted_first(self):
        late, later = published(delay=HOUR), published(delay=HOUR)
        set_columns(late, available_at=DatabaseTime(-HOUR))
        set_columns(later, available_at=DatabaseTime(-2 * HOUR))

        assert settling.make_scheduled_ready("default", 1) == 1
        assert (state_of(late), state_of(later)) == (State.SCHEDULED, State.READY)


class TestExpiry:
    def test_claim_marks_a_message_as_expired_at_its_time_and_never_early(self):
        message = published(expires_in=timedelta(milliseconds=150))
        expires_at = row_of(message).expires_at

        def claimed():
            with transaction.atomic():
                [row] = in_hand(10)
                return row

        wait_until(lambda: claimed().expired)

        assert database_now() >= expires_at


class TestDatabaseClock:
    def test_database_clock_is_in_utc_whatever_the_time_zone_of_the_project(self, settings):
        settings.TIME_ZONE = "Asia/Kolkata"
        row = row_of(published())

        assert abs(row.created_at - datetime.now(tz=UTC)) < timedelta(minutes=1)

    def test_database_clock_of_an_unsupported_database_is_refused_with_the_remedy(self):
        with pytest.raises(NotSupportedError, match="oracle is not supported: use PostgreSQL"):
            DatabaseTime().as_sql(None, SimpleNamespace(vendor="oracle"))
