"""The page on which an operator corrects the payload of a dead inbox message: edit, see what changes, confirm."""

import json
from functools import partial

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import transaction
from django.urls import reverse

from exactly_once.models import AuditEntry
from inbox import Reject
from inbox.models import InboxMessage
from inbox.states import State
from tests.support.admin_pages import Page, act, said, staff_client
from tests.support.deliveries import an_envelope, at_once, deliver, drain, effects, the_effect, the_row
from tests.support.inbox_rows import copy_of, settle

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

LIST, DETAIL = "admin:inbox_inboxmessage_changelist", "admin:inbox_inboxmessage_change"
VIEW, RETRY, SKIP, EDIT = "view_inboxmessage", "retry_inboxmessage", "skip_inboxmessage", "edit_inboxmessage"
BAD, GOOD = {"order_id": 7, "amount": "five"}, '{"order_id": 7, "amount": 5}'


def takes_whole_amounts(message):
    if not isinstance(message.payload["amount"], int):
        raise Reject("the amount is not a whole number")
    the_effect(message)


@pytest.fixture
def dead(handles):
    handler = handles(takes_whole_amounts)

    def make(payload=BAD):
        envelope = an_envelope(payload)
        deliver(handler, envelope)
        return the_row(message_id=envelope.id)

    return make


def edit(client, *rows, **fields):
    return act(client, "edit", *rows, page=LIST, **fields)


def own_page(client, row):
    return Page(client.get(reverse(DETAIL, args=[row.pk])))


def hidden(page, name):
    return page.all("input", name=name)[0].get("value", "")


def confirm(client, row, text, **fields):
    """Have the changes shown, and confirm them."""
    page = Page(edit(client, row, confirmed="yes", payload=text, **fields))
    return edit(client, row, confirmed="yes", payload=text, shown=hidden(page, "shown"), **fields)


def test_page_of_a_dead_message_offers_to_edit_it_with_the_permission_only(dead):
    row = dead()

    for permissions in ({EDIT}, {RETRY, SKIP}):
        page = own_page(staff_client(VIEW, *permissions), row)
        assert {f"{button['value']}_inboxmessage" for button in page.all("button", name="action")} == permissions
        assert "Correction" not in page.text


def test_payload_is_edited_as_json_and_changes_are_shown_again_until_they_are_those_that_were_shown(dead):
    row, client = dead({**BAD, "name": "fünf \u202e"}), staff_client(VIEW, EDIT)
    form = Page(edit(client, row))
    assert '{\n  "order_id": 7,\n  "amount": "five",\n  "name": "fünf \\u202e"\n}' in form.text
    assert form.all("textarea", name="payload")
    assert form.all("input", type="submit", value="Show the changes")

    page = Page(edit(client, row, confirmed="yes", payload=GOOD))
    again = Page(edit(client, row, confirmed="yes", payload=GOOD.replace("5", "6"), shown=hidden(page, "shown")))

    assert '-   "amount": "five",\n' in page.text
    assert '+   "amount": 5\n' in page.text
    assert page.all("input", type="submit", value="Replace the message and run it")
    assert '+   "amount": 6\n' in again.text
    assert (InboxMessage.objects.count(), the_row().state) == (1, State.DEAD)


@pytest.mark.every_database
def test_confirmed_correction_is_stored_with_the_user_logged_and_run(dead):
    row = dead()
    client = staff_client(VIEW, EDIT)

    response = confirm(client, row, GOOD, own_page="yes")
    drain()

    assert response.url == reverse(DETAIL, args=[row.pk])
    ((level, words),) = said(response)
    assert (level, words.endswith(": replaced by a corrected message")) == ("success", True)
    new = the_row(replaces=row)
    assert (the_row(pk=row.pk).state, new.state, effects()) == (State.SKIPPED, State.DONE, 1)
    assert f"by {User.objects.get().username} in the admin" in the_row(pk=row.pk).last_error
    assert LogEntry.objects.get().object_id == str(row.pk)
    assert AuditEntry.objects.get().parameters == {"payload": f"{len(GOOD)} characters"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"order_id": 7,\r\n "amount" 5}', "Line 2, column 11: the text is not JSON"),
        (json.dumps(BAD), "The payload is unchanged."),
        ("", "This field is required."),
        ('{"a": "\x00"}', "Null characters are not allowed."),
    ],
)
def test_text_that_cannot_be_stored_comes_back_with_the_reason(dead, text, reason):
    row = dead()

    page = Page(edit(staff_client(VIEW, EDIT), row, confirmed="yes", payload=text, shown="x"))

    assert reason in page.text
    assert text.partition("\r")[0].partition("\x00")[0] in page.text
    assert InboxMessage.objects.count() == 1


def test_several_messages_and_a_payload_too_large_for_the_page_are_refused(dead):
    rows = [dead(), dead({"amount": "five", "note": "x" * 300_000})]

    assert said(edit(staff_client(VIEW, EDIT), *rows)) == [("error", "Nothing was changed: select one message.")]
    ((_, words),) = said(edit(staff_client(VIEW, EDIT), rows[1]))
    assert "Use the command inbox_edit." in words


def test_message_that_cannot_be_edited_is_refused_with_the_reason(dead):
    row = dead()
    settle(InboxMessage.objects.all())

    response = edit(staff_client(VIEW, EDIT), row, own_page="yes")

    ((level, words),) = said(response)
    assert (level, response.url) == ("error", reverse(DETAIL, args=[row.pk]))
    assert words.endswith("not replaced by a corrected message: Its state is done; only a dead message can be corrected.")


@pytest.mark.every_database
def test_correction_of_a_locked_row_is_reported_as_locked(dead, short_lock_waits):
    row = dead()
    client = staff_client(VIEW, EDIT)
    shown = hidden(Page(edit(client, row, confirmed="yes", payload=GOOD)), "shown")

    with transaction.atomic():
        InboxMessage.objects.filter(pk=row.pk).update(attempts=row.attempts)
        (response,) = at_once([partial(edit, client, row, confirmed="yes", payload=GOOD, shown=shown)])

    ((level, words),) = said(response)
    assert (level, "locked" in words) == ("error", True)
    assert (InboxMessage.objects.count(), the_row().state) == (1, State.DEAD)


@pytest.mark.every_database
def test_correction_whose_biz_id_another_row_has_is_reported_as_taken(dead):
    row = dead()
    client = staff_client(VIEW, EDIT)
    taken = f"edited:{row.pk}:{row.biz_id}"
    shown = hidden(Page(edit(client, row, confirmed="yes", payload=GOOD)), "shown")
    copy_of(the_row(pk=row.pk), biz_id=taken, state=State.DONE)

    ((level, words),) = said(edit(client, row, confirmed="yes", payload=GOOD, shown=shown))

    assert level == "error"
    assert f"Another row of this handler has the biz-id {taken}" in words
    assert the_row(pk=row.pk).state == State.DEAD


@pytest.mark.long
def test_pages_of_both_rows_link_to_each_other_and_the_list_marks_the_correction(dead):
    row = dead()
    client = staff_client(VIEW, EDIT)
    confirm(client, row, GOOD)
    new = the_row(replaces=row)

    assert own_page(client, row).all("a", href=reverse(DETAIL, args=[new.pk]))
    assert own_page(client, new).all("a", href=reverse(DETAIL, args=[row.pk]))
    assert f"replaced by row {new.pk}" in own_page(client, row).text
    assert "corrected" in Page(client.get(reverse(LIST))).text
    InboxMessage.objects.filter(pk=row.pk).delete()
    assert f"Row {row.pk} has been purged." in own_page(client, new).text
