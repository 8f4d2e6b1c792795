"""The timer: each scheduled message becomes ready once and never early, even when the wheel is lost."""

import math
import threading
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
from django.db import connection, transaction

from exactly_once.models import Lease
from exactly_once.process.clock import monotonic
from exactly_once.process.loop import StopRequest, Watchdog
from exactly_once.sql.days import day_of
from exactly_once.sql.now import DatabaseTime
from outbox import cancel, publish, reschedule
from outbox.conf import WheelOptions
from outbox.models import OutboxMessage, TrailEntry
from outbox.relay import timer as module
from outbox.relay.timer import Timer
from outbox.states import State
from outbox.store import scheduling
from outbox.store.scheduling import Offset, Upcoming
from tests.support.relaying import TOPIC, in_threads, open_transaction, published, published_many, quick, set_columns, state_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
every_database = pytest.mark.every_database

SOON = timedelta(seconds=0.3)
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def _everything_leaves_a_trail(settings):
    settings.OUTBOX = {**settings.OUTBOX, "TRAIL": "all"}


def a_timer(*, ring=lambda: None, **options):
    options = quick(**options)
    return Timer("default", options, watchdog=Watchdog(limit=HOUR), ring=ring)


@contextmanager
def turning(*timers):
    """The timers in threads, until the block ends."""
    stop = StopRequest()
    with in_threads(*(lambda timer=timer: timer.run(stop) for timer in timers), stop=stop):
        yield


def scheduled(**columns):
    return OutboxMessage.objects.filter(state=State.SCHEDULED, **columns)


def is_ready(message):
    return state_of(message) == State.READY


def became_ready():
    """By message id, every instant at which the message became ready."""
    rows = TrailEntry.objects.filter(was=State.SCHEDULED, became=State.READY).values_list("message_id", "at")
    when = {}
    for message_id, at in rows:
        when.setdefault(message_id, []).append(at)
    return when


def assert_each_once_and_none_early(messages):
    when = became_ready()
    due = dict(OutboxMessage.objects.values_list("message_id", "available_at"))
    assert set(when) == {message.id for message in messages}
    for message_id, instants in when.items():
        assert len(instants) == 1
        assert instants[0] >= due[message_id]


@every_database
class TestScheduledMessages:
    @pytest.mark.parametrize("wheel", [WheelOptions(), WheelOptions(SLOTS=4, TICK=timedelta(milliseconds=20))])
    def test_scheduled_messages_become_ready_at_their_time_and_wake_the_relay(self, wheel):
        """Also those that are due after several revolutions of the wheel."""
        rung = threading.Event()
        with transaction.atomic():
            messages = [publish(TOPIC, {}, delay=n * SOON / 10) for n in range(1, 20)]
        with turning(a_timer(ring=rung.set, WHEEL=wheel)):
            wait_until(lambda: not scheduled().exists())

        assert rung.is_set()
        assert_each_once_and_none_early(messages)

    def test_message_rescheduled_without_a_wake_up_is_found_by_the_next_sweep_and_a_new_one_by_the_next_catch_up(self):
        timer = a_timer()
        first = published(delay=HOUR)
        timer._turn()
        reschedule(first.id, delay=timedelta(seconds=0.01))
        wait_until(lambda: timer._turn() is not None and is_ready(first))

        message = published(delay=SOON)
        timer._load_at = timer._sweep_at = math.inf
        timer._catch_up_at = 0.0
        wait_until(lambda: timer._turn() is not None and is_ready(message))
        assert_each_once_and_none_early([first, message])

    @pytest.mark.long
    def test_message_cancelled_or_rescheduled_after_it_was_read_is_not_made_ready(self):
        timer = a_timer()
        cancelled, deferred, advanced, unchanged = messages = [published(delay=10 * SOON) for _ in range(4)]
        timer._table.take([Upcoming(message.position, TOPIC, "", monotonic() + 3.0, "") for message in messages], monotonic())
        assert cancel(cancelled.id)
        assert reschedule(deferred.id, delay=HOUR)
        assert reschedule(advanced.id, delay=timedelta(seconds=0.01))

        wait_until(lambda: timer._turn() is not None and is_ready(unchanged) and is_ready(advanced))
        wait_until(lambda: timer._turn() is not None and not timer._table._topic_of)
        assert state_of(cancelled) == State.CANCELLED
        assert state_of(deferred) == State.SCHEDULED

    @pytest.mark.long
    def test_scheduled_messages_become_ready_once_when_the_wheel_is_discarded(self):
        timer = a_timer()
        messages = [published(delay=n * SOON) for n in range(1, 5)]
        while scheduled().exists():
            timer._turn()
            timer._forget()

        assert_each_once_and_none_early(messages)

    def test_message_is_not_early_when_the_database_clock_steps_back_and_not_late_when_it_jumps_ahead(self):
        timer = a_timer()
        message, later = published(delay=SOON), published(delay=HOUR)
        for each, due in ((message, monotonic()), (later, monotonic() + 3600.0)):  # by its own clock
            timer._table.take([Upcoming(each.position, TOPIC, "", due, "")], monotonic())

        wait_until(lambda: timer._turn() is not None and is_ready(message))
        assert_each_once_and_none_early([message])
        set_columns(later, available_at=DatabaseTime(-HOUR))
        timer._sweep_at = timer._sweep_all_at = 0.0
        timer._turn()
        assert is_ready(later)


@every_database
class TestSeveralTimers:
    def test_several_timers_make_each_message_ready_once(self, monkeypatch):
        """Both run, as when one was frozen and has lost its lease without knowing it."""
        monkeypatch.setattr(module, "is_postgresql", lambda connection: False)
        with transaction.atomic():
            messages = [publish(TOPIC, {}, delay=n * SOON / 100) for n in range(1, 200)]
        with turning(a_timer(), a_timer()):
            wait_until(lambda: not scheduled().exists())

        assert_each_once_and_none_early(messages)

    def test_timer_starts_at_once_after_another_has_ended(self):
        with turning(a_timer()):
            pass
        message = published(delay=timedelta(seconds=0.05))
        with turning(a_timer()):
            wait_until(lambda: is_ready(message))


@every_database
class TestBurst:
    def test_burst_is_fair_between_topics_and_limited_to_the_room_of_eight_passes(self):
        timer = a_timer(BATCH_SIZE=30)
        published_many(1_000, "shop.large", delay=HOUR)
        published_many(100, "shop.middle", delay=HOUR)
        published_many(10, "shop.small", delay=HOUR)
        OutboxMessage.objects.update(available_at=DatabaseTime(-HOUR))
        timer._turn()
        assert not scheduled(topic="shop.small").exists(), "a batch takes ten of each topic, also of the topic that came last"
        for _ in range(20):
            timer._turn()
        ready = OutboxMessage.objects.filter(state=State.READY)
        assert ready.count() == 8 * 30, "eight passes of a relay"

        ready.filter(pk__in=ready.values_list("pk")[:100]).update(state=State.PUBLISHED, day=day_of("default"))
        timer._ask_for_room_at = 0.0
        timer._turn()
        assert ready.count() == 140, "no more before almost all of them are claimed"
        ready.filter(pk__in=ready.values_list("pk")[:80]).update(state=State.PUBLISHED, day=day_of("default"))
        timer._ask_for_room_at = 0.0
        for _ in range(20):
            timer._turn()
        assert ready.count() == 8 * 30

    def test_burst_longer_than_one_read_of_its_topic_is_read_to_its_end(self, monkeypatch):
        monkeypatch.setattr("outbox.relay.timetable.OF_A_TOPIC", 50)
        monkeypatch.setattr(module, "OF_A_TOPIC", 50)
        timer = a_timer(BATCH_SIZE=200)
        messages = published_many(400, topic=lambda n: f"shop.{n % 2}", delay=SOON)
        timer._load_at = 0.0
        while scheduled().exists():
            timer._turn()
            timer._sweep_at = math.inf  # the reading alone must find all of them

        assert_each_once_and_none_early(messages)

    def test_wheel_holds_a_bounded_number_of_messages_of_all_topics_together(self, monkeypatch):
        monkeypatch.setattr("outbox.relay.timetable.OF_ALL_TOPICS", 200)
        monkeypatch.setattr("outbox.relay.timetable._LEAST_READ", 1)
        timer, held = a_timer(BATCH_SIZE=100), []
        messages = published_many(600, topic=lambda n: f"shop.{n % 50 if n < 400 else 0}", delay=SOON)
        timer._load_at = 0.0
        while scheduled().exists():
            timer._turn()
            held.append(len(timer._table._topic_of))
            timer._sweep_at = math.inf  # the reading alone must find all of them

        assert 100 < max(held) <= 200
        assert_each_once_and_none_early(messages)


# On SQLite one relay works at a time, so its timers need no lease of their own.
def test_timer_takes_over_when_the_lease_of_the_other_expires(monkeypatch):
    monkeypatch.setattr(module, "_LEASE", HOUR)
    first, second = a_timer(), a_timer()
    message = published(delay=timedelta(seconds=0.05))
    first._turn()
    wait_until(lambda: second._turn() is not None and first._turn() is not None and is_ready(message))
    assert not second._holds

    later = published(delay=timedelta(seconds=0.05))
    Lease.objects.update(expires_at=DatabaseTime(-HOUR))  # the first is silent: killed, or frozen
    second._ask_for_lease_at = 0.0
    wait_until(lambda: second._turn() is not None and is_ready(later))
    assert second._holds
    first._ask_for_lease_at = 0.0
    first._turn()
    assert not first._holds


# SQLite reads within this process.
@pytest.mark.long
@pytest.mark.parametrize(
    "read",
    [
        lambda: scheduling.upcoming("default", {TOPIC: Offset("", 0, 10)}, 2 * HOUR),
        lambda: scheduling.newly_scheduled("default", 0, [], HOUR, 2 * HOUR, 10),
    ],
)
def test_messages_that_are_read_slowly_are_not_late_by_that(read):
    before = monotonic()
    message = published(delay=HOUR)
    after = monotonic()

    def slowly(execute, sql, *rest):
        return execute(sql.replace("SELECT m.id", "SELECT (SELECT m.id FROM pg_sleep(1.5))", 1), *rest)

    with connection.execute_wrapper(slowly):
        [found] = read()
    assert monotonic() > after + 1.5
    assert found.position == message.position
    assert before <= found.due - HOUR.total_seconds() < after + 1


# SQLite has no dead rows, so each of its sweeps reads all messages.
def test_message_overdue_for_longer_than_the_horizon_waits_for_the_next_sweep_of_all_messages():
    timer = a_timer()
    timer._turn()
    recent, old = published(delay=HOUR), published(delay=HOUR)
    set_columns(recent, available_at=DatabaseTime(-timedelta(seconds=2)))
    set_columns(old, available_at=DatabaseTime(-HOUR))
    timer._load_at = timer._sweep_all_at = math.inf
    timer._sweep_at = 0.0
    timer._turn()
    assert (state_of(recent), state_of(old)) == (State.READY, State.SCHEDULED)

    timer._sweep_at = timer._sweep_all_at = 0.0
    timer._turn()
    assert is_ready(old)


# SQLite locks no rows.
def test_burst_continues_past_a_locked_row():
    locked, *others = [published(delay=timedelta(seconds=0.05)) for _ in range(20)]
    with ExitStack() as lock:
        lock.enter_context(open_transaction(lambda: OutboxMessage.objects.select_for_update().get(message_id=locked.id)))
        with turning(a_timer()):
            wait_until(lambda: scheduled().count() == 1)
            assert state_of(locked) == State.SCHEDULED
            lock.close()
            wait_until(lambda: is_ready(locked))
    assert_each_once_and_none_early([locked, *others])
