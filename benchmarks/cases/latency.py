"""How long from a commit until the message is at the broker's consumer, and until its handler's effect is committed?

Idle: one message every 200 to 300 ms; also with the doorbell off, when the relay only polls. Loaded: a steady stream of small
transactions at 30 % of what the relay, or the handler's process, can carry.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import amqp

from benchmarks.lab.actors import acting
from benchmarks.lab.arrivals import Arrivals, at_consumer, consume, fresh_queue
from benchmarks.lab.deliveries import effects_of
from benchmarks.lab.handling import declare
from benchmarks.lab.plan import Plan, say
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record, Verdict, percentile
from benchmarks.lab.relays import consuming, drain_preloaded, relaying
from benchmarks.lab.servers import Lab
from benchmarks.lab.verdicts import verdict
from benchmarks.lab.waiting import wait_for, wait_for_end
from benchmarks.lab.workload import QUEUE, many_customers, number_of

RELAY, HANDLER = "capacity of the relay", "capacity of the handler's process"
TRANSACTIONS_PER_SECOND = 100
SHARE_OF_CAPACITY = 0.3
PERCENTS = (50, 95, 99)
NANOSECONDS_PER_MILLISECOND = 1e6
MOST_SAMPLES_KEPT = 1_000

LATENCIES_OF_EFFECTS = """
SELECT extract(epoch FROM pg_xact_commit_timestamp(effect.xmin) - pg_xact_commit_timestamp(sale.xmin))::float8 * 1000
FROM shop_effect effect JOIN shop_sale sale USING (number)
"""
"""Milliseconds. Both instants are when the commit record was made, before it was flushed."""
RATE_OF_EFFECTS = """
SELECT (count(*) - 1) / extract(epoch FROM max(pg_xact_commit_timestamp(xmin)) - min(pg_xact_commit_timestamp(xmin)))::float8
FROM shop_effect
"""
"""Effects per second, between the first's commit and the last's."""
EFFECTS = "SELECT count(*), count(DISTINCT number) FROM shop_effect"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The pace of the steady publisher: the messages of a transaction, and the pauses in seconds between transactions."""

    count: int
    per_transaction: int = 1
    shortest: float = 0.0
    longest: float = 0.0

    @classmethod
    def of(cls, rate: float, seconds: float) -> Pace:
        """So many messages per second, in small transactions."""
        per_transaction = max(1, round(rate / TRANSACTIONS_PER_SECOND))
        rest = per_transaction / rate
        return cls(count=int(rate * seconds), per_transaction=per_transaction, shortest=rest, longest=rest)

    @property
    def arguments(self) -> tuple[float, ...]:
        return self.count, self.per_transaction, self.shortest, self.longest


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    idle = Pace(count=plan.choose(full=400, quick=8), shortest=0.2, longest=0.3)
    burst = plan.choose(full=2_000, quick=300)
    seconds = plan.choose(full=20.0, quick=2.0)
    broker_only, with_handler = lab.new_project(), lab.new_project()

    say(f"{record.name}: idle, {idle.count} messages to the broker, as many with the doorbell off, as many to the handler")
    _to_broker(broker_only, record, "commit -> broker, idle", idle)
    _to_broker(broker_only, record, "commit -> broker, idle, polling", idle, LISTEN_ALIAS=None)
    to_handler(with_handler, record, "commit -> handler, idle", idle)

    say(f"{record.name}: finding out what 30 % of the capacity is")
    count = plan.choose(full=20_000, quick=3_000)
    record.add(RELAY, drain_preloaded(broker_only, record, RELAY, count, many_customers), "msg/s")
    to_handler(with_handler, record, "commit -> handler, burst", Pace(count=burst, per_transaction=burst))
    record.add(HANDLER, float(with_handler.database.value(RATE_OF_EFFECTS)), "msg/s")
    relay_load, handler_load = (SHARE_OF_CAPACITY * record.series[side].values[-1] for side in (RELAY, HANDLER))

    say(f"{record.name}: loaded, {relay_load:,.0f} messages/s to the broker, {handler_load:,.0f}/s to the handler")
    _to_broker(broker_only, record, "commit -> broker, loaded", Pace.of(relay_load, seconds))
    to_handler(with_handler, record, "commit -> handler, loaded", Pace.of(handler_load, seconds))
    record.note(f"Idle, to the broker: p50 is to be at most 2.5 ms and p99 below 25 ms. Burst: {burst:,} in one transaction.")


def _to_broker(project: Project, record: Record, side: str, pace: Pace, **outbox: Any) -> None:
    arrivals, arrived_at = Arrivals(), [0] * pace.count

    def take(message: amqp.Message) -> None:
        now = time.monotonic_ns()
        arrivals.take(message)
        arrived_at[number_of(message.properties["application_headers"]["cloudEvents:bizid"])] = now

    project.empty()
    fresh_queue(project)
    publishing = acting(project, "steady_publisher", *pace.arguments, **outbox)
    with relaying(project, **outbox) as relays, publishing as publisher:
        consume(at_consumer(project, arrivals, pace.count), take, *relays, publisher)
        publisher.finish()
        committed: list[tuple[int, int]] = publisher.answer()
    _add(record, side, [(arrived_at[number] - at) / NANOSECONDS_PER_MILLISECOND for number, at in committed])
    record.judge(verdict(project, side, pace.count, arrivals=arrivals))


def to_handler(project: Project, record: Record, side: str, pace: Pace) -> None:
    """Publish at that pace, through relay and consumer, and put the latencies of the effects and a verdict on record."""
    database = project.database
    declare(project)
    fresh_queue(project)
    publishing = acting(project, "steady_publisher", *pace.arguments)
    with consuming(project) as consumers, relaying(project) as relays, publishing as publisher:
        wait_for_end(publisher, project, *consumers, *relays)
        wait_for(effects_of(project, pace.count, unread=[QUEUE]), *consumers, *relays)
    _add(record, side, [latency for (latency,) in database.connection.execute(LATENCIES_OF_EFFECTS)])
    record.judge(verdict(project, side, pace.count))
    effects, sales = database.connection.execute(EFFECTS).fetchone()
    detail = f"{pace.count:,} committed, {effects:,} effects of {sales:,} of them"
    record.judge(Verdict(f"{side}, effects", correct=effects == sales == pace.count, detail=detail))


def _add(record: Record, side: str, milliseconds: list[float]) -> None:
    for percent in PERCENTS:
        record.add(f"{side}, p{percent}", percentile(milliseconds, percent), "ms")
    if len(milliseconds) <= MOST_SAMPLES_KEPT:
        record.details.setdefault("samples_ms", {})[side] = milliseconds
    record.details.setdefault("samples", {})[side] = len(milliseconds)
