"""The overview in the admin: what it counts, what it warns of, and what it does not know."""

from datetime import timedelta

import pytest
from django.urls import reverse

from exactly_once.models import Alert, Minute, Operation
from exactly_once.process.clock import utcnow
from exactly_once.sql.counts import LIMIT
from exactly_once.sql.now import DatabaseTime
from exactly_once.telemetry.statistics import bucket_of
from inbox.models import PausedHandler
from inbox.states import State as InboxState
from outbox.models import PausedTopic
from outbox.states import State
from tests.support import ROOT
from tests.support.admin_pages import NASTY, Page, a_message, an_inbox_message, staff_client, superuser_client
from tests.support.deliveries import the_effect
from tests.support.heartbeats import a_consumer, a_relay, let_consumers_fall_silent
from tests.support.many_rows import multiply
from tests.support.shop_day import CHARGE, TIMEOUT, failing

pytestmark = pytest.mark.django_db(databases=["default", "other"])

OVERVIEW = "admin:exactly_once_overview_changelist"
FIGURES, LATENCY = "admin:exactly_once_overview_figures", "admin:exactly_once_overview_latency"
HEALTH = "admin:exactly_once_databasehealth_changelist"
VIEW, DAY = "view_overview", timedelta(days=1)


class OverviewPage(Page):
    """With the text of each cell of each row of a table, and the lines of what needs attention."""

    def __init__(self, response):
        self.rows, self.lines, self._is_in_cell, self._is_in_line = [], [], False, False
        super().__init__(response)

    def handle_starttag(self, tag, attributes):
        super().handle_starttag(tag, attributes)
        if tag == "tr":
            self.rows.append([])
        elif tag in {"th", "td"} and self.rows:
            self.rows[-1].append("")
            self._is_in_cell = True
        elif tag == "li" and dict(attributes).get("class") in {"overview-urgent", "overview-known"}:
            self.lines.append([dict(attributes)["class"].removeprefix("overview-"), ""])
            self._is_in_line = True

    def handle_endtag(self, tag):
        if tag in {"th", "td"}:
            self._is_in_cell = False
        elif tag == "li":
            self._is_in_line = False

    def handle_data(self, data):
        super().handle_data(data)
        if self._is_in_line:
            self.lines[-1][1] += data
        if self._is_in_cell:
            self.rows[-1][-1] = f"{self.rows[-1][-1]}{data}".strip()


def the_page(url=OVERVIEW):
    return OverviewPage(superuser_client().get(reverse(url)))


def links(page):
    return [a.get("href", "") for a in page.all("a")]


def statistics(app, subject="", *, ago=timedelta(), **given):
    times = {name: given.pop(name) for name in list(given) if name.startswith("to_")}
    minute = utcnow() - ago
    return Minute.objects.create(app=app, minute=minute, process="host:1", subject=subject, counts=given, times=times)


def test_overview_is_the_first_page_of_the_console_in_the_admin():
    client = superuser_client()

    apps = {app["app_label"]: app["models"] for app in client.get(reverse("admin:index")).context["app_list"]}

    assert apps["exactly_once"][0]["object_name"] == "Overview"


@pytest.mark.every_database
def test_counts_of_each_state_link_to_the_list_of_that_state_and_beyond_the_limit_are_shown_as_more():
    row = a_message(State.DEAD)
    a_message(State.READY)
    page = the_page()
    assert f"{reverse('admin:outbox_outboxmessage_changelist')}?state=dead" in links(page)
    assert "1 message is dead." in page.text

    multiply(row, LIMIT)
    assert "more than 10,000 messages are dead." in the_page().text


def raised(number, app="outbox", **columns):
    times = {"first_seen_at": DatabaseTime(), "seen_at": DatabaseTime(), "raised_at": DatabaseTime(-timedelta(minutes=number))}
    given = {"condition": "lag", "object": f"topic-{number}", "summary": f"late by {number} min", "state": "raised"}
    return Alert.objects.create(app=app, **{**given, **times, **columns})


def test_raised_alerts_are_named_with_a_link_to_each_and_counted():
    alerts = [raised(number) for number in range(1, 8)]
    raised(9, state="cleared", cleared_at=DatabaseTime())
    raised(8, "inbox", summary=NASTY)

    page = the_page()

    assert [f"topic-{number}" in page.text for number in range(1, 10)] == [True] * 5 + [False] * 2 + [True, False]
    assert reverse("admin:exactly_once_alert_change", args=[alerts[0].pk]) in links(page)
    assert "late by 1 min" in page.text
    assert "2 more alerts are raised." in page.text
    assert ["Raised alerts", "8"] in page.rows
    assert reverse("admin:exactly_once_alert_changelist") in links(page)
    assert not page.all("script", src=None)
    of_another = Page(staff_client(VIEW, "view_outboxmessage").get(reverse(OVERVIEW))).text
    assert "topic-1" not in of_another
    assert "Raised alerts" not in of_another


def attention(page):
    """The lines of what needs attention: the degree and the text of each."""
    return [(degree, " ".join(text.split())) for degree, text in page.lines]


def test_what_needs_attention_in_both_halves_stands_before_all_figures_with_the_urgent_lines_first(handles):
    a_relay()
    handles(the_effect, name="shop.reserve")
    PausedTopic.objects.create(topic="shop.slow", paused_by="ada", paused_at=utcnow())
    PausedTopic.objects.create(topic="shop.refused", mode="refused", paused_at=utcnow())
    PausedHandler.objects.create(handler="shop.charge", paused_by="ada", paused_at=utcnow())
    a_message(State.DEAD)

    page = the_page()

    lines = attention(page)
    assert [degree for degree, _text in lines] == ["urgent"] * 3 + ["known"] * 2
    assert [" ".join(text.split()[:4]) for _degree, text in lines] == [
        "Inbox: No consumer is",
        "Outbox: 1 message is",
        "Outbox: Topic shop.refused has",
        "Outbox: Topic shop.slow has",
        "Inbox: Handler shop.charge has",
    ]
    assert page.text.index("1 message is dead.") < page.text.index("Published")


def test_one_box_searches_the_messages_of_both_halves_also_their_errors(handles):
    failing(CHARGE, "order-17", TIMEOUT, dead=True)
    a_message(State.DEAD, topic="shop.order.placed", biz_id="order-18", last_error="no answer within 3 s")
    a_message(State.PUBLISHED, topic="shop.order.placed", biz_id="order-19", settled_at=utcnow())
    found = f"{reverse('admin:exactly_once_overview_search')}?q="
    client = staff_client("view_overview", "view_outboxmessage", "view_inboxmessage")

    page = Page(client.get(f"{found}no answer within"))
    assert "order-17" in page.text
    assert "order-18" in page.text
    assert "order-19" not in page.text
    assert "order-19" in Page(client.get(f"{found}order-19")).text
    assert "Write the beginning" in Page(client.get(f"{found}*")).text
    assert "order-17" not in Page(staff_client("view_overview", "view_outboxmessage").get(f"{found}no answer within")).text
    assert staff_client("view_outboxmessage").get(f"{found}order-19").status_code == 403


def test_project_can_override_a_template_and_extend_ours(settings, tmp_path):
    ours = tmp_path / "exactly_once" / "overview.html"
    ours.parent.mkdir()
    ours.write_text('{% extends "exactly_once/overview.html" %}{% block content %}Our runbook{{ block.super }}{% endblock %}')
    (engine,) = settings.TEMPLATES
    settings.TEMPLATES = [{**engine, "DIRS": [tmp_path]}]

    text = the_page().text

    assert "Our runbook" in text
    assert "Relays running" in text


def test_dead_messages_are_said_once_with_their_alert_and_their_largest_failure_groups():
    failure = {"error_class": "nacked", "failing_since": utcnow()}
    for topic in ("shop.placed", "shop.placed", "shop.placed", "shop.paid"):
        a_message(State.DEAD, topic=topic, **failure)
    alert = raised(1, condition="dead", object="", summary="New dead messages: 4")
    raised(2, acknowledged_by="ada", acknowledged_at=DatabaseTime())
    raised(3)

    page = the_page()

    assert "New dead messages" not in page.text
    [line] = [text for _degree, text in attention(page) if "dead" in text]
    assert line.startswith("Outbox: 4 messages are dead. 3: nacked shop.placed 1: nacked shop.paid alert raised")
    group = f"{reverse('admin:exactly_once_failurenote_group')}?app=outbox&class=nacked&place=shop.placed"
    assert {group, reverse("admin:exactly_once_alert_change", args=[alert.pk])} <= set(links(page))
    degrees = {text.split(": ")[1]: degree for degree, text in attention(page)}
    assert (degrees["lag topic-2"], degrees["lag topic-3"]) == ("known", "urgent"), "an operator has acknowledged one"


@pytest.mark.parametrize(
    ("app", "condition", "name", "page"),
    [
        ("outbox", "no_relay", "", "exactly_once_process_changelist?app=outbox"),
        ("outbox", "lag", "", "outbox_outboxmessage_changelist?stuck=overdue"),
        ("outbox", "dead", "", "outbox_outboxmessage_changelist?state=dead"),
        ("outbox", "stuck_prepared", "", "outbox_outboxmessage_changelist?state=stuck"),
        ("outbox", "topic_paused", "shop.slow", "outbox_pausedtopic_changelist"),
        ("inbox", "no_consumer", "shop.reserve", "exactly_once_process_changelist?app=inbox"),
        ("inbox", "lag", "shop.reserve", "inbox_inboxmessage_changelist?handler=shop.reserve&stuck=overdue"),
        ("inbox", "dead", "", "inbox_inboxmessage_changelist?state=dead"),
        ("inbox", "conflicts", "shop.reserve", "inbox_inboxmessage_changelist?handler=shop.reserve&duplicates=conflicting"),
        ("inbox", "handler_paused", "shop.reserve", "inbox_pausedhandler_changelist"),
    ],
)
def test_page_of_an_alert_links_to_what_it_names(app, condition, name, page):
    alert = raised(1, app, condition=condition, object=name)
    name, _, query = page.partition("?")
    target = reverse(f"admin:{name}") + (f"?{query}" if query else "")
    client = superuser_client()
    url = reverse("admin:exactly_once_alert_change", args=[alert.pk])

    assert Page(client.get(url)).all("a", href=target)
    assert client.get(target).status_code == 200
    assert not Page(staff_client("view_alert").get(url)).all("a", href=target)


def test_overview_needs_its_own_permission():
    client = staff_client("view_outboxmessage", "view_inboxmessage")

    for url in map(reverse, (OVERVIEW, FIGURES, LATENCY)):
        assert client.get(url).status_code == 403
        assert staff_client(VIEW).get(url).status_code == 200
    assert "No process has written statistics of a topic in the last hour." in Page(staff_client(VIEW).get(url)).text


def test_user_without_permission_for_a_page_gets_no_link_to_it():
    a_message(State.DEAD)
    PausedTopic.objects.create(topic="shop.slow", paused_by="ada", paused_at=utcnow())
    client = staff_client(VIEW, "view_outboxmessage")

    page = Page(client.get(reverse(OVERVIEW)))

    assert "1 message is dead." in page.text
    assert "Topic shop.slow has been paused" in page.text
    assert [link for link in links(page) if "outboxmessage" in link]
    assert not [link for link in links(page) if "pausedtopic" in link or "process" in link]


@pytest.mark.parametrize("app", ["outbox", "inbox"])
def test_figures_of_an_app_are_shown_only_to_users_who_may_view_its_messages(app, handles):
    handles(the_effect, name="shop.reserve", topic="shop.t")
    a_message(State.DEAD)
    PausedTopic.objects.create(topic="shop.slow", paused_by="ada", paused_at=utcnow())
    PausedHandler.objects.create(handler="shop.charge", paused_by="ada", paused_at=utcnow())
    statistics("outbox", "shop.t", dead=1, to_broker={bucket_of(1): 1})
    statistics("inbox", "shop.reserve", failed=1, to_effect={bucket_of(1): 1})
    raised(1, "outbox")
    raised(2, "inbox")
    Operation.objects.create(app="outbox", action="x", state="stopped", planned_at=DatabaseTime(), ended_at=DatabaseTime())
    own = {"outbox": ("Outbox", "shop.slow", "topic-1"), "inbox": ("Inbox", "shop.reserve", "shop.charge", "topic-2")}
    client = staff_client(VIEW, f"view_{app}message", "view_alert", "view_databasehealth")

    pages = [client.get(reverse(url) + "?charts=day").content.decode() for url in (OVERVIEW, LATENCY, FIGURES, HEALTH)]

    for name, words in own.items():
        for word in words:
            assert any(word in page.replace("<wbr>", "") for page in pages) is (name == app), word
    assert "Users with the permission to view the messages of both apps see more of it." in pages[0]
    assert "Users with the permission" not in the_page().text


def test_operation_that_has_stopped_by_itself_is_reported_for_a_day_with_its_reason():
    times = {"planned_at": DatabaseTime(-2 * DAY)}
    stopped = {"app": "inbox", "action": "retry", "state": "stopped", "stopped_because": "wave 1: ValueError", **times}
    Operation.objects.create(**stopped, ended_at=DatabaseTime(-DAY - timedelta(minutes=1)))
    Operation.objects.create(**{**stopped, "state": "cancelled"}, ended_at=DatabaseTime())
    assert "has stopped by itself" not in the_page().text
    row = Operation.objects.create(**stopped, ended_at=DatabaseTime(timedelta(minutes=1) - DAY))

    page = the_page()

    assert ("urgent", "Inbox: Within a day, 1 operation has stopped by itself. wave 1: ValueError") in attention(page)
    assert reverse("admin:exactly_once_operation_change", args=[row.pk]) in links(page)
    assert f"{reverse('admin:exactly_once_operation_changelist')}?state=stopped&app=inbox" in links(page)


def test_figures_without_statistics_are_unknown_and_not_zero():
    a_message(State.SCHEDULED, due_ago=-timedelta(hours=5))
    page = the_page()

    assert page.text.count("unknown") >= 15
    assert "last hour" in page.text
    assert "none is due" in page.text


@pytest.mark.every_database
def test_counts_and_latencies_are_those_of_the_last_hour_and_day():
    statistics("outbox", published=7, retried=2, to_broker={"10": 9})
    statistics("outbox", ago=timedelta(hours=3), published=100)
    statistics("outbox", ago=timedelta(days=2), published=5000)

    rows = the_page().rows

    assert ["published", "7", "107"] in rows
    assert ["failed attempts", "2", "2"] in rows
    assert ["Due → confirmed by the broker", "27 ms", "27 ms", "27 ms"] in rows


def test_stages_of_each_topic_are_shown_with_their_percentiles(handles):
    handles(the_effect, name="shop.reserve", topic="shop.placed")
    for ago in (timedelta(), timedelta(minutes=30)):
        statistics("outbox", "shop.placed", ago=ago, to_broker={"10": 9})
    statistics("outbox", "shop.placed", ago=timedelta(hours=2), to_broker={"30": 1000})
    statistics("outbox", "", to_broker={"30": 1000})
    statistics("outbox", "shop.cancelled", to_broker={"0": 1})
    statistics("outbox", "*", to_broker={"0": 3})
    statistics("inbox", "shop.reserve", to_inbox={"12": 5}, to_effect={"10": 4, "14": 1})
    statistics("inbox", "removed.handler", to_effect={"0": 2})
    statistics("inbox", "celery.shop.charge", to_effect={"0": 1})

    client = superuser_client()
    page = OverviewPage(client.get(reverse(LATENCY)))

    received, committed = "Due → received", "Received → effect committed"
    assert [row for row in page.rows if len(row) == 7][1:] == [
        ["celery.shop.charge", committed, "celery.shop.charge", "1", "0.5 ms", "0.5 ms", "0.5 ms"],
        ["shop.cancelled", "Due → confirmed by the broker", "", "1", "0.5 ms", "0.5 ms", "0.5 ms"],
        ["shop.placed", "Due → confirmed by the broker", "", "18", "27 ms", "27 ms", "27 ms"],
        ["shop.placed", received, "shop.reserve", "5", "54 ms", "54 ms", "54 ms"],
        ["shop.placed", committed, "shop.reserve", "5", "27 ms", "108 ms", "108 ms"],
        ["unknown", committed, "removed.handler", "2", "0.5 ms", "0.5 ms", "0.5 ms"],
        ["others", "Due → confirmed by the broker", "", "3", "0.5 ms", "0.5 ms", "0.5 ms"],
    ]
    assert reverse(LATENCY) in links(the_page())


def test_failing_topics_and_handlers_are_listed_with_the_worst_first():
    statistics("outbox", "shop.a", retried=1)
    statistics("outbox", "shop.b", retried=2, dead=1)
    statistics("outbox", "shop.c", published=5)
    statistics("inbox", "shop.reserve", failed=4)
    statistics("inbox", "")

    page = the_page()

    first = page.rows.index(["shop.b", "3"])
    assert page.rows[first + 1] == ["shop.a", "1"]
    assert ["shop.reserve", "4"] in page.rows
    assert "shop.c" not in page.text
    assert any("q=shop.b" in link for link in links(page))


def test_missing_relay_and_handlers_without_a_consumer_are_reported(handles):
    handles(the_effect, name="shop.reserve_stock")
    page = the_page()
    assert "No relay is running: no message is published." in page.text
    assert "No consumer is running for the handler shop.reserve_stock." in page.text
    assert f"{reverse('admin:exactly_once_process_changelist')}?app=outbox" in links(page)

    a_relay()
    a_consumer(handlers=["shop.reserve_stock"])
    assert "is running" not in the_page().text


def test_waiting_relay_paused_topic_paused_handler_and_overdue_message_are_reported():
    a_relay(waits_for="the broker: connection refused")
    a_message(State.READY, ago=timedelta(hours=3))
    paused = {"paused_by": "ada", "paused_at": utcnow() - timedelta(minutes=5)}
    PausedTopic.objects.create(topic="shop.slow", **paused)
    PausedHandler.objects.create(handler="shop.reserve", **paused)

    text = the_page().text
    a_relay(host="relay-2", waits_for="the broker: connection refused")

    assert "Relay relay-1:4711 waits for the broker: connection refused." in text
    assert "A message has been due for 3 h and is not published." in text
    assert "Topic shop.slow has been paused for 5 min by ada." in text
    assert "Handler shop.reserve has been paused for 5 min by ada." in text
    [line] = [text for _degree, text in attention(the_page()) if "wait for" in text]
    assert "relay-1:4711, relay-2:4711 wait for the broker: connection refused." in line


def test_what_hangs_is_silent_fails_and_cannot_be_delivered_is_said_once_where_it_can_be_acted_on():
    a_relay(host="relay-1", silent_for=timedelta(minutes=12))
    called = {"what": "shop.receipt_sent", "message": "", "messages": 1, "thread": "callbacks-1", "began": 48 * 60.0}
    a_relay(host="relay-2", running_for=timedelta(hours=1), running=[called])
    run = {"what": CHARGE, "message": "m-1", "messages": 1, "thread": "worker-1", "began": 0.0}
    a_consumer(running_for=timedelta(minutes=12), running=3 * [run], threads={CHARGE: 3}, queued={CHARGE: 97_000})
    statistics("inbox", "shop.mail", failed=9, handled=1)
    at = dict.fromkeys(("first_seen_at", "seen_at", "raised_at"), utcnow())
    Alert.objects.create(app="inbox", condition="hanging", object=CHARGE, state="raised", summary="again", **at)
    why = {"error_class": "returned", "last_error": "unroutable: no queue is bound", "failing_since": utcnow()}
    a_message(State.RETRYING, topic="shop.unknown", **why)
    statistics("outbox", "shop.unknown", retried=20)

    page = the_page()

    lines = [text for degree, text in attention(page) if degree == "urgent"]
    expected = {
        f"{CHARGE} runs for 12 min in 3 of 3 threads of consumer-1:4712.": "exactly_once_busy_changelist",
        "shop.receipt_sent runs for 12 min in relay-2:4711.": "exactly_once_busy_changelist",
        "Relay relay-1:4711 has sent no heartbeat for 12 min": "exactly_once_process_changelist?app=outbox",
        "shop.mail: 9 of 10 attempts have failed within 10 min.": "inbox_inboxmessage_changelist?handler=shop.mail&stuck=any",
        "Messages of shop.unknown cannot be delivered, and wait:": "outbox_outboxmessage_changelist?topic=shop.unknown",
        f"97,000 messages wait at the broker for {CHARGE}.": "exactly_once_topicsandhandlers_changelist",
    }
    for words, target in expected.items():
        assert len([line for line in lines if words in line]) == 1, words
        name, _, query = target.partition("?")
        assert reverse(f"admin:{name}") + (f"?{query}" if query else "") in links(page)
    assert len([line for line in lines if "shop.unknown" in line]) == 1
    assert len([line for line in lines if CHARGE in line]) == 2


def test_handler_that_runs_for_long_in_some_of_its_threads_is_not_urgent():
    run = {"what": CHARGE, "message": "m-1", "messages": 1, "thread": "worker-1", "began": 0.0}
    a_consumer(running_for=timedelta(minutes=12), running=[run], threads={CHARGE: 3})

    assert [degree for degree, text in attention(the_page()) if "1 of 3 threads" in text] == ["known"]


def test_message_that_was_received_and_not_run_is_in_the_list_that_its_line_leads_to_and_says_what_it_waits_for(handles):
    handles(the_effect, name="shop.reserve_stock")
    run = {"what": "shop.reserve_stock", "message": "m-1", "messages": 1, "thread": "worker-1", "began": 0.0}
    process = {"handlers": ["shop.reserve_stock"], "threads": {"shop.reserve_stock": 1}}
    a_consumer(running_for=timedelta(minutes=17), running=[run], **process)
    kept = {"received_ago": timedelta(minutes=17), "next_ago": -timedelta(minutes=1)}
    running, waiting = (an_inbox_message(InboxState.RECEIVED, message_id=name, **kept) for name in ("m-1", "m-2"))
    url = f"{reverse('admin:inbox_inboxmessage_changelist')}?state=received&o=3"

    assert "A message was received 17 min ago and has not been run." in the_page().text
    assert url in links(the_page())
    shown = superuser_client().get(url).content.decode()
    assert str(running.biz_id) in shown
    assert str(waiting.biz_id) in shown

    def said(row):
        return Page(superuser_client().get(reverse("admin:inbox_inboxmessage_change", args=[row.pk]))).text

    assert "A thread of consumer-1:4712 runs it now" in said(running)
    assert "It waits for a thread: other messages of its handler have been running for 17 min in consumer-1:4712." in said(
        waiting
    )
    let_consumers_fall_silent(timedelta(minutes=2))
    assert "No consumer is running for its handler." in said(waiting)


def test_figures_view_returns_charts_only_if_asked():
    statistics("outbox", ago=timedelta(minutes=2), published=60, to_broker={"0": 60})
    client = superuser_client()
    url = reverse(FIGURES)

    assert "charts" not in client.get(url).json()
    hour = client.get(url, {"charts": "hour"}).json()["charts"]
    day = client.get(url, {"charts": "day"}).json()["charts"]

    assert [chart["title"] for chart in hour][::2] == ["Outbox: messages per minute", "Inbox: messages per minute"]
    assert len(hour[0]["times"]) == 60
    assert sum(hour[0]["series"][0]["values"]) == 60
    assert [value for value in hour[1]["series"][0]["values"] if value is not None] == [0.0005]
    assert len(day[0]["times"]) == 144
    assert hour[2]["times"] == []


def test_the_script_of_the_charts_comes_with_its_licence():
    charts = ROOT / "exactly_once" / "static" / "exactly_once" / "uplot"

    assert (charts / "uPlot.iife.min.js").exists()
    assert "MIT License" in (charts / "LICENSE").read_text()
