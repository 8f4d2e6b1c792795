"""Webhook endpoints in the admin: how they fare, and the operators' decisions."""

from functools import partial

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from exactly_once.models import AuditEntry
from inbox.contrib.outgoing_webhooks import Endpoint, endpoints
from inbox.models import InboxMessage
from tests.support.admin_pages import Page, act, said, staff_client
from tests.support.inbox_rows import store_message

pytestmark = pytest.mark.django_db(databases=["default", "other"])

LIST, ADD, ONE = (f"admin:inbox_outgoing_webhooks_endpoint_{page}" for page in ("changelist", "add", "change"))
VIEW = "view_endpoint"
CONFIRMED = {"confirmed": "yes", "reason": "asked by the partner"}

on_the_list = partial(act, page=LIST)


@pytest.fixture
def endpoint():
    return Endpoint.objects.create(name="partner", url="https://example.com/hooks", topics=["shop.order.placed"])


def the_endpoint():
    return Endpoint.objects.get(name="partner")


@pytest.mark.long
def test_list_shows_state_url_and_the_messages_that_wait(endpoint):
    Endpoint.objects.create(name="other", url="https://example.org/", state="paused", reason="POST … was answered with 500.")
    store_message(
        handler="webhook/partner", topic="t", biz_id="1", state="received", body=b"{}", received_at=endpoint.state_since
    )
    text = Page(staff_client(VIEW).get(reverse(LIST))).text

    for words in ("partner", "https://example.com/hooks", "Active", "other", "Paused", "was answered with 500"):
        assert words in text


def test_parts_of_the_url_which_may_be_secrets_are_not_shown(endpoint):
    endpoints.edit("default", endpoint.pk, url="https://example.com/hooks/s3cr3t?token=s3cr3t")
    client = staff_client(VIEW)

    for url in (reverse(LIST), reverse(ONE, args=[endpoint.pk])):
        text = Page(client.get(url)).text
        assert "s3cr3t" not in text
        assert "https://example.com/hooks/***?…" in text


def test_secret_is_shown_on_the_page_with_its_permission_only(endpoint):
    url = reverse(ONE, args=[endpoint.pk])
    shown, hidden = (Page(staff_client(VIEW, *more).get(url)).text for more in (["secret_endpoint"], []))

    assert endpoint.secret in shown.replace("\n", "")
    assert "Show the URL" in shown
    assert "Show the URL" not in hidden
    assert endpoint.secret[6:20] not in hidden
    assert "shop.order.placed" in hidden


def test_operator_adds_an_endpoint(endpoint):
    given = {"name": "new", "url": "https://example.com/in", "topics": '["shop.order.placed"]', "concurrency": 3}
    staff_client(VIEW, "add_endpoint").post(reverse(ADD), given)

    added = Endpoint.objects.get(name="new")
    assert (added.url, added.topics, added.concurrency, added.state) == (given["url"], ["shop.order.placed"], 3, "active")
    assert added.secret != endpoint.secret
    assert AuditEntry.objects.get().action == "add"


def test_endpoint_that_cannot_be_called_is_neither_added_nor_changed_to(endpoint):
    given = {"name": "partner", "url": "http://user:pw@example.com", "topics": "7", "concurrency": 0}
    for name, wrong in given.items():
        fields = {"name": "new", "url": "https://example.com/in", "topics": "[]", "concurrency": 3, name: wrong}
        assert staff_client(VIEW, "add_endpoint").post(reverse(ADD), fields).status_code == 200
    for wrong in ({"url": "https://"}, {"topics": "{"}, {"topics": '["#"]'}, {"concurrency": "100"}):
        on_the_list(staff_client(VIEW, "edit_endpoint"), "edit", endpoint, **wrong, **CONFIRMED)

    assert Endpoint.objects.filter(url=endpoint.url, topics=endpoint.topics, concurrency=2).exists()
    assert Endpoint.objects.count() == 1
    assert not AuditEntry.objects.exists()


def test_operator_disables_and_enables_an_endpoint(endpoint):
    client = staff_client(VIEW, "disable_endpoint", "enable_endpoint")
    assert "They get no new messages" in Page(on_the_list(client, "disable", endpoint)).text
    on_the_list(client, "disable", endpoint, **CONFIRMED)
    assert (the_endpoint().state, the_endpoint().reason) == ("disabled", "asked by the partner")
    on_the_list(client, "enable", endpoint, **CONFIRMED)
    assert (the_endpoint().state, the_endpoint().reason) == ("active", "")
    assert "not enabled: it is active now" in said(on_the_list(client, "enable", endpoint, **CONFIRMED))[-1][1]

    assert list(AuditEntry.objects.order_by("pk").values_list("action", "kind", "name")) == [
        ("disable", "endpoint", "partner"),
        ("enable", "endpoint", "partner"),
    ]
    assert "asked by the partner" in LogEntry.objects.order_by("pk").first().change_message


def test_operator_sends_a_test_message_makes_a_new_secret_and_changes_what_is_filled_in(endpoint):
    client = staff_client(VIEW, "test_endpoint", "rotate_endpoint", "edit_endpoint")
    on_the_list(client, "test", endpoint, **CONFIRMED)
    on_the_list(client, "rotate", endpoint, **CONFIRMED)
    assert InboxMessage.objects.get(handler="webhook/partner").topic == "webhook.test"
    assert the_endpoint().secret != endpoint.secret
    assert the_endpoint().old_secret == endpoint.secret

    on_the_list(client, "edit", endpoint, url="https://example.org/new", **CONFIRMED)
    assert (the_endpoint().url, the_endpoint().topics) == ("https://example.org/new", ["shop.order.placed"])
    on_the_list(client, "edit", endpoint, topics="[]", concurrency="9", **CONFIRMED)
    assert (the_endpoint().url, the_endpoint().topics, the_endpoint().concurrency) == ("https://example.org/new", [], 9)
