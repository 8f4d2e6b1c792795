"""The page of topics and handlers: a row each, with what waits, what fails and what is paused."""

import re
from datetime import timedelta
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from exactly_once.models import AuditEntry, Minute
from exactly_once.process.clock import utcnow
from exactly_once.sql import counts
from exactly_once.telemetry.statistics import bucket_of
from inbox.models import PausedHandler
from outbox.models import PausedTopic
from outbox.states import State
from tests.support.admin_pages import Page, a_message, staff_client
from tests.support.many_rows import multiply
from tests.support.shop_day import AMOUNT, CHARGE, PLACED, RESERVE, SMS, TEXT, a_handled, failing
from tests.support.sql import executed

pytestmark = pytest.mark.django_db(databases=["default", "other"])

PAGE = "admin:exactly_once_topicsandhandlers_changelist"
VIEW = ("view_topicsandhandlers", "view_outboxmessage", "view_inboxmessage")
PAUSED = ("view_pausedtopic", "view_pausedhandler")
MINUTE = timedelta(minutes=1)


def opened(*permissions):
    return staff_client(*VIEW, *permissions).get(reverse(PAGE))


def rows(response):
    """The text of each row's cells by their labels, by the name of the row; and what follows its name."""
    found = {}
    for row in re.findall(r'<tr><th scope="row">(.*?)</tr>', response.content.decode(), re.DOTALL):
        heading, *cells = re.split(r'<td[^>]*data-label="([^"]*)">', row)
        name, _, further = heading.partition("</a>")
        content = {label: " ".join(Text(cell).text.split()) for label, cell in zip(cells[::2], cells[1::2], strict=True)}
        pause = re.search(r'class="traffic-pause" href="([^"]*)"', row)
        further = "".join(Text(further).text.split())
        found["".join(Text(name).text.split())] = {**content, "further": further, "pause": pause and unescape(pause[1])}
    return found


class Text(Page):
    def __init__(self, html):
        super(Page, self).__init__()
        self.elements, self.text = [], ""
        self.feed(html)


@pytest.mark.every_database
def test_each_topic_and_handler_has_its_backlog_its_oldest_message_and_what_fails(handles):
    handles(print, name=RESERVE, topic=PLACED)
    for ago in (5, 9):
        a_message(State.READY, topic=PLACED, ago=ago * MINUTE)
    a_message(State.PUBLISHED, topic=PLACED, settled_at=utcnow())
    a_message(State.RETRYING, topic=SMS)
    a_message(State.DEAD, topic=SMS)
    failing(CHARGE, "order-1", AMOUNT, dead=True)
    a_handled(TEXT, "order-2", state="received", ago=7 * MINUTE)

    response = opened()
    found = rows(response)

    assert [found[name]["Backlog"] for name in (PLACED, SMS, TEXT, CHARGE, RESERVE)] == ["2", "0", "1", "0", "0"]
    assert "9 min ago" in found[PLACED]["Oldest"]
    assert "7 min ago" in found[TEXT]["Oldest"]
    assert (found[SMS]["Failing"], found[CHARGE]["Failing"]) == ("1 retrying 1 dead", "1 dead")


def test_due_scheduled_messages_belong_to_the_backlog_and_a_handler_is_shown_with_all_of_its_topics(handles):
    handles(print, name=RESERVE, topic=[PLACED, SMS])
    a_message(State.SCHEDULED, topic=PLACED, due_ago=2 * MINUTE)
    a_message(State.SCHEDULED, topic=PLACED, due_ago=-2 * MINUTE)

    found = rows(opened())

    assert found[PLACED]["Backlog"] == "1"
    assert "2 min ago" in found[PLACED]["Oldest"]
    assert found[RESERVE]["further"] == f"{PLACED},{SMS}"


@pytest.mark.every_database
def test_rate_and_percentiles_are_those_of_the_last_ten_minutes():
    now = utcnow()
    for ago, count in ((2, 30), (3, 20), (11, 4_000)):
        times = {"minute": now - ago * MINUTE, "process": "a:1"}
        sent = {"counts": {"published": count}, "times": {"to_broker": {bucket_of(0.5): count}}}
        handled = {"counts": {"handled": count}, "times": {"to_effect": {bucket_of(2): count}}}
        Minute.objects.create(app="outbox", subject=PLACED, **times, **sent)
        Minute.objects.create(app="inbox", subject=CHARGE, **times, **handled)

    found = rows(opened())

    assert (found[PLACED]["Per minute"], found[CHARGE]["Per minute"]) == ("5.0", "5.0")
    assert found[PLACED]["p50"].endswith("ms")
    assert found[CHARGE]["p95"].endswith(" s")


def test_failing_and_paused_ones_come_first_and_lead_to_the_filtered_list():
    a_message(State.READY, topic="a.quiet.one")
    a_message(State.DEAD, topic=SMS)

    page = Page(response := opened())

    assert list(rows(response)) == [SMS, "a.quiet.one"]
    address = reverse("admin:outbox_outboxmessage_changelist")
    (dead,) = page.all("a", href=f"{address}?topic={SMS}&state=dead")
    assert dead
    listed = staff_client(*VIEW).get(f"{address}?topic={SMS}&state=dead").context["cl"].result_list
    assert [row.topic for row in listed] == [SMS]


def test_page_with_a_prefix_shows_the_names_that_begin_with_it(handles):
    handles(print, name="tasks.mail", topic="tasks.mail")
    handles(print, name=RESERVE, topic=PLACED)
    a_message(State.READY, topic=PLACED)

    response = staff_client(*VIEW).get(reverse(PAGE, query={"prefix": "tasks."}))

    assert list(rows(response)) == ["tasks.mail"]
    assert "None." in Page(response).text  # no topic
    assert Page(response).all("a", href=reverse(PAGE))


def test_handler_of_dead_letters_is_shown_once_it_has_messages(handles):
    handles(print, name=CHARGE, topic=PLACED, on_dead=print)
    before = rows(opened())
    a_handled(f"{CHARGE}.on_dead", "order-1", state="received")

    assert list(before) == [CHARGE]
    assert list(rows(opened())) == [f"{CHARGE}.on_dead", CHARGE]


def test_more_messages_than_are_counted_are_marked_also_where_none_was_counted(monkeypatch):
    monkeypatch.setattr(counts, "LIMIT", 3)
    for _ in range(5):
        a_message(State.READY, topic=PLACED)
    a_message(State.DEAD, topic=SMS)

    found = rows(opened())

    assert (found[PLACED]["Backlog"], found[SMS]["Backlog"]) == ("3+", "0+")


def test_pause_asks_for_a_reason_and_is_audited_and_resume_is_offered_then(handles):
    handles(print, name=RESERVE, topic=PLACED)
    a_message(State.READY, topic=SMS)
    client = staff_client(*VIEW, *PAUSED, "pause_pausedtopic", "pause_pausedhandler", "resume_pausedtopic")

    for kind, name, model in (("topic", SMS, PausedTopic), ("handler", RESERVE, PausedHandler)):
        found = rows(client.get(reverse(PAGE)))[name]
        form = client.get(found["pause"])
        assert form.context["form"].initial[kind] == name
        client.post(found["pause"], {kind: name, "reason": "the provider is down"})
        row = model.objects.get(**{kind: name})
        assert (row.reason, row.paused_by) == ("the provider is down", "staff0 in the admin")
        entry = AuditEntry.objects.get(kind=kind)
        assert (entry.action, entry.object_id) == ("pause", name)
        assert entry.parameters == {kind: name, "reason": "the provider is down"}
        assert LogEntry.objects.get(object_repr=name)

    response = client.get(reverse(PAGE))
    assert [name for name, row in rows(response).items() if not row["pause"]] == [SMS, RESERVE]
    page = Page(response)
    (resume,) = page.all("input", name="_selected_action")  # of the topic; it may not resume a handler
    assert resume["value"] == str(PausedTopic.objects.get().pk)
    asked = client.post(
        reverse("admin:outbox_pausedtopic_changelist"), {"action": "resume", "_selected_action": resume["value"]}
    )
    assert "Resume these topics?" in asked.content.decode()


def test_limited_topic_is_shown_as_limited_and_may_be_paused_but_not_resumed_with_the_permissions_only():
    PausedTopic.objects.create(topic=SMS, paused_at=utcnow(), mode="limited", allowed_at=utcnow())
    a_message(State.PAUSED, topic=SMS)

    response = opened(*PAUSED, "pause_pausedtopic", "resume_pausedtopic")
    PausedTopic.objects.create(topic=PLACED, paused_by="ada", paused_at=utcnow())
    without = Page(opened(*PAUSED))

    row = rows(response)[SMS]
    assert row["pause"]
    assert "Limited" in row["State"]
    assert not Page(response).all("input", name="_selected_action")
    assert not without.all("a", **{"class": "traffic-pause"})
    assert not without.all("input", name="_selected_action")


def test_page_is_refused_without_its_permission_and_shows_no_app_whose_messages_the_user_may_not_view():
    a_message(State.READY, topic=SMS)
    a_handled(TEXT, "order-1", state="received")

    assert staff_client(*VIEW[1:]).get(reverse(PAGE)).status_code == 403
    assert list(rows(staff_client(*VIEW[:2]).get(reverse(PAGE)))) == [SMS]
    assert list(rows(staff_client(VIEW[0], VIEW[2]).get(reverse(PAGE)))) == [TEXT]


@pytest.mark.every_database
def test_statements_use_indexes_among_many_messages():
    multiply(a_message(State.SCHEDULED, due_ago=-timedelta(hours=1)), 10_000)
    multiply(a_handled(TEXT, "first"), 10_000)
    executed("ANALYZE")
    with CaptureQueriesContext(connection) as captured:
        opened()

    prefix = "EXPLAIN" if connection.vendor == "postgresql" else "EXPLAIN QUERY PLAN"
    reads = [query["sql"] for query in captured if "boxmessage" in query["sql"]]
    assert len(reads) >= 4
    for sql in reads:
        plan = "\n".join(str(line[-1]) for line in executed(f"{prefix} {sql}"))
        assert "Seq Scan on outbox" not in plan, (sql, plan)
        # The partition of open messages is empty here.
        assert "Seq Scan on inbox" not in plan.replace("Seq Scan on inbox_inboxmessage_live", ""), (sql, plan)
