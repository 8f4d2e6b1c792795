"""What runs now: each process says so with its heartbeats, and a page of the admin shows it."""

from datetime import timedelta

import pytest
from django.urls import reverse

from exactly_once.models import Process
from exactly_once.process import work
from exactly_once.process.clock import monotonic, utcnow
from inbox import Lease
from inbox.consumer.heartbeat import Activity, Heartbeats
from inbox.states import State
from inbox.store.handler_rows import consumers
from tests.support.admin_pages import Page, staff_client
from tests.support.deliveries import Slow
from tests.support.heartbeats import a_consumer, a_relay
from tests.support.inbox_rows import delete_messages
from tests.support.shop_day import CHARGE, a_handled
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, consuming, declare, send

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.long]

PAGE = "admin:exactly_once_busy_changelist"
FLOW = "admin:exactly_once_flow_changelist"
VIEW = ("view_busy", "view_outboxmessage", "view_inboxmessage")
RUN = {"what": CHARGE, "message": "m-1", "messages": 1, "thread": "worker-3", "began": 60.0}


def page(*permissions):
    return Page(staff_client(*(permissions or VIEW)).get(reverse(PAGE)))


def words(*permissions):
    return " ".join(page(*permissions).text.split())


def said():
    """What the consumers have said."""
    return [run for process in Process.objects.filter(app="inbox", stopped_at=None) for run in process.running]


@pytest.mark.parametrize("lease", [None, Lease(duration=timedelta(minutes=5))], ids=["transactional", "leased"])
def test_handler_that_runs_is_shown_with_its_message_thread_and_process_until_it_has_ended(handles, rabbitmq_url, lease):
    slow = Slow()
    handler = handles(slow, name="tests.slow", lease=lease)
    options = broker_options(rabbitmq_url)
    declare(handler, options)
    send(rabbitmq_url, handler.topics[0], {}, message_id="m-1")
    heartbeats = Heartbeats(lambda: Activity(handlers=[handler]))
    with heartbeats.sending(["default"]), consuming([handler], options):
        try:
            wait_until(said)
            (run,) = said()
            assert (run["what"], run["message"], run["messages"]) == ("tests.slow", "m-1", 1)
            text = words()
            assert "tests.slow m-1" in text
            assert run["thread"] in text
            assert "Further runs under leases" not in text
        finally:
            slow.go_on.set()
        wait_until(lambda: not said())
        assert "nothing" in words()


def test_run_that_lasts_for_more_than_a_minute_is_shown_with_the_stack_of_its_thread(monkeypatch):
    monkeypatch.setattr(work, "_STACK_AFTER_SECONDS", 0.0)
    before = work.begin("inbox", "default", "tests.slow", "m-1")
    try:
        (run,) = work.running("inbox", "default", monotonic())
    finally:
        work.end(before)
    assert "test_what_runs_now.py" in run["stack"]
    a_consumer(running=[run])

    assert "Stack" in words()
    assert "work.running(" in words()


def test_page_says_how_old_a_statement_is_and_since_when_the_work_goes_on():
    runs = [{**RUN, "began": 4 * 3600.0}, {**RUN, "messages": 3, "message": "m-2"}]
    a_consumer(running_for=timedelta(hours=5), silent_for=timedelta(minutes=4), running=runs)
    a_relay(host="relay-7", running=[{**RUN, "what": "", "message": "", "thread": "lane-1"}])

    text = words()

    assert "Silent 4 min ago payments.request_payment m-1 60 min ago worker-3" in text
    assert "m-2 and 2 more" in text
    assert "Relay pass - 4 h ago lane-1" in text


def test_process_that_works_for_two_databases_is_shown_with_what_it_runs_for_each_and_leads_to_its_flow():
    first, elsewhere = a_consumer(running=[RUN]), [{**RUN, "what": "elsewhere.handle"}]
    consumers.write("other", first, running_for=timedelta(hours=5), waits_for="", facts={}, running=elsewhere)

    shown = page(*VIEW, "view_flow")

    assert CHARGE in shown.text
    assert "elsewhere.handle" in shown.text
    assert shown.all("a", href=f"{reverse(FLOW)}?id=m-1")
    assert not page().all("a", href=f"{reverse(FLOW)}?id=m-1"), "which the user may not view"


def test_leased_run_that_no_process_has_named_is_listed_with_the_end_of_its_lease():
    ends_at = utcnow() + timedelta(minutes=9, seconds=30)
    for name in ("m-1", "m-2"):
        a_handled(CHARGE, name, state=State.RUNNING, message_id=name, next_attempt_at=ends_at)
    a_consumer(running=[RUN])

    text = words()

    further = text[text.index("Further runs under leases") :]
    assert "m-2in 9 min" in further.replace(" in 9", "in 9")
    assert "m-1" not in further
    delete_messages()
    assert "Further runs" not in words()


def test_page_is_refused_without_its_permission_and_shows_no_app_whose_messages_the_user_may_not_view():
    a_consumer(host="consumer-9", running=[RUN])
    a_relay(host="relay-9")

    assert staff_client(*VIEW[1:]).get(reverse(PAGE)).status_code == 403
    assert "relay-9" in words(*VIEW[:2])
    assert "consumer-9" not in words(*VIEW[:2])


def test_thread_is_named_with_what_it_runs_inside_of_other_work_and_without_it_at_the_end():
    started_at = monotonic()
    before = work.begin("outbox", "default", "")
    try:
        (run,) = work.running("outbox", "default", started_at)
        assert (run["what"], run["thread"], work.running("inbox", "default", started_at)) == ("", "MainThread", [])
        inner = work.begin("outbox", "default", "a.callback", "m-1")
        assert [run["what"] for run in work.running("outbox", "default", started_at)] == ["a.callback"]
        work.end(inner)
        assert [run["what"] for run in work.running("outbox", "default", started_at)] == [""]
        assert work.running("outbox", "other", started_at) == []
    finally:
        work.end(before)
    assert work.running("outbox", "default", started_at) == []
