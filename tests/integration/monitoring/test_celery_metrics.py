"""The processes of a Celery worker count into one directory, which is served as one set of figures."""

import json
import os
import signal

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.celery.apps import close
from tests.integration.celery.handling.project import begun, make_app, release
from tests.support.workers import CeleryWorker

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.timeout(120)]

HANDLER = "celery.shop.work"


@pytest.fixture
def directory(tmp_path):
    directory = tmp_path / "metrics"
    directory.mkdir()
    return directory


@pytest.fixture
def tasks(redis_url):
    app = make_app(redis_url, None)
    yield app.tasks
    close(app)


@pytest.fixture
def worker(redis_url, process_environment, tmp_path, directory):
    """A worker with two prefork processes; it has begun to take tasks."""
    given = {
        "DJANGO_SETTINGS_MODULE": "tests.support.apps.worker.settings",
        "CELERY_BROKER": redis_url,
        "CELERY_RESULTS": "",
        "CELERY_SETTINGS": json.dumps({"result_backend": None}),
        "PROMETHEUS_MULTIPROC_DIR": str(directory),
    }
    options = ["--pool", "prefork", "--concurrency", "2"]
    log = tmp_path / "worker.log"
    with CeleryWorker("tests.integration.monitoring.worker", {**process_environment, **given}, log, *options) as worker:
        worker.until(worker.is_ready)
        yield worker


def served(directory):
    """What a scrape of the directory gives: name and handler to value."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(directory))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, sample.labels.get("handler")): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_figures_of_all_prefork_processes_are_served_together_also_those_of_a_killed_one(tasks, worker, directory):
    def handled():
        return served(directory).get(("inbox_handled_total", HANDLER))

    for order in ("o-1", "o-2"):
        tasks["shop.work"].delay(order, "wait until released")
    worker.until(lambda: begun("o-1") and begun("o-2"))
    children = {*begun("o-1"), *begun("o-2")}
    assert len(children) == 2
    release("o-1")
    release("o-2")
    worker.until(lambda: handled() == 2)
    assert {int(file.stem.partition("_")[2]) for file in directory.glob("counter_*.db")} >= children
    assert served(directory)["inbox_handler_seconds_count", HANDLER] == 2

    os.kill(children.pop(), signal.SIGKILL)
    tasks["shop.work"].delay("o-3")
    worker.until(lambda: handled() == 3)
