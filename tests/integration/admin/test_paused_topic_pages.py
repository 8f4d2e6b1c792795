"""Paused topics in the admin: the list, pausing a topic, resuming some."""

from datetime import timedelta
from functools import partial

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from exactly_once.process.clock import utcnow
from outbox.models import PausedTopic
from outbox.states import State
from tests.support.admin_pages import NASTY, Page, a_message, act, said, staff_client

pytestmark = [pytest.mark.django_db(databases=["default", "other"]), pytest.mark.every_database]

TOPICS, TOPIC, ADD = (f"admin:outbox_pausedtopic_{page}" for page in ("changelist", "change", "add"))
VIEW_TOPICS, PAUSE, RESUME = "view_pausedtopic", "pause_pausedtopic", "resume_pausedtopic"
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
    for _ in range(3):
        a_message(State.PAUSED, topic=BAD)
    a_message(State.READY, topic=BAD)

    text = the_list().text

    expected = ("ada", "consumer defect", "2 h ago", "circuit breaker", "basic.nack", "Paused", "Refused", "Resuming", "3")
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
