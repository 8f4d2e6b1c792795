"""Failures in the admin: class and place, every attempt, groups and notes; and deferred messages apart from these."""

from datetime import timedelta

import pytest
from django.urls import reverse

from exactly_once.failures import DEFERRED, REFUSED
from exactly_once.models import FailureNote, Operation
from exactly_once.process.loop import StopRequest
from exactly_once.upkeep.executing import Operations
from inbox import RetryLater
from inbox.models import InboxMessage
from inbox.states import State
from outbox.models import OutboxMessage
from tests.support.admin_pages import Page, a_message, previewed, said, staff_client
from tests.support.deliveries import an_envelope, deliver, drain, make_due, options, the_row
from tests.support.inbox_rows import settle

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

VIEW, SKIP, NOTE = "view_inboxmessage", "skip_inboxmessage", "note_failurenote"
LIST, DETAIL = "admin:inbox_inboxmessage_changelist", "admin:inbox_inboxmessage_change"
GROUPS, GROUP = "admin:exactly_once_failurenote_changelist", "admin:exactly_once_failurenote_group"
THIS_FILE = "tests/integration/admin/test_failure_pages.py"


def refuse_the_card(message):
    raise ValueError("the card was refused")


def ask_the_warehouse(message):
    raise ConnectionError("no answer")


def wait_for_stock(message):
    raise RetryLater(timedelta(minutes=5), "out of stock")


def failed(handles, function, count=1, **given):
    handler = handles(function)
    for _ in range(count):
        deliver(handler, an_envelope(), given=options(**given))
    return handler


def group_of(row):
    return {"app": "inbox", "class": row.error_class, "place": row.error_place}


def operate():
    """What a running consumer does with planned operations."""
    return Operations("inbox", ["default"]).drain(StopRequest())


def test_group_says_which_keys_and_headers_its_messages_share_with_a_link_to_these(handles):
    handler = handles(refuse_the_card)
    for number in range(3):
        deliver(handler, an_envelope(key="customer-4", headers={"tenant": "acme" if number else "other"}))
    row = InboxMessage.objects.first()

    page = Page(staff_client("view_failurenote", VIEW).get(reverse(GROUP, query=group_of(row))))

    text = "".join(page.text.split())
    assert "keycustomer-43" in text
    assert "headers.tenantacme2" in text
    assert "tenantother" not in text
    failure = f"{row.error_class}|{row.error_place}"
    assert page.all("a", href=reverse(LIST, query={"failure": failure, "q": "headers.tenant:acme"}))


class TestFailureOfAMessage:
    def test_class_and_place_are_those_of_the_innermost_frame_of_the_projects_code(self, handles):
        failed(handles, refuse_the_card)
        row = the_row()
        file, function, line = row.error_place.split(":")
        assert (row.error_class, file, function, int(line) > 0) == ("ValueError", THIS_FILE, "refuse_the_card", True)
        assert row.failing_since == row.failed_at is not None
        make_due()
        drain(options(MAX_ATTEMPTS=3))
        again = the_row()
        assert (again.failing_since, again.failed_at > row.failed_at) == (row.failing_since, True), "the same failure returns"

    def test_frames_of_libraries_do_not_hide_the_place(self, handles):
        def read_json(message):
            import json  # noqa: PLC0415

            json.loads("{")

        failed(handles, read_json)
        assert the_row().error_class == "json.decoder.JSONDecodeError"
        assert the_row().error_place.startswith(f"{THIS_FILE}:read_json:")

    def test_each_failed_attempt_is_kept_with_its_traceback_up_to_the_latest_ten(self, handles):
        failed(handles, refuse_the_card, MAX_ATTEMPTS=14)
        for _ in range(13):
            make_due()
            drain(options(MAX_ATTEMPTS=14))
        attempts = the_row().failures
        assert [attempt["attempt"] for attempt in attempts] == [*range(5, 15)]
        assert all("refuse_the_card" in attempt["own"] and "Traceback" in attempt["traceback"] for attempt in attempts)
        assert all("/inbox/" not in attempt["own"] for attempt in attempts)

    def test_attempts_stay_when_the_message_is_handled(self, handles):
        fails = [True]

        def fail_once(message):
            if fails.pop() if fails else False:
                raise ValueError("once")

        failed(handles, fail_once)
        make_due()
        drain()
        row = the_row()
        assert (row.state, row.error_class, row.error_place, row.failing_since) == (State.DONE, "", "", None)
        assert [attempt["attempt"] for attempt in row.failures] == [1]

    def test_refused_message_has_a_class_and_no_place_and_a_deferred_one_does_not_fail(self, handles):
        deliver(handles(refuse_the_card), an_envelope(body=b"\xff"))
        refused = the_row()
        assert (refused.state, refused.error_class, refused.error_place) == (State.DEAD, REFUSED, "")
        assert refused.failing_since is not None
        failed(handles, wait_for_stock)
        row = the_row(state=State.RETRYING)
        assert (row.error_class, row.failing_since, row.failures) == (DEFERRED, None, None)

    def test_page_shows_own_frames_first_and_folds_those_of_libraries(self, handles):
        failed(handles, refuse_the_card)
        make_due()
        drain()
        page = Page(staff_client(VIEW).get(reverse(DETAIL, args=[the_row().pk])))
        attempts = page.all("details", **{"class": "message-attempt"})
        assert [set(attempt) >= {"open"} for attempt in attempts] == [True, False]
        assert page.text.index("Attempt 2") < page.text.index("Attempt 1")
        own, complete = page.text.index('raise ValueError("the card was refused")'), page.text.index("Traceback (most")
        assert own < complete
        assert len(page.all("details", **{"class": "message-frames"})) == 2


def test_list_filters_and_groups_distinguish_deferred_messages_from_failed_ones(handles):
    failed(handles, wait_for_stock, count=2)
    assert "No message is retrying or dead." in Page(staff_client(VIEW).get(reverse(GROUPS))).text
    failed(handles, refuse_the_card)
    client = staff_client(VIEW)
    text = " ".join(Page(client.get(reverse(LIST))).text.split())
    for expected in ("◷ Later", "Retrying (1)", "Later (2)"):
        assert expected in text
    for query, function in (
        ("state=retrying", refuse_the_card),
        ("state=later", wait_for_stock),
        ("stuck=any", refuse_the_card),
    ):
        found = client.get(f"{reverse(LIST)}?{query}").context["cl"].result_list
        assert {row.error_place.split(":")[1] for row in found} == {function.__name__}


class TestFailureGroups:
    @pytest.mark.every_database
    def test_groups_show_class_place_count_and_handlers_with_the_largest_first(self, handles):
        failed(handles, ask_the_warehouse)
        failed(handles, refuse_the_card, count=3)
        response = staff_client(VIEW).get(reverse(GROUPS))
        groups = response.context["groups"]
        assert [group["of"].count for group in groups] == [3, 1]
        text = Page(response).text
        assert text.index("ValueError") < text.index("ConnectionError")
        assert "refuse_the_card" in text
        assert "rising: 3 new in the last hour, 0 in the hour before" in text

    def test_group_lists_its_messages_and_links_to_all_of_them(self, handles):
        failed(handles, refuse_the_card, count=2)
        failed(handles, ask_the_warehouse)
        row = InboxMessage.objects.filter(error_class="ValueError").first()
        client = staff_client(VIEW)
        page = Page(client.get(reverse(GROUP), group_of(row)))
        (link, *_rest) = [a["href"] for a in page.all("a") if "failure=" in a.get("href", "")]
        found = client.get(link).context["cl"].result_list
        assert [row.error_class for row in found] == ["ValueError"] * 2
        settle(InboxMessage.objects.all())
        assert "No message fails so any more." in Page(client.get(reverse(GROUP), group_of(row))).text

    def test_note_is_shown_with_its_author_and_not_lost_if_it_is_too_long(self, handles):
        failed(handles, refuse_the_card)
        client, url = staff_client(VIEW, NOTE), reverse(GROUP, query=group_of(the_row()))
        client.post(url, {"action": "note", "note": "The bank is down, see #7."})
        assert "The bank is down, see #7." in Page(client.get(reverse(GROUPS))).text
        assert FailureNote.objects.get().written_by.startswith("staff")
        client.post(url, {"action": "note", "note": ""})
        long = "The bank is down. " * 300
        page = Page(client.post(url, {"action": "note", "note": long}))
        assert long in page.text
        assert "at most 4000 characters" in page.text
        assert not FailureNote.objects.exists()

    def test_note_and_actions_need_their_permissions(self, handles):
        failed(handles, refuse_the_card)
        url = f"{reverse(GROUP)}?app=inbox&class=ValueError&place={the_row().error_place}"
        client = staff_client(VIEW)
        assert not Page(client.get(url)).all("button", name="action")
        for action in ("note", "retry", "skip"):
            assert client.post(url, {"action": action, "note": "x", "plan_confirmed": "1", "reason": "x"}).status_code == 403
        assert not Operation.objects.exists()
        assert staff_client().get(reverse(GROUPS)).status_code == 403
        assert staff_client().get(url).status_code == 403

    def test_whole_group_is_skipped_and_no_other_message(self, handles):
        failed(handles, refuse_the_card, count=3)
        failed(handles, ask_the_warehouse)
        row = InboxMessage.objects.filter(error_class="ValueError").first()
        client = staff_client(VIEW, SKIP)
        url = f"{reverse(GROUP)}?app=inbox&class=ValueError&place={row.error_place}"
        preview = client.post(url, {"action": "skip"})
        assert "It applies to 3 of 3 messages." in Page(preview).text
        failed(handles, refuse_the_card)
        response = client.post(url, {"action": "skip", **previewed(preview), "reason": "paid by hand"})
        assert "planned" in said(response)[0][1]
        assert operate() > 0
        operation = Operation.objects.get()
        assert response.url == reverse("admin:exactly_once_operation_change", args=[operation.pk])
        assert (operation.state, operation.done, operation.total) == ("finished", 3, 3)
        states = sorted(InboxMessage.objects.values_list("state", flat=True))
        assert states == ["retrying", "retrying", "skipped", "skipped", "skipped"]
        assert InboxMessage.objects.filter(last_error="skipped: paid by hand").count() == 3

    @pytest.mark.every_database
    def test_outbox_groups_are_by_the_brokers_answer_and_topic(self):
        failing = {"error_class": "returned", "last_error": "NO_ROUTE"}
        for topic in ("shop.a", "shop.a", "shop.b"):
            row = a_message("retrying", topic=topic, **failing)
            OutboxMessage.objects.filter(pk=row.pk).update(failing_since=row.created_at, failed_at=row.created_at)
        response = staff_client("view_outboxmessage").get(reverse("admin:exactly_once_failurenote_changelist"))
        assert [group["of"].count for group in response.context["groups"]] == [2, 1]
        assert "shop." in Page(response).text


def test_names_in_a_url_that_no_column_takes_find_nothing():
    client, hostile = staff_client(VIEW, NOTE, "view_auditentry"), "\0" + "W" * 5_000
    group = reverse(GROUP, query={"app": "inbox", "class": hostile, "place": hostile})
    listed = reverse(LIST, query={"failure": f"{hostile}|{hostile}"})
    logged = reverse("admin:exactly_once_auditentry_changelist", query={"actor": hostile})

    assert [client.get(url).status_code for url in (group, listed, logged)] == [200, 200, 200]
    assert client.post(group, {"action": "note", "note": "Whose is it?"}).status_code == 302
    assert "Whose is it?" in Page(client.get(group)).text
