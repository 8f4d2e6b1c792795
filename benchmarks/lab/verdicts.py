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
    not_due: int = 0,
    early: int = 0,
) -> Verdict:
    """Empty the queue, and compare everything that arrived with everything that was committed.

    Args:
        count: how many messages the benchmark committed; the outbox must agree.
        arrivals: what was taken off the queue before.
        relayed: False for a side that bypasses the outbox, whose rows stay ready.
        not_due: how many more are in the outbox, scheduled for later, and may not arrive.
        early: how many were seen before they were due.
    """
    arrivals = collect(project, arrivals or Arrivals())
    states = project.database.states()
    faults = [arrivals.faults(project.database.committed())]
    expected = {"published" if relayed else "ready": count, "scheduled": not_due}
    if states != {state: rows for state, rows in expected.items() if rows}:
        faults.append(f"rows by state: {states}, of {count:,} committed and {not_due:,} that are not due")
    if early:
        faults.append(f"{early:,} early")
    found = "; ".join(fault for fault in faults if fault)
    return Verdict(
        side=side,
        correct=not found,
        detail=found or f"{count:,} committed, {arrivals.taken:,} arrived",
        producer_rate=producer_rate,
        capacity=capacity,
    )
