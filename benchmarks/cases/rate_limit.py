"""Does a rate limit hold across processes while five times as much comes in, and is nothing lost?

For a minute 10,000 messages a second are sent to a handler that may take 2,000 a second in two processes; then they work the
backlog off. The handler takes batches of 100, because no handler of one message a call takes 2,000 a second on a small machine.
"""

from __future__ import annotations

from collections import Counter
from statistics import mean

from benchmarks.lab.actors import acting
from benchmarks.lab.deliveries import effects, effects_of, handled_by, judged, remember
from benchmarks.lab.handling import declare
from benchmarks.lab.plan import Plan, say
from benchmarks.lab.record import Record
from benchmarks.lab.relays import consuming
from benchmarks.lab.servers import Lab
from benchmarks.lab.waiting import wait_for, wait_for_end

IN, LIMIT = 10_000, 2_000
SENT, HANDLED, OVERALL = "sent", "handled, each second", "handled, all in all"
WITHIN = "seconds within 5 % of the limit"
TOLERANCE = 0.05


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    count = IN * plan.choose(full=60, quick=5)
    project = handled_by(lab.new_project(), "bulk", size=100, wait=0.2, rate_limit=f"{LIMIT}/s")
    declare(project)
    remember(project)
    say(f"{record.name}: {count:,} messages in, {count / LIMIT:.0f} s to work them off")
    with consuming(project, 2) as consumers, acting(project, "flood", count, IN) as flood:
        wait_for_end(flood, project, *consumers)
        sent = flood.answer()
        wait_for(effects_of(project, count), *consumers)
    found = effects(project)
    record.add(SENT, sent["messages"] / sent["seconds"], "msg/s")
    record.judge(judged(project, "two processes", count, found))
    _record_rates(record, [at for _, at in found])


def _record_rates(record: Record, instants: list[float]) -> None:
    """What was handled in each second of the database's clock but the first and the last, which are not whole."""
    began, ended = min(instants), max(instants)
    by_second = Counter(int(at - began) for at in instants)
    series = [by_second[second] for second in range(1, int(ended - began))]
    for handled in series:
        record.add(HANDLED, handled, "msg/s")
    record.add(OVERALL, len(instants) / (ended - began), "msg/s")
    record.add(WITHIN, 100 * mean(abs(handled / LIMIT - 1) <= TOLERANCE for handled in series), "%")
    record.details["per_second"] = series
    record.note(f"The limit is {LIMIT:,}/s; reach: within 5 % of it, second by second. One run, whatever --runs says.")
