"""What does it cost a Celery task that its effect happens once per business id?

One worker process of one child (prefork), a classic queue on RabbitMQ, late acknowledgement on every side, no results. The
effect is one row through the ORM; the plain task writes it in autocommit, in a transaction of its own, and with the rows by
which an inbox recognises a duplicate, inserted as settled by a statement of its own: the least that can be done. The worker
keeps its database connection (`CELERY_DB_REUSE_MAX`); by default Celery closes it after each task, and little else would
count.
"""

from __future__ import annotations

import sys

from benchmarks.lab.actors import acting
from benchmarks.lab.deliveries import UNTIMED, effects, effects_of, judged, rate_of, remember
from benchmarks.lab.handling import PREFETCH
from benchmarks.lab.plan import Plan
from benchmarks.lab.processes import running
from benchmarks.lab.project import Project
from benchmarks.lab.record import Record
from benchmarks.lab.servers import Lab
from benchmarks.lab.waiting import wait_for, wait_for_end

SIDES = {
    "plain": "plain task",
    "atomic": "plain task in a transaction",
    "by_hand": "plain task with the rows of an inbox",
    "idempotent": "@idempotent_task",
}
WORKER = [sys.executable, "-m", "celery", "-A", "benchmarks.actors.celery_worker", "worker", "--loglevel", "WARNING"]
WORKER += ["--without-gossip", "--without-mingle"]
ALONE = ["--pool", "prefork", "--concurrency", "1", "--prefetch-multiplier", str(PREFETCH)]


def measure(lab: Lab, plan: Plan, record: Record) -> None:
    count = plan.choose(full=10_000, quick=1_000)
    project = lab.new_project()
    for run in plan.each_run(record.name):
        for task in SIDES if run % 2 else reversed(SIDES):
            _work_off(project, record, task, count)
    record.compare(SIDES["idempotent"], SIDES["plain"])
    record.compare(SIDES["idempotent"], SIDES["atomic"], reach=">= 0.85")
    record.compare(SIDES["idempotent"], SIDES["by_hand"])
    record.note(f"{count:,} tasks in the queue; the clock runs from the {UNTIMED}th effect's commit to the last one's.")


def _work_off(project: Project, record: Record, task: str, count: int) -> None:
    side = SIDES[task]
    project.empty()
    remember(project)
    with acting(project, "celery_worker", task, count) as sender:
        wait_for_end(sender, project)
    with running([*WORKER, *ALONE], project) as worker:
        wait_for(effects_of(project, count), worker)
        worker.stop()
    found = effects(project)
    record.judge(judged(project, side, count, found))
    record.add(side, rate_of(found), "tasks/s")
