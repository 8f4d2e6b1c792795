"""Declare recurring messages. What is wrong with a declaration is an error of `manage.py check`, which commands run first.

The instants of a schedule depend on its declaration only, so all processes compute the same ones. They are compared in UTC:
Python compares those of one time zone by their local time, which is another order when clocks are set back.

`cronsim` does what Debian's cron does at a change of summer time. Of a fixed time that does not exist, it is
the end of the gap; of one that exists twice, the first. With `*` in minutes or hours, an expression goes by elapsed time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import count, takewhile
from typing import Any, Literal, NamedTuple, TypeVar, get_args
from zoneinfo import ZoneInfo

from django.apps import apps
from django.core.checks import CheckMessage, Error, register
from django.db import connections, router
from django.utils import timezone

from exactly_once.packages import name_of
from exactly_once.wire.identity import origin
from exactly_once.wire.text import describe, why_unfit
from outbox.api import Draft, publish_many
from outbox.callbacks import synchronous
from outbox.store.dialect import database_of

Missed = Literal["none", "last", "all"]
_Function = TypeVar("_Function")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SHORTEST = timedelta(seconds=1)
_MOST_MISSED = 100
GRACE = timedelta(minutes=1)
"""A tick that is younger is not missed yet."""
_HINT = "Correct it, or DATABASE_ROUTERS. A cron expression needs cronsim: pip install 'django-exactly-once[recurring]'."


@dataclass(frozen=True, kw_only=True)
class Tick:
    """One instant of a schedule: the argument of its function.

    Attributes:
        name: of the schedule.
        at: the instant, in the time zone of the schedule, not the present time; of a run that an operator has started, its own.
    """

    name: str
    at: datetime

    @property
    def biz_id(self) -> str:
        """The biz-id of its message: the name, and the instant in UTC."""
        return f"{self.name}@{self.at.astimezone(UTC).isoformat()}"


@dataclass(frozen=True)
class recurring:  # noqa: N801 - a decorator
    """Have the relays call the decorated function at these times, in the transaction that publishes its message.

    The function gets a `Tick`. It returns a `Draft`, which is published with the tick's biz-id unless it has one, or None after
    it has published by itself what it wants. If it raises, all of that is rolled back, and it is called again later. An object
    with a method `enqueue`, as a task of Django has it, is enqueued without arguments.

    Args:
        cron: a cron expression: minute, hour, day of month, month, day of week.
        every: in place of `cron`, an interval of at least one second, counted from 1970-01-01 00:00 UTC.
        tz: the time zone of the expression, and of the ticks' instants; default: TIME_ZONE.
        missed: which ticks are published that became due while no relay was running: the "last", "all" (at most the last
            hundred), or "none" (but one that is at most a minute old).
        name: stable name of the schedule; default: `<app label>.<function name>`.
        using: the database of its row and its messages. Default: as for `publish`.
    """

    cron: str = ""
    _: KW_ONLY
    every: timedelta | None = None
    tz: str | None = None
    missed: Missed = "last"
    name: str | None = None
    using: str | None = None

    def __call__(self, function: _Function) -> _Function:
        target: Any = getattr(function, "func", function)
        where = origin(target)
        try:
            schedule = Declaration(self.name or name_of(target, "schedule"), self, function, where)
            if not (why := _why_not(schedule)):
                declarations[schedule.name] = schedule
        except Exception as error:  # noqa: BLE001 - of zoneinfo, of cronsim, or of an argument of another type
            why = describe(error)
        if why:
            problems[where] = f"{why} ({self})"
        return function

    @property
    def zone(self) -> tzinfo:
        return ZoneInfo(self.tz) if self.tz else timezone.get_default_timezone()

    @property
    def expression(self) -> str:
        """When it ticks, for people, and to see whether it was changed."""
        return f"{self.cron} {self.zone}" if self.cron else f"every {self.every}"

    def upcoming(self, after: datetime) -> Iterator[datetime]:
        """The ticks after an instant, in order. There is none if an expression matches nothing for 50 years.

        Raises:
            ImportError: cronsim is not installed.
            cronsim.CronSimError: the expression is not valid.
        """
        if self.every is not None:
            yield from (_EPOCH + number * self.every for number in count((after - _EPOCH) // self.every + 1))
        else:
            from cronsim import CronSim  # noqa: PLC0415 - intervals do not need it

            # After the second of two equal hours has begun, it finds instants of the first.
            ticks = (tick.astimezone(UTC) for tick in CronSim(self.cron, after.astimezone(self.zone)))
            yield from (tick for tick in ticks if tick > after)

    def due(self, after: datetime, now: datetime) -> list[datetime]:
        """The ticks to publish, of those later than `after` and not later than `now`, in order.

        It searches back from `now` in growing windows, because `after` may be years ago.
        """
        most, window = _MOST_MISSED if self.missed == "all" else 1, GRACE
        while True:
            since = max(after, now - window)
            ticks = list(takewhile(now.__ge__, self.upcoming(since)))
            if len(ticks) >= most or since == after or self.missed == "none":
                return ticks[-most:]
            window *= 4


class Declaration(NamedTuple):
    """A declared schedule: its name, when it ticks, and what a tick calls."""

    name: str
    when: recurring
    function: Any
    origin: str

    def publish(self, at: datetime, alias: str) -> None:
        """Call the function for one tick, and publish its message, in the open transaction.

        Raises:
            TypeError: it returned something other than a `Draft` or None.
            Exception: its own.
        """
        if hasattr(self.function, "enqueue"):
            self.function.enqueue()
            return
        tick = Tick(name=self.name, at=at.astimezone(self.when.zone))
        draft = synchronous(self.function)(tick)
        if isinstance(draft, Draft):
            publish_many([replace(draft, biz_id=draft.biz_id or tick.biz_id)], using=alias)
        elif draft is not None:
            raise TypeError(f"it returned {draft!r:.80}, which must be a Draft, or None if it has published what it wants")


declarations: dict[str, Declaration] = {}
"""The valid ones of this process, by name."""
problems: dict[str, str] = {}
"""What is wrong with the others, by the origin of their function."""


def _why_not(schedule: Declaration) -> str:
    """What is wrong with a declaration, or ""."""
    when, known = schedule.when, declarations.get(schedule.name, schedule)
    if bool(when.cron) == (when.every is not None) or (when.every or _SHORTEST) < _SHORTEST:
        return "give either a cron expression, or every= with at least one second"
    if when.cron and len(when.cron.split()) != 5:  # noqa: PLR2004 - with seconds, cronsim repeats and omits fixed times
        return "a cron expression has five fields"
    if next(when.upcoming(timezone.now()), None) is None:
        return "the expression matches no instant"
    if when.missed not in get_args(Missed) or when.using not in {None, *connections}:
        return "missed= is none, last or all, and using= an alias in DATABASES"
    if (known.origin, known.when) != (schedule.origin, when):
        return f"{known.origin} is called {known.name!r}, too ({known.when}): give one of them another name="
    return why_unfit(Tick(name=schedule.name, at=datetime.max.replace(tzinfo=UTC)).biz_id) or ""


@register()
def check_declarations(app_configs: object, **kwargs: Any) -> list[CheckMessage]:
    """outbox_recurring.E001: a schedule that no relay can run."""
    homes = {(schedule.origin, database_of(schedule.when.using)) for schedule in declarations.values()}
    table = apps.all_models["outbox_recurring"].get("schedule")  # None: the app is not installed
    rowless = sorted(home for home in homes if table and not router.allow_migrate_model(home[1], table))
    found = [f"{where} is not valid: {problem}" for where, problem in problems.items()]
    found += [f"{where} never ticks: the database routers do not allow its app on {alias!r}" for where, alias in rowless]
    return [Error(f"The schedule {each}.", hint=_HINT, id="outbox_recurring.E001") for each in found]
