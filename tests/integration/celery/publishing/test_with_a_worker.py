"""Calls inside a transaction, a relay, and a real Celery worker, on RabbitMQ and on Redis."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from celery import chain, chord, group
from django.db import transaction

from inbox.models import InboxMessage
from outbox.models import OutboxMessage, State
from tests.integration.celery.publishing.conftest import SECONDS, Worker, called, published
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import effects, wait_until
from tests.support.relaying import relaying

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]


@pytest.fixture(scope="module", params=["rabbitmq", "redis"])
def broker(request):
    """One for all tests of the module, so that they may share a worker."""
    server = request.getfixturevalue(f"{request.param}_server").start()
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
    """Those that outlast their test."""
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


@pytest.mark.usefixtures("running")
class TestACall:
    def test_runs_once_with_the_id_it_was_given(self, tasks):
        with transaction.atomic():
            result = tasks["tests.write"].delay("one", detail="ä 🍰")
            assert result.id
            assert result.state == "PENDING"

        assert result.get(timeout=SECONDS) == "one"
        assert [effect.detail for effect in Effect.objects.filter(name="one")] == ["ä 🍰"]
        assert len(published()) == 1

    def test_that_is_rolled_back_never_runs(self, tasks):
        with suppress(ZeroDivisionError), transaction.atomic():
            tasks["tests.write"].delay("rolled back")
            raise ZeroDivisionError

        with transaction.atomic():
            after = [tasks["tests.write"].delay(f"after {n}") for n in range(3)]
        assert [result.get(timeout=SECONDS) for result in after] == ["after 0", "after 1", "after 2"]
        assert effects("rolled back") == 0

    def test_carries_everything_to_the_worker(self, tasks):
        soon = datetime.now(tz=UTC) + timedelta(hours=1)
        result = called(
            lambda: tasks["tests.look"].apply_async(
                queue="aside",
                priority=5,
                expires=soon,
                group_id="a group",
                root_id="root",
                parent_id="parent",
                headers={"tenant": "acme", "nested": {"none": None, "list": [1, {"x": True}]}},
                stamped_headers=["stamp"],
                stamp=["a"],
            )
        )

        assert result.get(timeout=SECONDS) == {
            "id": result.id,
            "root_id": "root",
            "parent_id": "parent",
            "group": "a group",
            "correlation_id": result.id,
            "eta": None,
            "expires": soon.isoformat(),
            "tenant": "acme",
            "nested": {"none": None, "list": [1, {"x": True}]},
            "priority": 5,
            "routing_key": "aside",
            "ignore_result": False,
            "stamps": {"stamp": ["a"]},
        }

    @pytest.mark.parametrize("options", [{"serializer": "pickle"}, {"compression": "zlib"}], ids=str)
    def test_is_read_in_any_form(self, options, tasks):
        assert called(lambda: tasks["tests.add"].apply_async([1, 2], **options)).get(timeout=SECONDS) == 3

    def test_that_is_delayed_waits_in_the_outbox_and_not_in_the_worker(self, tasks):
        with transaction.atomic():
            result = tasks["tests.look"].apply_async(countdown=1)
            assert OutboxMessage.objects.get().state == State.SCHEDULED

        told = result.get(timeout=SECONDS)

        [row] = published()
        assert row.settled_at >= row.deliver_at == datetime.fromisoformat(told["eta"])

    def test_that_comes_after_its_end_does_not_run(self, tasks):
        with transaction.atomic():
            tasks["tests.write"].apply_async(["too late"], countdown=1.5, expires=1)

        wait_until(lambda: OutboxMessage.objects.filter(state=State.EXPIRED).exists())
        called(lambda: tasks["tests.add"].delay(1, 2)).get(timeout=SECONDS)
        assert effects("too late") == 0

    def test_from_within_a_task_commits_with_what_the_task_did(self, tasks):
        called(lambda: tasks["tests.order"].delay("fails", fails=True)).get(timeout=SECONDS, propagate=False)
        called(lambda: tasks["tests.order"].delay("works")).get(timeout=SECONDS)

        wait_until(lambda: effects("followed works"))
        _, works, followed = OutboxMessage.objects.order_by("pk")
        assert (followed.causation_id, followed.correlation_id) == (works.biz_id, works.biz_id)
        assert effects("ordered fails") == effects("followed fails") == 0

    def test_for_a_retry_survives_the_transaction_that_the_retry_rolls_back(self, tasks):
        called(lambda: tasks["tests.try_again"].delay("it")).get(timeout=SECONDS)

        assert [effect.detail for effect in Effect.objects.filter(name="tried it")] == ["2"]

    def test_for_a_replacement_survives_the_transaction_that_it_rolls_back(self, tasks):
        result = called(lambda: tasks["tests.hand_on"].delay("it"))

        assert result.get(timeout=SECONDS) == "in its place it"
        assert (effects("replaced it"), effects("in its place it")) == (0, 1)


@pytest.mark.usefixtures("running")
class TestBothHalves:
    def test_a_message_that_the_relay_sends_twice_has_one_effect(self, tasks):
        result = called(lambda: tasks["tests.charge"].delay("o-1"))
        assert result.get(timeout=SECONDS) == "o-1"
        published()

        OutboxMessage.objects.update(state=State.READY)  # as if the relay had died before it wrote down what the broker said

        wait_until(lambda: InboxMessage.objects.filter(duplicates=1).exists())
        assert effects("charged o-1") == 1

    def test_two_calls_for_one_business_id_have_one_effect(self, tasks):
        first, second = called(lambda: [tasks["tests.charge"].delay("o-2") for _ in range(2)])

        assert first.get(timeout=SECONDS) == second.get(timeout=SECONDS) == "o-2"
        assert effects("charged o-2") == 1

    def test_a_retry_survives_the_transaction_that_it_rolls_back(self, tasks):
        assert called(lambda: tasks["tests.charge"].delay("o-3", retries=2)).get(timeout=SECONDS) == "o-3"

        assert [effect.detail for effect in Effect.objects.filter(name="charged o-3")] == ["2"]


@pytest.mark.usefixtures("running")
class TestSeveral:
    def test_in_a_chain_follow_each_other(self, tasks):
        result = called(
            lambda: chain(tasks["tests.add"].s(1, 2), tasks["tests.add"].s(3), tasks["tests.add"].s(4)).apply_async()
        )

        assert (result.get(timeout=SECONDS), result.parent.get(), result.parent.parent.get()) == (10, 6, 3)

    def test_that_are_linked_follow_it(self, tasks):
        called(lambda: tasks["tests.write"].apply_async(["first"], link=tasks["tests.write"].si("linked")))

        wait_until(lambda: effects("linked"))
        assert effects("first") == 1

    def test_in_a_group_run_each(self, tasks):
        result = called(lambda: group(tasks["tests.add"].s(n, n) for n in range(5)).apply_async())

        assert result.get(timeout=SECONDS) == [0, 2, 4, 6, 8]
        assert OutboxMessage.objects.count() == 5

    def test_in_a_chord_come_together(self, tasks):
        result = called(lambda: chord([tasks["tests.add"].s(n, n) for n in range(5)])(tasks["tests.total"].s()))

        assert result.get(timeout=SECONDS) == 20

    def test_that_are_rolled_back_never_run(self, tasks):
        with suppress(ZeroDivisionError), transaction.atomic():
            chord([tasks["tests.write"].s(f"part {n}") for n in range(3)])(tasks["tests.write"].si("whole"))
            raise ZeroDivisionError

        called(lambda: tasks["tests.add"].delay(1, 2)).get(timeout=SECONDS)
        assert effects() == 0
