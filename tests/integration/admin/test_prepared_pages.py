"""Prepared messages in the admin: the list of undecided messages and the operator's decisions."""

from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.urls import reverse

from exactly_once.process.clock import utcnow
from outbox.callbacks import Answer, checker, checkers
from outbox.conf import outbox_options
from outbox.models import TrailEntry
from outbox.states import State
from tests.support.admin_names import CANCEL, DECIDE, DETAIL, LIST, RESCHEDULE, RESTORE, VIEW
from tests.support.admin_pages import Page, a_message, act, listed, staff_client

pytestmark = pytest.mark.django_db(databases=["default", "other"])

CHECKED = "bank.transfer.requested"
LIMIT = outbox_options().CHECKS.LIMIT


@pytest.fixture(autouse=True)
def _a_checker():
    checker(CHECKED)(lambda message: Answer.UNKNOWN)
    yield
    checkers.remove(CHECKED)


def undecided(state=State.PREPARED, *, topic=CHECKED, **columns):
    return a_message(state, topic=topic, **columns)


def page_of(row, *codenames):
    return Page(staff_client(VIEW, *codenames).get(reverse(DETAIL, args=[row.pk])))


def trail_of(row):
    return [(entry.was, entry.became, entry.reason) for entry in TrailEntry.objects.filter(message_id=row.message_id)]


class TestPreparedList:
    def test_prepared_messages_are_listed_in_the_order_of_their_checks_and_the_list_warns_of_stuck_ones(self):
        later, next_one = undecided(due_ago=-timedelta(hours=1)), undecided()
        client = staff_client(VIEW)
        assert "An operator must decide" not in Page(client.get(reverse(LIST))).text
        stuck = undecided(State.STUCK)

        assert "Stuck prepared messages: 1." in Page(client.get(reverse(LIST))).text

        assert listed(client, state="prepared") == [next_one.pk, later.pk]
        assert listed(client, state="stuck") == [stuck.pk]

    def test_list_shows_the_next_check_and_the_last_answer_of_the_checker(self):
        undecided(attempts=3, last_error="its checker answered unknown", due_ago=timedelta(minutes=3, seconds=10))

        text = Page(staff_client(VIEW).get(reverse(LIST), {"state": "prepared"})).text

        for words in ("check due 3 min ago", "3 attempts", "its checker answered unknown"):
            assert words in text


class TestDecision:
    def test_ask_again_makes_the_next_check_due_now(self):
        stuck, prepared = undecided(State.STUCK, attempts=LIMIT), undecided(attempts=2, due_ago=-timedelta(hours=1))

        act(staff_client(VIEW, DECIDE), "ask_again", stuck, prepared)

        for row in (stuck, prepared):
            row.refresh_from_db()
            assert row.state == State.PREPARED
            assert row.available_at <= utcnow()
        assert (stuck.attempts, prepared.attempts) == (0, 2)
        assert trail_of(stuck) == [(State.STUCK, State.PREPARED, f"by {User.objects.get().username} in the admin")]


class TestPreparedMessagePage:
    @pytest.mark.parametrize(
        ("state", "topic", "expected"),
        [
            (State.STUCK, CHECKED, "does not know whether its effect has happened"),
            (State.PREPARED, CHECKED, "It has answered “unknown” 4 of "),
            (State.PREPARED, "bank.without_a_checker", "This process has no checker for its topic"),
        ],
    )
    def test_page_offers_only_the_decisions_and_says_whether_a_checker_or_a_person_decides(self, state, topic, expected):
        page = page_of(undecided(state, topic=topic, attempts=4), RESTORE, RESCHEDULE, CANCEL, DECIDE)

        assert expected in page.text
        assert {found["value"] for found in page.all("button", name="action")} == {"commit", "roll_back", "ask_again"}
