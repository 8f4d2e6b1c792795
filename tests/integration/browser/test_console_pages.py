"""Pages of the console as an operator uses them in a real browser, with real processes behind: also on a bad day."""

import re

import pytest
from django.urls import reverse

from exactly_once.models import AuditEntry, Minute
from exactly_once.telemetry.statistics import ALL
from inbox.models import InboxMessage
from inbox.states import State as InboxState
from outbox.models import OutboxMessage, PausedTopic
from outbox.states import State
from tests.support.apps.effects.models import Effect, Unique
from tests.support.apps.worker import CHAINED, JOB
from tests.support.layout import faults
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
    page.get_by_text(re.compile("confirmed .* later")).wait_for()
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
    page.wait_for_url(re.compile("/flow/"))  # and until all of it has arrived
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


OVERVIEW = "admin:exactly_once_overview_changelist"
CHARTS = 4


def test_overview_draws_charts_refreshes_its_figures_and_its_counts_lead_to_the_messages(operator, running):
    for number in range(5):
        published(topic=JOB, payload={"do": "fail"} if number == 0 else {})
    running.until(lambda: Minute.objects.filter(app="outbox", subject=ALL, counts__published__gt=0).exists())
    running.until(lambda: Minute.objects.filter(app="inbox", subject=ALL, counts__handled__gt=0).exists())

    page = operator.visit(OVERVIEW)
    page.locator(".overview-charts canvas").nth(CHARTS - 1).wait_for()
    assert page.locator(".overview-charts canvas").count() == CHARTS
    page.get_by_role("button", name="Last day").click()
    page.locator("[data-range=day][aria-pressed=true]").wait_for()
    page.locator(".overview-charts canvas").nth(CHARTS - 1).wait_for()

    published(topic="nobody.listens", payload={})
    page.locator("[data-part=states]").get_by_text("Retrying").first.wait_for()
    page.locator("[data-part=figures]").get_by_text("Failing topics").wait_for()
    page.locator(".overview-states a[href*='outbox'][href*='state=retrying']", has_text="1").wait_for()

    page.locator("[data-app=outbox] a[href*='state=published']").click()
    page.wait_for_url("**/outboxmessage/?state=published")
    assert page.locator("#result_list tbody tr").count() >= 4


def test_overview_says_so_if_it_cannot_be_refreshed(operator):
    page = operator.visit(OVERVIEW)
    page.locator(".overview-charts figure").first.wait_for()

    page.context.clear_cookies()

    page.get_by_text("These figures could not be refreshed.").wait_for()
    # The browser reports the redirect to the login page, which the script refuses to follow.
    page.goto("about:blank")
    operator.errors.clear()


def test_operator_finds_a_failed_message_in_two_clicks_corrects_it_and_sees_its_effect(operator, running, handles):
    handles(print, name=OF_THE_WORKERS.name, topic=JOB)  # the web process knows the handler, too
    sent = published(topic=JOB, payload={"do": "what it cannot"})
    running.until(lambda: InboxMessage.objects.filter(state=InboxState.DEAD).exists())
    original = InboxMessage.objects.get()

    page = operator.visit(OVERVIEW)
    page.get_by_role("link", name="1 message is a dead letter.").click()
    page.locator("#result_list .field-summary a").click()
    page.wait_for_url(f"**/inboxmessage/{original.pk}/change/**")
    assert page.get_by_text("KeyError: 'what it cannot'").first.is_visible()
    assert page.get_by_text("tests/support/apps/worker/handlers.py").first.is_visible()
    assert not faults(page)

    page.get_by_role("button", name="Edit").click()
    payload = page.get_by_label("Payload")
    assert "what it cannot" in payload.input_value()
    payload.fill('{"do": "work"}')
    page.get_by_role("button", name="Show the changes").click()
    page.locator(".message-del", has_text="what it cannot").wait_for()
    assert not faults(page)
    page.get_by_role("button", name="Replace the message and run it").click()
    page.locator(".messagelist .success", has_text="replaced by a corrected message").wait_for()

    running.until(lambda: Effect.objects.filter(name=sent.biz_id).exists())
    running.until(lambda: InboxMessage.objects.get(replaces=original).state == InboxState.DONE)
    corrected = InboxMessage.objects.get(replaces=original)
    page.locator(".field-replacing_row a").click()
    page.wait_for_url(f"**/inboxmessage/{corrected.pk}/change/")
    page.locator(".field-state_explained .message-state-done").wait_for()
    assert page.locator(".field-replaced_row a", has_text=str(original.pk)).is_visible()
    assert Effect.objects.filter(name=sent.biz_id).count() == 1
