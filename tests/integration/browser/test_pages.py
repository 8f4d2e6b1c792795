"""Every page of both apps' admin in a real browser, with rows of every kind: layout, hostile texts, no effect."""

from itertools import cycle
from urllib.parse import urlencode

import pytest
from django.contrib import admin
from django.db import connection
from django.urls import reverse

from inbox.models import InboxMessage
from outbox.models import OutboxMessage
from tests.support.admin_pages import NASTY
from tests.support.browser import DESKTOP, PHONE
from tests.support.layout import faults
from tests.support.shop_day import TOPIC_OF, a_busy_day, hostile_rows

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.timeout(400)]

APPS = {
    *("exactly_once", "exactly_once_views", "outbox", "outbox_recurring"),
    *("inbox", "inbox_outgoing_webhooks", "inbox_tasks"),
}
OURS = [model for model in admin.site._registry if model._meta.app_label in APPS]
MESSAGES = (OutboxMessage, InboxMessage)
HOSTILE = f"{NASTY}{'W' * 120}"
WAYS = [(("light", PHONE), ("dark", DESKTOP)), (("dark", PHONE), ("light", DESKTOP))]
"""A page is looked at in both sizes and both schemes, and the next one in the other two combinations."""
SAFE = {"auth_user", "django_session", "django_migrations", "django_content_type", "auth_permission"}
"""Tables that a log-in changes, or that never change."""


@pytest.fixture
def world(handles):
    """Rows of every kind: those of a busy day, and one with a hostile text in every column."""
    for name, topic in TOPIC_OF.items():
        handles(print, name=name, topic=topic)
    a_busy_day(hours=1)
    hostile_rows(HOSTILE)


def name_of(model, page):
    return f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}"


def lists():
    yield reverse("admin:index")
    yield f"{reverse('admin:exactly_once_overview_search')}?q=no answer"
    for model in OURS:
        yield reverse(name_of(model, "changelist"))
    for name in ("outbox_pausedtopic", "inbox_pausedhandler", "inbox_outgoing_webhooks_endpoint"):
        yield reverse(f"admin:{name}_add")
    for name in ("cart-7299", HOSTILE):
        yield f"{reverse('admin:exactly_once_flow_changelist')}?{urlencode({'id': name})}"


def rows():
    """The page of one row of each model and state, and of each row with a hostile text."""
    for model in OURS:
        if model._meta.proxy:
            continue
        found = model.objects.order_by("pk")
        keys = {row.pk for row in found if NASTY in "".join(map(str, vars(row).values()))}
        assert keys, f"no row with a hostile text: {model}"
        if model in MESSAGES:
            found = model.objects.order_by("state", "-pk").distinct("state")
        for pk in sorted({*keys, *found.values_list("pk", flat=True)}):
            yield reverse(name_of(model, "change"), args=[pk])


def content():
    """Every row of every table of both apps and of the admin's log."""
    with connection.cursor() as cursor:
        tables = [name for name in connection.introspection.table_names(cursor) if name not in SAFE]
        found = {}
        for table in tables:
            cursor.execute(f"SELECT {table}::text FROM {table} ORDER BY 1")
            found[table] = cursor.fetchall()
    return found


def require_good_pages(operator, paths):
    """Open the pages one after another: they have a good layout, nothing injected, and change no row."""
    before, wrong, ways = content(), [], cycle(WAYS)
    assert before["inbox_inboxmessage"]
    for path in paths:
        page = operator.open(path)
        for charts in page.locator(".overview-charts").all():
            charts.locator("canvas").nth(1).wait_for()
        if "?id=" in path:
            page.locator(".flow-message").first.wait_for()
        if page.locator("img[src='x'], #content script:not([src])").count():
            wrong.append(f"{path}: an injected element")
        for scheme, size in next(ways):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size(size)
            wrong += [f"{path} at {size['width']} px, {scheme}: {fault}" for fault in faults(page)]
    page.goto("about:blank")
    assert not wrong, "\n".join(wrong)
    assert content() == before


def test_lists_fit_a_phone_and_a_desktop_in_light_and_dark_show_hostile_texts_as_text_and_change_nothing(operator, world):
    require_good_pages(operator, lists())


def test_pages_of_rows_fit_a_phone_and_a_desktop_in_light_and_dark_show_hostile_texts_as_text_and_change_nothing(
    operator, world
):
    require_good_pages(operator, rows())
