"""The page on which an operator corrects the payload of a dead inbox message: edit, see what changes, confirm."""

import json
from functools import partial

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import transaction
from django.urls import reverse

from inbox import Reject
from inbox.models import InboxMessage
from inbox.states import State
from tests.support.admin_pages import NASTY, Page, said, staff_client
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
    data = {"action": "edit", "_selected_action": [row.pk for row in rows], **fields}
    return client.post(reverse(LIST), data)


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

    def offered(*permissions):
        return {button["value"] for button in own_page(staff_client(VIEW, *permissions), row).all("button", name="action")}

    assert offered(EDIT) == {"edit"}
    assert offered(RETRY, SKIP) == {"retry", "skip"}


def test_form_holds_the_payload_as_json(dead):
    page = Page(edit(staff_client(VIEW, EDIT), dead({"order_id": 7, "amount": "fünf \u202e"})))

    assert '{\n  "order_id": 7,\n  "amount": "fünf \\u202e"\n}' in page.text
    assert page.all("textarea", name="payload")
    assert page.all("input", type="submit", value="Show the changes")


def test_changes_are_shown_before_anything_is_stored(dead):
    row = dead()

    page = Page(edit(staff_client(VIEW, EDIT), row, confirmed="yes", payload=GOOD))

    assert '-   "amount": "five"\n' in page.text
    assert '+   "amount": 5\n' in page.text
    assert page.all("input", type="submit", value="Replace the message and run it")
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


def test_text_changed_after_its_changes_were_shown_is_shown_again(dead):
    row = dead()
    client = staff_client(VIEW, EDIT)
    shown = hidden(Page(edit(client, row, confirmed="yes", payload=GOOD)), "shown")

    again = Page(edit(client, row, confirmed="yes", payload=GOOD.replace("5", "6"), shown=shown))

    assert '+   "amount": 6\n' in again.text
    assert InboxMessage.objects.count() == 1


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


def test_one_message_is_edited_at_a_time(dead):
    first, second = dead(), dead()

    ((level, words),) = said(edit(staff_client(VIEW, EDIT), first, second))

    assert (level, words) == ("error", "Nothing was changed: select one message.")


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


def test_payload_that_is_too_large_for_the_page_is_left_to_the_command(dead):
    row = dead({"amount": "five", "note": "x" * 300_000})

    ((_, words),) = said(edit(staff_client(VIEW, EDIT), row))

    assert "Use the command inbox_edit." in words


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


def test_row_without_a_correction_has_no_part_for_it(dead):
    assert "Correction" not in own_page(staff_client(VIEW, EDIT), dead()).text


def test_payload_and_changes_are_escaped(dead):
    row = dead({"amount": NASTY})
    client = staff_client(VIEW, EDIT)

    pages = [edit(client, row), edit(client, row, confirmed="yes", payload=json.dumps({"amount": NASTY * 2}))]

    for response in pages:
        assert "<script>alert(1)" not in response.content.decode()
        assert "&lt;script&gt;alert(1)" in response.content.decode()
