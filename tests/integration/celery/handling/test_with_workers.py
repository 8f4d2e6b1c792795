"""Real workers on RabbitMQ and on Redis: sent twice, delivered twice, killed in the middle. Each effect happens once."""

import os
import signal

import pytest
from celery import chain, chord
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from django.core.management import call_command

from inbox.models import InboxMessage, State
from tests.integration.celery.handling.project import begun, go_on
from tests.support.apps.effects.models import Effect, Unique
from tests.support.deliveries import effects, the_row, wait_until

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.timeout(180)]

WAIT = {"timeout": 60, "interval": 0.05}


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
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
    with worker(takes_over=True):
        assert result.get(**WAIT) == "done o-1"

    assert effects("o-1") == 1
    assert the_row().state == State.DONE


def test_a_worker_that_is_killed_between_commit_and_acknowledgement(tasks, worker):
    with worker() as running:
        result = tasks["shop.work"].delay("o-1", "die with the worker after the commit")
        running.ends()
    assert effects("o-1") == 1
    with worker(takes_over=True):
        assert result.get(**WAIT) == "done o-1"

    assert effects("o-1") == 1
    assert (the_row().duplicates, the_row().redeliveries) == (1, 1)


def test_a_twin_that_is_at_work_is_waited_for_outside_the_worker(tasks, worker):
    """A task that may not retry at all: waiting for its twin is none."""
    with worker() as running:
        first = tasks["shop.work"].delay("o-1", "wait for the word")
        running.until(lambda: begun("o-1"))
        second = tasks["shop.work"].delay("o-1", "wait for the word")
        running.until(lambda: running.said().count("comes again in") >= 3)
        assert len(begun("o-1")) == 1
        go_on("o-1")

        assert [first.get(**WAIT), second.get(**WAIT)] == ["done o-1"] * 2

    assert effects("o-1") == 1
    assert the_row().duplicates == 1


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_twin_whose_copy_cannot_be_sent_stays_with_the_broker(tasks, worker, pool):
    """It came as pickle and holds what JSON does not, and a task is sent again as it is usually sent."""
    with worker(pool=pool, accept_content=["json", "pickle"]) as running:
        first = tasks["shop.work"].delay("o-1", "wait for the word")
        running.until(lambda: begun("o-1"))
        second = tasks["shop.work"].apply_async(["o-1", {"a set"}], serializer="pickle")
        running.until(lambda: "cannot be sent again" in running.said())
        go_on("o-1")

        assert [first.get(**WAIT), second.get(**WAIT)] == ["done o-1"] * 2

    assert effects("o-1") == 1


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_on_quorum_queues(app, tasks, worker):
    """There Celery has RabbitMQ do the delaying, in whole seconds."""
    quorum = {"task_default_queue_type": "quorum", "task_default_exchange_type": "topic"}
    app.conf.update(quorum)
    with worker(**quorum) as running:
        first = tasks["shop.work"].delay("o-1", "wait for the word")
        [victim] = running.until(lambda: begun("o-1"))
        second = tasks["shop.work"].delay("o-1", "wait for the word")
        running.until(lambda: running.said().count("comes again in") >= 2)
        os.kill(victim, signal.SIGKILL)
        running.until(lambda: len(begun("o-1")) == 2)
        go_on("o-1")

        assert [first.get(**WAIT), second.get(**WAIT)] == ["done o-1"] * 2
        assert tasks["shop.try_again"].apply_async(["o-2"], countdown=1).get(**WAIT) == 1

    assert (effects("o-1"), effects("o-2")) == (1, 1)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_redis_delivers_a_long_task_again_while_it_runs(tasks, worker):
    with worker() as running:
        result = tasks["shop.work"].delay("o-1", "wait for the word")
        running.until(lambda: begun("o-1"))
        with worker(takes_over=True) as other:
            other.until(lambda: "comes again in" in running.said() + other.said())
            assert len(begun("o-1")) == 1
            go_on("o-1")
            assert result.get(**WAIT) == "done o-1"
            wait_until(lambda: the_row().duplicates)

    assert effects("o-1") == 1


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_retry_is_no_duplicate_of_the_try_that_failed(tasks, worker, pool):
    with worker(pool=pool):
        assert tasks["shop.try_again"].delay("o-1").get(**WAIT) == 1
        assert tasks["shop.by_itself"].delay("o-2").get(**WAIT) == 1

    assert list(Effect.objects.order_by("name").values_list("name", "detail")) == [("o-1", "1"), ("o-2", "1")]
    assert list(InboxMessage.objects.values_list("state", "attempts", "duplicates")) == [(State.DONE, 2, 0)] * 2


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_whose_result_is_ignored(tasks, worker, pool):
    with worker(pool=pool) as running:
        tasks["shop.quietly"].apply_async(["o-1"], task_id="t-1")
        tasks["shop.quietly"].apply_async(["o-1"], task_id="t-1")
        tasks["shop.quietly"].apply_async(["o-2"], task_id="t-2")
        running.until(lambda: InboxMessage.objects.filter(duplicates=1).exists() and effects("o-2"))

    assert (effects("o-1"), effects("o-2")) == (1, 1)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_that_swallows_an_error_of_the_database_is_no_success(tasks, worker, pool):
    with worker(pool=pool):
        result = tasks["shop.work"].delay("o-1", "swallow an IntegrityError")
        with pytest.raises(Exception, match="its transaction can no longer commit"):
            result.get(**WAIT)

        assert not Effect.objects.exists()
        assert not InboxMessage.objects.exists()
        assert tasks["shop.work"].delay("o-1").get(**WAIT) == "done o-1"


def test_a_chain_goes_on_after_a_duplicate_of_its_head(tasks, worker):
    """The worker dies between the head's commit and the sending of the next, and then the whole chain is sent once more."""
    flow = chain(tasks["shop.work"].s("o-1", "die with the worker after the commit"), tasks["shop.follow"].s("o-1"))
    flow.freeze()
    with worker(concurrency=1) as running:
        result = flow.apply_async()
        running.ends()
    assert not effects("followed o-1")
    with worker(concurrency=1, takes_over=True):
        result.get(**WAIT)
        flow.apply_async()
        wait_until(lambda: InboxMessage.objects.filter(handler="celery.shop.follow", duplicates=1).exists())

    assert (effects("o-1"), effects("followed o-1")) == (1, 1)
    assert Effect.objects.get(name="followed o-1").detail == "done o-1"


def test_a_chord_is_complete_although_a_process_died_over_one_and_two_are_the_same(tasks, worker):
    work = tasks["shop.work"]
    with worker():
        header = [work.s("o-1", "die after the commit"), work.s("o-2"), work.s("o-2")]
        result = chord(header)(tasks["shop.follow"].s("all"))
        result.get(**WAIT)

    assert [effects(name) for name in ("o-1", "o-2", "followed all")] == [1, 1, 1]
    assert Effect.objects.get(name="followed all").detail == "['done o-1', 'done o-2', 'done o-2']"


def test_a_task_that_kills_its_worker_ends_as_a_dead_letter_until_an_operator_sends_it_again(app, current, tasks, worker):
    current(app)
    with worker() as running:
        result = tasks["shop.work"].apply_async(["o-1", "die"], link=tasks["shop.follow"].s("o-1"))
        with pytest.raises(Exception, match="never ended"):
            result.get(**WAIT)
        dead = the_row()
        # The first delivery is not counted: nothing was known against it.
        assert (dead.state, dead.attempts, Effect.objects.using("other").filter(name="died o-1").count()) == ("dead", 3, 4)
        with pytest.raises(Exception, match="was not run"):
            tasks["shop.work"].delay("o-1").get(**WAIT)

        Unique.objects.using("other").create(name="mended")
        call_command("inbox_retry", dead.message_id)
        running.until(lambda: the_row(biz_id="o-1").state == State.DONE)
        running.until(lambda: effects("followed o-1"))

    assert effects("o-1") == 1


def test_a_failure_leaves_nothing_and_a_second_call_is_a_first(tasks, worker):
    with worker():
        with pytest.raises(ValueError, match="no"):
            tasks["shop.work"].delay("o-1", "fail").get(**WAIT)
        assert not InboxMessage.objects.exists()

        assert tasks["shop.work"].delay("o-1").get(**WAIT) == "done o-1"


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
@pytest.mark.parametrize("limit", ["soft_time_limit", "time_limit"])
def test_a_time_limit_is_a_failure_that_leaves_nothing(tasks, worker, limit):
    with worker():
        with pytest.raises((SoftTimeLimitExceeded, TimeLimitExceeded)):
            tasks["shop.work"].apply_async(["o-1", "wait for the word"], **{limit: 2}).get(**WAIT)
        assert tasks["shop.work"].delay("o-1").get(**WAIT) == "done o-1"

    assert effects("o-1") == 1


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_a_hard_time_limit_of_a_delivery_that_came_again_leaves_its_row_to_the_next(tasks, worker):
    with worker() as running:
        result = tasks["shop.work"].apply_async(["o-1", "wait for the word"], time_limit=8)
        running.until(lambda: begun("o-1"))
        running.kill()
    with worker():
        with pytest.raises(TimeLimitExceeded):
            result.get(**WAIT)
        assert (the_row().state, the_row().attempts) == (State.RECEIVED, 1)

        assert tasks["shop.work"].delay("o-1").get(**WAIT) == "done o-1"

    assert effects("o-1") == 1
    assert (the_row().state, the_row().duplicates) == (State.DONE, 0)


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_a_task_that_is_revoked_while_it_runs_is_rolled_back(app, tasks, worker):
    with worker() as running:
        result = tasks["shop.work"].delay("o-1", "wait for the word")
        running.until(lambda: begun("o-1"))
        app.control.revoke(result.id, terminate=True, signal="SIGKILL")
        with pytest.raises(TaskRevokedError):
            result.get(**WAIT)
        assert tasks["shop.work"].delay("o-1").get(**WAIT) == "done o-1"

    assert effects("o-1") == 1


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_a_plain_task_with_late_acknowledgement_does_it_twice(tasks, worker):
    """What all this is for."""
    with worker() as running:
        result = tasks["shop.bare"].delay("o-1")
        [victim] = running.until(lambda: begun("o-1"))
        os.kill(victim, signal.SIGKILL)
        go_on("o-1")
        result.get(**WAIT)

    assert effects("o-1") == 2


def test_a_database_that_is_killed_in_the_middle_fails_nobody(tasks, worker, mortal_postgres, migrated_mortal_database):
    """Its tasks go back to the broker until it is there again."""
    with worker(database=migrated_mortal_database) as running:
        in_the_middle = tasks["shop.work"].delay("o-1", "wait for the word")
        running.until(lambda: begun("o-1"))
        mortal_postgres.kill()
        come_later = [tasks["shop.charge"].delay({"id": f"o-{n}"}) for n in (2, 3)]
        running.until(lambda: running.said().count("the database is away") >= 2)
        go_on("o-1")
        running.until(lambda: in_the_middle.id in running.said().partition("comes again")[2])
        mortal_postgres.start()

        assert in_the_middle.get(**WAIT) == "done o-1"
        assert all(result.get(**WAIT) for result in come_later)

    assert [effects(f"o-{n}") for n in (1, 2, 3)] == [1, 1, 1]
