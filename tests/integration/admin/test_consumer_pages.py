"""The page of the admin that shows which processes run handlers."""

from datetime import timedelta

import pytest
from django.contrib import admin
from django.test import override_settings
from django.urls import reverse

from exactly_once.admin.processes import ProcessAdmin
from exactly_once.models import Process
from exactly_once.process.heartbeat import SILENT_AFTER
from tests.support.admin_pages import Page, staff_client
from tests.support.deliveries import the_effect
from tests.support.heartbeats import a_consumer

pytestmark = [pytest.mark.django_db(databases=["default", "other"]), pytest.mark.every_database]

CONSUMERS = "admin:exactly_once_process_changelist"
CONSUMER = "admin:exactly_once_process_change"
VIEW = "view_process"


def the_page():
    return Page(staff_client(VIEW).get(reverse(CONSUMERS)))


def test_list_shows_process_version_state_ages_handlers_and_counts():
    a_consumer(handlers=["shop.reserve_stock", "shop.send_receipt"])

    text = the_page().text

    for expected in (
        "consumer-1:4712",
        "1.2.3",
        "Working",
        "5 h ago",
        "shop.reserve_stock",
        "shop.send_receipt",
        "1,234,567",
        "89",
    ):
        assert expected in text
    assert "No consumer is running" not in text


def test_list_shows_what_a_consumer_waits_for():
    a_consumer(waits_for="the broker: connection refused")

    text = the_page().text

    assert "Waiting" in text
    assert "for the broker: connection refused" in text
    assert "Working" not in text


def test_silent_consumer_is_shown_as_silent_and_last():
    a_consumer(host="silent-host", silent_for=timedelta(minutes=3), running_for=timedelta(minutes=1))
    a_consumer(host="live-host", running_for=timedelta(minutes=2))

    text = the_page().text

    assert "Silent" in text
    assert "for 3 min" in text
    assert text.index("live-host") < text.index("silent-host")


def test_list_warns_of_handlers_that_no_live_process_runs(handles):
    handles(the_effect, name="shop.reserve_stock")
    handles(the_effect, name="shop.elsewhere", using="other")
    words = "No consumer is running for: shop.reserve_stock. Their messages wait in the database."
    assert words in the_page().text

    a_consumer(silent_for=2 * SILENT_AFTER)
    assert words in the_page().text
    with override_settings(OUTBOX={"BROKER_URL": "amqp://host//"}):
        assert "Their messages wait in the broker's queues. Start `inbox_consume`" in the_page().text

    a_consumer()
    assert "No consumer is running" not in the_page().text


def test_list_shows_three_handlers_of_a_consumer_and_its_own_page_shows_all():
    consumer = a_consumer(handlers=[f"shop.handler_{n}" for n in range(9)])
    listed, own = the_page().text, Page(staff_client(VIEW).get(reverse(CONSUMER, args=[consumer.id]))).text

    assert "and 6 more" in listed
    assert "shop.handler_3" not in listed
    assert all(f"shop.handler_{n}" in own for n in range(9))


def test_query_count_of_the_list_does_not_grow_with_rows(django_assert_num_queries):
    for pid in range(50):
        a_consumer(pid=pid)
    client = staff_client(VIEW)
    client.get(reverse(CONSUMERS))

    # session, user, permissions (2), is there a relay, its table, what is ready, handlers without a consumer, count, rows
    with django_assert_num_queries(10):
        client.get(reverse(CONSUMERS))


def test_admin_of_another_database_lists_its_consumers_and_handlers(rf, handles):
    class OtherAdmin(ProcessAdmin):
        using = "other"

    handles(the_effect, name="shop.here")
    handles(the_effect, name="shop.there", using="other")
    a_consumer(host="here")
    a_consumer(host="there", using="other")
    other = OtherAdmin(Process, admin.site)

    assert [row.host for row in other.get_queryset(rf.get("/"))] == ["there"]
    [*_, warned] = other.warnings(rf.get("/"))
    assert "shop.there" in warned
    assert "shop.here" not in warned
