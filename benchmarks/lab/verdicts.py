"""From a run to its verdict."""

from __future__ import annotations

from benchmarks.lab.arrivals import Arrivals, collect
from benchmarks.lab.project import Project
from benchmarks.lab.record import Verdict


def verdict(
    project: Project,
    side: str,
    count: int,
    *,
    arrivals: Arrivals | None = None,
    producer_rate: float | None = None,
    capacity: float | None = None,
    relayed: bool = True,
) -> Verdict:
    """Empty the queue, and compare everything that arrived with everything that was committed.

    Args:
        count: how many messages the benchmark committed; the outbox must agree.
        arrivals: what was taken off the queue before.
        relayed: False for a side that sends past the outbox, whose rows stay ready.
    """
    arrivals = collect(project, arrivals or Arrivals())
    states = project.database.states()
    faults = [arrivals.faults(project.database.committed())]
    if states != {"published" if relayed else "ready": count}:
        faults.append(f"rows by state: {states}, of {count:,} committed")
    found = "; ".join(fault for fault in faults if fault)
    return Verdict(
        side=side,
        correct=not found,
        detail=found or f"{count:,} committed, {arrivals.taken:,} arrived",
        producer_rate=producer_rate,
        capacity=capacity,
    )
