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
    def test_search_finds_foreign_message_ids_topics_biz_ids_and_handlers(self):
        written_without_dashes = uuid.uuid4()
        row = an_inbox_message(message_id="a/1", topic="t", biz_id="b", handler="gone.handler")
        without = an_inbox_message(message_id=written_without_dashes.hex)
        conflicting = an_inbox_message(State.DONE, duplicates=1, conflicts=1, conflicting_id=str(uuid.uuid4()))
        client = staff_client(VIEW)

        for term in ("a/1", "t", "b", "gone.handler", "gone.handler "):
            assert shown(client, q=term) == {row.pk}
        for term in (str(written_without_dashes), written_without_dashes.hex):
            assert shown(client, q=term) == {without.pk}
        assert shown(client, q=conflicting.conflicting_id) == {conflicting.pk}

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
    def test_stuck_filter_selects_dead_retrying_overdue_and_quarantined_messages(self):
        too_long = inbox_options().STUCK_AFTER + timedelta(minutes=1)
        dead, retrying = an_inbox_message(State.DEAD), an_inbox_message(State.RETRYING, next_ago=-LONG_AGO)
        held, _ = an_inbox_message(quarantined=True), an_inbox_message(State.SKIPPED, quarantined=True)
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
        assert shown(client, stuck="any") == {dead.pk, held.pk, retrying.pk, *overdue}
        assert shown(client, stuck="quarantined") == {held.pk}

    def test_list_shows_quarantine_duplicates_conflicts_and_the_end_of_a_lease(self):
        an_inbox_message(quarantined=True)
        again = an_inbox_message(State.DONE, duplicates=1234, resends=1234)
        conflicting = an_inbox_message(State.DONE, duplicates=3, conflicts=2)
        an_inbox_message(State.RUNNING, next_ago=-timedelta(minutes=9.5))
        an_inbox_message(State.RUNNING, next_ago=timedelta(minutes=3.5))
        client = staff_client(VIEW)

        text = text_of(client.get(reverse(LIST)))

        expected = ["Dead in quarantine", "Done 1,234 more", "Done ✕ 2 conflicting", "ends in 9 min", "lease ended 3 min ago"]
        assert [words for words in expected if words not in text] == []
        assert shown(client, duplicates="any") == {again.pk, conflicting.pk}
        assert shown(client, duplicates="conflicting") == {conflicting.pk}
        assert shown(client, duplicates="unknown\x00") == set()


class TestDetailPage:
    def test_detail_page_shows_payload_headers_error_and_traceback(self):
        columns = {"headers": {"tenant": "acme"}, "last_error": "no stock", "traceback": "Traceback\n  line 1"}
        row = an_inbox_message(payload={"total": "9.90"}, **columns)

        text = html(staff_client(VIEW).get(reverse(DETAIL, args=[row.pk])))

        for expected in ("&quot;total&quot;: &quot;9.90&quot;", "&quot;acme&quot;", "no stock", "Traceback\n  line 1"):
            assert expected in text

    def test_waiting_message_links_to_the_first_open_message_of_its_key(self):
        ordered = {"key": "customer-4", "ordered": True}
        an_inbox_message(State.DONE, **ordered)
        an_inbox_message(State.DEAD, key="customer-4", ordered=True, handler="another.handler")
        passed = an_inbox_message(State.DEAD, key="customer-4")
        head = an_inbox_message(State.RETRYING, **ordered)
        waiting = [an_inbox_message(State.WAITING, **ordered) for _ in range(3)]
        free = an_inbox_message(State.WAITING, key="customer-5", ordered=True)
        client = staff_client(VIEW)

        response = client.get(reverse(DETAIL, args=[waiting[1].pk]))
        first, unordered, unblocked = (text_of(client.get(reverse(DETAIL, args=[row.pk]))) for row in (head, passed, free))

        assert f'href="{reverse(DETAIL, args=[head.pk])}"' in html(response)
        assert f"{head.topic} {head.biz_id} (retrying)" in text_of(response)
        assert "wait for it: 3." in first
        assert "wait for it" not in unordered
        assert "a consumer will run it shortly" in unblocked

    def test_running_message_shows_the_number_and_the_end_of_its_lease(self):
        running = an_inbox_message(State.RUNNING, next_ago=-timedelta(minutes=9.5), fence=2)
        ended = an_inbox_message(State.RUNNING, next_ago=timedelta(minutes=1), fence=3)
        client = staff_client(VIEW)

        assert "Lease 2 ends in 9 min" in text_of(client.get(reverse(DETAIL, args=[running.pk])))
        assert "Lease 3 has expired" in text_of(client.get(reverse(DETAIL, args=[ended.pk])))

    def test_detail_page_shows_steps_duplicates_by_cause_and_the_latest_conflicting_message(self):
        counted = {"duplicates": 12, "redeliveries": 2, "resends": 3, "replays": 1, "conflicts": 2}
        other = {"conflicting_id": str(uuid.uuid4()), "conflicting_body": b'{"order": 2}', "conflicting_at": utcnow()}
        row, empty = an_inbox_message(State.DONE, **counted, **other), an_inbox_message(State.DONE)
        taken_at = utcnow() - timedelta(minutes=3, seconds=30)
        Step.objects.create(message=row, name="charge", result={"receipt": "r-1"}, taken_at=taken_at)
        client = staff_client(VIEW, "view_step")

        text, without = (text_of(client.get(reverse(DETAIL, args=[one.pk]))) for one in (row, empty))

        expected = [
            *("Further deliveries", "Steps taken", "charge ( 3 min ago )", "&quot;receipt&quot;: &quot;r-1&quot;"),
            *("12 in total; none was run 2 delivered again by the broker 3 sent again by a relay",),
            *("1 sent again by an operator 6 published again with another message id",),
            *("with this biz-id but different content: 2.", other["conflicting_id"]),
            *("&quot;order&quot;: 1", "&quot;order&quot;: 2"),
        ]
        assert [words for words in expected if words not in text] == []
        assert [words for words in expected[:2] if words in without] == []

    def test_detail_page_shows_bytes_a_compressed_body_inflated_and_a_bomb_with_the_reason(self):
        bodies = {
            "80 04 70 69 63 6b 6c 65 64": (b"\x80\x04pickled", {"content_type": "application/x-python-serialize"}),
            "&quot;9.90&quot;": (zlib.compress(b'{"total": "9.90"}'), {"headers": {"compression": "gzip"}}),
            "inflates to more than": (zlib.compress(bytes(32 * 1024 * 1024)), {"headers": {"compression": "gzip"}}),
        }
        client = staff_client(VIEW)

        for expected, (body, columns) in bodies.items():
            text = html(client.get(reverse(DETAIL, args=[an_inbox_message(body=body, **columns).pk])))
            assert expected in text
            assert ("(9 bytes, application/x-python-serialize) is not JSON" in text) == ("pickled" in str(body))


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


def test_quarantined_message_is_offered_an_override_that_asks_for_a_reason_and_warns_of_a_second_effect():
    held, act_on = an_inbox_message(quarantined=True), "override_maximum_age"
    client = staff_client(VIEW, RETRY, SKIP, OVERRIDE)
    assert actions_on_its_page(client, held) == {"skip", act_on}
    assert actions_on_its_page(client, an_inbox_message()) == {"retry", "skip"}

    assert "effect would happen a second time" in text_of(act(client, act_on, held))
    assert 'class="errorlist"' in html(act(client, act_on, held, confirmed="yes", reason=" "))
    assert state_of(held) == State.DEAD
