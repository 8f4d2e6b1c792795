"""How fast are django.tasks on the outbox and the inbox beside the other backends and procrastinate?

Every side has a table of its own design in a database of its own, and its worker is its own command. The task inserts one row.
Ours has no broker (`local://`): `outbox_relay` runs the tasks, one at a time; the three others of four threads or processes are
those of `inbox_consume`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace

from benchmarks.cases.latency import PERCENTS
from benchmarks.lab.deliveries import effects
from benchmarks.lab.peers import OX, PROCRASTINATE, TASKS_DB, PeerUnavailable
from benchmarks.lab.plan import Plan
from benchmarks.lab.processes import Process, ProcessFailed, running
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record, Verdict, percentile
from benchmarks.lab.servers import Lab
from benchmarks.lab.waiting import Progress, until, wait_for

OURS = "django-exactly-once"
FOUR = 4
POLL = "--interval=0.01"
"""Seconds. The default of both is 1; neither is notified."""
WORKERS: Mapping[str, Mapping[str, Sequence[Sequence[str]]]] = {
    OURS: {
        "one worker": [["outbox_relay"]],
        "four threads": [["outbox_relay"], ["inbox_consume", f"--concurrency={FOUR - 1}"]],
        "four processes": [["outbox_relay"], *[["inbox_consume", "--concurrency=1"]] * (FOUR - 1)],
    },
    TASKS_DB.name: {
        "one worker": [["db_worker", POLL, "--verbosity=0"]],
        "four processes": [["db_worker", POLL, "--verbosity=0"]] * FOUR,
    },
    OX.name: {
        "one worker": [["ox_worker", POLL, "--verbosity=0"]],
        "four threads": [["ox_worker", POLL, "--verbosity=0", f"--concurrency={FOUR}"]],
        "four processes": [["ox_worker", POLL, "--verbosity=0", f"--processes={FOUR}"]],
    },
    PROCRASTINATE.name: {
        "one worker": [["procrastinate", "worker"]],
        "four threads": [["procrastinate", "worker", f"--concurrency={FOUR}"]],
        "four processes": [["procrastinate", "worker"]] * FOUR,
    },
}
SUCCESSFUL = {
    OURS: "SELECT count(*) FROM inbox_tasks_result WHERE status = 'SUCCESSFUL'",
    TASKS_DB.name: "SELECT count(*) FROM django_tasks_database_dbtaskresult WHERE status = 'SUCCESSFUL'",
    OX.name: "SELECT count(*) FROM django_ox_oxtask WHERE status = 'SUCCESSFUL'",
    PROCRASTINATE.name: "SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'",
}
LATENCIES = """
SELECT extract(epoch FROM pg_xact_commit_timestamp(effect.xmin) - pg_xact_commit_timestamp(sale.xmin))::float8 * 1000
FROM shop_effect effect JOIN shop_sale sale USING (number) WHERE number >= %s
"""
COMMITTED_AT = "SELECT extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8 FROM shop_sale WHERE number = %s"
LONGEST_PAUSE = 0.15
WARM = 100
HISTORY = 500
"""Tasks that have been run before, so that PostgreSQL plans with statistics of each side's tables."""
START_SECONDS = 60.0


@dataclass
class Side:
    """One project with its client. `enqueued` is how many tasks it has since it was last empty."""

    name: str
    python: str
    project: Project
    client: Process
    record: Record
    enqueued: int = field(default=0)

    def empty(self) -> None:
        self.project.empty()
        self.enqueued = 0

    def enqueue(self, count: int, *, together: int = 1, pause: float = 0.0) -> float:
        """So many tasks, numbered on; how many seconds it took."""
        self.client.order(first=self.enqueued, count=count, together=together, pause=pause)
        self.enqueued += count
        seconds: float = self.client.answer()
        return seconds

    @contextmanager
    def working(self, form: str) -> Iterator[list[Process]]:
        """Its workers, idle after some tasks; at the end all tasks have been run, and are judged."""
        self.empty()
        commands, processes = WORKERS[self.name][form], FOUR if form == "four processes" else len(WORKERS[self.name][form])
        with ExitStack() as stack:
            workers = [
                stack.enter_context(running([self.python, "-m", "django", *command], self.project)) for command in commands
            ]
            until("every worker has run a task", lambda: self._have_run(processes), *workers, seconds=START_SECONDS)
            self.enqueue(HISTORY, together=HISTORY)
            self.wait(workers)
            self.project.database.connection.execute("VACUUM (ANALYZE)")
            yield workers
            self.wait(workers)
            for worker in workers:
                # A signal may interrupt a query of django-tasks-db, whose worker then ends with an error.
                with nullcontext() if self.name == OURS else suppress(ProcessFailed):
                    worker.stop()
        self._judge(form)

    def wait(self, workers: Sequence[Process]) -> None:
        wait_for(
            Progress(project=self.project, what="successful tasks", goal=self.enqueued, current=self._successful), *workers
        )

    def _have_run(self, processes: int) -> bool:
        self.enqueue(FOUR)
        return int(self.project.database.value("SELECT count(DISTINCT process) FROM shop_effect")) == processes

    def _successful(self) -> int:
        return int(self.project.database.value(SUCCESSFUL[self.name]))

    def _judge(self, form: str) -> None:
        numbers, successful = sorted(number for number, _ in effects(self.project)), self._successful()
        correct = numbers == [*range(self.enqueued)] and successful == self.enqueued
        detail = f"{self.enqueued:,} tasks, {successful:,} successful, {len(numbers):,} effects"
        verdict = Verdict(f"{self.name}, {form}", correct=correct, detail=detail)
        (self.record.judge if self.name == OURS else self.record.mention)(verdict)


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    count = plan.choose(full=1_500, quick=200)
    with ExitStack() as stack:
        sides = list(_sides(lab, stack, record))
        for run in plan.each_run(record.name):
            turns = sides if run % 2 else sides[::-1]
            for how, together in {"enqueue": 0, "enqueue with a row": 1}.items():
                for side in turns:
                    record.add(f"{how}: {side.name}", _enqueuing(side, count, together), "tasks/s")
            for form in WORKERS[OURS]:
                for side in (side for side in turns if form in WORKERS[side.name]):
                    record.add(f"{form}: {side.name}", _running(side, form, count), "tasks/s")
            for side in turns:
                _latency(side, plan.choose(full=60, quick=10))
    for figure in [*record.series]:
        how, _, name = figure.partition(": ")
        if name != OURS:
            record.compare(f"{how}: {OURS}", figure, name=f"{how}: / {name}")
    record.note(f"{count:,} tasks, committed at once while the workers are idle; the clock runs from that commit.")
    record.note(f"{TASKS_DB.name} has no threads. It and {OX.name} poll each 10 ms (default: 1 s); the others are notified.")


def _sides(lab: Lab, stack: ExitStack, record: Record) -> Iterator[Side]:
    yield _side(lab, stack, record, OURS, sys.executable)
    for peer in (TASKS_DB, OX, PROCRASTINATE):
        try:
            peer.install()
        except PeerUnavailable as error:
            record.note(f"{peer.name} was not measured: {error}")
        else:
            record.details.setdefault("versions", {})[peer.name] = peer.versions()
            yield _side(lab, stack, record, peer.name, peer.python)


def _side(lab: Lab, stack: ExitStack, record: Record, name: str, python: str) -> Side:
    environ = {"DJANGO_SETTINGS_MODULE": "benchmarks.peers.task_settings", "TASKS_SIDE": name}
    project = replace(lab.blank_project(lab.rabbit), extra=environ)
    client = stack.enter_context(running([str(python), "-m", "benchmarks.peers.task_client"], project))
    client.answer()
    return Side(name, python, project, client, record)


def _enqueuing(side: Side, count: int, together: int) -> float:
    """Tasks per second of a client that has enqueued some before."""
    side.empty()
    side.enqueue(WARM, together=together)
    return count / side.enqueue(count, together=together)


def _running(side: Side, form: str, count: int) -> float:
    """Tasks per second, from the commit of all of them to the commit of the last effect."""
    with side.working(form):
        first = side.enqueued
        side.enqueue(count, together=count)
    began = float(side.project.database.value(COMMITTED_AT, first))
    return count / (max(at for _, at in effects(side.project)) - began)


def _latency(side: Side, count: int) -> None:
    with side.working("one worker"):
        first = side.enqueued
        side.enqueue(count, pause=LONGEST_PAUSE)
    latencies = [value for (value,) in side.project.database.connection.execute(LATENCIES, [first])]
    for percent in PERCENTS[:2]:
        side.record.add(f"commit -> effect, p{percent}: {side.name}", percentile(latencies, percent), "ms")
