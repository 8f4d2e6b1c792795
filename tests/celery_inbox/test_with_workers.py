"""Real workers on RabbitMQ and on Redis: sent twice, delivered twice, killed in the middle. Each effect happens once."""

import os
import signal

import pytest
from celery import chain
from celery.exceptions import Retry

from inbox.models import InboxMessage, State
from tests.app.models import Effect, Unique
from tests.celery_inbox.project import begun, go_on
from tests.deliveries import effects, the_row, wait_until

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.timeout(180)]

WAIT = {"timeout": 60, "interval": 0.05}


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_sent_eight_times_under_eight_ids_it_happens_once(tasks, worker, pool):
    with worker(pool=pool, concurrency=4):
        sent = [tasks["shop.charge"].delay({"id": "o-1"}) for _ in range(8)]
        answers = [result.get(**WAIT) for result in sent]

    assert effects() == 1
    assert answers == [answers[0]] * 8
    row = the_row()
    assert (row.handler, row.biz_id, row.state, row.duplicates, row.conflicts) == ("celery.shop.charge", "o-1", "done", 7, 0)


def test_a_child_of_the_pool_that_is_killed_in_the_middle(tasks, worker):
    with worker() as running:
        result = tasks["shop.work"].delay("o-1", "wait for the word")
        [victim] = running.until(lambda: begun("o-1"))
        os.kill(victim, signal.SIGKILL)
        running.until(lambda: len(begun("o-1")) == 2)
        go_on("o-1")

        assert result.get(**WAIT) == "done o-1"

    assert effects("o-1") == 1
    assert the_row().state == State.DONE


def test_a_child_of_the_pool_that_dies_after_the_commit(tasks, worker):
    with worker():
        result = tasks["shop.work"].delay("o-1", "die after the commit")

        assert result.get(**WAIT) == "done o-1"

    assert effects("o-1") == 1
    assert (the_row().duplicates, the_row().redeliveries) == (1, 1)


def test_a_worker_that_is_killed_in_the_middle(tasks, worker):
    with worker() as running:
        result = tasks["shop.work"].delay("o-1", "wait for the word")
        running.until(lambda: begun("o-1"))
        running.kill()
    go_on("o-1")
    with worker(visibility_seconds=1):
        assert result.get(**WAIT) == "done o-1"

    assert effects("o-1") == 1
    assert the_row().state == State.DONE


def test_a_worker_that_is_killed_between_commit_and_acknowledgement(tasks, worker):
    with worker() as running:
        result = tasks["shop.work"].delay("o-1", "die with the worker after the commit")
        running.ends()
    assert effects("o-1") == 1
    with worker(visibility_seconds=1):
        assert result.get(**WAIT) == "done o-1"

    assert effects("o-1") == 1
    assert (the_row().duplicates, the_row().redeliveries) == (1, 1)
