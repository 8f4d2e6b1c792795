"""What a block of a benchmark leaves behind is removed, and a wait that ends in vain reports what was counted."""

import subprocess
import sys

import pytest
import redis

from benchmarks.lab import waiting
from benchmarks.lab.arrivals import fresh_queue
from benchmarks.lab.database import Database, Specimen
from benchmarks.lab.project import ROOT, Project
from benchmarks.lab.waiting import Progress, ProgressWatch, Stalled
from inbox import Lease
from inbox.outcome import Outcome
from tests.support.deliveries import an_envelope, deliver, options


@pytest.fixture
def project(postgres_server, rabbitmq_server, rabbitmq_url, redis_server, redis_url):
    """With the tables, one row in the outbox and one queue, which is empty."""
    url = postgres_server.create_database()
    database = Database(url, Specimen(columns=(), types=(), values=()))
    project = Project(database=database, rabbit=rabbitmq_server, broker_url=rabbitmq_url, redis=redis_server)
    for command in (["manage.py", "migrate", "--run-syncdb", "--verbosity", "0"], ["-m", "benchmarks.actors.specimen"]):
        subprocess.run([sys.executable, *command], cwd=ROOT, env=project.environ(), check=True)
    fresh_queue(project)
    yield project
    database.connection.close()
    postgres_server.drop_database(url.rpartition("/")[2])


@pytest.mark.django_db(transaction=True)
def test_an_emptied_project_has_no_rows_no_queues_and_no_keys_of_leases(project, redis_url, handles):
    handler, given = handles(lambda message: None, lease=Lease()), options(LEASE_STORE=redis_url)
    assert deliver(handler, an_envelope(), given=given) is Outcome.HANDLED
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() > 0
        assert project.database.states() == {"ready": 1}
        assert len(project.queue_lengths()) == 1

        project.empty()

        assert client.dbsize() == 0
        assert project.database.states() == {}
        assert project.queue_lengths() == {}


def progress_of(project, **given):
    return Progress(project=project, what="effects", goal=7, current=lambda: 3, **given)


def test_a_wait_ends_with_the_account_when_no_work_is_left(project, monkeypatch):
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.0)

    with pytest.raises(Stalled) as stalled:
        ProgressWatch(progress_of(project, work_left=lambda: 0)).check()

    said = str(stalled.value)
    assert said.startswith("3 of 7 effects and nothing is left that could become more: outbox rows: 1 ready; ")
    assert said.endswith("queues: 0 benchmark")


def test_a_wait_goes_on_while_work_is_left(project, monkeypatch):
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.0)

    ProgressWatch(progress_of(project, work_left=lambda: 1)).check()
