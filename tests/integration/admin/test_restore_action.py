"""The restore action in the admin: a preview for each message, with or without the overdue ones."""

from datetime import timedelta

import pytest
from django.contrib.auth.models import User

from exactly_once.process.clock import utcnow
from outbox.models import TrailEntry
from outbox.states import State
from tests.support.admin_pages import RESTORE, VIEW, Page, a_message, act, said, staff_client, state_of

pytestmark = pytest.mark.django_db(databases=["default", "other"])

HOUR = timedelta(hours=1)


def cancelled(**columns):
    return a_message(State.CANCELLED, settled_at=utcnow(), **columns)


def ahead(**columns):
    return cancelled(deliver_at=utcnow() + HOUR, **columns)


def test_restore_asks_for_confirmation_and_previews_the_result_for_each_message():
    rows = [cancelled(), ahead(), a_message(State.PUBLISHED)]

    page = Page(act(staff_client(VIEW, RESTORE), "restore", *rows))

    for expected in ("Overdue: it is sent at once.", "Scheduled again, due in", "In this state it is not changed."):
        assert page.text.count(expected) == 1
    assert page.all("input", name="overdue", type="checkbox")
    assert [state_of(row) for row in rows] == [State.CANCELLED, State.CANCELLED, State.PUBLISHED]


@pytest.mark.every_database
def test_restore_with_overdue_messages_records_the_user_and_the_reason():
    late, later = cancelled(), ahead()

    act(staff_client(VIEW, RESTORE), "restore", late, later, confirmed="yes", overdue="on", reason="cancelled by mistake")

    assert (state_of(late), state_of(later)) == (State.READY, State.SCHEDULED)
    reason = f"by {User.objects.get().username} in the admin: cancelled by mistake"
    reasons = [entry.reason for entry in TrailEntry.objects.all()]
    assert len(reasons) == 2
    assert all(reason in written for written in reasons)


def test_restore_without_overdue_messages_leaves_them_and_says_so():
    late, later = cancelled(), ahead()

    response = act(staff_client(VIEW, RESTORE), "restore", late, later, confirmed="yes")

    assert (state_of(late), state_of(later)) == (State.CANCELLED, State.SCHEDULED)
    assert said(response)[0][1].endswith("not restored: it is overdue, and overdue messages were not selected")
    assert said(response)[1][0] == "success"


def test_restore_leaves_a_unique_message_that_was_replaced_and_says_so():
    first = cancelled(topic="a", biz_id="b", is_unique=True)
    a_message(State.READY, topic="a", biz_id="b", is_unique=True)

    preview = Page(act(staff_client(VIEW, RESTORE), "restore", first))
    response = act(staff_client(VIEW, RESTORE), "restore", first, confirmed="yes", overdue="on")

    assert "A later message has replaced it: it is not changed." in preview.text
    assert state_of(first) == State.CANCELLED
    [(level, words)] = said(response)
    assert level == "warning"
    assert words.endswith("it was published with unique=True, and so was a later message with its topic and biz-id")
