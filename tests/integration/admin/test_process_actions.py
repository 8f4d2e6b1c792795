"""The pages of processes and of paused handlers: what they show, and the requests that operators make there."""

from __future__ import annotations

import re
from datetime import timedelta
from functools import partial

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from exactly_once.models import AuditEntry, Process
from exactly_once.process.heartbeat import STOPPED_SHOWN_FOR
from exactly_once.process.requests import Mode, Request
from exactly_once.sql.now import DatabaseTime
from inbox.models import PausedHandler
from inbox.store.heartbeats import consumers
from outbox.store.heartbeats import relays
from tests.support.admin_pages import Page, act, said, staff_client
from tests.support.deliveries import the_effect
from tests.support.heartbeats import a_consumer, a_relay

pytestmark = [pytest.mark.django_db(databases=["default", "other"]), pytest.mark.every_database]

PROCESSES, PROCESS = "admin:exactly_once_process_changelist", "admin:exactly_once_process_change"
HANDLERS, HANDLER_ADD = "admin:inbox_pausedhandler_changelist", "admin:inbox_pausedhandler_add"
VIEW, VIEW_HANDLERS = "view_process", "view_pausedhandler"


class Row:
    """A heartbeat's identity, as the primary key of a row."""

    def __init__(self, identity):
        self.pk = str(identity.id)


def the_relays(*permissions):
    return Page(staff_client(VIEW, *permissions).get(reverse(PROCESSES)))


class TestList:
    def test_list_shows_memory_round_trips_and_shards(self):
        a_relay(memory_bytes=64 * 2**20, database_ms=1.25, broker_ms=2.5, shards=32)

        text = the_relays().text.replace("\xa0", " ")

        assert [words for words in ("64.0 MB", "database 1.2 ms", "broker 2.5 ms", "32 / 64") if words not in text] == []

    def test_figures_that_are_not_known_are_shown_as_unknown(self):
        a_relay()

        text = the_relays().text

        assert "database unknown" in text
        assert "broker unknown" in text

    def test_stopped_process_is_shown_for_an_hour_after_the_running_ones(self):
        stopped = a_relay(host="stopped-host")
        a_relay(host="live-host", running_for=timedelta(minutes=1))
        relays.mark_stopped("default", stopped.id)
        text = the_relays().text
        assert "Stopped" in text
        assert text.index("live-host") < text.index("stopped-host")

        Process.objects.filter(pk=stopped.id).update(stopped_at=DatabaseTime(-STOPPED_SHOWN_FOR))
        assert "stopped-host" not in the_relays().text

    def test_stopped_consumer_counts_as_not_running(self, handles):
        handles(the_effect, name="shop.reserve_stock")
        consumers.mark_stopped("default", a_consumer().id)

        text = Page(staff_client(VIEW).get(reverse(PROCESSES))).text

        assert "No consumer is running for: shop.reserve_stock." in text
        assert "consumer-1:4712" in text

    @pytest.mark.parametrize(("mode", "shown"), [("paused", "Paused"), ("draining", "Draining"), ("stopping", "Stopping")])
    def test_mode_of_a_process_is_shown_with_its_request(self, mode, shown):
        relay = a_relay()
        relays.request("default", relay.id, Request.PAUSE, "ada in the admin")
        assert re.search(r"pause is requested (now|\d+ s ago) by ada in the admin, not yet read", the_relays().text)

        relays.acknowledge("default", relay.id, Request.PAUSE, Mode(mode))
        text = the_relays().text
        assert shown in text
        assert re.search(r"pause was requested (now|\d+ s ago) by ada in the admin", text)


class TestRequests:
    @pytest.mark.parametrize("request_", ["pause", "drain", "stop"])
    def test_confirmed_request_is_in_the_row_in_the_log_and_in_the_audit_log(self, request_):
        relay = a_relay()
        client = staff_client(VIEW, f"{request_}_process")
        asked = Page(act(client, request_, Row(relay), page=PROCESSES))
        assert "relay-1:4711" in asked.text
        assert relays.pending("default", relay.id) is None

        response = act(client, request_, Row(relay), page=PROCESSES, confirmed="yes")

        assert said(response) == [("success", f"Process relay-1:4711: asked to {request_}")]
        row = Process.objects.get()
        assert (row.requested, row.requested_by, row.acknowledged_at) == (request_, "staff0 in the admin", None)
        assert LogEntry.objects.get().object_id == str(relay.id)
        entry = AuditEntry.objects.get()
        assert (entry.actor, entry.place, entry.address) == ("staff0", "admin", "127.0.0.1")
        assert (entry.app, entry.action, entry.kind) == ("outbox", request_, "process")
        assert (entry.object_id, entry.name) == (str(relay.id), "relay-1:4711")

    def test_paused_process_is_resumed_without_a_question(self):
        consumer = a_consumer(mode="paused")
        client = staff_client(VIEW, "resume_process")

        act(client, "resume", Row(consumer), page=PROCESSES)

        assert consumers.pending("default", consumer.id) is Request.RESUME
        assert AuditEntry.objects.get().action == "resume"

    def test_request_to_a_process_that_has_stopped_meanwhile_is_refused(self):
        relay = a_relay()
        relays.mark_stopped("default", relay.id)
        client = staff_client(VIEW, "stop_process")

        response = act(client, "stop", Row(relay), page=PROCESSES, confirmed="yes")

        [(level, words)] = said(response)
        assert level == "warning"
        assert "it has stopped, or the request has no effect in its state" in words
        assert not AuditEntry.objects.exists()

    def test_own_page_offers_only_requests_with_an_effect(self):
        relay = a_relay(mode="paused")
        client = staff_client(VIEW, *(f"{request}_process" for request in Request))

        page = Page(client.get(reverse(PROCESS, args=[relay.id])))

        assert {field["value"] for field in page.all("button", name="action")} == {"resume", "drain", "stop"}


on_handlers = partial(act, page=HANDLERS)


class TestPausedHandlers:
    @pytest.fixture(autouse=True)
    def handler(self, handles):
        return handles(the_effect, name="shop.reserve_stock")

    def test_adding_a_handler_pauses_it_and_writes_the_audit_log(self):
        client = staff_client(VIEW_HANDLERS, "pause_pausedhandler")
        response = client.post(reverse(HANDLER_ADD), {"handler": "shop.reserve_stock", "reason": "defect"})

        assert response.url == reverse(HANDLERS)
        row = PausedHandler.objects.get()
        assert (row.handler, row.reason, row.paused_by) == ("shop.reserve_stock", "defect", "staff0 in the admin")
        entry = AuditEntry.objects.get()
        assert (entry.action, entry.kind, entry.object_id) == ("pause", "handler", "shop.reserve_stock")
        assert entry.parameters == {"handler": "shop.reserve_stock", "reason": "defect"}

    def test_unknown_handler_is_refused_with_the_known_ones(self):
        client = staff_client(VIEW_HANDLERS, "pause_pausedhandler")

        page = Page(client.post(reverse(HANDLER_ADD), {"handler": "shop.missing"}))

        assert "No handler is called 'shop.missing'." in page.text
        assert "shop.reserve_stock" in page.text
        assert not PausedHandler.objects.exists()

    def test_list_shows_since_when_by_whom_and_why(self):
        PausedHandler.objects.create(
            handler="shop.reserve_stock",
            paused_by="ada",
            reason="defect\nand more",
            paused_at=DatabaseTime(-timedelta(hours=2)),
        )

        text = Page(staff_client(VIEW_HANDLERS).get(reverse(HANDLERS))).text

        assert [words for words in ("shop.reserve_stock", "ada", "defect", "2 h ago", "Paused") if words not in text] == []
        assert "and more" not in text

    def test_resuming_deletes_the_row_and_writes_the_audit_log(self):
        row = PausedHandler.objects.create(handler="shop.reserve_stock", paused_by="ada", paused_at=DatabaseTime())
        client = staff_client(VIEW_HANDLERS, "resume_pausedhandler")
        assert "Resume these handlers?" in Page(on_handlers(client, "resume", row)).text

        response = on_handlers(client, "resume", row, confirmed="yes")

        assert said(response) == [("success", "Handler shop.reserve_stock: resumed")]
        assert not PausedHandler.objects.exists()
        assert AuditEntry.objects.get().action == "resume"
