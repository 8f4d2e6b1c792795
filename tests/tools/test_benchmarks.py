"""What a block of a benchmark leaves behind is removed, and a wait that ends in vain reports what was counted."""

import subprocess
import sys
from contextlib import closing, suppress

import pytest
import redis

from benchmarks.lab import last, waiting
from benchmarks.lab.arrivals import fresh_queue
from benchmarks.lab.database import Database, Specimen
from benchmarks.lab.processes import Process, ProcessFailed
from benchmarks.lab.project import ROOT, Project
from benchmarks.lab.record import Record
from benchmarks.lab.report import WIDTH, table
from benchmarks.lab.waiting import LOOK_SECONDS, Progress, ProgressWatch, StallDetector, Stalled
from inbox import Lease
from inbox.states import Outcome
from tests.support.clock import Clock
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


def test_a_wait_goes_on_while_work_is_left_and_ends_with_the_account_when_none_is(project, monkeypatch):
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 0.0)
    progress = {"project": project, "what": "effects", "goal": 7, "current": lambda: 3}

    ProgressWatch(Progress(**progress, work_left=lambda: 1)).check()
    with pytest.raises(Stalled) as stalled:
        ProgressWatch(Progress(**progress, work_left=lambda: 0)).check()

    said = str(stalled.value)
    assert said.startswith("3 of 7 effects and nothing is left that could become more: outbox rows: 1 ready; ")
    assert said.endswith("queues: 0 benchmark")


LIMIT = 30.0


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def detector(clock):
    return StallDetector(clock, LIMIT)


def test_a_number_that_stays_the_same_is_stalled_when_its_time_is_over(clock, detector):
    assert not detector.stalled(7)
    clock.now += LIMIT - 0.1
    assert not detector.stalled(7)
    clock.now += 0.1
    assert detector.stalled(7)


def test_the_remaining_work_is_looked_at_only_while_nothing_changes(clock, detector):
    for number in range(10):
        clock.now += LOOK_SECONDS - 0.1
        detector.stalled(number)
        assert not detector.look_due()
    clock.now += LOOK_SECONDS
    detector.stalled(9)
    assert detector.look_due()
    assert not detector.look_due()


def run_to_the_end(code, **options):
    """A process of the benchmarks that has ended, whatever its status."""
    process = Process([sys.executable, "-c", code], {}, **options)
    with suppress(ProcessFailed):
        process.finish()
    return closing(process)


def test_a_process_that_ends_fails_unless_it_may_end_by_itself_without_an_error():
    with run_to_the_end("") as relay, pytest.raises(ProcessFailed, match="ended with 0"):
        relay.check()
    with run_to_the_end("", ends=True) as publisher:
        publisher.check()
    failing = run_to_the_end("import sys; sys.exit('refused by the broker')", ends=True)
    with failing as publisher, pytest.raises(ProcessFailed, match=r"ended with 1:\n.*refused by the broker"):
        publisher.check()


def a_record(*rates):
    record = Record(name="publish", question="How fast?")
    for rate in rates:
        record.add("publish()", rate, "round trips")
        record.add("raw INSERT", 1000.0, "tx/s")
    record.compare("publish()", "raw INSERT", reach=">= 0.90", name="publish / raw")
    return record


def line_of(name, lines):
    return next(line for line in lines if line.startswith(name)).removeprefix(name).split()


def test_kept_medians_are_shown_beside_the_next_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(last, "FILE", tmp_path / "last.json")
    last.FILE.write_text('{"relay": {}, "publish": {"renamed": {}}}')
    last.keep(a_record(700.0, 800.0, 1_234_567.0))
    record = a_record(900.0)
    record.add("new", 1.0, "ms")

    lines = table(record, last.last_figures("publish")).splitlines()

    assert line_of("publish() ", lines) == ["900", "900", "900", "800", "1", "round", "trips"]
    assert line_of("publish / raw ", lines) == ["0.90", "0.90", "0.90", "0.80", "1", ">=", "0.90"]
    assert line_of("new ", lines) == ["1.00", "1.00", "1.00", "-", "1", "ms"]
    assert max(map(len, lines)) <= WIDTH
    assert list(last.last_figures("publish")) == ["publish()", "raw INSERT", "publish / raw"]
    assert last.last_figures("relay") == {}
