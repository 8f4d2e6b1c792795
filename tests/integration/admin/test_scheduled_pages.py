"""The scheduled messages in the admin: the list in due order, publish now, reschedule, cancel."""

from datetime import datetime, timedelta
from functools import partial
from itertools import repeat

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from exactly_once.process.clock import utcnow
from outbox.conf import outbox_options
from outbox.models import OutboxMessage
from outbox.states import State
from tests.support.admin_names import LIST, RESCHEDULE, VIEW
from tests.support.admin_pages import NASTY, Page, a_message, act, listed, said, staff_client
from tests.support.sql import executed

pytestmark = pytest.mark.django_db(databases=["default", "other"])

HOUR = timedelta(hours=1)
TOMORROW = f"{timezone.now() + timedelta(days=1):%Y-%m-%dT%H:%M}"

in_the_list = partial(listed, state="scheduled")


def scheduled(due_in=HOUR, **columns):
    return a_message(State.SCHEDULED, due_ago=-due_in, **columns)


class TestScheduledList:
    @pytest.mark.every_database
    def test_scheduled_messages_are_listed_in_the_order_they_become_due(self):
        rows = {hours: scheduled(hours * HOUR) for hours in (3, 1, 2)}
        for state in set(State) - {State.SCHEDULED}:
            a_message(state)

        assert in_the_list(staff_client(VIEW)) == [rows[1].pk, rows[2].pk, rows[3].pk]
        page = Page(staff_client(VIEW).get(reverse(LIST), {"state": "scheduled"}))
        assert not [column for column in page.all("th") if "sorted" in column.get("class", "").split()], "not by age"

    @pytest.mark.every_database
    def test_filters_and_search_select_scheduled_messages(self):
        late = scheduled(-outbox_options().STUCK_AFTER - HOUR)
        soon, later = scheduled(timedelta(seconds=30), biz_id="order-soon"), scheduled(2 * HOUR)
        a_message(State.READY)
        client = staff_client(VIEW)

        assert in_the_list(client, stuck="overdue") == [late.pk]
        assert listed(client, due="minute") == [late.pk, soon.pk]
        assert listed(client, due="day") == [late.pk, soon.pk, later.pk]
        assert listed(client, due="no such span\x00") == []
        assert in_the_list(client, q="order-soon") == [soon.pk]


# The plan is that of PostgreSQL, so the test runs there only.
@pytest.mark.long
@pytest.mark.parametrize("query", [{"state": "scheduled"}, {"due": "hour"}], ids=["scheduled", "due within an hour"])
def test_list_query_reads_the_due_index_without_sorting(query):
    OutboxMessage.objects.bulk_create(
        OutboxMessage(topic="t", shard=1, body=b"1", state=State.SCHEDULED, created_at=now, available_at=now + HOUR)
        for now in repeat(utcnow(), 5000)
    )
    connection.cursor().execute("ANALYZE outbox_outboxmessage")

    with CaptureQueriesContext(connection) as queries:
        staff_client(VIEW).get(reverse(LIST), query)

    [statement] = [query["sql"] for query in queries if 'ORDER BY "outbox_outboxmessage"."available_at"' in query["sql"]]
    plan = "\n".join(line for (line,) in executed(f"EXPLAIN {statement}"))
    assert "outbox_due" in plan
    assert "Sort" not in plan


class TestReschedule:
    def reschedule(self, *rows, **fields):
        return act(staff_client(VIEW, RESCHEDULE), "reschedule", *rows, **fields)

    @pytest.mark.every_database
    @pytest.mark.parametrize(("written", "delay"), [("30m", HOUR / 2), (" 90 S", timedelta(seconds=90)), ("2d", 48 * HOUR)])
    def test_reschedule_by_a_delay_counts_from_now(self, written, delay):
        row = scheduled()
        before = utcnow()

        response = self.reschedule(row, confirmed="yes", delay=written)

        row.refresh_from_db()
        assert row.state == State.SCHEDULED
        assert before + delay - HOUR / 60 < row.available_at < utcnow() + delay + HOUR / 60
        assert said(response)[0][1].endswith(f"rescheduled, due in {delay}")

    def test_reschedule_to_an_instant_uses_the_time_zone_of_the_site(self, settings):
        settings.TIME_ZONE = "Asia/Shanghai"
        row = scheduled()
        tomorrow = timezone.localtime() + timedelta(days=1)

        assert "Asia/Shanghai" in Page(self.reschedule(row)).text
        self.reschedule(row, confirmed="yes", deliver_at=f"{tomorrow:%Y-%m-%dT}09:30:00")

        row.refresh_from_db()
        assert timezone.localtime(row.available_at) == timezone.make_aware(
            datetime(tomorrow.year, tomorrow.month, tomorrow.day, 9, 30)  # noqa: DTZ001 - made aware at once
        )

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({}, "Fill in either “In” or “Or at”"),
            ({"delay": "30m", "deliver_at": TOMORROW}, "Fill in either “In” or “Or at”, not both."),
            ({"delay": "soon"}, "Write a number and s, m, h or d, as in 90s or 30m."),
            ({"delay": NASTY}, "Write a number and s, m, h or d"),
            ({"delay": "0m"}, "It is not in the future. To send the messages at once, choose “Publish now…”."),
            ({"delay": "99999d"}, "too far in the future: the maximum is ten years"),
            ({"delay": "30m", "deliver_at": "2999-01-01T00:00:00"}, "too far in the future: the maximum is ten years"),
            ({"deliver_at": "2020-01-01T00:00:00"}, "It is not in the future. To send"),
            ({"deliver_at": "next week"}, "Enter a valid date/time."),
        ],
        ids=lambda value: value if isinstance(value, str) else "-".join(value),
    )
    def test_reschedule_to_an_invalid_time_is_refused_and_changes_nothing(self, fields, expected):
        row = scheduled()

        page = Page(self.reschedule(row, confirmed="yes", **fields))

        assert expected in page.text
        assert [found["value"] for found in page.all("input", name="_selected_action")] == [str(row.pk)]
        assert OutboxMessage.objects.get(pk=row.pk).available_at == row.available_at
