"""Topics and handlers, what runs now, and flow, as an operator uses them in a real browser, with real processes behind."""

import re

import pytest
from django.urls import reverse

from exactly_once.models import AuditEntry
from inbox.models import InboxMessage
from outbox.models import OutboxMessage, PausedTopic
from outbox.states import State
from tests.support.apps.effects.models import Effect, Unique
from tests.support.apps.worker import CHAINED, JOB
from tests.support.relaying import published
from tests.support.waiting import wait_until
from tests.support.workers import OF_THE_WORKERS

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.timeout(400)]

TOPICS, BUSY = (f"admin:exactly_once_{name}_changelist" for name in ("topicsandhandlers", "busy"))


def until(operator, page, shows):
    """Reload the page until it shows this text."""
    wait_until(lambda: operator.visit(page).get_by_text(shows).count())
    return operator.page


def test_operator_sees_what_runs_follows_its_message_and_sees_it_end(operator, running, handles):
    handles(print, name=OF_THE_WORKERS.name, topic=JOB)
    sent = published(topic=JOB, payload={"do": "wait for the word"}, biz_id="slow-1")

    page = until(operator, BUSY, OF_THE_WORKERS.name)
    assert "ago" in page.locator("tr", has_text=OF_THE_WORKERS.name).inner_text()
    page.get_by_role("link", name=str(sent.id)).click()
    page.locator(".flow-meant", has_text=JOB).wait_for()
    assert page.get_by_text(re.compile("confirmed .* later")).is_visible()
    assert not InboxMessage.objects.exists()

    Unique.objects.create(name="go slow-1")
    running.until(lambda: Effect.objects.filter(name="slow-1").exists())
    until(operator, BUSY, "nothing")


def test_operator_pauses_a_topic_with_a_reason_and_resumes_it(operator, running, handles):
    handles(print, name=OF_THE_WORKERS.name, topic=JOB)
    published(topic=JOB, payload={"do": "work"}, biz_id="first")
    running.until(lambda: Effect.objects.filter(name="first").exists())

    page = operator.visit(TOPICS)
    page.locator("tr", has_text=JOB).filter(has_not_text=OF_THE_WORKERS.name).get_by_role("link", name="Pause…").click()
    assert page.get_by_label("Topic").input_value() == JOB
    page.get_by_label("Reason").fill("the provider is down")
    page.get_by_role("button", name="Pause the topic").click()
    page.locator(".messagelist .success").wait_for()
    published(topic=JOB, payload={"do": "work"}, biz_id="second")
    running.until(lambda: OutboxMessage.objects.filter(state=State.PAUSED).exists())

    page = operator.visit(TOPICS)
    row = page.locator("tr", has_text="the provider is down")
    assert row.locator("td[data-label='Backlog']").inner_text() == "1"
    row.get_by_role("button", name="Resume…").click()
    page.get_by_role("button", name="Resume the topics").click()
    running.until(lambda: Effect.objects.filter(name="second").exists())
    running.until(lambda: not PausedTopic.objects.exists())
    assert list(AuditEntry.objects.order_by("pk").values_list("action", "object_id")) == [("pause", JOB), ("resume", JOB)]


def test_operator_follows_a_chain_from_the_page_of_a_message_and_finds_it_again_by_its_id(operator, running, handles):
    handles(print, name=OF_THE_WORKERS.name, topic=JOB)
    sent = published(topic=JOB, payload={"do": "chain"}, biz_id="order-1")
    running.until(lambda: InboxMessage.objects.filter(topic=CHAINED, state="done").exists())
    caused = OutboxMessage.objects.get(topic=CHAINED)

    page = operator.open(reverse("admin:outbox_outboxmessage_change", args=[caused.pk]))
    page.locator(".field-correlation_id_name a").click()
    messages = page.locator(".flow-message")
    assert [messages.nth(number).locator(".flow-name").inner_text().split()[-2:] for number in range(2)] == [
        [JOB, "order-1"],
        [CHAINED, "order-1"],
    ]
    assert messages.nth(1).locator(".flow-effects li").count() == 1
    assert "effect" in messages.nth(1).locator(".flow-effects").inner_text()

    page.get_by_label("Message id or correlation id").fill(f" {caused.message_id} ")
    page.get_by_role("button", name="Show the flow").click()
    page.locator(".flow-meant", has_text=CHAINED).wait_for()
    page.locator(".flow-name a").first.click()
    page.wait_for_url(f"**/outboxmessage/{OutboxMessage.objects.get(message_id=sent.id).pk}/change/")
