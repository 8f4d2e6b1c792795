"""Paused topics and paused handlers in the admin: the lists, pausing one, resuming some."""

from datetime import timedelta
from functools import partial

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

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
    assert "No topic is paused." in the_list().text
    paused(paused_by="ada", reason="consumer defect\nand more")
    paused("shop.refused", mode="refused", reason="the broker refused to keep it (basic.nack)", probe_at=utcnow())
    paused("shop.resumed", mode="resuming")
    paused("shop.mail.wanted", mode="limited", allowed_at=utcnow())
    for _ in range(3):
        a_message(State.PAUSED, topic=BAD)
    a_message(State.READY, topic=BAD)

    text = the_list().text

    expected = ("ada", "consumer defect", "2 h ago", "circuit breaker", "basic.nack", "Paused", "Refused", "Resuming", "3")
    expected += ("Limited", "its rate")
    assert [word for word in expected if word not in text] == []
    assert "and more" not in text


@pytest.mark.parametrize("topic", ["", "shop.*", "x" * 300])
def test_topic_that_no_message_can_have_is_refused_in_the_form(topic):
    client = staff_client(VIEW_TOPICS, PAUSE)

    assert Page(client.post(reverse(ADD), {"topic": topic})).all("ul", **{"class": "errorlist"})
    assert not PausedTopic.objects.exists()


def test_resume_warns_and_reports_each_topic_also_a_limited_one_which_is_not_paused():
    row, other = paused(paused_by="ada", reason="defect\nand more"), paused("shop.resumed", mode="resuming")
    limited = paused("shop.mail", mode="limited", allowed_at=utcnow())
    client = staff_client(VIEW_TOPICS, RESUME)
    page = Page(client.get(reverse(TOPIC, args=[row.pk])))
    assert "and more" in page.text
    assert {found["value"] for found in page.all("button", name="action")} == {"resume"}

    asked = Page(on_the_list(client, "resume", row, other, limited)).text
    assert "what is sent cannot be taken back" in asked
    assert "It is not paused: its rate limits it." in asked

    response = on_the_list(client, "resume", row, other, limited, confirmed="yes", reason="it is mended")
    modes = dict(PausedTopic.objects.values_list("pk", "mode"))
    assert modes == {row.pk: "resuming", other.pk: "resuming", limited.pk: "limited"}
    assert sorted(level for level, _ in said(response)) == ["success", "warning", "warning"]
    assert LogEntry.objects.get().change_message == "Being resumed: it is mended"


def test_pausing_proposes_the_topics_of_the_outbox_and_takes_any_other():
    a_message(topic=NASTY)
    client = staff_client(VIEW_TOPICS, PAUSE)

    page = Page(client.get(reverse(ADD)))

    (entry,) = page.all("input", name="topic")
    assert page.all("datalist", id=entry["list"])
    assert [option["value"] for option in page.all("option")] == [NASTY]
    client.post(reverse(ADD), {"topic": "shop.another", "reason": ""})
    assert PausedTopic.objects.filter(topic="shop.another").exists()


class TestPausedHandlers:
    @pytest.fixture(autouse=True)
    def handler(self, handles):
        return handles(the_effect, name="shop.reserve_stock")

    def test_unknown_handler_is_refused_with_the_known_ones(self):
        client = staff_client(VIEW_HANDLERS, "pause_pausedhandler")

        page = Page(client.post(reverse(HANDLER_ADD), {"handler": "shop.missing"}))

        assert "No handler is called 'shop.missing'." in page.text
        assert "shop.reserve_stock" in page.text
        assert not PausedHandler.objects.exists()

    def test_list_shows_since_when_by_whom_and_why_and_resuming_deletes_the_row(self):
        at = DatabaseTime(-timedelta(hours=2))
        row = PausedHandler.objects.create(
            handler="shop.reserve_stock", paused_by="ada", reason="defect\nand more", paused_at=at
        )
        client = staff_client(VIEW_HANDLERS, "resume_pausedhandler")

        text = Page(client.get(reverse(HANDLERS))).text
        response = act(client, "resume", row, page=HANDLERS, confirmed="yes")

        assert [words for words in ("shop.reserve_stock", "ada", "defect", "2 h ago", "Paused") if words not in text] == []
        assert "and more" not in text
        assert said(response) == [("success", "Handler shop.reserve_stock: resumed")]
        assert not PausedHandler.objects.exists()
