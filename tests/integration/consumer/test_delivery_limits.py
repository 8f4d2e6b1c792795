"""A queue whose messages the broker drops after a number of deliveries is not received from, and the log says what to do."""

import logging
import threading
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import kombu
import pytest

from inbox.consumer import subscriptions
from inbox.consumer.topology import queue_name
from tests.support.deliveries import TOPIC, effects, the_effect
from tests.support.servers import RabbitServer
from tests.support.servers.private import LOOPBACK, free_port
from tests.support.threads import in_threads
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, consumers_of, consuming, send, send_and_handle

pytestmark = [pytest.mark.django_db(transaction=True)]


@pytest.fixture(autouse=True)
def logged(caplog):
    caplog.set_level(logging.INFO)


def declare_by_hand(url, name, *, durable=True, auto_delete=False, **arguments):
    with closing(kombu.Connection(url)) as connection:
        connection.channel().queue_declare(
            name,
            durable=durable,
            auto_delete=auto_delete,
            arguments={f"x-{key.replace('_', '-')}": value for key, value in arguments.items()},
        )


DROPS, LOSES = ("drops a message that has been delivered 5 times", "delete it"), "set INBOX['GROUP'] to another name"


@pytest.mark.parametrize(
    ("complaint", "properties"),
    [
        (DROPS, {"queue_type": "quorum", "delivery_limit": 5}),
        (DROPS, {"queue_type": "quorum", "delivery_limit": 5, "max_length": 1000, "overflow": "reject-publish"}),
        (DROPS, {"queue_type": "quorum", "delivery_limit": 5, "dead_letter_exchange": "somewhere"}),
        (("is a stream", LOSES), {"queue_type": "stream"}),
        (("when its last consumer ends", LOSES), {"auto_delete": True}),
        (("when its last consumer ends", LOSES), {"auto_delete": True, "max_length": 1000}),
        (("when the broker restarts", LOSES), {"durable": False}),
        (("for 60000 ms", LOSES), {"queue_type": "quorum", "expires": 60_000}),
        (("for 60000 ms", LOSES), {"queue_type": "classic", "expires": 60_000}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("queue_type", ["quorum", "classic"], ids=["quorum wanted", "classic wanted"])
def test_queue_that_drops_or_loses_messages_is_not_received_from(
    handles, rabbitmq_url, caplog, complaint, properties, queue_type
):
    options = broker_options(rabbitmq_url, QUEUE_TYPE=queue_type)
    unusable, sound = handles(the_effect, name="tests.unusable"), handles(the_effect, name="tests.sound")
    name = queue_name(unusable, options)
    declare_by_hand(rabbitmq_url, name, **properties)

    with consuming([unusable, sound], options):
        wait_until(lambda: "receiving from 1 queue at" in caplog.text)
        send_and_handle(rabbitmq_url, TOPIC, "m")
        assert consumers_of(rabbitmq_url, name) == 0

    (said,) = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert all(words in said for words in complaint)


def test_quorum_queue_without_the_argument_has_the_limit_of_the_brokers_version(handles, rabbitmq_url, caplog):
    handler, options = handles(the_effect), broker_options(rabbitmq_url)
    declare_by_hand(rabbitmq_url, queue_name(handler, options), queue_type="quorum")
    expected = "receiving from 1 queue at"
    if version_of(rabbitmq_url) >= 4:
        expected = "drops a message that has been delivered 20 times"

    with consuming([handler], options):
        wait_until(lambda: expected in caplog.text)


def version_of(url):
    with closing(kombu.Connection(url)) as connection:
        return int(connection.default_channel.connection.server_properties["version"].partition(".")[0])


@pytest.mark.parametrize(
    "arguments",
    [
        {"queue_type": "quorum", "delivery_limit": -1},
        {"queue_type": "quorum", "delivery_limit": -1, "max_length": 1000},
        {"queue_type": "classic", "max_length": 1000},
        {},
    ],
    ids=["quorum", "quorum with a maximum length", "classic with a maximum length", "classic"],
)
def test_queue_with_other_arguments_and_no_delivery_limit_is_received_from(handles, rabbitmq_url, caplog, arguments):
    handler, options = handles(the_effect), broker_options(rabbitmq_url)
    declare_by_hand(rabbitmq_url, queue_name(handler, options), **arguments)

    with consuming([handler], options):
        wait_until(lambda: "receiving from 1 queue at" in caplog.text)
        send_and_handle(rabbitmq_url, TOPIC, "m")

    assert caplog.text.count("exists with other arguments") == 1


def test_exclusive_queue_of_another_program_stops_no_other_handler(handles, rabbitmq_url, caplog):
    options = broker_options(rabbitmq_url)
    taken, sound = handles(the_effect, name="tests.taken"), handles(the_effect, name="tests.sound")

    with closing(kombu.Connection(rabbitmq_url)) as other:
        other.channel().queue_declare(queue_name(taken, options), exclusive=True)
        with consuming([taken, sound], options):
            wait_until(lambda: "receiving from 1 queue at" in caplog.text)
            send_and_handle(rabbitmq_url, TOPIC, "m")

    assert "is exclusive to a connection of another program" in caplog.text


def test_management_api_of_a_broker_at_another_port_is_reported_as_not_asked(handles, rabbitmq_url, caplog):
    handler = handles(the_effect)

    with consuming([handler], broker_options(rabbitmq_url)):
        wait_until(lambda: "receiving from 1 queue at" in caplog.text)

    (logged,) = [record for record in caplog.records if "the management API of RabbitMQ is not queried" in record.getMessage()]
    assert logged.levelname == "WARNING"
    assert "INBOX['MANAGEMENT_URL']" in logged.getMessage()


@contextmanager
def an_api_that_drips():
    """An HTTP server that answers with one byte of a header after the other, and never ends."""
    end = threading.Event()

    class Drips(BaseHTTPRequestHandler):
        def do_GET(self):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            with suppress(OSError):
                while not end.wait(0.2):
                    self.wfile.write(b".")

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer((LOOPBACK, 0), Drips) as server, in_threads(server.serve_forever):
        try:
            yield f"http://{LOOPBACK}:{server.server_port}"
        finally:
            end.set()
            server.shutdown()


def test_management_api_that_drips_its_answer_does_not_stop_receiving_and_is_reported(handles, rabbitmq_url, caplog):
    handler = handles(the_effect)

    with an_api_that_drips() as url, consuming([handler], broker_options(rabbitmq_url, MANAGEMENT_URL=url)):
        wait_until(lambda: "receiving from 1 queue at" in caplog.text)
        send_and_handle(rabbitmq_url, TOPIC, "m")
        wait_until(lambda: f"the management API of RabbitMQ at '{url}' is unavailable" in caplog.text)


@pytest.fixture(scope="module")
def managed():
    port = free_port()
    listens = {"management__tcp__port": str(port), "management__tcp__ip": LOOPBACK}
    with RabbitServer(spins=False, plugins=["rabbitmq_management"], **listens) as server:
        server.management_url = f"http://{LOOPBACK}:{port}"
        yield server


@pytest.mark.long  # a broker of its own
class TestPolicies:
    @pytest.fixture(autouse=True)
    def frequent_checks(self, monkeypatch):
        monkeypatch.setattr(subscriptions, "_HEALTH_SECONDS", 0.5)

    @pytest.fixture
    def url(self, managed):
        url = managed.new_vhost()
        yield url
        managed.delete_vhost(url)

    @pytest.mark.parametrize("by_operator", [False, True], ids=["policy", "operator policy"])
    def test_queue_with_a_delivery_limit_by_policy_is_received_from_once_the_policy_is_changed(
        self, handles, managed, url, caplog, by_operator
    ):
        managed.set_policy(url, {"delivery-limit": 5}, name="limit all", by_operator=by_operator)
        handler, options = handles(the_effect), broker_options(url, MANAGEMENT_URL=managed.management_url)

        with consuming([handler], options):
            wait_until(lambda: "drops a message that has been delivered 5 times" in caplog.text)
            send(url, TOPIC, {}, message_id="m")
            assert consumers_of(url, queue_name(handler, options)) == 0
            managed.clear_policy(url, name="limit all", by_operator=by_operator)
            wait_until(lambda: effects("m") == 1)

        (complaint,) = [record.getMessage() for record in caplog.records if "drops a message" in record.getMessage()]
        assert "'limit all'" in complaint

    @pytest.mark.parametrize("existing", ["quorum", "classic"])
    def test_policy_limits_what_a_classic_queue_type_finds_as_a_quorum_queue(self, handles, managed, url, caplog, existing):
        managed.set_policy(url, {"delivery-limit": 5})
        handler = handles(the_effect)
        options = broker_options(url, MANAGEMENT_URL=managed.management_url, QUEUE_TYPE="classic")
        declare_by_hand(url, queue_name(handler, options), queue_type=existing)

        with consuming([handler], options):
            expected = "drops a message that has been delivered" if existing == "quorum" else "receiving from 1 queue at"
            wait_until(lambda: expected in caplog.text)

    def test_delivery_limit_that_comes_back_while_another_queue_is_unusable_is_reported_again(
        self, handles, managed, url, caplog
    ):
        handler, options = handles(the_effect), broker_options(url, MANAGEMENT_URL=managed.management_url)
        unusable = handles(the_effect, name="unusable")
        declare_by_hand(url, queue_name(unusable, options), queue_type="quorum", delivery_limit=7)

        def limited(times):
            managed.set_policy(url, {"delivery-limit": 5})
            wait_until(lambda: caplog.text.count("drops a message that has been delivered 5 times") == times)

        with consuming([handler, unusable], options):
            wait_until(lambda: "receiving from 1 queue at" in caplog.text)
            limited(1)
            managed.clear_policy(url)
            wait_until(lambda: caplog.text.count("receiving from 1 queue at") == 2)
            limited(2)
