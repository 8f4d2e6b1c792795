"""What does publish() cost beside the raw INSERT of the same row in the same business transaction?

A business transaction changes one account and writes one message. One client does the kinds in turn, transaction by
transaction, and times each; 300 of each kind are a block, with figures of its own. Sixteen clients all do the same kind for a
second, then all do the next, many times over and every second time in the opposite order. A connection LISTENs to the doorbell
all the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

import psycopg

from benchmarks.lab.actors import act, acting
from benchmarks.lab.plan import Plan
from benchmarks.lab.processes import Process
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab
from benchmarks.lab.workload import ACCOUNTS, many_customers
from outbox.doorbell import CHANNEL

KINDS = ("bare", "raw", "publish", "publish without doorbell", "publish through the project")
NAMES = {
    "bare": "no message",
    "raw": "raw INSERT",
    "publish": "publish()",
    "publish without doorbell": "publish(), no doorbell",
    "publish through the project": "publish(), connection.cursor replaced",
}
ONE, CROWD = 1, 16
CROWDS = {ONE: "1 client", CROWD: "16 clients"}
PUBLISH_MANY, COPY = "publish_many, 10,000 a transaction", "raw COPY of the same rows"
MILLI = 1e3
BLOCKS = 3
"""In every run, of either number of clients: many short blocks see the same machine more than a few long ones do."""
WARM_UP_ROUNDS = 50


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    rounds = plan.choose(full=300, quick=60)
    seconds = plan.choose(full=1.0, quick=0.3)
    drafts = plan.choose(full=10_000, quick=2_000)
    project = lab.new_project()
    with _crowd(project, ONE) as (client,):
        for _ in plan.each_run(f"{record.name}, {CROWDS[ONE]}"):
            _new_accounts(project)
            _alternating(client, WARM_UP_ROUNDS)
            for _ in range(BLOCKS):
                _in_turn(record, client, rounds)
    with _crowd(project, CROWD) as crowd:
        for run in plan.each_run(f"{record.name}, {CROWDS[CROWD]}"):
            _new_accounts(project)
            for kind in KINDS:
                _together(crowd, kind, seconds)
            for block in range(BLOCKS):
                for kind in KINDS if (run + block) % 2 else KINDS[::-1]:
                    record.add(_side(kind, CROWD), _together(crowd, kind, seconds), "tx/s")
    for _ in plan.each_run("publish_many"):
        _in_bulk(project, record, drafts)
    _compare(record, rounds, seconds)


def _compare(record: Record, rounds: int, seconds: float) -> None:
    raw, publish, silent, replaced = "raw", "publish", "publish without doorbell", "publish through the project"
    sides = ((raw, "publish / raw", ">= 1.00", ">= 0.97"), (silent, "doorbell / no doorbell", "not slowed", "not slowed"))
    for other, name, alone, in_crowd in sides:
        # The time of the other over the time of ours, so that more is better as in all the other ratios.
        record.compare(_time(other), _time(publish), reach=alone, name=f"{name}, 1 client, median time")
        record.compare(_side(publish, ONE), _side(other, ONE), name=f"{name}, 1 client, mean time")
        record.compare(_side(publish, CROWD), _side(other, CROWD), reach=in_crowd, name=f"{name}, 16 clients")
    record.compare(_time(raw), _time(replaced), name="publish, cursor replaced / raw, 1 client, median time")
    record.compare(PUBLISH_MANY, COPY, reach=">= 0.95", name="publish_many / COPY")
    record.note(
        f"1 client: blocks of {rounds} transactions of each kind, one by one. 16 clients: blocks of {seconds:g} s a kind."
    )
    record.note("publish_many is to reach 40,000 rows/s.")


@contextmanager
def _listener(project: Project) -> Iterator[None]:
    """A listener that the doorbell wakes, as an idle relay, and that does nothing then."""
    with psycopg.connect(project.database.url, autocommit=True) as connection:
        connection.execute(f"LISTEN {CHANNEL}")
        yield


@contextmanager
def _crowd(project: Project, clients: int) -> Iterator[list[Process]]:
    """So many clients, connected and idle."""
    project.empty()
    project.database.preload(1, many_customers)  # the row that the raw side copies
    with ExitStack() as stack:
        stack.enter_context(_listener(project))
        crowd = [stack.enter_context(acting(project, "publish_client")) for _ in range(clients)]
        for client in crowd:
            client.answer()  # it is ready
        yield crowd


def _new_accounts(project: Project) -> None:
    project.empty()
    project.database.connection.execute("INSERT INTO shop_account (balance) SELECT 0 FROM generate_series(1, %s)", [ACCOUNTS])


def _in_turn(record: Record, client: Process, rounds: int) -> None:
    for kind, seconds in _alternating(client, rounds).items():
        record.add(_side(kind, ONE), len(seconds) / sum(seconds), "tx/s")
        record.add(_time(kind), median(seconds) * MILLI, "ms, median")


def _alternating(client: Process, rounds: int) -> dict[str, list[float]]:
    """The seconds of every transaction, by kind."""
    client.order(kinds=KINDS, rounds=rounds)
    answer: dict[str, list[float]] = client.answer()
    return answer


def _together(crowd: Sequence[Process], kind: str, seconds: float) -> float:
    """Transactions per second of all clients."""
    for client in crowd:
        client.order(kind=kind, seconds=seconds)
    answers = [client.answer() for client in crowd]
    return sum(answer["transactions"] / answer["seconds"] for answer in answers)


def _side(kind: str, clients: int) -> str:
    return f"{NAMES[kind]}, {CROWDS[clients]}"


def _time(kind: str) -> str:
    return f"{_side(kind, ONE)}, time"


def _in_bulk(project: Project, record: Record, drafts: int) -> None:
    project.empty()
    answer = act(project, "publish_many", drafts)
    record.add(PUBLISH_MANY, answer["rows"] / answer["seconds"], "rows/s")
    project.empty()
    record.add(COPY, project.database.preload(drafts, many_customers), "rows/s")
