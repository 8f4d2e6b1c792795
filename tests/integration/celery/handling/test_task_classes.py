"""A project's own task classes and tasks that call themselves work as in Celery."""

import pytest
from celery import Celery, Task, states
from celery.app.trace import _install_stack_protection, reset_worker_optimizations
from celery.exceptions import Reject
from django.db import OperationalError, transaction

from exactly_once.sql.days import LIVE
from inbox.celery import IdempotentTask, idempotent_task
from inbox.errors import NotRun
from inbox.models import InboxMessage
from inbox.states import State
from inbox.store import arrivals, dialect, message_rows
from outbox.celery import OutboxTask
from outbox.models import OutboxMessage
from tests.integration.celery.handling.tracing import deliver
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import effects, the_row

pytestmark = pytest.mark.django_db


def the_effect(order_id):
    Effect.objects.create(name=str(order_id))
    return order_id


class Client(Task):
    """Celery's own example: one instance in each process, with state that its tasks share."""

    def __init__(self):
        self.users = {"george": "password"}


class Wrapped(Task):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


class AutoRetrying(Task):
    autoretry_for = (Exception,)
    dont_autoretry_for = (ValueError,)
    max_retries = 3


class TestBaseClasses:
    @pytest.mark.parametrize("by_app", [False, True], ids=["base", "task_cls"])
    def test_init_of_the_base_class_is_called(self, decorated, local_app, by_app):
        def look(self, order_id):
            the_effect(order_id)
            return self.users["george"]

        if by_app:
            local_app.task_cls = Client
        task = decorated(look, base=None if by_app else Client, bind=True, biz_id="order_id")

        assert [deliver(task, "o-1"), deliver(task, "o-1")] == [(states.SUCCESS, "password")] * 2
        assert effects() == 1

    def test_task_class_whose_init_does_not_call_super_is_still_idempotent(self, a_task):
        class Sloppy(IdempotentTask):
            def __init__(self):
                self.users = {}

        task = a_task(the_effect, base=Sloppy, biz_id="order_id")

        for _ in range(2):
            deliver(task, "o-1")

        assert effects() == 1

    def test_dont_autoretry_for_of_the_base_class_is_respected(self, decorated, sent):
        def fail(order_id):
            raise ValueError("no")

        task = decorated(fail, base=AutoRetrying, biz_id="order_id")

        assert deliver(task, "o-1")[0] == states.FAILURE
        assert sent() == []

    @pytest.mark.parametrize("worker", [False, True])
    @pytest.mark.parametrize("eager", [False, True])
    def test_task_whose_base_overrides_call_is_still_deduplicated(self, a_task, worker, eager):
        class Both(IdempotentTask, Wrapped):
            pass

        task = a_task(the_effect, base=Both, biz_id="order_id")
        if worker:
            _install_stack_protection()
        try:
            for _ in range(2):
                if eager:
                    assert task.apply(["o-1"]).get() == "o-1"
                else:
                    assert deliver(task, "o-1") == (states.SUCCESS, "o-1")
        finally:
            reset_worker_optimizations(task.app)

        assert (effects(), the_row().duplicates) == (1, 1)

    def test_idempotent_task_as_task_cls_makes_every_task_idempotent(self, current):
        app = Celery("tests", broker="memory://", backend="cache+memory://", set_as_current=False, task_cls=IdempotentTask)
        current(app)
        task = idempotent_task(name="shared.of_the_class", biz_id="order_id")(the_effect)
        plain = app.task(the_effect, name="shared.by_its_id", shared=False)

        for one in (task, plain):
            for _ in range(2):
                assert deliver(one, "o-1", task_id="t-1") == (states.SUCCESS, "o-1")

        assert effects() == 2
        app.close()

    def test_task_cls_of_the_app_is_the_default_base(self, current):
        class Shop(OutboxTask):
            color = "red"

        app = Celery("tests", broker="memory://", backend="cache+memory://", set_as_current=False, task_cls=Shop)
        current(app)
        task = idempotent_task(name="shared.of_the_app", biz_id="order_id")(the_effect)

        assert task.color == "red"
        with transaction.atomic():
            task.delay("o-1")
        assert OutboxMessage.objects.get().topic == "celery.shared.of_the_app"
        app.close()


class TestDirectCall:
    @pytest.mark.parametrize("worker", [False, True])
    @pytest.mark.parametrize("eager", [False, True])
    def test_task_that_calls_itself_directly_only_calls_the_function(self, a_task, worker, eager):
        def count(self, order_id, depth=0):
            the_effect(f"{order_id}/{depth}")
            return self(order_id, depth + 1) if depth < 2 else depth

        task = a_task(count, bind=True, biz_id="order_id")
        if worker:
            _install_stack_protection()
        try:
            for _ in range(2):
                given = task.apply(["o-1"]) if eager else deliver(task, "o-1")
                assert (given.get() if eager else given[1]) == 2
        finally:
            reset_worker_optimizations(task.app)

        assert (effects(), the_row().duplicates) == (3, 1)


class TestRetries:
    @pytest.mark.parametrize("dont_autoretry_for", [(), (ValueError,)])
    def test_not_run_is_never_retried_by_autoretry(self, a_task, sent, dont_autoretry_for):
        task = a_task(the_effect, biz_id="order_id", autoretry_for=(Exception,), dont_autoretry_for=dont_autoretry_for)
        deliver(task, "o-1")
        InboxMessage.objects.update(state=State.DEAD, day=LIVE, last_error="because")

        state, error = deliver(task, "o-1")

        assert (state, type(error), sent()) == (states.FAILURE, NotRun, [])
        assert "is dead in the inbox (because)" in str(error)

    @pytest.fixture
    def busy(self, monkeypatch):
        def begin_fresh(*args, **kwargs):
            raise message_rows.ConcurrentDuplicate

        monkeypatch.setattr(arrivals, "begin_fresh", begin_fresh)

    @pytest.mark.usefixtures("busy")
    def test_concurrent_duplicate_that_cannot_be_sent_again_is_requeued_despite_autoretry(self, a_task):
        task = a_task(the_effect, autoretry_for=(Exception,))

        # It came as pickle, and this task is sent as JSON.
        state, reject = deliver(task, object())

        assert (state, isinstance(reject, Reject), reject.requeue) == (states.REJECTED, True, True)

    @pytest.mark.usefixtures("busy")
    def test_concurrent_duplicate_with_arguments_that_are_not_json_is_sent_again_as_pickle(self, local_app, a_task, sent):
        local_app.conf.accept_content = ["json", "pickle"]

        state, _ = deliver(a_task(the_effect), object(), task_id="t-1")

        [copy] = sent()
        assert (state, copy.headers["id"], copy.content_type) == (states.IGNORED, "t-1", "application/x-python-serialize")

    def test_transaction_that_is_run_again_gets_the_original_arguments(self, a_task):
        """A transaction that failed to serialise is run again at once, without Celery."""
        collide = [True]

        def pay(order, lines):
            the_effect(order.pop("id"))
            lines.append("changed")
            if collide:
                collide.clear()
                raise OperationalError("database is locked")
            return [order, lines]

        task = a_task(pay, biz_id="order.id")

        assert deliver(task, {"id": "o-1"}, kwargs={"lines": []}) == (states.SUCCESS, [{}, ["changed"]])
        assert [effect.name for effect in Effect.objects.all()] == ["o-1"]

    def test_copy_of_a_delivery_has_the_original_arguments(self, a_task, sent, monkeypatch):
        def pay(lines):
            lines.append("changed")
            monkeypatch.setattr(dialect, "is_reachable", lambda alias: False)
            raise OperationalError("server closed the connection unexpectedly")

        deliver(a_task(pay), [1])

        [message] = sent()
        assert message.payload[0] == [[1]]
