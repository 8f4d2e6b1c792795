"""procrastinate: its parts as the harness has them, and the deaths of the harness's Celery worker.

The harness has no contract for it. A death is followed by the manual's task for stalled jobs, and by a worker.
"""

import asyncio
import os
import subprocess
import sys

import pytest

from benchmarks.peers.driving import configure_django

configure_django("procrastinate.contrib.django")

import pytest_obligation as harness
from django.db import connection
from procrastinate.contrib.django import app
from procrastinate.contrib.django.models import ProcrastinateJob
from procrastinate.manager import JobManager
from pytest_obligation import Claim, Decline, NotApplicable, Profile
from pytest_obligation.integrations import procrastinate, task_queues
from pytest_obligation.integrations.django import django_host
from pytest_obligation.process_histories import ProcessHistory, die_here, fault_environment

from benchmarks.contracts import effects

NAME, QUEUE = "procrastinate", "default"
DEATHS = {"task_prerun": "fetch_job", "mark_as_done": "finish_job", "task_postrun": "finish_job"}
SILENCE = "UPDATE procrastinate_workers SET last_heartbeat = now() - interval '1 hour'"

harness.configure(django_host({NAME}))


@pytest.fixture
def emptied(transactional_db):
    """Django does not flush the tables of unmanaged models."""
    connection.cursor().execute("TRUNCATE procrastinate_jobs CASCADE")


@app.task(name="note")
def note(name):
    effects.note(connection.cursor(), name)


@app.task(name="charge")
def charge(name):
    effects.charge(connection.cursor(), name)


def defer(task=note):
    return task.defer(name=effects.new_name(connection.cursor()))


def worker(**environ):
    url = f"{os.environ['DATABASE_URL'].rpartition('/')[0]}/{connection.settings_dict['NAME']}"
    command = [sys.executable, "-m", "benchmarks.contracts.procrastinate"]
    return subprocess.run(command, env={**os.environ, "DATABASE_URL": url, **environ}, check=False).returncode


def history(task):
    def run(death):
        job_id = defer(task)
        return job_id, worker(**fault_environment(death))

    def observe(job_id):
        job = ProcrastinateJob.objects.get(id=job_id)
        return task_queues.TaskOutcome(status=job.status, effect=effects.count(connection.cursor(), job.args["name"]))

    def recover(job_id):
        connection.cursor().execute(SILENCE)
        asyncio.run(procrastinate.retry_stalled_jobs(app))
        worker()

    return ProcessHistory(
        name=f"the worker runs {task.name}",
        initial=task_queues.TaskOutcome(status="todo", effect=0),
        expected=task_queues.TaskOutcome(status="succeeded", effect=1),
        run=run,
        observe=observe,
        recover=recover,
        death_points=tuple(DEATHS),
    )


def ownership():  # ARRANGE: a job # REAL PRODUCTION # OBSERVE: by the harness # EXTERNAL SEAM: none
    return procrastinate.ownership(app, defer=defer, queue=QUEUE)


def retention():  # ARRANGE: a job # REAL PRODUCTION # OBSERVE: by the harness # EXTERNAL SEAM: none
    return procrastinate.retention(app, defer=defer, max_hours=24)


PROFILES = {
    Profile.A: NotApplicable("the task that retries stalled jobs is the application's; the histories run it"),
    Profile.B: Claim(),
    Profile.C: Decline("a job whose worker died runs again; whether it reached its service is its own"),
    Profile.D: Claim(),
    Profile.E: task_queues.settled_by_one_worker("job"),
    Profile.F: task_queues.the_obligation_is_the("job"),
    Profile.G: task_queues.application_gate(NAME),
    Profile.H: task_queues.replay_safety_is_the_functions("job", NAME, runs_again="after its worker died"),
    Profile.I: task_queues.application_admission(NAME),
    Profile.J: Decline("a job's retries are its task's"),
}


@harness.due_work_contract_suite(
    harness.ObligationContract(
        name=NAME,
        profiles=PROFILES,
        ownership=ownership,
        retention=retention,
        process_handoffs=(history(note), history(charge)),
        fixtures=("emptied",),
        transactional=True,
    )
)
class TestWorker: ...


def dying(death, method):
    """`method` of the manager, which dies before it, or after it has fetched or finished a job."""

    async def call(*given, **options):
        if death == "mark_as_done":
            die_here(death)
        answer = await method(*given, **options)
        if answer or death == "task_postrun":
            die_here(death)
        return answer

    return call


if __name__ == "__main__":
    for death, name in DEATHS.items():
        setattr(JobManager, name, dying(death, getattr(JobManager, name)))
    procrastinate.django_worker_once([QUEUE])()
