"""The overview in a real browser, with a real relay and a real consumer."""

import pytest

from exactly_once.models import Minute
from exactly_once.telemetry.statistics import ALL
from tests.support.apps.worker import JOB
from tests.support.relaying import published

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

OVERVIEW = "admin:exactly_once_overview_changelist"
CHARTS = 4


def settled(running):
    """Have messages published and handled, and wait until both processes have written their statistics."""
    for number in range(5):
        published(topic=JOB, payload={"do": "fail"} if number == 0 else {})
    running.until(lambda: Minute.objects.filter(app="outbox", subject=ALL, counts__published__gt=0).exists())
    running.until(lambda: Minute.objects.filter(app="inbox", subject=ALL, counts__handled__gt=0).exists())


def test_overview_draws_charts_and_refreshes_its_figures(operator, running):
    settled(running)

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


def test_count_of_a_state_leads_to_the_messages_of_that_state(operator, running):
    settled(running)

    page = operator.visit(OVERVIEW)
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
