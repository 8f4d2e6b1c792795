"""The outbox in the admin: lists, search, detail pages, actions and their permissions."""

import json
import re
from datetime import timedelta

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.contrib.messages.storage.fallback import FallbackStorage
from django.db import DatabaseError, connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from exactly_once.console import display
from exactly_once.models import AuditEntry
from exactly_once.process.clock import utcnow
from outbox.admin import OutboxMessageAdmin
from outbox.admin.actions import RESTORE_THEM
from outbox.conf import outbox_options
from outbox.models import OutboxMessage, TrailEntry
from outbox.states import State
from outbox.store import decision_rows
from tests.support.admin_names import CANCEL, DETAIL, LIST, RESTORE, VIEW
from tests.support.admin_pages import (
    NASTY,
    Page,
    a_message,
    act,
    said,
    shown,
    staff_client,
    state_of,
    superuser_client,
)

pytestmark = pytest.mark.django_db(databases=["default", "other"])

LONG_AGO = timedelta(days=1)


class TestMessageFilters:
    @pytest.mark.every_database
    def test_stuck_filter_selects_dead_retrying_stuck_and_overdue_messages(self):
        dead, retrying = a_message(State.DEAD), a_message(State.RETRYING, due_ago=-LONG_AGO)
        overdue = a_message(State.READY, due_ago=outbox_options().STUCK_AFTER + timedelta(minutes=1))
        forgotten = a_message(State.SCHEDULED, due_ago=LONG_AGO)
        behind = a_message(State.WAITING, due_ago=LONG_AGO)
        a_message(State.READY, ago=LONG_AGO, due_ago=outbox_options().STUCK_AFTER - timedelta(minutes=1))
        a_message(State.SCHEDULED, ago=LONG_AGO, due_ago=-LONG_AGO)
        for state in (State.PUBLISHED, State.CANCELLED, State.EXPIRED):
            a_message(state, ago=LONG_AGO)
        undecided, unasked = a_message(State.STUCK, due_ago=-LONG_AGO), a_message(State.PREPARED, due_ago=LONG_AGO)
        a_message(State.PREPARED)
        client = staff_client(VIEW)

        assert shown(client, stuck="any") == {
            *(row.pk for row in (dead, retrying, overdue, forgotten, behind, undecided, unasked))
        }
        assert shown(client, stuck="overdue") == {overdue.pk, forgotten.pk, behind.pk, unasked.pk}

    def test_stuck_filter_uses_the_stuck_after_setting(self, settings):
        settings.OUTBOX = {"STUCK_AFTER": timedelta(hours=1)}
        client = staff_client(VIEW)
        a_message(due_ago=timedelta(minutes=50))
        overdue = a_message(due_ago=timedelta(minutes=70))

        assert shown(client, stuck="overdue") == {overdue.pk}
        assert "Overdue by 60 min" in Page(client.get(reverse(LIST))).text


class TestDetailPage:
    def page(self, row, *codenames):
        return Page(staff_client(VIEW, *codenames).get(reverse(DETAIL, args=[row.pk])))

    def test_detail_page_shows_payload_headers_error_message_id_and_times(self):
        texts = {"payload": {"total": "9.90", "name": "Zoë"}, "headers": {"tenant": "acme"}, "last_error": "line 1\nline 2"}
        times = {"ago": timedelta(hours=3), "due_ago": timedelta(hours=2), "settled_at": utcnow() - timedelta(hours=1)}
        row = a_message(State.DEAD, **texts, **times)

        page = self.page(row)

        for expected in ('"total": "9.90"', '"name": "Zoë"', '"tenant": "acme"', "line 1\nline 2", str(row.message_id)):
            assert expected in page.text
        instants = {instant.isoformat() for instant in (row.created_at, row.available_at, row.settled_at)}
        assert instants <= {found["datetime"] for found in page.all("time")}

    def test_fields_and_sections_without_a_value_are_left_out(self):
        without, with_key = (self.page(a_message(State.READY, **columns)).text for columns in ({}, {"key": "customer-4"}))

        assert "Ordering key" in with_key
        assert "Ordering key" not in without
        for name in ("Correlation id", "Origin"):
            assert name not in with_key

    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            *((body, "is not JSON") for body in (b"", b"{", b"[" * 50_000, b"9" * 5_000)),
            *((b"just text", "just text"), (b"\xff\x00\x80abc", "ff 00 80 61 62 63"), (b"NaN", "NaN")),
            *((b'"\\ud800 \\u202e"', '"\\ud800 \\u202e"'), (b'["outside", ' * 990 + b"0" + b"]" * 990, '"outside"')),
        ],
        ids=lambda value: ascii(value)[:20],
    )
    def test_detail_page_shows_any_body_or_says_why_it_cannot(self, body, expected):
        assert expected in self.page(a_message(body=body)).text

    def test_detail_page_truncates_a_large_payload_and_says_so(self):
        body = json.dumps({"text": "é" * 300_000}, ensure_ascii=False).encode()
        response = staff_client(VIEW).get(reverse(DETAIL, args=[a_message(body=body).pk]))

        assert len(response.content) < 64 * 1024 + 60_000
        assert f"Only the first 64 kB are shown. The body has {len(body):,} bytes." in Page(response).text

    def test_detail_page_offers_only_actions_that_state_and_permissions_allow(self):
        def offered(state, *codenames):
            return {found["value"] for found in self.page(a_message(state), *codenames).all("button", name="action")}

        assert offered(State.DEAD, RESTORE, CANCEL) == {"restore", "cancel"}
        assert offered(State.DEAD, CANCEL) == {"cancel"}
        assert offered(State.SCHEDULED, RESTORE, CANCEL) == offered(State.WAITING, RESTORE, CANCEL) == {"cancel"}
        assert offered(State.PUBLISHED, RESTORE, CANCEL) == set()
        assert offered(State.DEAD) == set()

    def test_action_on_the_detail_page_redirects_back_to_it(self):
        row = a_message(State.DEAD)

        client = staff_client(VIEW, RESTORE)

        assert Page(act(client, "restore", row, own_page="yes")).all("input", name="own_page", value="yes")
        response = act(client, "restore", row, own_page="yes", confirmed="yes", overdue="on")

        assert response.url == reverse(DETAIL, args=[row.pk])
        assert state_of(row) == State.READY


class TestBlockedOrderingKey:
    """A message that failed blocks the later ones of its key, and the pages of both say so."""

    def page(self, row):
        return Page(staff_client(VIEW, CANCEL).get(reverse(DETAIL, args=[row.pk])))

    @pytest.mark.parametrize("failed", [State.DEAD, State.RETRYING])
    def test_waiting_message_links_to_the_first_failed_message_of_its_key(self, failed):
        a_message(State.DEAD, key="b")
        a_message(State.PUBLISHED, key="a")
        head = a_message(failed, key="a", biz_id="the-head")
        _, row, _ = (a_message(state, key="a") for state in (State.DEAD, State.WAITING, State.DEAD))
        a_message(State.WAITING, key="b")

        with CaptureQueriesContext(connection) as queries:
            page = self.page(row)
        (statement,) = [query["sql"] for query in queries if '"state" IN' in query["sql"]]

        assert "It waits behind an earlier message of its ordering key, which failed: shop.order.placed the-head" in page.text
        assert page.all("a", href=reverse(DETAIL, args=[head.pk]))
        assert "Waiting behind it: 1." in self.page(head).text
        assert "LIMIT 1" in statement
        assert not re.search(r'"(body|headers)"', statement)

    def test_waiting_message_says_when_no_failed_message_blocks_it(self):
        a_message(State.PUBLISHED, key="a")
        row = a_message(State.WAITING, key="a")
        a_message(State.DEAD, key="a")

        assert "Nothing blocks it any more" in self.page(row).text

    @pytest.mark.parametrize(("state", "key"), [(State.DEAD, ""), (State.READY, "a"), (State.PUBLISHED, "a")])
    def test_message_that_blocks_no_other_shows_no_notice_about_its_key(self, state, key):
        row = a_message(state, key=key)
        a_message(State.WAITING, key=key)

        assert "ordering key." not in self.page(row).text


class TestMessageTextIsEscaped:
    """Every text in a message comes from outside and is shown as text only."""

    def test_body_that_is_not_json_adds_no_element(self):
        harmless, nasty = (
            Page(staff_client(VIEW).get(reverse(DETAIL, args=[a_message(body=body).pk])))
            for body in (b"harmless", NASTY.encode())
        )

        assert NASTY in nasty.text
        assert nasty.shape == harmless.shape

    def test_bidirectional_control_characters_are_shown_as_escapes(self):
        a_message(biz_id="order-\u202e1")

        text = Page(staff_client(VIEW).get(reverse(LIST))).text

        assert "\u202e" not in text
        assert "order-\\u202e1" in text


def test_user_is_offered_the_actions_with_their_permission_and_never_deletion():
    a_message(State.DEAD)
    every = {"restore", "publish_now", "reschedule", "cancel", "commit", "roll_back", "ask_again", "export"}
    by_client = {staff_client(VIEW, RESTORE): {"restore"}, staff_client(VIEW, CANCEL): {"cancel"}, superuser_client(): every}

    for client, expected in by_client.items():
        assert {found.get("value") for found in Page(client.get(reverse(LIST))).all("option")} == {"", *expected}


class TestRestore:
    def test_restore_reports_a_message_that_was_deleted(self):
        row, stays = a_message(State.DEAD), a_message(State.DEAD)
        OutboxMessage.objects.filter(pk=row.pk).delete()

        response = act(staff_client(VIEW, RESTORE), "restore", row, stays, confirmed="yes", overdue="on")

        assert ("warning", f"Message number {row.pk}: not restored: it no longer exists") in said(response)
        assert state_of(stays) == State.READY

    def test_restore_report_of_many_messages_is_summarised(self):
        dead = [a_message(State.DEAD) for _ in range(19)]
        rest = [a_message(State.PUBLISHED) for _ in range(12)] + [a_message(State.WAITING)]

        report = said(act(staff_client(VIEW, RESTORE), "restore", *dead, *rest, confirmed="yes", overdue="on"))

        assert report[:2] == [
            ("success", "19 of 32 messages restored."),
            ("warning", "13 not restored. 12: it is published now; 1: it is waiting now."),
        ]
        assert len(report) == 2 + 10
        assert LogEntry.objects.count() == AuditEntry.objects.count() == 19

    def test_restore_of_more_selected_messages_than_the_limit_is_refused(self, monkeypatch):
        monkeypatch.setattr(OutboxMessageAdmin, "ACTION_LIMIT", 2)
        rows = [a_message(State.DEAD) for _ in range(3)]

        refused = act(staff_client(VIEW, RESTORE), "restore", *rows, confirmed="yes", overdue="on")

        assert [level for level, _ in said(refused)] == ["error"]
        assert {state_of(row) for row in rows} == {State.DEAD}

    def test_restore_continues_after_a_database_error_on_one_message(self, monkeypatch):
        first, second = a_message(State.DEAD), a_message(State.DEAD)
        decide = decision_rows.decide

        def fails_for_the_first(alias, transition, positions, **options):
            if positions == [first.pk]:
                raise DatabaseError("canceling statement due to <b>lock timeout</b>")
            return decide(alias, transition, positions, **options)

        monkeypatch.setattr(decision_rows, "decide", fails_for_the_first)

        report = said(act(staff_client(VIEW, RESTORE), "restore", first, second, confirmed="yes", overdue="on"))

        assert [level for level, _ in report] == ["error", "success"]
        assert "the database reported canceling statement" in report[0][1]
        assert (state_of(first), state_of(second)) == (State.DEAD, State.READY)


class TestCancel:
    def test_cancel_reports_a_message_that_a_relay_has_claimed(self, monkeypatch):
        row = a_message(State.READY)
        monkeypatch.setattr(decision_rows, "decide", lambda *args, **options: decision_rows.Decided({}, {row.pk: "locked"}))

        response = act(staff_client(VIEW, CANCEL), "cancel", row, confirmed="yes")

        assert said(response)[0][1].endswith("not cancelled: it is ready now, and a process is working on it; try again")

    def test_cancel_reports_a_message_whose_relay_has_ended_its_pass_since_by_its_state(self, monkeypatch):
        row = a_message(State.PUBLISHED)
        monkeypatch.setattr(decision_rows, "decide", lambda *args, **options: decision_rows.Decided({}, {row.pk: "locked"}))

        response = act(staff_client(VIEW, CANCEL), "cancel", row, confirmed="yes")

        assert said(response)[0][1].endswith("not cancelled: it is published now")

    def test_cancel_of_deleted_messages_says_that_none_is_left(self):
        row = a_message(State.DEAD)
        OutboxMessage.objects.all().delete()

        assert "None of them exists any more" in Page(act(staff_client(VIEW, CANCEL), "cancel", row)).text


@pytest.mark.every_database
@pytest.mark.django_db(databases=["default", "other"])
def test_admin_of_another_database_lists_and_restores_messages_of_that_database(rf):
    class OtherAdmin(OutboxMessageAdmin):
        using = "other"

    here, there = a_message(State.DEAD), a_message(State.DEAD, using="other")
    request = rf.post("/", {"_selected_action": [there.pk], "confirmed": "yes", "overdue": "on"})
    request.user, request.session = User.objects.create_superuser("root"), {}
    request._messages = FallbackStorage(request)
    other_admin = OtherAdmin(OutboxMessage, admin.site)
    queryset = other_admin.get_queryset(request)

    assert [row.message_id for row in queryset] == [there.message_id]
    RESTORE_THEM(other_admin, request, queryset)

    assert OutboxMessage.objects.using("other").get(pk=there.pk).state == State.READY
    assert state_of(here) == State.DEAD


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        *((0, "now"), (0.9, "now"), (1, "1 s ago"), (119, "119 s ago"), (120, "2 min ago"), (-20, "in 20 s")),
        *((3 * 3600, "3 h ago"), (2000 * 86_400, "2,000 d ago")),
    ],
)
def test_relative_time_is_shown_in_one_unit(seconds, expected):
    now = utcnow()

    assert display.relative(now - timedelta(seconds=seconds), now) == expected


HOUR = timedelta(hours=1)


def cancelled(**columns):
    return a_message(State.CANCELLED, settled_at=utcnow(), **columns)


def ahead(**columns):
    return cancelled(deliver_at=utcnow() + HOUR, **columns)


def test_restore_asks_for_confirmation_and_previews_the_result_for_each_message():
    replaced = cancelled(topic="a", biz_id="b", is_unique=True)
    rows = [cancelled(), ahead(), a_message(State.PUBLISHED), replaced]
    a_message(State.READY, topic="a", biz_id="b", is_unique=True)

    page = Page(act(staff_client(VIEW, RESTORE), "restore", *rows))
    ((level, words),) = said(act(staff_client(VIEW, RESTORE), "restore", replaced, confirmed="yes", overdue="on"))

    expected = ["Overdue: it is sent at once.", "Scheduled again, due in", "In this state it is not changed."]
    for text in (*expected, "A later message has replaced it: it is not changed."):
        assert page.text.count(text) == 1
    assert page.all("input", name="overdue", type="checkbox")
    assert [state_of(row) for row in rows] == [State.CANCELLED, State.CANCELLED, State.PUBLISHED, State.CANCELLED]
    assert level == "warning"
    assert words.endswith("it was published with unique=True, and so was a later message with its topic and biz-id")


@pytest.mark.every_database
@pytest.mark.parametrize(
    ("given", "became", "level", "words"),
    [
        ({"overdue": "on"}, State.READY, "success", ": restored"),
        ({}, State.CANCELLED, "warning", "not restored: it is overdue, and overdue messages were not selected"),
    ],
)
def test_restore_leaves_overdue_messages_unless_they_are_selected_and_says_so(given, became, level, words):
    late, later = cancelled(), ahead()
    more = {"confirmed": "yes", "reason": "cancelled by mistake", **given}

    report = said(act(staff_client(VIEW, RESTORE), "restore", late, later, **more))

    assert (state_of(late), state_of(later)) == (became, State.SCHEDULED)
    assert (report[0][0], report[1][0]) == (level, "success")
    assert report[0][1].endswith(words)
    reason = f"by {User.objects.get().username} in the admin: cancelled by mistake"
    assert TrailEntry.objects.filter(reason__contains=reason).count() == (2 if given else 1)
