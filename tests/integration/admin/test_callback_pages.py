"""Pending callbacks in the admin: the list with the last errors, calling one now, discarding it."""

from datetime import timedelta
from functools import partial

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from exactly_once.process.clock import utcnow
from outbox.models import PendingCallback
from outbox.states import State
from tests.support.admin_names import DETAIL, VIEW
from tests.support.admin_pages import NASTY, Page, a_message, act, listed, said, staff_client

pytestmark = pytest.mark.django_db(databases=["default", "other"])

CALLBACKS, CALLBACK = "admin:outbox_pendingcallback_changelist", "admin:outbox_pendingcallback_change"
VIEW_CALLBACKS, RUN, DISCARD = "view_pendingcallback", "run_pendingcallback", "discard_pendingcallback"
HOUR = timedelta(hours=1)

on_the_list = partial(act, page=CALLBACKS)


def pending(callback="shop.callbacks.order_published", due_in=HOUR, event="published", message=None, **columns):
    message = message or a_message(State(event), settled_at=utcnow())
    times = {"settled_at": message.settled_at, "available_at": utcnow() + due_in}
    return PendingCallback.objects.create(message=message, event=event, callback=callback, **times, **columns)


class TestCallbackList:
    def page(self):
        return Page(staff_client(VIEW, VIEW_CALLBACKS).get(reverse(CALLBACKS)))

    @pytest.mark.long
    def test_list_shows_the_next_due_callback_first_and_the_last_error(self):
        assert "every callback has returned" in self.page().text
        later = pending(due_in=60 * HOUR, attempts=3, last_error="no answer\nand more")
        soon = pending(event="dead")

        text = self.page().text

        assert listed(staff_client(VIEW, VIEW_CALLBACKS), CALLBACKS) == [soon.pk, later.pk]
        for expected in ("shop.callbacks.order_published", "Published", "Dead", "in 2 d", "no answer", "order-0"):
            assert expected in text
        assert "and more" not in text

    def test_unknown_filter_selects_callbacks_not_registered_in_this_process(self, add_callback):
        unknown, known = pending("gone"), pending("known")
        add_callback(name="known")
        assert listed(staff_client(VIEW, VIEW_CALLBACKS), CALLBACKS, trouble="unknown") == [unknown.pk]
        assert self.page().text.count("Not known here") == 1
        assert listed(staff_client(VIEW, VIEW_CALLBACKS), CALLBACKS, trouble="failing") == []
        assert set(listed(staff_client(VIEW, VIEW_CALLBACKS), CALLBACKS, trouble="?")) == {unknown.pk, known.pk}

    def test_search_finds_a_callback_by_its_name_message_id_or_biz_id(self):
        row, _ = pending("a.callback"), pending("b.callback")
        client = staff_client(VIEW, VIEW_CALLBACKS)
        message = row.message

        for term in ("a.callback", str(message.message_id), message.biz_id):
            assert listed(client, CALLBACKS, q=term) == [row.pk]
        for odd in ("%", NASTY, "\x01", "x" * 10_000):
            assert listed(client, CALLBACKS, q=odd) == []


def test_pages_of_a_callback_and_of_its_message_link_to_each_other_and_offer_permitted_actions():
    row = pending(attempts=2, last_error="no answer")
    client, of_the_message = staff_client(VIEW, VIEW_CALLBACKS, RUN), reverse(DETAIL, args=[row.message.pk])

    page = Page(client.get(reverse(CALLBACK, args=[row.pk])))
    text = " ".join(Page(client.get(of_the_message)).text.split())
    row.delete()

    assert page.all("a", href=of_the_message)
    assert {found["value"] for found in page.all("button", name="action")} == {"call_now"}
    assert "shop.callbacks.order_published (published), 2 calls so far, due in" in text
    assert "no answer" in text
    assert "Callbacks" not in Page(client.get(of_the_message)).text


def test_call_now_makes_a_callback_due_and_is_logged():
    row = pending()

    response = on_the_list(staff_client(VIEW, VIEW_CALLBACKS, RUN), "call_now", row, own_page="yes")

    row.refresh_from_db()
    assert row.available_at <= utcnow()
    assert response.url == reverse(CALLBACK, args=[row.pk])
    assert said(response)[0][1].startswith("Callback shop.callbacks.order_published of message ")
    assert LogEntry.objects.get().change_message == "To be called now."


def test_discard_reports_callbacks_called_in_the_meantime_and_leads_back_to_the_list():
    row, called = pending(), pending()
    client, keys = staff_client(VIEW, VIEW_CALLBACKS, DISCARD), [row.pk, called.pk]

    assert "the project is not notified about their messages" in Page(on_the_list(client, "discard", row, called)).text
    called.delete()
    response = on_the_list(client, "discard", confirmed="yes", own_page="yes", _selected_action=keys)

    assert not PendingCallback.objects.exists()
    assert response.url == reverse(CALLBACKS)
    assert [level for level, _ in said(response)] == ["success", "warning"]
    assert f"number {keys[1]}: not discarded: it no longer exists" in said(response)[1][1]
