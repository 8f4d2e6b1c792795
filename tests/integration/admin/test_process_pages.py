"""The page of processes: what it shows of relays and of consumers, what it warns of, and the requests that operators make."""

import re
from datetime import timedelta

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.test import override_settings
from django.urls import reverse

from exactly_once.console.admin.processes import ProcessAdmin
from exactly_once.models import AuditEntry, Process
from exactly_once.process.loop import Mode, Request
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.heartbeat_table import SILENT_AFTER, STOPPED_SHOWN_FOR
from inbox.store.handler_rows import consumers
from outbox.relay.heartbeat import relays
from outbox.states import State
from tests.support.admin_pages import Page, a_message, act, said, staff_client
from tests.support.deliveries import the_effect
from tests.support.heartbeats import a_consumer, a_relay, write_beat

pytestmark = pytest.mark.django_db(databases=["default", "other"])

PROCESSES, PROCESS = "admin:exactly_once_process_changelist", "admin:exactly_once_process_change"
VIEW = "view_process"


class Row:
    """A heartbeat's identity, as the primary key of a row."""

    def __init__(self, identity):
        self.pk = str(identity.id)


def the_list():
    return Page(staff_client(VIEW).get(reverse(PROCESSES)))


BOTH = pytest.mark.parametrize("a_process", [a_relay, a_consumer])


class TestList:
    @pytest.mark.parametrize(
        ("a_process", "expected"),
        [
            (a_relay, ["relay-1:4711", "4 min ago", "812.5"]),
            (a_consumer, ["consumer-1:4712", "shop.reserve_stock", "shop.send_receipt", "89"]),
        ],
    )
    def test_list_shows_process_version_state_ages_and_counts(self, a_process, expected):
        a_process(**({"handlers": ["shop.reserve_stock", "shop.send_receipt"]} if a_process is a_consumer else {}))

        text = the_list().text

        assert [words for words in (*expected, "1.2.3", "Working", "5 h ago", "1,234,567") if words not in text] == []
        assert "No consumer is running" not in text

    @BOTH
    def test_list_shows_what_a_process_waits_for_and_a_silent_one_as_silent_without_a_rate_and_last(self, a_process):
        silent = a_process(host="silent-host", running_for=timedelta(minutes=1), waits_for="the broker: connection refused")
        waiting = the_list().text
        Process.objects.filter(pk=silent.id).update(beat_at=DatabaseTime(-timedelta(minutes=3)))
        alone = the_list().text
        a_process(host="live-host", running_for=timedelta(minutes=2))
        text = the_list().text

        assert "Waiting" in waiting
        assert "for the broker: connection refused" in waiting
        assert "Working" not in waiting
        assert "Silent" in alone
        assert "for 3 min" in alone
        assert not {"Working", "Waiting", "812.5"} & set(alone.split())
        assert text.index("live-host") < text.index("silent-host")

    def test_relay_is_shown_as_starting_without_times_and_sizes_that_are_not_known_yet(self):
        a_relay(last_pass_at=None, published=0, rate=0.0, running_for=timedelta(seconds=1))

        page = the_list()

        assert [words for words in ("Starting", "database unknown", "broker unknown") if words not in page.text] == []
        assert "Working" not in page.text
        assert len(page.all("time")) == 2, "started and last heartbeat, and no last pass"

        a_relay(memory_bytes=64 * 2**20, database_ms=1.25, broker_ms=2.5, shards=32)
        text = the_list().text.replace("\xa0", " ")
        assert [words for words in ("64.0 MB", "database 1.2 ms", "broker 2.5 ms", "32 / 64") if words not in text] == []

    @pytest.mark.every_database
    def test_stopped_process_is_shown_for_an_hour_after_the_running_ones(self):
        stopped = a_relay(host="stopped-host")
        a_relay(host="live-host", running_for=timedelta(minutes=1))
        relays.mark_stopped("default", stopped.id)
        text = the_list().text
        assert "Stopped" in text
        assert text.index("live-host") < text.index("stopped-host")

        Process.objects.filter(pk=stopped.id).update(stopped_at=DatabaseTime(-STOPPED_SHOWN_FOR))
        assert "stopped-host" not in the_list().text

    def test_mode_of_a_process_is_shown_with_its_request(self):
        relay = a_relay()
        relays.request("default", relay.id, Request.PAUSE, "ada in the admin")
        assert re.search(r"pause is requested (now|\d+ s ago) by ada in the admin, not yet read", the_list().text)

        relays.acknowledge("default", relay.id, Request.PAUSE, Mode.PAUSED)
        for mode, shown in (("paused", "Paused"), ("draining", "Draining"), ("stopping", "Stopping")):
            Process.objects.update(mode=mode)
            text = the_list().text
            assert shown in text
            assert re.search(r"pause was requested (now|\d+ s ago) by ada in the admin", text)

    def test_list_shows_three_handlers_of_a_consumer_and_its_own_page_shows_all(self):
        consumer = a_consumer(handlers=[f"shop.handler_{n}" for n in range(9)])
        listed, own = the_list().text, Page(staff_client(VIEW).get(reverse(PROCESS, args=[consumer.id]))).text

        assert "and 6 more" in listed
        assert "shop.handler_3" not in listed
        assert all(f"shop.handler_{n}" in own for n in range(9))

    def test_query_count_of_the_list_does_not_grow_with_rows(self, django_assert_num_queries):
        for pid in range(25):
            a_relay(pid=pid)
            a_consumer(pid=pid)
        client = staff_client(VIEW)
        client.get(reverse(PROCESSES))

        # session, user, permissions (2), does a relay run, handlers without a consumer, count, rows
        with django_assert_num_queries(8):
            client.get(reverse(PROCESSES))

    def test_admin_of_another_database_lists_its_processes_and_handlers(self, rf, handles):
        class OtherAdmin(ProcessAdmin):
            using = "other"

        handles(the_effect, name="shop.here")
        handles(the_effect, name="shop.there", using="other")
        for a_process in (a_relay, a_consumer):
            a_process(host="here")
        write_beat("other", host="there")
        a_consumer(host="there", using="other")
        other = OtherAdmin(Process, admin.site)

        assert [row.host for row in other.get_queryset(rf.get("/"))] == ["there"] * 2
        [*_, warned] = other.warnings(rf.get("/"))
        assert "shop.there" in warned
        assert "shop.here" not in warned


class TestWarnings:
    def test_list_warns_when_no_relay_is_running(self):
        a_message(State.READY)
        a_message(State.SCHEDULED, due_ago=timedelta(minutes=1))
        a_message(State.SCHEDULED, due_ago=-timedelta(minutes=1))
        assert "No relay is running. Messages that are due: 2." in the_list().text

        a_relay(silent_for=2 * SILENT_AFTER)
        assert "No relay is running. Messages that are due: 2." in the_list().text

    def test_list_warns_of_handlers_that_no_live_process_runs(self, handles):
        handles(the_effect, name="shop.reserve_stock")
        handles(the_effect, name="shop.elsewhere", using="other")
        words = "No consumer is running for: shop.reserve_stock. Any messages for them wait in the database."
        assert words in the_list().text

        a_consumer(silent_for=2 * SILENT_AFTER)
        consumers.mark_stopped("default", a_consumer(host="stopped").id)
        assert words in the_list().text
        with override_settings(OUTBOX={"BROKER_URL": "amqp://host//"}):
            assert "Any messages for them wait in the broker's queues. Start inbox_consume" in the_list().text

        a_consumer()
        assert "No consumer is running" not in the_list().text


class TestRequests:
    @pytest.mark.parametrize("request_", ["pause", "drain", "stop"])
    def test_confirmed_request_is_in_the_row_in_the_log_and_in_the_audit_log(self, request_):
        relay = a_relay()

        response = act(staff_client(VIEW, f"{request_}_process"), request_, Row(relay), page=PROCESSES, confirmed="yes")

        assert said(response) == [("success", f"Process relay-1:4711: asked to {request_}")]
        row = Process.objects.get()
        assert (row.requested, row.requested_by, row.acknowledged_at) == (request_, "staff0 in the admin", None)
        assert LogEntry.objects.get().object_id == str(relay.id)
        entry = AuditEntry.objects.get()
        assert (entry.actor, entry.place, entry.address) == ("staff0", "admin", "127.0.0.1")
        assert (entry.app, entry.action, entry.kind) == ("outbox", request_, "process")
        assert (entry.object_id, entry.name) == (str(relay.id), "relay-1:4711")

    def test_own_page_offers_only_requests_with_an_effect_and_resumes_without_a_question(self):
        consumer = a_consumer(mode="paused")
        client = staff_client(VIEW, *(f"{request}_process" for request in Request))

        page = Page(client.get(reverse(PROCESS, args=[consumer.id])))
        act(client, "resume", Row(consumer), page=PROCESSES)

        assert {field["value"] for field in page.all("button", name="action")} == {"resume", "drain", "stop"}
        assert consumers.pending("default", consumer.id) is Request.RESUME
        assert AuditEntry.objects.get().action == "resume"

    def test_request_to_a_process_that_has_stopped_meanwhile_is_refused(self):
        relay = a_relay()
        relays.mark_stopped("default", relay.id)

        [(level, words)] = said(act(staff_client(VIEW, "stop_process"), "stop", Row(relay), page=PROCESSES, confirmed="yes"))

        assert (level, "it has stopped, or the request has no effect in its state" in words) == ("warning", True)
        assert not AuditEntry.objects.exists()
