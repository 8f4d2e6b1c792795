"""How late are the messages of a topic while the queue of another topic confirms nothing?

The process of a quorum queue is suspended, as if the queue had lost its majority. Twenty messages a second are published to it,
and as many to another topic, whose latency is measured. Then the queue works again, and everything must arrive.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import amqp

from benchmarks.lab.actors import acting
from benchmarks.lab.arrivals import Arrivals, at_consumer, consume, fresh_queue
from benchmarks.lab.broker import connected
from benchmarks.lab.plan import Plan
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record, Verdict, percentile
from benchmarks.lab.relays import relaying
from benchmarks.lab.servers import Lab
from benchmarks.lab.waiting import Progress, wait_for
from benchmarks.lab.workload import EXCHANGE, number_of

SILENT = "shop.silent"
ALONE, BESIDE = "the queue confirms", "the queue confirms nothing"
PERCENTS = (50, 99)
PAUSE_SECONDS = 0.05
NANOSECONDS_PER_MILLISECOND = 1e6
PUBLISHED = "SELECT count(*) FROM outbox_outboxmessage WHERE state = 'published'"
_PROCESS = (
    '[begin {N, _} = amqqueue:get_pid(Q), sys:%s(whereis(N)) end || Q <- rabbit_amqqueue:list(<<"%s">>), '
    'element(4, amqqueue:get_name(Q)) =:= <<"silent">>].'
)


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    project, count = lab.new_project(), plan.choose(full=600, quick=100)
    for run in plan.each_run(record.name):
        for side in (ALONE, BESIDE) if run % 2 else (BESIDE, ALONE):
            _publish_beside(project, record, side, count)
    record.note(f"To reach: {BESIDE}, p99 at most 1,000 ms.")


def _publish_beside(project: Project, record: Record, side: str, count: int) -> None:
    arrivals, arrived_at = Arrivals(), [0] * count

    def take(message: amqp.Message) -> None:
        now = time.monotonic_ns()
        arrivals.take(message)
        arrived_at[number_of(message.properties["application_headers"]["cloudEvents:bizid"])] = now

    project.empty()
    fresh_queue(project)
    _declare_silent(project)
    publishing = acting(project, "steady_publisher", count, 1, PAUSE_SECONDS, PAUSE_SECONDS, SILENT)
    with relaying(project) as relays:
        with _suspended(project) if side == BESIDE else nullcontext(), publishing as publisher:
            consume(at_consumer(project, arrivals, count), take, *relays, publisher)
            publisher.finish()
            committed: list[tuple[int, int]] = publisher.answer()
        value = project.database.value
        wait_for(Progress(project=project, what="published", goal=2 * count, current=lambda: int(value(PUBLISHED))), *relays)
    late = [(arrived_at[number] - at) / NANOSECONDS_PER_MILLISECOND for number, at in committed]
    for percent in PERCENTS:
        record.add(f"{side}, p{percent}", percentile(late, percent), "ms")
    silent = project.queue_lengths()["silent"]
    correct = arrivals.taken == count and all(arrived_at) and silent >= count
    record.judge(Verdict(side, correct=correct, detail=f"{arrivals.taken:,} and {silent:,} of {count:,} messages each arrived"))


def _declare_silent(project: Project) -> None:
    with connected(project.broker_url) as connection:
        channel = connection.channel()
        channel.queue_declare("silent", durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
        channel.queue_bind("silent", EXCHANGE, SILENT)


@contextmanager
def _suspended(project: Project) -> Iterator[None]:
    vhost = project.broker_url.rpartition("/")[2]
    project.rabbit.evaluate(_PROCESS % ("suspend", vhost))
    try:
        yield
    finally:
        project.rabbit.evaluate(_PROCESS % ("resume", vhost))
