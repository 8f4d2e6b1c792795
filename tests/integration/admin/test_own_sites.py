"""Pages that a project registers in a site of its own, as for another database: the site need not have the others."""

import pytest
from django.contrib import admin
from django.urls import path, reverse

from exactly_once.console.admin.pages import PageAdmin
from exactly_once.models import Operation
from outbox.admin import OutboxMessageAdmin
from outbox.models import OutboxMessage
from outbox.states import State
from tests.support.admin_actions import PAGES
from tests.support.admin_pages import Page, a_message, act, act_on_all, said, staff_client, superuser_client
from tests.support.shop_day import hostile_rows

pytestmark = [pytest.mark.django_db(databases=["default", "other"]), pytest.mark.urls(__name__)]

OF_MESSAGES = {"exactly_once.FailureNote", "exactly_once.TopicsAndHandlers"}
"""Pages that are of no use without the messages they link to."""


class ElsewhereAdmin(OutboxMessageAdmin):
    using = "other"


def a_site(name, *pages):
    site = admin.AdminSite(name=name)
    for page in pages:
        site.register(page.model, type(page))
    return site


ALONE = {label: a_site(f"alone{number}", page) for number, (label, page) in enumerate(sorted(PAGES.items()))}
ELSEWHERE = admin.AdminSite(name="elsewhere")
ELSEWHERE.register(OutboxMessage, ElsewhereAdmin)
LIST = "elsewhere:outbox_outboxmessage_changelist"

urlpatterns = [path(f"{site.name}/", site.urls) for site in (*ALONE.values(), ELSEWHERE)]


@pytest.mark.parametrize("label", sorted(PAGES.keys() - OF_MESSAGES))
def test_page_needs_no_other_page_in_its_site(label):
    hostile_rows("text")
    client, site = superuser_client(), ALONE[label]
    page = site.get_model_admin(PAGES[label].model)
    name = f"{site.name}:{page.opts.app_label}_{page.opts.model_name}"
    urls = [reverse(f"{site.name}:index"), reverse(f"{name}_changelist")]
    if not isinstance(page, PageAdmin):
        urls += [reverse(f"{name}_change", args=[row.pk]) for row in page.get_queryset(client.get(urls[0]).wsgi_request)]

    assert len(urls) > 1
    for url in urls:
        assert not Page(client.get(url, follow=True)).all("a", href=""), url


def test_message_of_another_database_is_restored_and_an_operation_planned_there():
    failed = {"error_class": "unroutable", "last_error": "no queue"}
    row = a_message(State.DEAD, using="other", **failed)
    a_message(State.CANCELLED, using="other")
    client = superuser_client()

    done = act(client, "restore", row, page=LIST, confirmed="yes", overdue="on", own_page="1")
    assert "restored" in said(done)[0][1]
    assert "unroutable" in Page(client.get(done.url)).text
    planned = act_on_all(client, "restore", page=LIST, query="?state=cancelled")

    assert planned.url == reverse(LIST) + "?state=cancelled"
    assert Operation.objects.using("other").get().state == "planned"
    assert OutboxMessage.objects.using("other").get(pk=row.pk).state == State.READY


def test_operator_who_may_pause_but_not_view_returns_to_the_index_of_this_site():
    client, site = staff_client("pause_pausedtopic"), ALONE["outbox.PausedTopic"]

    response = client.post(reverse(f"{site.name}:outbox_pausedtopic_add"), {"topic": "shop.order.placed", "reason": ""})

    assert response.url == reverse(f"{site.name}:index")
