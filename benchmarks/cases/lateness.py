"""How late is a scheduled message at the broker's consumer, with a million others in the table that are not due yet?

A thousand messages fall due every second, one each millisecond. Lateness is the time from the due instant to the callback of a
consumer, by the database's clock. One relay; two relays; and one relay while others publish messages with a delay of one to
two seconds. None of them may be early: not at the consumer, not when it was settled and, in a separate run in which a trigger
records it, not when it was made ready.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import amqp

from benchmarks.lab.actors import acting
from benchmarks.lab.arrivals import Arrivals, at_consumer, consume, fresh_queue
from benchmarks.lab.clock import DatabaseClock
from benchmarks.lab.plan import Plan, say
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record, Verdict, percentile
from benchmarks.lab.relays import relaying
from benchmarks.lab.scheduled import early, schedule_far, schedule_soon
from benchmarks.lab.servers import Lab
from benchmarks.lab.verdicts import verdict
from benchmarks.lab.workload import TOPICS, number_of

ONE, TWO, BESIDE = "one relay", "two relays", "beside short delays"
SHORT = "the short delays"
WATCHED = "watched"
PER_SECOND = 1_000
SHORT_PER_SECOND = 200
PERCENTS = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
MILLISECONDS = 1e3

DUE = "SELECT biz_id, extract(epoch FROM deliver_at)::float8 FROM outbox_outboxmessage WHERE state = 'published'"
WATCH = """
CREATE TABLE fired (id bigint, at timestamptz);
CREATE FUNCTION note_firing() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO fired VALUES (new.id, clock_timestamp()); RETURN new; END';
CREATE TRIGGER note_firing BEFORE UPDATE ON outbox_outboxmessage_live FOR EACH ROW
    WHEN (old.state = 'scheduled' AND new.state = 'ready') EXECUTE FUNCTION note_firing();
"""
"""What was not made ready before it was due cannot have been claimed, sent or settled before."""
STEPS = """
SELECT extract(epoch FROM fired.at - deliver_at)::float8, extract(epoch FROM settled_at - fired.at)::float8
FROM outbox_outboxmessage JOIN fired USING (id)
"""
"""Seconds, by the database's clock."""


@dataclass(frozen=True)
class Trial:
    """So many messages over so many seconds, beside so many that are not due, carried by so many relays.

    Attributes:
        short: messages with a short delay, published meanwhile.
    """

    far: int
    seconds: float
    relays: int = 1
    short: int = 0

    @property
    def scheduled(self) -> int:
        return int(PER_SECOND * self.seconds)

    @property
    def count(self) -> int:
        return self.scheduled + self.short


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    far, seconds = plan.choose(full=(1_000_000, 30.0), quick=(20_000, 3.0))
    short = int(SHORT_PER_SECOND * seconds)
    project = lab.new_project()
    say(f"{record.name}: scheduling {far:,} for later")
    record.add("rows scheduled by COPY", schedule_far(project.database, far), "rows/s")
    for _ in plan.each_run(record.name):
        _try(project, record, ONE, Trial(far, seconds))
        _try(project, record, TWO, Trial(far, seconds, relays=2))
        _try(project, record, BESIDE, Trial(far, seconds, short=short))
    say(f"{record.name}: once more, watched by a trigger")
    project.database.connection.execute(WATCH)
    trial = Trial(far, seconds)
    _try(project, record, WATCHED, trial)
    _record_steps(project, record, trial)
    record.note(f"{far:,} scheduled for later, {PER_SECOND:,} due per second for {seconds:.0f} s.")
    record.note("To reach: p50 at most 10 ms, p99 at most 20 ms, none early.")


def _try(project: Project, record: Record, side: str, trial: Trial) -> None:
    database, arrivals = project.database, Arrivals()
    arrived_at: dict[int, float] = {}

    def take(message: amqp.Message) -> None:
        now = time.monotonic()
        arrivals.take(message)
        arrived_at.setdefault(number_of(message.properties["application_headers"]["cloudEvents:bizid"]), now)

    database.sweep()
    fresh_queue(project, TOPICS)
    with relaying(project, trial.relays) as relays, ExitStack() as beside:
        publishers = []
        begin = schedule_soon(database, trial.scheduled, trial.seconds)
        if trial.short:
            arguments = (trial.scheduled, trial.short, SHORT_PER_SECOND, begin)
            publishers.append(beside.enter_context(acting(project, "delaying_publisher", *arguments)))
        clock = DatabaseClock.read(database)
        consume(at_consumer(project, arrivals, trial.count), take, *relays, *publishers)
        error = clock.error_until(DatabaseClock.read(database))
        for publisher in publishers:
            publisher.finish()
    due = {number_of(biz_id): at for biz_id, at in database.connection.execute(DUE)}
    late = {number: clock.at(arrived_at[number]) - at for number, at in due.items()}
    record.judge(
        verdict(
            project,
            side,
            trial.count,
            arrivals=arrivals,
            not_due=trial.far,
            early=early(database) + sum(lateness < -error for lateness in late.values()),
        )
    )
    _add(record, side, [lateness for number, lateness in late.items() if number < trial.scheduled])
    if trial.short:
        _add(record, SHORT, [lateness for number, lateness in late.items() if number >= trial.scheduled])
    record.add("the two clocks, related within", error * MILLISECONDS, "ms")


def _add(record: Record, side: str, seconds: Sequence[float]) -> None:
    for name, percent in PERCENTS.items():
        record.add(f"{side}, {name}", percentile(list(seconds), percent) * MILLISECONDS, "ms")


def _record_steps(project: Project, record: Record, trial: Trial) -> None:
    """What takes the time, by the records of the trigger, and whether a message was early."""
    steps = project.database.connection.execute(STEPS).fetchall()
    fired, settled = zip(*steps, strict=True)
    _add(record, "due -> made ready", fired)
    _add(record, "made ready -> settled", settled)
    early = sum(seconds < 0 for seconds in fired)
    detail = f"{len(fired):,} times made ready, {early:,} of them early"
    record.judge(Verdict("made ready", correct=len(fired) == trial.count and not early, detail=detail))
