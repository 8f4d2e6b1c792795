"""The instants of schedules, also when the clocks change, and what `manage.py check` says of declarations."""

import sys
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.contrib.recurring import recurring
from outbox.contrib.recurring.declarations import check_declarations, declarations, problems

BERLIN = {"tz": "Europe/Berlin"}
SPRING, AUTUMN = datetime(2026, 3, 29, tzinfo=UTC), datetime(2026, 10, 25, tzinfo=UTC)
"""02:00 is 03:00 at 01:00 UTC; 03:00 is 02:00 at 01:00 UTC."""
EXPRESSIONS = ["30 2 * * *", "0 3 * * *", "30 1,2,3 * * *", "*/20 * * * *", "15 * * * *", "*/30 2 * * *", "0 0 1 * *"]


def nightly(tick):
    """A function of a schedule."""


def declared(*cron, name="tests.nightly", **options):
    declarations.pop(name, None)
    recurring(*cron, name=name, **options)(nightly)
    return declarations[name].when


def on(day, schedule):
    """The ticks of this day and the one before, in UTC."""
    return [f"{at:%d %H:%M}" for at in schedule.due(day - timedelta(hours=25), day + timedelta(hours=23))]


def refused(*cron, **options):
    recurring(*cron, **{"name": "tests.wrong", **options})(nightly)
    (problem,) = check_declarations(None)
    assert problem.id == "outbox_recurring.E001"
    assert "tests.wrong" not in declarations
    return problem.msg


@pytest.mark.parametrize(
    ("cron", "spring", "autumn"),
    [
        # 02:30 does not exist in spring: 03:00. In autumn the first of two.
        ("30 2 * * *", ["28 01:30", "29 01:00"], ["24 00:30", "25 00:30"]),
        ("0 3 * * *", ["28 02:00", "29 01:00"], ["24 01:00", "25 02:00"]),
        ("0,30 2 * * *", ["28 01:00", "28 01:30", "29 01:00"], ["24 00:00", "24 00:30", "25 00:00", "25 00:30"]),
    ],
)
def test_a_fixed_time_ticks_once_on_each_day_of_a_change_of_summer_time(cron, spring, autumn):
    schedule = declared(cron, missed="all", **BERLIN)
    assert on(SPRING, schedule) == spring
    assert on(AUTUMN, schedule) == autumn


@pytest.mark.parametrize("day", [SPRING, AUTUMN])
@pytest.mark.parametrize("when", [{"cron": "0 * * * *", **BERLIN}, {"every": timedelta(hours=1)}], ids=["cron", "every"])
def test_an_hourly_schedule_ticks_in_each_elapsed_hour_of_a_change_of_summer_time(day, when):
    ticks = declared(missed="all", **when).due(day - timedelta(hours=3), day + timedelta(hours=5))
    assert len(ticks) == 8
    assert {later - earlier for earlier, later in pairwise(ticks)} == {timedelta(hours=1)}


@given(
    st.sampled_from(EXPRESSIONS),
    st.sampled_from([SPRING, AUTUMN]),
    st.lists(st.integers(-300, 600), min_size=2, max_size=6, unique=True),
)
def test_ticks_do_not_depend_on_when_relays_look(cron, day, minutes):
    """Looking at any instants finds the ticks that one look finds, each once."""
    schedule = declared(cron, missed="all", **BERLIN)
    looks = [day + timedelta(minutes=each) for each in sorted(minutes)]
    assert [at for after, now in pairwise(looks) for at in schedule.due(after, now)] == schedule.due(looks[0], looks[-1])


def test_missed_ticks_are_the_last_or_at_most_a_hundred_or_those_of_the_last_minute():
    now = datetime(2026, 6, 1, 12, 0, 30, tzinfo=UTC)
    last = datetime(2026, 6, 1, 12, tzinfo=UTC)
    minutely, ages_ago = {"every": timedelta(minutes=1)}, now - timedelta(days=4000)

    assert declared(**minutely).due(ages_ago, now) == [last]
    assert declared("0 12 1 6 *", tz="UTC").due(ages_ago, now + timedelta(days=90)) == [last]
    assert declared(**minutely, missed="all").due(ages_ago, now) == [last - timedelta(minutes=n) for n in range(99, -1, -1)]
    assert declared(**minutely, missed="none").due(ages_ago, now) == [last]
    assert declared(every=timedelta(hours=1), missed="none").due(ages_ago, now + timedelta(minutes=1)) == []


def test_a_set_back_clock_finds_no_tick_again():
    now = datetime(2026, 6, 1, 12, tzinfo=UTC)
    schedule = declared(every=timedelta(minutes=1), missed="all")
    assert schedule.due(now, now - timedelta(hours=1)) == []
    assert next(schedule.upcoming(now)) == now + timedelta(minutes=1)


def test_the_instants_of_an_interval_are_those_of_every_process():
    ticks = declared(every=timedelta(minutes=7)).upcoming(datetime(2026, 6, 1, 12, 3, 4, tzinfo=UTC))
    assert {at.timestamp() % 420 for at in islice(ticks, 3)} == {0}


@pytest.mark.parametrize(
    ("cron", "options", "why"),
    [
        ("61 * * * *", {}, "Bad minute"),
        ("* * *", {}, "five fields"),
        ("0 30 2 * * *", BERLIN, "five fields"),  # cronsim would find two on 25 October, and none on 29 March
        ("0 0 30 2 *", {}, "day-of-month"),
        ("0 3 * * *", {"tz": "Europe/Berlinn"}, "Europe/Berlinn"),
        ("0 3 * * *", {"every": timedelta(hours=1)}, "either"),
        ("", {}, "either"),
        ("", {"every": timedelta(milliseconds=1)}, "at least one second"),
        ("", {"every": 60}, "60"),
        ("0 3 * * *", {"missed": "some"}, "'some'"),
        ("0 3 * * *", {"using": "nowhere"}, "'nowhere'"),
        ("0 3 * * *", {"name": "x" * 250}, "255"),
    ],
)
def test_check_names_what_is_wrong_with_a_declaration(cron, options, why):
    assert why in refused(cron, **options)


def test_check_reports_two_schedules_of_one_name():
    declared("0 3 * * *", name="tests.taken")
    recurring("0 4 * * *", name="tests.taken")(lambda tick: None)
    (problem,) = check_declarations(None)
    assert "nightly" in problem.msg
    assert declarations["tests.taken"].when.cron == "0 3 * * *"


def test_check_reports_two_schedules_of_one_function_without_names():
    function = recurring("0 3 * * *")(recurring("0 4 * * *")(nightly))
    (problem,) = check_declarations(None)
    assert "0 4 * * *" in problem.msg
    assert "0 3 * * *" in problem.msg
    assert "name=" in problem.msg

    problems.clear()
    recurring("0 3 * * *", name="tests.early")(function)
    assert not check_declarations(None)


def test_check_reports_a_schedule_on_a_database_without_its_table(settings):
    declared("0 3 * * *")
    declared("0 3 * * *", name="tests.elsewhere", using="other")
    assert not check_declarations(None)

    settings.DATABASE_ROUTERS = [NoSchedulesOnOther()]
    (problem,) = check_declarations(None)
    assert problem.id == "outbox_recurring.E001"
    assert "never ticks: the database routers do not allow its app on 'other'" in problem.msg


class NoSchedulesOnOther:
    def allow_migrate(self, db, app_label, **hints):
        return False if (db, app_label) == ("other", "outbox_recurring") else None


def test_cron_expressions_need_cronsim_and_intervals_do_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    declared(every=timedelta(hours=1))
    assert "cronsim" in refused("0 3 * * *")
    (problem,) = check_declarations(None)
    assert "django-exactly-once[recurring]" in problem.hint


def test_default_name_is_that_of_the_function_of_a_task():
    task = SimpleNamespace(func=nightly, enqueue=lambda: None)
    assert recurring("0 3 * * *")(task) is task
    assert declarations[f"{__name__}.nightly"].function is task
