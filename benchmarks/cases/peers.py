"""How fast does the relay drain the same messages as other outboxes for Django, each in its fastest safe setting?

Every side drains a table of its own design, in a process of its own, to the same quorum queue of the same broker; each is timed
from the end of its first settled batch to the end of its last. What a peer does not promise is not asked of it: the order of
keys is judged for ours only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any
from uuid import UUID

from benchmarks.lab.arrivals import Arrivals, collect, fresh_queue, in_queue
from benchmarks.lab.peers import CELERY_OUTBOX, OUTBOX_PATTERN, PROCRASTINATE, Peer, PeerUnavailable
from benchmarks.lab.plan import Plan, say
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record, Verdict
from benchmarks.lab.relays import drain_preloaded
from benchmarks.lab.servers import Lab
from benchmarks.lab.stomp import StompRabbitServer
from benchmarks.lab.waiting import Stalled, wait_for
from benchmarks.lab.workload import many_customers
from tests.support.servers import RabbitServer, ServerFailed

OURS = "outbox_relay"
TRIAL = 3_000
TRIALS = 2
"""Of each setting, not one after the other, so that a moment's noise does not choose a slower one for a peer."""


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    count = plan.choose(full=5_000, quick=1_500)
    with ExitStack() as stack:
        rabbit = _rabbit(lab, stack, record)
        ours = lab.new_project(rabbit)
        chosen = [(peer, _fastest(lab, plan, record, rabbit, peer)) for peer in _available(record, rabbit)]
        for _ in plan.each_run(record.name):
            record.add(OURS, drain_preloaded(ours, record, OURS, count, many_customers), "msg/s")
            for peer, options in chosen:
                rate, verdict = _drain(lab, rabbit, peer, options, count)
                record.add(peer.name, rate, peer.unit)
                record.mention(verdict)
    for peer, _ in chosen:
        record.compare(OURS, peer.name, reach=">= 12" if peer is CELERY_OUTBOX else "")
    record.details["options"] = {peer.name: options for peer, options in chosen}
    record.details["versions"] = {peer.name: peer.versions() for peer, _ in chosen}
    record.note(f"{count:,} messages a run. {OUTBOX_PATTERN.name} sends unconfirmed and not persistent.")
    record.note(f"{PROCRASTINATE.name} has no broker: its jobs do nothing.")


def _rabbit(lab: Lab, stack: ExitStack, record: Record) -> RabbitServer:
    try:
        return stack.enter_context(StompRabbitServer())
    except ServerFailed as error:
        why, _, _ = str(error).partition("\n")
        record.note(f"{OUTBOX_PATTERN.name} was not measured, because RabbitMQ did not start with its STOMP plugin: {why}")
        return lab.rabbit


def _available(record: Record, rabbit: RabbitServer) -> list[Peer]:
    available = []
    for peer in (CELERY_OUTBOX, OUTBOX_PATTERN, PROCRASTINATE):
        if peer is OUTBOX_PATTERN and not isinstance(rabbit, StompRabbitServer):
            continue
        try:
            peer.install()
        except PeerUnavailable as error:
            record.note(str(error))
        else:
            available.append(peer)
    return available


def _fastest(lab: Lab, plan: Plan, record: Record, rabbit: RabbitServer, peer: Peer) -> Mapping[str, Any]:
    """Try every setting, and again; which was fastest at its best. With one, or in a hurry, there is nothing to try."""
    settings: Sequence[Mapping[str, Any]] = peer.options[:1] if plan.quick else peer.options
    if len(settings) == 1:
        return settings[0]
    say(f"{record.name}: looking for the fastest of {len(settings)} settings of {peer.name}")
    trials = [[_drain(lab, rabbit, peer, options, TRIAL)[0] for options in settings] for _ in range(TRIALS)]
    rates = list(zip(*trials, strict=True))
    record.details.setdefault("trials", {})[peer.name] = [
        {**options, "rates": of_one} for options, of_one in zip(settings, rates, strict=True)
    ]
    best = [max(of_one) for of_one in rates]
    return settings[best.index(max(best))]


def _drain(lab: Lab, rabbit: RabbitServer, peer: Peer, options: Mapping[str, Any], count: int) -> tuple[float, Verdict]:
    project = lab.blank_project(rabbit)
    fresh_queue(project)
    environ = {"STOMP_PORT": str(rabbit.stomp_port)} if isinstance(rabbit, StompRabbitServer) else {}
    answer = peer.drain(project, count, options, **environ)
    return answer["messages"] / answer["seconds"], _verdict(project, peer, answer["committed"], answer["faults"])


def _verdict(project: Project, peer: Peer, committed: list[tuple[str, int]], faults: str) -> Verdict:
    count = len(committed)
    if peer.read is None:
        return Verdict(peer.name, correct=not faults, detail=faults or f"{count:,} committed, {count:,} done")
    with suppress(Stalled):  # unconfirmed messages may be lost; the arrivals show which
        wait_for(in_queue(project, count))
    arrivals = collect(project, Arrivals(), peer.read)
    faults = faults or arrivals.faults((UUID(message_id), number) for message_id, number in committed)
    detail = faults or f"{count:,} committed, {arrivals.taken:,} arrived; order not judged"
    return Verdict(peer.name, correct=not faults, detail=detail)
