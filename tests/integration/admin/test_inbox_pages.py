"""The inbox in the admin: lists, search, detail pages, the operator's decisions and their permissions."""

import re
import uuid
import zlib
from datetime import timedelta
from functools import partial

import pytest
from django.urls import reverse

from exactly_once.process.clock import utcnow
from inbox.conf import inbox_options
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.models import InboxMessage, Step
from inbox.states import State
from tests.support.admin_pages import act as act_on_a_list
from tests.support.admin_pages import an_inbox_message, listed, said, staff_client

pytestmark = pytest.mark.django_db(databases=["default", "other"])

LIST = "admin:inbox_inboxmessage_changelist"
DETAIL = "admin:inbox_inboxmessage_change"
VIEW, RETRY, SKIP = "view_inboxmessage", "retry_inboxmessage", "skip_inboxmessage"
OVERRIDE = "override_inboxmessage"
LONG_AGO = timedelta(days=1)

act = partial(act_on_a_list, page=LIST)


def shown(client, **query):
    return set(listed(client, LIST, **query))


def html(response):
    assert response.status_code == 200
    return response.content.decode()


def text_of(response):
    """What a person reads."""
    return " ".join(re.sub(r"<[^>]*>", " ", html(response).replace("<wbr>", "")).split())


def actions_on_its_page(client, row):
    return set(re.findall(r'name="action" value="(\w+)"', html(client.get(reverse(DETAIL, args=[row.pk])))))


def state_of(row):
    return InboxMessage.objects.get(pk=row.pk).state


class TestMessageList:
    def test_search_finds_a_message_id_that_another_producer_wrote_without_dashes(self):
        found = uuid.uuid4()
        row, _ = an_inbox_message(message_id=found.hex), an_inbox_message()
        client = staff_client(VIEW)

        assert shown(client, q=str(found)) == shown(client, q=found.hex) == {row.pk}

    def test_search_finds_foreign_message_ids_topics_biz_ids_and_handlers(self):
        row, _ = an_inbox_message(message_id="a/1", topic="t", biz_id="b", handler="gone.handler"), an_inbox_message()
        client = staff_client(VIEW)

        for term in ("a/1", "t", "b", "gone.handler", "gone.handler "):
            assert shown(client, q=term) == {row.pk}

    def test_handler_filter_offers_registered_handlers_and_selects_any(self, monkeypatch):
        handler = Handler(name="shop.bill", topics=("t",), function=print, biz_id=None, using="default")
        monkeypatch.setattr(registry, "_handlers", {handler.name: handler})
        row, removed = an_inbox_message(handler="shop.bill"), an_inbox_message(handler="removed")
        client = staff_client(VIEW)

        assert 'href="?handler=shop.bill"' in html(client.get(reverse(LIST)))
        assert shown(client, handler="shop.bill") == {row.pk}
        assert shown(client, handler="removed") == {removed.pk}
        assert shown(client, handler="unknown\x00") == set()

    @pytest.mark.every_database
    def test_stuck_filter_selects_dead_retrying_and_overdue_messages(self):
        too_long = inbox_options().STUCK_AFTER + timedelta(minutes=1)
        dead, retrying = an_inbox_message(State.DEAD), an_inbox_message(State.RETRYING, next_ago=-LONG_AGO)
        overdue = {
            an_inbox_message(State.RECEIVED, next_ago=too_long).pk,
            an_inbox_message(State.WAITING, received_ago=too_long).pk,
            an_inbox_message(State.RUNNING, received_ago=too_long).pk,
        }
        an_inbox_message(State.RECEIVED, received_ago=LONG_AGO, next_ago=-LONG_AGO)
        an_inbox_message(State.WAITING)
        for state in (State.DONE, State.SKIPPED, State.SHED):
            an_inbox_message(state, received_ago=LONG_AGO)
        client = staff_client(VIEW)

        assert shown(client, stuck="overdue") == overdue
        assert shown(client, stuck="any") == {dead.pk, retrying.pk, *overdue}

    def test_list_shows_quarantine_duplicates_and_conflicts(self):
        an_inbox_message(quarantined=True)
        an_inbox_message(State.DONE, duplicates=1234, resends=1234)
        an_inbox_message(State.DONE, duplicates=3, conflicts=2)

        text = text_of(staff_client(VIEW).get(reverse(LIST)))

        for expected in ("Dead in quarantine", "Done 1,234 more", "Done ✕ 2 conflicting"):
            assert expected in text

    def test_duplicates_filter_selects_all_duplicates_or_only_conflicts(self):
        again, conflicting = an_inbox_message(State.DONE, duplicates=1), an_inbox_message(State.DONE, duplicates=1, conflicts=1)
        an_inbox_message(State.DONE)
        client = staff_client(VIEW)

        assert shown(client, duplicates="any") == {again.pk, conflicting.pk}
        assert shown(client, duplicates="conflicting") == {conflicting.pk}
        assert shown(client, duplicates="unknown\x00") == set()

    def test_quarantined_filter_selects_dead_quarantined_messages_only(self):
        held, _ = an_inbox_message(quarantined=True), an_inbox_message()
        an_inbox_message(State.SKIPPED, quarantined=True)

        assert shown(staff_client(VIEW), stuck="quarantined") == {held.pk}

    def test_search_finds_a_message_by_its_conflicting_message_id(self):
        row, _ = an_inbox_message(State.DONE, duplicates=1, conflicts=1, conflicting_id=str(uuid.uuid4())), an_inbox_message()

        assert shown(staff_client(VIEW), q=row.conflicting_id) == {row.pk}

    def test_list_shows_when_a_lease_ends_or_has_ended(self):
        an_inbox_message(State.RUNNING, next_ago=-timedelta(minutes=9.5))
        an_inbox_message(State.RUNNING, next_ago=timedelta(minutes=3.5))

        text = text_of(staff_client(VIEW).get(reverse(LIST)))

        assert "lease ends in 9 min" in text
        assert "lease ended 3 min ago" in text


class TestDetailPage:
    def test_detail_page_shows_payload_headers_error_and_traceback(self):
        row = an_inbox_message(
            payload={"total": "9.90"}, headers={"tenant": "acme"}, last_error="no stock", traceback="Traceback\n  line 1"
        )

        text = html(staff_client(VIEW).get(reverse(DETAIL, args=[row.pk])))

        for expected in ("&quot;total&quot;: &quot;9.90&quot;", "&quot;acme&quot;", "no stock", "Traceback\n  line 1"):
            assert expected in text

    def test_waiting_message_links_to_the_first_open_message_of_its_key(self):
        ordered = {"key": "customer-4", "ordered": True}
        an_inbox_message(State.DONE, **ordered)
        an_inbox_message(State.DEAD, key="customer-4", ordered=True, handler="another.handler")
        head = an_inbox_message(State.RETRYING, **ordered)
        waiting = [an_inbox_message(State.WAITING, **ordered) for _ in range(3)]
        client = staff_client(VIEW)

        response = client.get(reverse(DETAIL, args=[waiting[1].pk]))

        assert f'href="{reverse(DETAIL, args=[head.pk])}"' in html(response)
        assert f"{head.topic} {head.biz_id} (retrying)" in text_of(response)
        assert "wait for it: 3." in text_of(client.get(reverse(DETAIL, args=[head.pk])))

    def test_unordered_dead_message_is_not_shown_as_blocking_its_key(self):
        passed = an_inbox_message(State.DEAD, key="customer-4")
        head = an_inbox_message(State.RECEIVED, key="customer-4", ordered=True)
        waiting = an_inbox_message(State.WAITING, key="customer-4", ordered=True)
        client = staff_client(VIEW)

        assert reverse(DETAIL, args=[head.pk]) in html(client.get(reverse(DETAIL, args=[waiting.pk])))
        assert "wait for it" not in text_of(client.get(reverse(DETAIL, args=[passed.pk])))

    def test_waiting_message_says_when_no_earlier_message_blocks_it(self):
        waiting = an_inbox_message(State.WAITING, key="customer-4", ordered=True)

        assert "a consumer will run it shortly" in text_of(staff_client(VIEW).get(reverse(DETAIL, args=[waiting.pk])))

    def test_running_message_shows_the_number_and_the_end_of_its_lease(self):
        running = an_inbox_message(State.RUNNING, next_ago=-timedelta(minutes=9.5), fence=2)
        ended = an_inbox_message(State.RUNNING, next_ago=timedelta(minutes=1), fence=3)
        client = staff_client(VIEW)

        assert "Lease 2 ends in 9 min" in text_of(client.get(reverse(DETAIL, args=[running.pk])))
        assert "Lease 3 has expired" in text_of(client.get(reverse(DETAIL, args=[ended.pk])))

    def test_detail_page_shows_the_completed_steps(self):
        row = an_inbox_message(State.RETRYING)
        taken_at = utcnow() - timedelta(minutes=3, seconds=30)
        Step.objects.create(message=row, name="charge", result={"receipt": "r-1"}, taken_at=taken_at)

        text = text_of(staff_client(VIEW, "view_step").get(reverse(DETAIL, args=[row.pk])))

        assert "charge ( 3 min ago )" in text
        assert "&quot;receipt&quot;: &quot;r-1&quot;" in text

    def test_detail_page_counts_duplicates_by_cause(self):
        row = an_inbox_message(State.DONE, duplicates=10, redeliveries=2, resends=3, replays=1)

        text = text_of(staff_client(VIEW).get(reverse(DETAIL, args=[row.pk])))

        assert "10 in total; none was run 2 delivered again by the broker 3 sent again by a relay" in text
        assert "1 sent again by an operator 4 published again with another message id" in text

    def test_detail_page_shows_the_latest_conflicting_message(self):
        other = str(uuid.uuid4())
        row = an_inbox_message(
            State.DONE,
            duplicates=2,
            conflicts=2,
            conflicting_id=other,
            conflicting_body=b'{"order": 2}',
            conflicting_at=utcnow(),
        )

        text = text_of(staff_client(VIEW).get(reverse(DETAIL, args=[row.pk])))

        assert "with this biz-id but different content: 2." in text
        assert other in text
        assert "&quot;order&quot;: 1" in text
        assert "&quot;order&quot;: 2" in text

    def test_detail_page_omits_empty_sections(self):
        empty, full = an_inbox_message(State.DONE), an_inbox_message(State.DONE, duplicates=1)
        Step.objects.create(message=full, name="charge", result=None, taken_at=utcnow())
        client = staff_client(VIEW, "view_step")
        sections = {"Further deliveries", "Steps taken"}

        shown_of_full, shown_of_empty = (
            {section for section in sections if section in text_of(client.get(reverse(DETAIL, args=[row.pk])))}
            for row in (full, empty)
        )

        assert (shown_of_full, shown_of_empty) == (sections, set())

    def test_detail_page_shows_bytes_of_another_media_type_with_the_reason(self):
        row = an_inbox_message(body=b"\x80\x04pickled", content_type="application/x-python-serialize")

        text = html(staff_client(VIEW).get(reverse(DETAIL, args=[row.pk])))

        assert "80 04 70 69 63 6b 6c 65 64" in text
        assert "(9 bytes, application/x-python-serialize) is not JSON" in text

    def test_detail_page_shows_a_compressed_body_inflated_and_a_bomb_as_bytes(self):
        body, bomb = (
            an_inbox_message(body=zlib.compress(inflated), headers={"compression": "gzip"})
            for inflated in (b'{"total": "9.90"}', bytes(32 * 1024 * 1024))
        )
        client = staff_client(VIEW)

        assert "&quot;9.90&quot;" in html(client.get(reverse(DETAIL, args=[body.pk])))
        assert "inflates to more than" in html(client.get(reverse(DETAIL, args=[bomb.pk])))


@pytest.mark.every_database
@pytest.mark.parametrize(("action", "becomes"), [("retry", State.RUNNING), ("skip", State.SKIPPED)])
def test_running_message_can_be_retried_or_skipped_only_after_its_lease_has_ended(action, becomes):
    running = an_inbox_message(State.RUNNING, next_ago=-timedelta(minutes=9), fence=2, attempts=3)
    ended = an_inbox_message(State.RUNNING, next_ago=timedelta(minutes=1), fence=2, attempts=3)
    client = staff_client(VIEW, RETRY, SKIP)
    offered = [f'value="{action}"' in html(client.get(reverse(DETAIL, args=[row.pk]))) for row in (running, ended)]
    assert offered == [False, True]

    response = act(client, action, running, ended, confirmed="yes", reason="because")

    assert [level for level, _ in said(response)] == ["warning", "success"]
    assert said(response)[0][1].endswith("it is running now, and a process is working on it; try again")
    assert (state_of(running), state_of(ended)) == (State.RUNNING, becomes)
    running.refresh_from_db()
    ended.refresh_from_db()
    assert (running.fence, ended.fence > 2) == (2, action == "retry")


class TestSkip:
    @pytest.mark.parametrize(
        "reason", ["", "   ", "x" * 501, "a\x00b"], ids=["empty", "only spaces", "501 characters", "null character"]
    )
    def test_skip_asks_for_a_reason_and_asks_again_without_a_valid_one(self, reason):
        row = an_inbox_message()
        client = staff_client(VIEW, SKIP)

        first, page = (html(act(client, "skip", row, **given)) for given in ({}, {"confirmed": "yes", "reason": reason}))

        assert 'name="reason"' in first
        assert 'class="errorlist"' not in first

        assert 'class="errorlist"' in page
        assert f'name="_selected_action" value="{row.pk}"' in page
        assert state_of(row) == State.DEAD

    def test_skip_from_the_detail_page_redirects_back_to_it(self):
        row = an_inbox_message()
        client = staff_client(VIEW, SKIP)

        assert 'name="own_page" value="yes"' in html(act(client, "skip", row, own_page="yes"))
        response = act(client, "skip", row, own_page="yes", confirmed="yes", reason="a test order")

        assert response.url == reverse(DETAIL, args=[row.pk])


class TestOverrideOfTheMaximumAge:
    """A message refused because of its age is run by an explicit decision only."""

    def test_override_is_offered_for_quarantined_messages_only_and_replaces_retry(self):
        client = staff_client(VIEW, RETRY, SKIP, OVERRIDE)

        assert actions_on_its_page(client, an_inbox_message(quarantined=True)) == {"skip", "override_maximum_age"}
        assert actions_on_its_page(client, an_inbox_message()) == {"retry", "skip"}

    def test_override_asks_for_a_reason_and_warns_of_a_second_effect(self):
        row = an_inbox_message(quarantined=True)
        client = staff_client(VIEW, OVERRIDE)

        page = text_of(act(client, "override_maximum_age", row))
        again = html(act(client, "override_maximum_age", row, confirmed="yes", reason=" "))

        assert "effect would happen a second time" in page
        assert row.message_id in page
        assert 'class="errorlist"' in again
        assert state_of(row) == State.DEAD
