from datetime import timedelta

import pytest
from django.db import connection
from django.utils.module_loading import import_string

from inbox.contrib.tasks.registering import register_queues
from inbox.operators import decisions
from inbox.receiving.in_hand import in_hand
from outbox import callbacks, on_published
from tests.support.apps.tasked import TASKS
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.joins import NAME, TOPICS
from tests.support.relaying import connected
from tests.support.servers import FaultProxy
from tests.support.tasks import tasks
from tests.support.workers import EXCHANGE, GROUP, Process, as_environment, broker_options, declare, length_of


@pytest.fixture
def peer():
    """A broker that does what the test scripts."""
    with FakeAmqpPeer() as peer:
        yield peer


@pytest.fixture
def transport(peer):
    """Connected to `peer`."""
    with connected(peer.url) as transport:
        yield transport


@pytest.fixture
def command(process_environment, tmp_path):
    """A command in a process with the apps of `tests.support.apps.<app>`: `command("outbox_relay", "--drain", OUTBOX={…})`.

    Its settings are those by keyword; `variables` are added to its environment.
    """

    def start(name, *arguments, app="worker", log="", variables=None, **settings):
        module = f"tests.support.apps.{app}.settings"
        environment = {
            **process_environment,
            **as_environment(**settings),
            "DJANGO_SETTINGS_MODULE": module,
            **(variables or {}),
        }
        return Process(environment, tmp_path / f"{log or name}.log", name, *arguments)

    return start


@pytest.fixture
def a_process(command, broker):
    """`command` with this broker: `a_process("inbox_consume", …)`. Options by keyword are those of the inbox."""

    def start(name, *arguments, app="worker", log="", variables=None, outbox=None, **inbox):
        inbox = {"BROKER_URL": broker, "EXCHANGE": EXCHANGE, "GROUP": GROUP, **inbox}
        outbox = {"BROKER_URL": broker, "EXCHANGE": EXCHANGE, **(outbox or {})}
        return command(name, *arguments, app=app, log=log, variables=variables, INBOX=inbox, OUTBOX=outbox)

    return start


@pytest.fixture
def broker(rabbitmq_url):
    """The URL of a broker that is empty."""
    return rabbitmq_url


@pytest.fixture
def proxy(rabbitmq_server):
    """A network to RabbitMQ that can fail."""
    with FaultProxy("127.0.0.1", rabbitmq_server.port) as proxy:
        yield proxy


@pytest.fixture
def consumer_timeout(mortal_rabbitmq):
    """Set RabbitMQ's `consumer_timeout` in milliseconds for channels that are opened from now on."""
    names = ("consumer_timeout", "channel_tick_interval")
    before = {name: mortal_rabbitmq.evaluate(f"element(2, application:get_env(rabbit, {name})).") for name in names}

    def configure(*values):
        for name, value in zip(names, values, strict=True):
            mortal_rabbitmq.evaluate(f"application:set_env(rabbit, {name}, {value}).")

    yield lambda milliseconds: configure(milliseconds, 250)
    configure(*before.values())


@pytest.fixture
def length(rabbitmq_server, rabbitmq_url):
    """How many messages RabbitMQ holds for a handler, unacknowledged ones included."""
    return lambda handler: length_of(rabbitmq_server, handler, broker_options(rabbitmq_url))


@pytest.fixture
def handling(handles, broker):
    """Register a function as a handler whose queue exists: `handling(function, topic=…)` is the handler."""

    def register(function, **given):
        handler = handles(function, **given)
        declare(handler, broker_options(broker))
        return handler

    return register


@pytest.fixture
def joins(own_handlers):
    """Register a function as a join for this test: `joins(function, on_missing=…)`."""

    def register(function, *, topics=TOPICS, name=NAME, **arguments):
        arguments = {"correlate": "run_id", "deadline": timedelta(hours=2), **arguments}
        return import_string("inbox.contrib.joins.joined_handler")(all_of=topics, name=name, **arguments)(function)

    return register


@pytest.fixture
def tasked(settings, own_handlers):
    """The tasks of `tests.support.apps.tasked`, with the handlers of their queues."""
    settings.TASKS = TASKS
    register_queues()
    return tasks()


@pytest.fixture
def add_callback():
    """Register callbacks for this test: `add_callback(function, on=on_dead)` is the list of the messages it was called with."""
    names = []

    def register(function=None, *, on=on_published, topic="shop.order.placed", name=None):
        calls = []

        def call(message):
            calls.append(message)
            return function and function(message)

        names.append(name or f"tests.callback{len(names)}")
        on(topic, name=names[-1])(call)
        return calls

    yield register
    for name in names:
        callbacks.registry.remove(name)


@pytest.fixture(autouse=True)
def _nothing_in_hand_elsewhere():
    """Which messages another process is handling is remembered for seconds, and tests use the same names again."""
    yield
    in_hand._elsewhere.clear()


@pytest.fixture
def short_lock_waits(monkeypatch):
    """An operator's decision about an inbox message waits 50 ms for the lock of another transaction."""
    monkeypatch.setattr(decisions, "OPERATORS_WAIT", timedelta(milliseconds=50))
    if connection.vendor == "sqlite":
        monkeypatch.setitem(connection.settings_dict["OPTIONS"], "timeout", 0.05)
