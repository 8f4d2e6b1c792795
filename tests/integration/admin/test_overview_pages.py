"""The overview in the admin: what it counts, what it warns of, and what it does not know."""

from datetime import timedelta

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from exactly_once.models import Alert, Minute
from exactly_once.process.clock import utcnow
from exactly_once.sql.counts import LIMIT
from exactly_once.sql.now import DatabaseTime
from inbox.models import PausedHandler
from outbox.models import OutboxMessage, PausedTopic
from outbox.states import State
from tests.support import ROOT
from tests.support.admin_pages import NASTY, Page, a_message, staff_client
from tests.support.deliveries import the_effect
from tests.support.heartbeats import a_consumer, a_relay

pytestmark = [pytest.mark.django_db(databases=["default", "other"]), pytest.mark.every_database]

OUTBOX, INBOX = "admin:outbox_overview_changelist", "admin:inbox_overview_changelist"
VIEW = "view_overview"


class OverviewPage(Page):
    """With the text of each cell of each row of a table."""

    def __init__(self, response):
        self.rows, self._is_in_cell = [], False
        super().__init__(response)

    def handle_starttag(self, tag, attributes):
        super().handle_starttag(tag, attributes)
        if tag == "tr":
            self.rows.append([])
        elif tag in {"th", "td"} and self.rows:
            self.rows[-1].append("")
            self._is_in_cell = True

    def handle_endtag(self, tag):
        if tag in {"th", "td"}:
            self._is_in_cell = False

    def handle_data(self, data):
        super().handle_data(data)
        if self._is_in_cell:
            self.rows[-1][-1] = f"{self.rows[-1][-1]}{data}".strip()


def the_page(url=OUTBOX):
    user = User.objects.create_superuser(f"operator{User.objects.count()}")
    client = Client()
    client.force_login(user)
    return OverviewPage(client.get(reverse(url)))


def links(page):
    return [a.get("href", "") for a in page.all("a")]


def statistics(app, subject="", *, ago=timedelta(), **given):
    times = {name: given.pop(name) for name in list(given) if name.startswith("to_")}
    minute = utcnow() - ago
    return Minute.objects.create(app=app, minute=minute, process="host:1", subject=subject, counts=given, times=times)


def test_overview_is_the_first_page_of_each_app_in_the_admin():
    client = Client()
    client.force_login(User.objects.create_superuser("operator"))

    apps = {app["app_label"]: app["models"] for app in client.get(reverse("admin:index")).context["app_list"]}

    assert [apps[label][0]["object_name"] for label in ("outbox", "inbox")] == ["Overview", "Overview"]


def test_counts_of_each_state_link_to_the_list_of_that_state():
    a_message(State.DEAD)
    a_message(State.DEAD)
    a_message(State.READY)

    page = the_page()

    assert f"{reverse('admin:outbox_outboxmessage_changelist')}?state=dead" in links(page)
    assert "2 messages are dead." in page.text


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
    assert ["Raised alerts", "7"] in page.rows
    assert reverse("admin:exactly_once_alert_changelist") in links(page)
    assert not page.all("script", src=None)


def test_alerts_are_not_shown_to_users_who_may_not_view_them():
    raised(1)
    page = Page(staff_client(VIEW).get(reverse(OUTBOX)))
    assert "topic-1" not in page.text
    assert "Raised alerts" not in page.text


def test_counts_beyond_the_limit_are_shown_as_more_than_the_limit():
    row = a_message(State.DEAD)
    OutboxMessage.objects.bulk_create(
        OutboxMessage(
            topic=row.topic,
            biz_id=str(number),
            shard=1,
            state=State.DEAD,
            body=b"{}",
            created_at=row.created_at,
            available_at=row.available_at,
        )
        for number in range(LIMIT)
    )

    assert "more than 10,000 messages are dead." in the_page().text


def test_both_halves_are_on_one_page_for_users_who_may_view_both():
    page = the_page(INBOX)

    assert [section["aria-labelledby"] for section in page.all("section")] == ["overview-outbox", "overview-inbox"]


def test_half_that_the_user_may_not_view_is_not_shown():
    client = staff_client()
    assert client.get(reverse(OUTBOX)).status_code == 403
    assert client.get(reverse("admin:outbox_overview_figures")).status_code == 403

    user = User.objects.get()
    user.user_permissions.set(Permission.objects.filter(codename=VIEW, content_type__app_label="inbox"))

    page = Page(client.get(reverse(INBOX)))
    assert [section["aria-labelledby"] for section in page.all("section")] == ["overview-inbox"]
    assert client.get(reverse(OUTBOX)).status_code == 403


def test_user_without_permission_for_a_page_gets_no_link_to_it():
    a_message(State.DEAD)
    client = staff_client(VIEW)

    page = Page(client.get(reverse(OUTBOX)))

    assert "1 message is dead." in page.text
    assert not [link for link in links(page) if "outboxmessage" in link]


def test_figures_without_statistics_are_unknown_and_not_zero():
    page = the_page()

    assert page.text.count("unknown") >= 15
    assert "last hour" in page.text


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

    client = Client()
    client.force_login(User.objects.create_superuser("operator"))
    page = OverviewPage(client.get(reverse("admin:outbox_overview_latency")))

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
    assert reverse("admin:outbox_overview_latency") in links(the_page())


def test_latency_by_topic_needs_the_permission_of_the_overview():
    assert staff_client("view_outboxmessage").get(reverse("admin:outbox_overview_latency")).status_code == 403
    page = Page(staff_client(VIEW).get(reverse("admin:inbox_overview_latency")))
    assert "No process has written statistics of a topic in the last hour." in page.text


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


def test_missing_relay_is_reported_with_a_link_to_the_relays():
    page = the_page()
    assert "No relay is running: no message is published." in page.text
    assert f"{reverse('admin:exactly_once_process_changelist')}?app=outbox" in links(page)

    a_relay()
    assert "No relay is running" not in the_page().text


def test_waiting_relay_paused_topic_and_overdue_message_are_reported():
    a_relay(waits_for="the broker: connection refused")
    a_message(State.READY, ago=timedelta(hours=3))
    PausedTopic.objects.create(topic="shop.slow", paused_by="ada", paused_at=utcnow() - timedelta(minutes=5))

    text = the_page().text

    assert "Relay relay-1:4711 waits for the broker: connection refused." in text
    assert "A message has been due for 3 h and is not published." in text
    assert "Topic shop.slow has been paused for 5 min by ada." in text


def test_handlers_without_a_consumer_are_reported(handles):
    handles(the_effect, name="shop.reserve_stock")
    assert "No consumer is running for the handler shop.reserve_stock." in the_page().text

    a_consumer(handlers=["shop.reserve_stock"])
    assert "No consumer is running" not in the_page().text


def test_paused_handler_is_reported():
    PausedHandler.objects.create(handler="shop.reserve", paused_by="ada", paused_at=utcnow() - timedelta(minutes=5))

    assert "Handler shop.reserve has been paused for 5 min by ada." in the_page().text


def test_scheduled_messages_of_the_future_are_not_overdue():
    a_message(State.SCHEDULED, due_ago=-timedelta(hours=5))
    assert "none is due" in the_page().text


def test_hostile_names_stay_text():
    statistics("outbox", NASTY, retried=1)
    statistics("outbox", "")
    a_relay(waits_for=NASTY)
    PausedTopic.objects.create(topic=NASTY, paused_by=NASTY, paused_at=utcnow())

    page = the_page()

    assert not page.all("img")
    assert NASTY in page.text
    assert [script["src"] for script in page.all("script") if "src" not in script] == []


def test_figures_view_returns_charts_only_if_asked():
    statistics("outbox", ago=timedelta(minutes=2), published=60, to_broker={"0": 60})
    client = Client()
    client.force_login(User.objects.create_superuser("operator"))
    url = reverse("admin:outbox_overview_figures")

    assert "charts" not in client.get(url).json()["outbox"]
    hour = client.get(url, {"charts": "hour"}).json()["outbox"]["charts"]
    day = client.get(url, {"charts": "day"}).json()["outbox"]["charts"]

    assert len(hour[0]["times"]) == 60
    assert sum(hour[0]["series"][0]["values"]) == 60
    assert [value for value in hour[1]["series"][0]["values"] if value is not None] == [0.0005]
    assert len(day[0]["times"]) == 144
    assert client.get(url, {"charts": "hour"}).json()["inbox"]["charts"][0]["times"] == []


def test_the_script_of_the_charts_comes_with_its_licence():
    charts = ROOT / "exactly_once" / "static" / "exactly_once" / "uplot"

    assert (charts / "uPlot.iife.min.js").exists()
    assert "MIT License" in (charts / "LICENSE").read_text()
