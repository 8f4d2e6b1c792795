"""Tasks are not lost when a worker is killed or not started yet."""

import pytest

from outbox.models import OutboxMessage
from outbox.states import State
from tests.integration.celery.publishing.conftest import SECONDS, Worker, called
from tests.support.relaying import relaying
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]


def test_call_made_before_its_queue_exists_is_retried_until_a_worker_declares_it(
    rabbitmq_url, make, results, process_environment, tmp_path
):
    """The row stays retrying while the queue does not exist."""
    tasks = make(rabbitmq_url, results).tasks
    with relaying(rabbitmq_url):
        result = called(lambda: tasks["tests.write"].delay("early"))
        # The last error is another one while the topic is paused.
        refused = OutboxMessage.objects.filter(attempts__gt=3, last_error__contains="queue 'celery' does not exist")
        wait_until(refused.filter(state=State.RETRYING).exists)

        with Worker(rabbitmq_url, results, process_environment, tmp_path / "worker.log") as worker:
            worker.until(worker.is_ready)
            assert result.get(timeout=SECONDS) == "early"


def test_delayed_task_for_quorum_queues_is_delayed_by_the_outbox_only(
    rabbitmq_url, make, results, process_environment, tmp_path
):
    settings = {"task_default_queue_type": "quorum", "task_default_exchange_type": "topic", "worker_detect_quorum_queues": True}
    tasks = make(rabbitmq_url, results, **settings).tasks
    worker = Worker(rabbitmq_url, results, process_environment, tmp_path / "worker.log", **settings)
    with worker, relaying(rabbitmq_url):
        worker.until(worker.is_ready)
        result = called(lambda: tasks["tests.look"].apply_async(countdown=1))

        assert result.get(timeout=SECONDS)["routing_key"] == "celery"
