"""Publishing from async code: inside a transaction of the synchronous code around it, or not at all."""

import asyncio
import re
import sys
import threading
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from urllib.parse import urlencode

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.core.handlers.asgi import ASGIHandler
from django.db import connections, transaction
from django.http import JsonResponse
from django.urls import path

from inbox import states
from outbox import (
    Draft,
    Outcome,
    PublishedOutsideTransaction,
    acancel,
    apublish,
    apublish_many,
    apublish_now,
    areschedule,
    arestore,
    publish,
)
from outbox.models import OutboxMessage
from outbox.states import State
from tests.support import ROOT
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import an_envelope, deliver
from tests.support.relaying import SECONDS, TOPIC, published, state_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(databases=["default", "other"], transaction=True)

HOUR = timedelta(hours=1)


class Orders:
    """The manager of a model `Order`, whose rows are effects."""

    def create(self, customer):
        return Effect.objects.create(name=customer)

    async def aget(self, **wanted):
        return await Effect.objects.aget(**wanted)


@pytest.fixture
def documented(monkeypatch):
    """Run the code under this title on the page, and return its names."""
    orders = ModuleType("orders")
    orders.models = ModuleType("orders.models")
    orders.models.Order = SimpleNamespace(objects=Orders())
    monkeypatch.setitem(sys.modules, "orders", orders)
    monkeypatch.setitem(sys.modules, "orders.models", orders.models)
    page = (ROOT / "docs" / "how-to" / "async.md").read_text()

    def run(title):
        [code] = re.findall(rf'^```python title="{re.escape(title)}"\n(.*?)^```', page, re.MULTILINE | re.DOTALL)
        names = {"__name__": title}
        exec(compile(code.replace("-> Order", "-> object"), title, "exec"), names)
        return names

    return run


async def in_executor_thread(coroutine):
    """Await it where no server has given the task a thread of its own, and close the connections of the common one."""
    try:
        return await coroutine
    finally:
        await sync_to_async(connections.close_all)()


def respond(view, settings, **data):
    """The response of an async view on an ASGI server."""
    urls = ModuleType("urls_of_a_view")
    urls.urlpatterns = [path("view/", view)]
    settings.ROOT_URLCONF, settings.MIDDLEWARE = urls, []

    async def request():
        headers = [(b"content-type", b"application/x-www-form-urlencoded")]
        scope = {"type": "http", "method": "POST", "path": "/view/", "query_string": b"", "headers": headers}
        server = ApplicationCommunicator(ASGIHandler(), scope)
        await server.send_input({"type": "http.request", "body": urlencode(data).encode()})
        start = await server.receive_output(SECONDS)
        await server.receive_output(SECONDS)
        await server.wait(SECONDS)
        return start["status"]

    return asyncio.run(request())


class TestAsyncView:
    def test_documented_view_commits_its_change_together_with_the_message_or_neither(self, documented, settings):
        names = documented("orders/views.py")
        assert respond(names["checkout"], settings, customer="ann") == 200

        [order], [message] = Effect.objects.all(), OutboxMessage.objects.all()
        assert (order.name, message.biz_id, message.state) == ("ann", f"order-{order.id}", State.READY)

        def fail(*args, **options):
            publish(*args, **options)
            raise ValueError("no stock")

        names["publish"] = fail
        assert respond(names["checkout"], settings, customer="ann") == 500
        assert (Effect.objects.count(), OutboxMessage.objects.count()) == (1, 1)

    def test_apublish_in_a_view_is_refused_with_a_remedy_that_publishes(self, settings):
        refusals = []

        def function(using):
            publish(TOPIC, {}, using=using)

        async def view(request):
            await Effect.objects.acreate(name="order")
            for refused in (apublish(TOPIC, {}), apublish_many([Draft(TOPIC, {})]), apublish(TOPIC, {}, using="other")):
                with pytest.raises(PublishedOutsideTransaction) as raised:
                    await refused
                refusals.append(str(raised.value))
            with pytest.raises(PublishedOutsideTransaction) as raised:
                publish(TOPIC, {})
            refusals.append(str(raised.value))
            await sync_to_async(transaction.atomic(function))("default")
            await sync_to_async(transaction.atomic(using="other")(function))("other")
            return JsonResponse({})

        assert respond(view, settings) == 200

        assert "'default': async code cannot open one" in refusals[0]
        assert "`await sync_to_async(transaction.atomic(function))()`" in refusals[0]
        assert refusals[0] == refusals[1] == refusals[3]
        assert "`await sync_to_async(transaction.atomic(using='other')(function))()`" in refusals[2]
        assert [OutboxMessage.objects.using(alias).count() for alias in ("default", "other")] == [1, 1]

    def test_decisions_in_a_view_commit_at_once(self, settings):
        message, decisions = published(delay=HOUR), []

        async def view(request):
            decisions.append(await areschedule(message.id, delay=2 * HOUR))
            decisions.append(await acancel(message_id=message.id))
            decisions.append(await arestore(message.id))
            decisions.append(await apublish_now(message.id, using="other"))
            raise ValueError("afterwards")

        assert respond(view, settings) == 500
        rescheduled, cancelled, restored, unknown = decisions
        assert (rescheduled.outcome, cancelled.outcome) == (Outcome.RESCHEDULED, Outcome.CANCELLED)
        assert (restored.outcome, unknown.outcome) == (Outcome.RESTORED, Outcome.NOT_FOUND)
        assert state_of(message) == State.SCHEDULED

    def test_cancelled_view_leaves_a_change_and_its_message_or_neither(self, documented):
        names, begun, released = documented("orders/views.py"), threading.Event(), threading.Event()

        def publish_later(*args, **options):
            begun.set()
            assert released.wait(SECONDS)
            return publish(*args, **options)

        names["publish"] = publish_later

        async def disconnected():
            view = asyncio.create_task(names["place_order"]("ann"))
            await asyncio.to_thread(begun.wait, SECONDS)
            view.cancel()
            with pytest.raises(asyncio.CancelledError):
                await view
            assert not released.is_set()
            released.set()

        asyncio.run(in_executor_thread(disconnected()))

        wait_until(Effect.objects.exists)
        assert OutboxMessage.objects.count() == 1


@pytest.mark.every_database
class TestInsideATransaction:
    def test_documented_handler_publishes_in_its_transaction(self, documented, handles, monkeypatch):
        order, handlers = Effect.objects.create(name="ann"), []

        def registering(topic):
            return lambda function: handlers.append(handles(function, topic=topic))

        monkeypatch.setattr("inbox.idempotent_handler", registering)
        documented("orders/handlers.py")

        envelope = an_envelope(topic="payment.received", payload={"order_id": order.id})
        assert deliver(handlers[0], envelope) is states.Outcome.HANDLED
        assert OutboxMessage.objects.get().biz_id == f"confirmed-{order.id}"

    @pytest.mark.parametrize("is_left", [False, True])
    def test_apublish_joins_the_transaction_around_async_to_sync(self, is_left):
        async def business():
            await Effect.objects.acreate(name="order")
            return await asyncio.gather(
                apublish(TOPIC, {}, biz_id="order-1"), apublish_many([Draft(TOPIC, {}), Draft(TOPIC, {})])
            )

        with transaction.atomic():
            one, many = async_to_sync(business)()
            transaction.set_rollback(is_left)

        assert (one.biz_id, one.created, len(many)) == ("order-1", True, 2)
        assert (Effect.objects.count(), OutboxMessage.objects.count()) == ((0, 0) if is_left else (1, 3))

    def test_apublish_joins_the_transaction_of_another_thread_that_called_it(self):
        def business():
            with transaction.atomic():
                Effect.objects.create(name="order")
                return async_to_sync(apublish)(TOPIC, {}, biz_id="order-1")

        message = asyncio.run(in_executor_thread(sync_to_async(business)()))

        assert message.biz_id == OutboxMessage.objects.get().biz_id
