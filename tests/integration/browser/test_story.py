"""What an operator does on a bad day, in a real browser: a handler fails in a real consumer, and the message is corrected."""

import pytest

from inbox.models import InboxMessage
from inbox.states import State
from tests.support.apps.effects.models import Effect
from tests.support.apps.worker import JOB
from tests.support.layout import faults
from tests.support.relaying import published
from tests.support.workers import OF_THE_WORKERS

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

OVERVIEW = "admin:exactly_once_overview_changelist"


def test_operator_finds_a_failed_message_in_two_clicks_corrects_it_and_sees_its_effect(operator, running, handles):
    handles(print, name=OF_THE_WORKERS.name, topic=JOB)  # the web process knows the handler, too
    sent = published(topic=JOB, payload={"do": "what it cannot"})
    running.until(lambda: InboxMessage.objects.filter(state=State.DEAD).exists())
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
    running.until(lambda: InboxMessage.objects.get(replaces=original).state == State.DONE)
    corrected = InboxMessage.objects.get(replaces=original)
    page.locator(".field-replacing_row a").click()
    page.wait_for_url(f"**/inboxmessage/{corrected.pk}/change/")
    page.locator(".field-state_explained .message-state-done").wait_for()
    assert page.locator(".field-replaced_row a", has_text=str(original.pk)).is_visible()
    assert Effect.objects.filter(name=sent.biz_id).count() == 1
