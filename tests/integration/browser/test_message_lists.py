"""The lists of messages in a real browser: nothing is clipped, wide or narrow."""

from datetime import timedelta

import pytest

from inbox.states import State as InboxState
from outbox.states import State
from tests.support.admin_pages import a_message as outbox_message
from tests.support.admin_pages import an_inbox_message as inbox_message
from tests.support.browser import DESKTOP, PHONE
from tests.support.layout import faults

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

CLIPPED = """[...document.querySelectorAll('#result_list :is(td, th)')]
    .filter(cell => cell.scrollWidth > cell.clientWidth + 1 || cell.getBoundingClientRect().right > innerWidth)
    .map(cell => cell.className)"""
ERROR = "OperationalError: could not obtain lock on row in relation stock_item"


def visible(page, text):
    return page.locator("#result_list").get_by_text(text).is_visible()


@pytest.mark.parametrize("app", ["inbox", "outbox"])
def test_list_shows_age_and_error_completely_in_two_lines_with_menus_of_filters_at_1280_and_390_pixels(operator, app):
    names = {"topic": "t" * 100, "biz_id": "b" * 200}
    if app == "inbox":
        inbox_message(InboxState.RETRYING, last_error=ERROR, next_ago=-timedelta(minutes=3), attempts=12)
    else:
        outbox_message(State.RETRYING, last_error=ERROR, attempts=12)
    page = operator.visit(f"admin:{app}_{app}message_changelist")
    assert page.locator("#result_list tbody tr").bounding_box()["height"] < 60
    if app == "inbox":
        inbox_message(InboxState.RECEIVED, attempts=0, biz_id="untried")
        inbox_message(InboxState.DEAD, last_error="e" * 200, handler="h" * 100, quarantined=True, **names)
    else:
        outbox_message(State.PUBLISHED, biz_id="untried")
        outbox_message(State.DEAD, last_error="e" * 200, **names)
    page.reload()

    for size in (DESKTOP, PHONE):
        page.set_viewport_size(size)
        assert not faults(page)
        assert page.evaluate(CLIPPED) == []
        assert visible(page, ERROR)
        assert visible(page, "12 attempts")
        assert page.locator("#result_list tbody tr", has_text="untried").locator(".field-age time").is_visible()
        for menu in page.locator(".message-filters details").all():
            menu.locator("summary").click()
            box = menu.locator("ul").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= size["width"]
            menu.locator("summary").click()
    page.locator(".message-filters summary", has_text="State").click()
    page.get_by_role("link", name="Waiting (0)").click()
    page.get_by_text("State: Waiting (0)").wait_for()
    page.get_by_role("link", name="Clear all filters").click()
    page.locator("#result_list").get_by_text(ERROR).wait_for()
