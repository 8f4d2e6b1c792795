"""Paused topics and paused handlers in the admin: the lists, pausing one, resuming some."""

from datetime import timedelta
from functools import partial

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from exactly_once.models import AuditEntry
from exactly_once.process.clock import utcnow
from exactly_once.sql.now import DatabaseTime
from inbox.models import PausedHandler
from outbox.models import PausedTopic
from outbox.states import State
from tests.support.admin_pages import NASTY, Page, a_message, act, said, staff_client
from tests.support.deliveries import the_effect

pytestmark = pytest.mark.django_db(databases=["default", "other"])

TOPICS, TOPIC, ADD = (f"admin:outbox_pausedtopic_{page}" for page in ("changelist", "change", "add"))
VIEW_TOPICS, PAUSE, RESUME = "view_pausedtopic", "pause_pausedtopic", "resume_pausedtopic"
HANDLERS, HANDLER_ADD = "admin:inbox_pausedhandler_changelist", "admin:inbox_pausedhandler_add"
VIEW_HANDLERS = "view_pausedhandler"
BAD = "shop.stock.full"

on_the_list = partial(act, page=TOPICS)


def paused(topic=BAD, *, ago=timedelta(hours=2), **columns):
    return PausedTopic.objects.create(topic=topic, paused_at=utcnow() - ago, **columns)


def the_list(*permissions):
    return Page(staff_client(VIEW_TOPICS, *permissions).get(reverse(TOPICS)))


def test_list_shows_by_whom_why_since_when_and_how_many_messages():
    paused(paused_by="ada", reason="consumer defect\nand more")
    paused("shop.refused", reason="the broker refused to keep it (basic.nack)", probe_at=utcnow())
    paused("shop.resumed", is_resuming=True)
    paused("shop.mail.wanted", is_resuming=True, allowed_at=utcnow())
    for _ in range(3):
        a_message(State.PAUSED, topic=BAD)
    a_message(State.READY, topic=BAD)

    text = the_list().text

    expected = ("ada", "consumer defect", "2 h ago", "circuit breaker", "basic.nack", "Paused", "Refused", "Resuming", "3")
    expected += ("Limited", "its rate")
    assert [word for word in expected if word not in text] == []
    assert "and more" not in text


def test_empty_list_says_that_no_topic_is_paused():
    assert "No topic is paused." in the_list().text


def test_adding_a_topic_pauses_it_and_is_logged_with_the_name_of_the_operator(caplog, django_capture_on_commit_callbacks):
    client = staff_client(VIEW_TOPICS, PAUSE)
    with django_capture_on_commit_callbacks(execute=True):
        response = client.post(reverse(ADD), {"topic": BAD, "reason": "consumer defect"})

    row = PausedTopic.objects.get()
    assert response.url == reverse(TOPICS)
    assert (row.topic, row.reason, row.probe_at, row.is_resuming) == (BAD, "consumer defect", None, False)
    assert row.paused_by == "staff0 in the admin"
    assert (LogEntry.objects.get().object_id, LogEntry.objects.get().object_repr) == (str(row.pk), BAD)
    assert f"topic '{BAD}' paused by staff0 in the admin: consumer defect" in caplog.text


def test_person_takes_over_what_the_circuit_breaker_has_paused():
    paused(probe_at=utcnow(), is_resuming=True)
    staff_client(VIEW_TOPICS, PAUSE).post(reverse(ADD), {"topic": BAD})

    row = PausedTopic.objects.get()
    assert (row.paused_by, row.probe_at, row.is_resuming) == ("staff0 in the admin", None, False)


@pytest.mark.parametrize("topic", ["", "shop.*", "x" * 300])
def test_topic_that_no_message_can_have_is_refused_in_the_form(topic):
    client = staff_client(VIEW_TOPICS, PAUSE)

    assert Page(client.post(reverse(ADD), {"topic": topic})).all("ul", **{"class": "errorlist"})
    assert not PausedTopic.objects.exists()


def test_resume_asks_for_confirmation_and_reports_each_topic():
    row, other = paused(paused_by="ada"), paused("shop.resumed", is_resuming=True)
    client = staff_client(VIEW_TOPICS, RESUME)

    assert "what is sent cannot be taken back" in Page(on_the_list(client, "resume", row, other)).text
    assert not PausedTopic.objects.get(pk=row.pk).is_resuming

    response = on_the_list(client, "resume", row, other, confirmed="yes", reason="it is mended")
    assert PausedTopic.objects.get(pk=row.pk).is_resuming
    assert [level for level, _ in said(response)] == ["success", "warning"]
    assert LogEntry.objects.get().change_message == "Being resumed: it is mended"


def test_limited_topic_cannot_be_resumed_because_it_is_not_paused():
    row = paused(is_resuming=True, allowed_at=utcnow())
    client = staff_client(VIEW_TOPICS, RESUME)

    assert "It is not paused: its rate limits it." in Page(on_the_list(client, "resume", row)).text
    [(level, _)] = said(on_the_list(client, "resume", row, confirmed="yes"))
    assert level == "warning"
    assert PausedTopic.objects.get().allowed_at


def test_pausing_proposes_the_topics_of_the_outbox_and_takes_any_other():
    a_message(topic=NASTY)
    client = staff_client(VIEW_TOPICS, PAUSE)

    page = Page(client.get(reverse(ADD)))

    (entry,) = page.all("input", name="topic")
    assert page.all("datalist", id=entry["list"])
    assert [option["value"] for option in page.all("option")] == [NASTY]
    client.post(reverse(ADD), {"topic": "shop.another", "reason": ""})
    assert PausedTopic.objects.filter(topic="shop.another").exists()


def test_page_of_a_topic_offers_to_resume_it():
    row = paused(paused_by="ada", reason="consumer defect\nand more")
    page = Page(staff_client(VIEW_TOPICS, RESUME).get(reverse(TOPIC, args=[row.pk])))

    assert "and more" in page.text
    assert {found["value"] for found in page.all("button", name="action")} == {"resume"}


class TestPausedHandlers:
    @pytest.fixture(autouse=True)
    def handler(self, handles):
        return handles(the_effect, name="shop.reserve_stock")

    def test_adding_a_handler_pauses_it_and_writes_the_audit_log(self):
        client = staff_client(VIEW_HANDLERS, "pause_pausedhandler")
        response = client.post(reverse(HANDLER_ADD), {"handler": "shop.reserve_stock", "reason": "defect"})

        assert response.url == reverse(HANDLERS)
        row = PausedHandler.objects.get()
        assert (row.handler, row.reason, row.paused_by) == ("shop.reserve_stock", "defect", "staff0 in the admin")
        entry = AuditEntry.objects.get()
        assert (entry.action, entry.kind, entry.object_id) == ("pause", "handler", "shop.reserve_stock")
        assert entry.parameters == {"handler": "shop.reserve_stock", "reason": "defect"}

    def test_unknown_handler_is_refused_with_the_known_ones(self):
        client = staff_client(VIEW_HANDLERS, "pause_pausedhandler")

        page = Page(client.post(reverse(HANDLER_ADD), {"handler": "shop.missing"}))

        assert "No handler is called 'shop.missing'." in page.text
        assert "shop.reserve_stock" in page.text
        assert not PausedHandler.objects.exists()

    def test_list_shows_since_when_by_whom_and_why(self):
        PausedHandler.objects.create(
            handler="shop.reserve_stock",
            paused_by="ada",
            reason="defect\nand more",
            paused_at=DatabaseTime(-timedelta(hours=2)),
        )

        text = Page(staff_client(VIEW_HANDLERS).get(reverse(HANDLERS))).text

        assert [words for words in ("shop.reserve_stock", "ada", "defect", "2 h ago", "Paused") if words not in text] == []
        assert "and more" not in text

    def test_resuming_deletes_the_row_and_writes_the_audit_log(self):
        row = PausedHandler.objects.create(handler="shop.reserve_stock", paused_by="ada", paused_at=DatabaseTime())
        client = staff_client(VIEW_HANDLERS, "resume_pausedhandler")
        assert "Resume these handlers?" in Page(act(client, "resume", row, page=HANDLERS)).text

        response = act(client, "resume", row, page=HANDLERS, confirmed="yes")

        assert said(response) == [("success", "Handler shop.reserve_stock: resumed")]
        assert not PausedHandler.objects.exists()
        assert AuditEntry.objects.get().action == "resume"
