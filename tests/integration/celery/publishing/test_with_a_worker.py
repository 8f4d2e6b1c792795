"""Calls inside a transaction, a relay, and a real Celery worker, on RabbitMQ and on Redis."""

from datetime import datetime

import pytest
from django.db import transaction

from inbox.models import InboxMessage
from outbox.models import OutboxMessage
from outbox.states import State
from tests.integration.celery.publishing.conftest import SECONDS, Worker, called, published
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import effects
from tests.support.relaying import relaying
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240), pytest.mark.usefixtures("running")]


@pytest.fixture(scope="module", params=["rabbitmq", "redis"])
def broker(request):
    """One for all tests of the module, so that they may share a worker."""
    server = request.getfixturevalue({"rabbitmq": "shared_rabbitmq", "redis": "redis_server"}[request.param]).start()
    if request.param == "redis":
        server.flush()
        yield server.url
    else:
        url = server.new_vhost()
        yield url
        server.delete_vhost(url)


@pytest.fixture(scope="module")
def results(redis_server):
    return redis_server.start().url.rpartition("/")[0] + "/5"


@pytest.fixture(scope="module")
def workers(broker):
    """The workers that several tests use."""
    running = []
    yield running
    for worker in running:
        worker.kill()


@pytest.fixture
def worker(workers, broker, results, process_environment, tmp_path_factory):
    """A worker that has begun to take tasks; the first test starts it."""
    if not workers:
        log = tmp_path_factory.mktemp("worker") / "worker.log"
        workers.append(Worker(broker, results, process_environment, log).start())
    workers[0].until(workers[0].is_ready)
    return workers[0]


@pytest.fixture
def relay(broker):
    with relaying(broker):
        yield


@pytest.fixture
def running(worker, relay):
    """A worker and a relay."""
    return worker


class TestCall:
    def test_committed_call_runs_once_with_its_task_id(self, tasks):
        with transaction.atomic():
            result = tasks["tests.write"].delay("one", detail="ä 🍰")
            assert result.id
            assert result.state == "PENDING"

        assert result.get(timeout=SECONDS) == "one"
        assert [effect.detail for effect in Effect.objects.filter(name="one")] == ["ä 🍰"]
        assert len(published()) == 1

    def test_delayed_call_waits_in_the_outbox(self, tasks):
        with transaction.atomic():
            result = tasks["tests.look"].apply_async(countdown=1)
            assert OutboxMessage.objects.get().state == State.SCHEDULED

        seen = result.get(timeout=SECONDS)

        [row] = published()
        assert row.settled_at >= row.deliver_at == datetime.fromisoformat(seen["eta"])

    def test_call_inside_a_task_commits_with_the_transaction_of_the_task(self, tasks):
        called(lambda: tasks["tests.order"].delay("fails", fails=True)).get(timeout=SECONDS, propagate=False)
        called(lambda: tasks["tests.order"].delay("works")).get(timeout=SECONDS)

        wait_until(lambda: effects("followed works"))
        _, works, followed = OutboxMessage.objects.order_by("pk")
        assert (followed.causation_id, followed.correlation_id) == (works.biz_id, works.biz_id)
        assert effects("ordered fails") == effects("followed fails") == 0

    def test_retry_survives_the_rollback_that_it_causes(self, tasks):
        called(lambda: tasks["tests.try_again"].delay("it")).get(timeout=SECONDS)

        assert [effect.detail for effect in Effect.objects.filter(name="tried it")] == ["2"]

    def test_replacement_survives_the_rollback_that_it_causes(self, tasks):
        result = called(lambda: tasks["tests.replace_itself"].delay("it"))

        assert result.get(timeout=SECONDS) == "replacement of it"
        assert (effects("replaced it"), effects("replacement of it")) == (0, 1)


class TestBothHalves:
    def test_task_that_the_relay_sends_twice_has_one_effect(self, tasks):
        assert called(lambda: tasks["tests.charge"].delay("o-1")).get(timeout=SECONDS) == "o-1"
        published()

        OutboxMessage.objects.update(state=State.READY, day=0)  # as if the relay had died before it stored the confirm

        wait_until(lambda: InboxMessage.objects.filter(duplicates=1).exists())
        assert effects("charged o-1") == 1

    def test_two_calls_for_one_business_id_have_one_effect(self, tasks):
        first, second = called(lambda: [tasks["tests.charge"].delay("o-2") for _ in range(2)])

        assert first.get(timeout=SECONDS) == second.get(timeout=SECONDS) == "o-2"
        assert effects("charged o-2") == 1

    def test_retry_of_an_idempotent_outbox_task_survives_the_rollback(self, tasks):
        assert called(lambda: tasks["tests.charge"].delay("o-3", retries=2)).get(timeout=SECONDS) == "o-3"

        assert [effect.detail for effect in Effect.objects.filter(name="charged o-3")] == ["2"]
