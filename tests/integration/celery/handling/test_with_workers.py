"""Real workers on RabbitMQ and on Redis: tasks sent twice, delivered twice, killed in the middle. Each effect happens once."""

import os
import signal

import pytest
from celery import chain, chord
from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded
from django.core.management import call_command

from exactly_once.models import Minute
from inbox.models import InboxMessage
from inbox.states import State
from tests.integration.celery.handling.project import begun, release
from tests.support.apps.effects.models import Effect, Unique
from tests.support.deliveries import effects, the_row
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.timeout(180)]

WAIT = {"timeout": 60, "interval": 0.05}


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_task_sent_eight_times_under_eight_ids_has_one_effect_and_is_counted_in_the_statistics(tasks, worker, pool):
    def handled():
        return list(Minute.objects.filter(subject="celery.shop.charge", counts__handled__gt=0))

    with worker(pool=pool, concurrency=4) as running:
        sent = [tasks["shop.charge"].delay({"id": "o-1"}) for _ in range(8)]
        answers = [result.get(**WAIT) for result in sent]
        [minute] = running.until(handled)

    assert effects() == 1
    assert answers == [answers[0]] * 8
    row = the_row()
    assert (row.handler, row.biz_id, row.state, row.duplicates, row.conflicts) == ("celery.shop.charge", "o-1", "done", 7, 0)
    assert (minute.counts["handled"], sum(minute.times["to_effect"].values())) == (1, 1)


def test_task_whose_worker_is_killed_in_the_middle_has_one_effect(tasks, worker):
    with worker() as running:
        result = tasks["shop.work"].delay("o-1", "wait until released")
        running.until(lambda: begun("o-1"))
        running.kill()
    release("o-1")
    with worker(takes_over=True):
        assert result.get(**WAIT) == "done o-1"

    assert effects("o-1") == 1
    assert the_row().state == State.DONE


def test_task_whose_worker_is_killed_between_commit_and_acknowledgement_has_one_effect(tasks, worker):
    with worker() as running:
        result = tasks["shop.work"].delay("o-1", "die with the worker after the commit")
        running.ends()
    assert effects("o-1") == 1
    with worker(takes_over=True):
        assert result.get(**WAIT) == "done o-1"

    assert effects("o-1") == 1
    assert (the_row().duplicates, the_row().redeliveries) == (1, 1)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
@pytest.mark.parametrize(("serializer", "answer"), [("pickle", "is sent again"), ("yaml", "cannot be sent again")])
def test_concurrent_duplicate_that_is_not_json_is_sent_again_as_pickle_or_stays_with_the_broker(
    tasks, worker, pool, serializer, answer
):
    """It holds a set, and the copy would be sent as JSON, the serialiser of the task."""
    with worker(pool=pool, accept_content=["json", serializer]) as running:
        first = tasks["shop.work"].delay("o-1", "wait until released")
        running.until(lambda: begun("o-1"))
        second = tasks["shop.work"].apply_async(["o-1", {"a set"}], serializer=serializer)
        running.until(lambda: answer in running.said())
        release("o-1")

        assert [first.get(**WAIT), second.get(**WAIT)] == ["done o-1"] * 2

    assert effects("o-1") == 1


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_kill_concurrent_duplicate_and_countdown_on_quorum_queues_have_one_effect(app, tasks, worker):
    """On quorum queues RabbitMQ delays the messages of Celery, by whole seconds."""
    quorum = {"task_default_queue_type": "quorum", "task_default_exchange_type": "topic"}
    app.conf.update(quorum)
    with worker(**quorum) as running:
        first = tasks["shop.work"].delay("o-1", "wait until released")
        [victim] = running.until(lambda: begun("o-1"))
        second = tasks["shop.work"].delay("o-1", "wait until released")
        running.until(lambda: running.said().count("is sent again with a countdown") >= 2)
        os.kill(victim, signal.SIGKILL)
        running.until(lambda: len(begun("o-1")) == 2)
        release("o-1")

        assert [first.get(**WAIT), second.get(**WAIT)] == ["done o-1"] * 2
        assert tasks["shop.try_again"].apply_async(["o-2"], countdown=1).get(**WAIT) == 1

    assert (effects("o-1"), effects("o-2")) == (1, 1)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_task_that_redis_redelivers_while_it_runs_has_one_effect(tasks, worker):
    with worker() as running:
        result = tasks["shop.work"].delay("o-1", "wait until released")
        running.until(lambda: begun("o-1"))
        with worker(takes_over=True) as other:
            other.until(lambda: "is sent again with a countdown" in running.said() + other.said())
            assert len(begun("o-1")) == 1
            release("o-1")
            assert result.get(**WAIT) == "done o-1"
            wait_until(lambda: the_row().duplicates)

    assert effects("o-1") == 1


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_retry_is_not_a_duplicate_of_the_failed_attempt(tasks, worker, pool):
    with worker(pool=pool):
        assert tasks["shop.try_again"].delay("o-1").get(**WAIT) == 1
        assert tasks["shop.by_itself"].delay("o-2").get(**WAIT) == 1

    assert list(Effect.objects.order_by("name").values_list("name", "detail")) == [("o-1", "1"), ("o-2", "1")]
    assert list(InboxMessage.objects.values_list("state", "attempts", "duplicates")) == [(State.DONE, 2, 0)] * 2


def test_chain_continues_after_a_duplicate_of_its_head(tasks, worker):
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


def test_chord_completes_with_a_killed_pool_process_and_duplicate_members(tasks, worker):
    work = tasks["shop.work"]
    with worker():
        header = [work.s("o-1", "die after the commit"), work.s("o-2"), work.s("o-2")]
        chord(header)(tasks["shop.follow"].s("all")).get(**WAIT)

    assert [effects(name) for name in ("o-1", "o-2", "followed all")] == [1, 1, 1]
    assert Effect.objects.get(name="followed all").detail == "['done o-1', 'done o-2', 'done o-2']"


def test_task_that_kills_its_worker_is_a_dead_letter_that_an_operator_can_send_again(app, current, tasks, worker):
    current(app)
    with worker() as running:
        result = tasks["shop.work"].apply_async(["o-1", "die"], link=tasks["shop.follow"].s("o-1"))
        with pytest.raises(Exception, match="never ended"):
            result.get(**WAIT)
        dead = the_row()
        # The first delivery is not counted: the attempts are counted from the first redelivery.
        assert (dead.state, dead.attempts, Effect.objects.using("other").filter(name="died o-1").count()) == ("dead", 3, 4)
        with pytest.raises(Exception, match="was not run"):
            tasks["shop.work"].delay("o-1").get(**WAIT)

        Unique.objects.using("other").create(name="mended")
        call_command("inbox_retry", dead.message_id)
        running.until(lambda: the_row(biz_id="o-1").state == State.DONE)
        running.until(lambda: effects("followed o-1"))

    assert effects("o-1") == 1


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
@pytest.mark.parametrize("limit", ["soft_time_limit", "time_limit"])
def test_task_that_exceeds_its_time_limit_leaves_no_effect_and_its_next_call_runs(tasks, worker, limit):
    with worker():
        with pytest.raises((SoftTimeLimitExceeded, TimeLimitExceeded)):
            tasks["shop.work"].apply_async(["o-1", "wait until released"], **{limit: 2}).get(**WAIT)
        assert tasks["shop.work"].delay("o-1").get(**WAIT) == "done o-1"

    assert effects("o-1") == 1


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_hard_time_limit_of_a_redelivered_task_leaves_its_row_for_the_next_call(tasks, worker):
    with worker() as running:
        result = tasks["shop.work"].apply_async(["o-1", "wait until released"], time_limit=8)
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
def test_plain_task_with_acks_late_has_two_effects_when_its_process_is_killed(tasks, worker):
    """The control: without the inbox the effect happens twice."""
    with worker() as running:
        result = tasks["shop.bare"].delay("o-1")
        [victim] = running.until(lambda: begun("o-1"))
        os.kill(victim, signal.SIGKILL)
        release("o-1")
        result.get(**WAIT)

    assert effects("o-1") == 2


def test_tasks_survive_a_database_that_is_killed_while_they_run(tasks, worker, mortal_postgres, migrated_mortal_database):
    """Their messages return to the broker until the database is available again."""
    with worker(database=migrated_mortal_database) as running:
        in_the_middle = tasks["shop.work"].delay("o-1", "wait until released")
        running.until(lambda: begun("o-1"))
        mortal_postgres.kill()
        sent_meanwhile = [tasks["shop.charge"].delay({"id": f"o-{n}"}) for n in (2, 3)]
        running.until(lambda: running.said().count("the database is unavailable") >= 2)
        release("o-1")
        running.until(lambda: in_the_middle.id in running.said().partition("is sent again")[2])
        mortal_postgres.start()

        assert in_the_middle.get(**WAIT) == "done o-1"
        assert all(result.get(**WAIT) for result in sent_meanwhile)

    assert [effects(f"o-{n}") for n in (1, 2, 3)] == [1, 1, 1]
