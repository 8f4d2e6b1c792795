"""How fast are half a million messages carried that fall due within one second, and does a small topic wait for a large one?

They are of three topics, of 94 %, 6 % and a hundred messages; each topic's fall due evenly over the second, and the small ones
were written last. Beside it, in the same run, as many that are ready at once. Two runs at most, because each takes minutes.
"""

from __future__ import annotations

from benchmarks.lab.arrivals import fresh_queue, in_queue
from benchmarks.lab.database import rate
from benchmarks.lab.plan import Plan
from benchmarks.lab.processes import memory_of, running
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record
from benchmarks.lab.relays import RELAY
from benchmarks.lab.scheduled import early, require_time
from benchmarks.lab.servers import Lab
from benchmarks.lab.verdicts import verdict
from benchmarks.lab.waiting import until, wait_for
from benchmarks.lab.workload import TOPICS, Due, no_customer

READY, DUE = "ready at once", "due within a second"
LARGE, MIDDLE, SMALL = TOPICS[:3]
SMALLEST = 100
LARGE_SHARE = 0.94
PER_SECOND = 500_000
MOST_RUNS = 2
LOOK_SECONDS = 0.5
START_SECONDS = 10.0
"""A relay takes them to start and to be connected, at the most; its wheel then has time to load what is due."""
MILLION = 1e6

LATENESS = """
SELECT topic, percentile_cont(0.5) WITHIN GROUP (ORDER BY late), max(late)
FROM (SELECT topic, extract(epoch FROM settled_at - deliver_at)::float8 AS late FROM outbox_outboxmessage) AS messages
GROUP BY topic
"""


class Topics:
    """Which topic message number n has, and when in the second it is due."""

    def __init__(self, count: int) -> None:
        large, middle = int(count * LARGE_SHARE), count - SMALLEST
        self._ranges = {LARGE: range(large), MIDDLE: range(large, middle), SMALL: range(middle, count)}
        self._seconds = count / PER_SECOND

    def __call__(self, number: int) -> str:
        return next(topic for topic, numbers in self._ranges.items() if number in numbers)

    def due(self, begin: float) -> Due:
        def at(number: int) -> float:
            numbers = self._ranges[self(number)]
            return begin + self._seconds * (number - numbers.start) / len(numbers)

        return at


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    count = plan.choose(full=500_000, quick=10_000)
    topics = Topics(count)
    project = lab.new_project()
    for run in plan.each_run(record.name):
        copied = _carry_ready(project, record, count, topics)
        _carry_due(project, record, count, topics, copied)
        if run == MOST_RUNS:
            break
    record.compare(DUE, READY, reach=">= 0.8")
    record.note(f"{count:,} messages over {count / PER_SECOND:g} s, so that they come as dense as {PER_SECOND:,} in a second.")
    record.note("Late is here the settling after the instant asked for. Memory: the relay's resident set, at its most.")


def _carry_ready(project: Project, record: Record, count: int, topics: Topics) -> float:
    """Rows per second that COPY wrote."""
    database = project.database
    project.empty()
    producer_rate = database.preload(count, no_customer, topics=topics)
    _carry(project, record, READY, count, producer_rate)
    return producer_rate


def _carry_due(project: Project, record: Record, count: int, topics: Topics, copied: float) -> None:
    database = project.database
    project.empty()
    begin = database.now() + 2 * START_SECONDS + 2 * count / copied
    producer_rate = database.preload(count, no_customer, topics=topics, due=topics.due(begin))
    require_time(database, begin - START_SECONDS)
    _carry(project, record, DUE, count, producer_rate, begin)
    late = {topic: seconds for topic, *seconds in database.connection.execute(LATENESS)}
    for name, topic in (("the large topic", LARGE), ("the small topic", SMALL)):
        middle, last = late[topic]
        record.add(f"{name}, median lateness", middle, "s")
        record.add(f"{name}, last", last, "s")


def _carry(project: Project, record: Record, side: str, count: int, producer_rate: float, begin: float = 0.0) -> None:
    """Carry so many messages, the first of which is due at `begin`."""
    database = project.database
    fresh_queue(project, TOPICS)
    with running(RELAY, project) as relay, memory_of(relay) as samples:
        left = max(0.0, begin - database.now())
        until(
            "the first message is due", lambda: database.now() >= begin, relay, seconds=left + START_SECONDS, every=LOOK_SECONDS
        )
        wait_for(in_queue(project, count), relay, every=LOOK_SECONDS)
        relay.stop()
    capacity = rate(database.settled())
    record.add(side, capacity, "msg/s")
    record.add(f"memory of the relay, {side}", max(size for _, size in samples) / MILLION, "MB")
    record.judge(verdict(project, side, count, producer_rate=producer_rate, capacity=capacity, early=early(database)))
