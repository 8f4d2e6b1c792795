"""The depths of queues, as RabbitMQ's management API reports them to a page."""

import socket

import pytest

from exactly_once.transport import management_api
from exactly_once.transport.management_api import QueueDepths
from tests.support.servers import RabbitServer
from tests.support.servers.private import LOOPBACK, free_port
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, declare, send


@pytest.fixture(autouse=True)
def read_at_every_call(monkeypatch):
    monkeypatch.setattr(management_api, "_FRESH_SECONDS", 0.0)


def test_depths_of_an_api_that_never_answers_are_unknown_and_it_is_asked_in_one_thread():
    with socket.create_server((LOOPBACK, 0)) as server:
        depths = QueueDepths("amqp://guest:guest@127.0.0.1:1//", f"http://{LOOPBACK}:{server.getsockname()[1]}")

        assert depths.known() is None
        reading = depths._reading
        assert depths.known() is None
        assert depths._reading is reading
        assert reading.is_alive()
    wait_until(lambda: not reading.is_alive())


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "memory://", "local://", "amqp://guest:guest@127.0.0.1:7//"])
def test_depths_are_unknown_without_an_api(url):
    assert QueueDepths(url, "").known() is None


@pytest.mark.long  # a broker of its own
@pytest.mark.django_db(transaction=True)
def test_depths_are_those_of_the_queues_of_the_virtual_host(handles):
    port = free_port()
    listens = {"management__tcp__port": str(port), "management__tcp__ip": LOOPBACK}
    with RabbitServer(spins=False, plugins=["rabbitmq_management"], **listens) as server:
        url = server.new_vhost()
        options = broker_options(url, MANAGEMENT_URL=f"http://{LOOPBACK}:{port}")
        handler = handles(print, name="tests.deep")
        declare(handler, options)
        for number in range(3):
            send(url, handler.topics[0], {}, message_id=str(number))
        depths = QueueDepths(url, options.MANAGEMENT_URL)

        wait_until(lambda: 3 in (depths.known() or {}).values())
        (queue,) = depths.known()
        assert "tests.deep" in queue
