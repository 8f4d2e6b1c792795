"""Recurring messages: each tick is published once, in the transaction that moves its schedule on."""

from datetime import UTC, timedelta
from types import SimpleNamespace

import pytest
from django.db import connection
from django.db.models import F

from exactly_once.process.loop import StopRequest
from exactly_once.sql.now import DatabaseTime
from outbox import Draft, publish
from outbox.conf import outbox_options
from outbox.contrib.recurring import recurring, ticking
from outbox.contrib.recurring.declarations import declarations
from outbox.contrib.recurring.models import Schedule
from outbox.models import OutboxMessage
from outbox.relay import attending
from outbox.relay.service import serve
from tests.support.apps.effects.models import Effect
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.relaying import open_transaction
from tests.support.servers.private import LOOPBACK, free_port
from tests.support.sql import executed
from tests.support.tasks import run_all

pytestmark = pytest.mark.django_db
every_database = pytest.mark.every_database

NAME, TOPIC = "tests.nightly", "reports.nightly"
LONG = {"every": timedelta(hours=7)}


@pytest.fixture(autouse=True)
def peer(settings):
    with FakeAmqpPeer() as peer:
        settings.OUTBOX = {"BROKER_URL": peer.url, "MAX_ATTEMPTS": 3}
        yield peer


@pytest.fixture
def recurs():
    """Declare a schedule that a relay has seen: `recurs(function, missed="all")` is the list of its ticks."""

    def declare(function=lambda tick: Draft(TOPIC, {"hour": tick.at.hour}), cron="", *, name=NAME, **options):
        ticks = []

        def called(tick):
            ticks.append(tick)
            return function(tick)

        declarations.pop(name, None)
        recurring(cron, name=name, **({} if cron else LONG) | options)(called)
        relay()
        return ticks

    return declare


def relay():
    """Publish what is due."""
    serve("default", drain=True)


def logged(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("outbox.")]


def no_relay_for(time, name=NAME):
    """As if none had run for so long."""
    assert Schedule.objects.filter(name=name).update(position=F("position") - time, due_at=DatabaseTime())


def the_schedule(name=NAME):
    return Schedule.objects.get(name=name)


def biz_ids():
    return list(OutboxMessage.objects.order_by("pk").values_list("biz_id", flat=True))


@every_database
def test_a_new_schedule_waits_for_its_next_tick(recurs):
    ticks = recurs()
    assert ticks == biz_ids() == []
    assert the_schedule().due_at > the_schedule().position


@every_database
def test_a_tick_is_published_once_with_its_name_and_instant_as_the_biz_id(recurs):
    ticks = recurs(cron="0 3 * * *", tz="Europe/Berlin")
    no_relay_for(timedelta(days=1))
    relay()
    relay()

    (tick,) = ticks
    assert (tick.name, f"{tick.at:%H:%M}", tick.at.tzinfo.key) == (NAME, "03:00", "Europe/Berlin")
    assert biz_ids() == [f"{NAME}@{tick.at.astimezone(UTC).isoformat()}"]
    assert the_schedule().position == tick.at
    assert timedelta(hours=22) < the_schedule().due_at - tick.at < timedelta(hours=26)


@pytest.mark.parametrize(("missed", "number"), [("last", 1), ("all", 5)])
def test_missed_ticks_follow_the_policy(recurs, missed, number):
    ticks = recurs(missed=missed)
    no_relay_for(5 * LONG["every"])
    relay()
    assert [tick.biz_id for tick in ticks] == biz_ids()
    assert len(ticks) == number


def test_a_function_may_publish_by_itself_name_its_own_message_or_publish_nothing(recurs):
    def function(tick):
        publish(TOPIC, {}, biz_id="by itself")
        return Draft(TOPIC, {}, biz_id="its own")

    recurs(function)
    recurs(lambda tick: None, name="tests.nothing")
    no_relay_for(LONG["every"])
    no_relay_for(LONG["every"], "tests.nothing")
    relay()
    assert biz_ids() == ["by itself", "its own"]


def test_an_async_function_and_a_task_are_called_in_the_transaction(recurs):
    async def function(tick):
        return Draft(TOPIC, {}, biz_id="async")

    recurs()
    recurring(name="tests.async", **LONG)(function)
    task = SimpleNamespace(func=relay, enqueue=lambda: publish(TOPIC, {}, biz_id=f"task {connection.in_atomic_block}"))
    recurring(name="tests.task", **LONG)(task)
    relay()
    for name in ("tests.async", "tests.task"):
        no_relay_for(LONG["every"], name)
    relay()
    assert sorted(biz_ids()) == ["async", "task True"]


@pytest.mark.django_db(transaction=True)
@every_database
def test_a_task_of_the_backend_is_enqueued_at_its_tick_and_runs_once(tasked, recurs, settings):
    settings.OUTBOX = {"BROKER_URL": "local://"}
    recurs()
    assert recurring(name="tests.task", **LONG)(tasked.note_a_tick) is tasked.note_a_tick
    relay()
    no_relay_for(LONG["every"], "tests.task")
    relay()
    run_all()
    relay()
    run_all()
    assert Effect.objects.get().name == "tick"
    assert OutboxMessage.objects.count() == 1


@every_database
def test_a_schedule_that_fails_is_tried_again_and_stops_no_other(recurs, caplog):
    broken = [True]

    def function(tick):
        publish(TOPIC, {}, biz_id="rolled back" if broken else "published")
        if broken:
            raise LookupError("no such report")

    recurs(function)
    recurs(name="tests.other")
    for name in (NAME, "tests.other"):
        no_relay_for(LONG["every"], name)
    position = the_schedule().position
    relay()

    (line,) = [record for record in caplog.records if record.name.startswith("outbox.contrib.recurring")]
    assert f"the schedule {NAME} failed" in line.getMessage()
    assert "LookupError: no such report" in line.getMessage()
    assert line.levelname == "ERROR"
    assert [biz_id.partition("@")[0] for biz_id in biz_ids()] == ["tests.other"]
    assert (the_schedule().error, the_schedule().failures) == ("LookupError: no such report", 1)
    assert the_schedule().position == position
    assert the_schedule().due_at > position

    broken.clear()
    Schedule.objects.update(due_at=DatabaseTime())
    relay()
    assert biz_ids()[1:] == ["published"]
    assert (the_schedule().error, the_schedule().failures) == ("", 0)


def test_a_tick_that_fails_takes_no_earlier_one_with_it(recurs):
    def function(tick):
        if len(ticks) == 3:
            raise LookupError

    ticks = recurs(lambda tick: function(tick) or Draft(TOPIC, {}), missed="all")
    no_relay_for(5 * LONG["every"])
    relay()
    assert biz_ids() == [tick.biz_id for tick in ticks[:2]]
    assert the_schedule().position == ticks[1].at


def refusing_connection(tick):
    elsewhere = connection.copy("elsewhere")
    elsewhere.settings_dict = {**connection.settings_dict, "HOST": LOOPBACK, "PORT": free_port()}
    elsewhere.cursor()


def locked_elsewhere(tick):
    with open_transaction(lambda: Effect.objects.select_for_update().get()):
        Effect.objects.select_for_update(nowait=True).get()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("expression", ["every 0:00:01", "changed"])
@pytest.mark.parametrize(
    ("function", "why"), [(refusing_connection, "unavailable"), (locked_elsewhere, "could not obtain lock")]
)
def test_an_outage_of_another_database_or_a_collision_delays_the_next_call_and_is_shown(
    recurs, caplog, monkeypatch, function, why, expression
):
    for module in (attending, ticking):
        monkeypatch.setattr(module, "PAUSE", LONG["every"])
    Effect.objects.create(name="locked")
    ticks = recurs(function, every=timedelta(seconds=1))
    ticks.clear()  # one may have been due at once
    caplog.clear()
    Schedule.objects.update(
        recurrence=expression, position=DatabaseTime(-timedelta(seconds=9)), due_at=DatabaseTime(), failures=0, error=""
    )
    before = the_schedule().position
    relay()

    assert len(ticks) == 1
    assert len([line for line in logged(caplog) if NAME in line]) == 1
    assert why in the_schedule().error
    assert the_schedule().position == before
    assert the_schedule().due_at - before > LONG["every"]


def test_a_function_that_returns_something_else_fails(recurs):
    recurs(lambda tick: {"day": 1})
    no_relay_for(LONG["every"])
    relay()
    assert "it returned {'day': 1}, which must be a Draft" in the_schedule().error


@every_database
def test_a_changed_expression_counts_from_now_and_keeps_what_is_due_within_the_last_minute(recurs):
    recurs(cron="0 0 1 1 *", missed="all")
    no_relay_for(timedelta(days=500))
    Schedule.objects.update(due_at=None)
    ticks = recurs(every=timedelta(minutes=1), missed="all")

    assert len(ticks) == 1
    assert the_schedule().recurrence == "every 0:01:00"
    assert the_schedule().due_at - ticks[0].at == timedelta(minutes=1)


@every_database
def test_relays_of_two_deployments_that_change_the_expression_in_turn_lose_and_repeat_no_tick(recurs):
    recurs(every=timedelta(minutes=1))
    no_relay_for(timedelta(hours=1))
    for _ in range(3):
        recurs(every=timedelta(days=3000))
        recurs(every=timedelta(minutes=1))
    assert 1 <= len(biz_ids()) == len({*biz_ids()}) <= 2


@every_database
def test_a_clock_that_was_set_back_publishes_no_tick_again(recurs):
    ticks = recurs()
    no_relay_for(-timedelta(hours=20))
    position = the_schedule().position
    relay()
    assert ticks == []
    assert the_schedule().position == position
    assert the_schedule().due_at > position


@pytest.mark.django_db(transaction=True)
def test_a_relay_skips_a_schedule_that_another_one_works_on(recurs):
    ticks = recurs()
    recurs(name="tests.other")
    for name in (NAME, "tests.other"):
        no_relay_for(LONG["every"], name)
    with open_transaction(lambda: Schedule.objects.select_for_update().get(name=NAME)):
        relay()
        assert [biz_id.partition("@")[0] for biz_id in biz_ids()] == ["tests.other"]
    relay()
    relay()
    assert len(ticks) == 1


@pytest.mark.django_db(transaction=True)
def test_a_relay_looks_twice_in_the_shortest_interval(recurs, monkeypatch):
    """Otherwise two ticks may be due at one look, of which missed="last" publishes one."""
    recurs(every=timedelta(seconds=1))
    recurs(name="tests.other")
    stop, waits = StopRequest(), []

    def wait(bell, seconds, stop):
        waits.append(seconds)
        if len(waits) == 5:
            stop.set()

    monkeypatch.setattr(attending.Bell, "wait", wait)
    for attendant in ticking.attendants("default", outbox_options()):
        attendant.run(stop)
    assert max(waits) == 0.5


@pytest.mark.django_db(transaction=True)
def test_a_call_beyond_its_timeout_has_failed(recurs, settings):
    recurs(lambda tick: executed("SELECT pg_sleep(60)"))
    no_relay_for(LONG["every"])
    settings.OUTBOX = {**settings.OUTBOX, "CALLBACK_TIMEOUT": timedelta(seconds=0.2)}
    relay()
    assert "QueryCanceled" in the_schedule().error or "timeout" in the_schedule().error
    assert biz_ids() == []


@every_database
def test_a_paused_schedule_is_passed_over(recurs):
    ticks = recurs()
    no_relay_for(LONG["every"])
    Schedule.objects.update(paused_at=DatabaseTime())
    relay()
    assert ticks == []


def test_messages_of_ticks_are_sent_to_the_broker(recurs, peer):
    recurs()
    no_relay_for(LONG["every"])
    relay()
    (message,) = peer.published
    assert message.routing_key == TOPIC
