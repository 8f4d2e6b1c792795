from datetime import timedelta

import pytest
from django.db import connection
from django.utils.module_loading import import_string

from inbox.operators import decisions
from inbox.receiving.in_hand import in_hand
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.joins import NAME, TOPICS
from tests.support.relaying import connected
from tests.support.workers import EXCHANGE, GROUP, Process, as_environment, broker_options, declare


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
    """A command in a process with handlers, settings and databases: `command("outbox_relay", "--drain", OUTBOX={…})`."""

    def start(name, *arguments, **settings):
        environment = {**process_environment, "DJANGO_SETTINGS_MODULE": "tests.support.apps.worker.settings"}
        return Process({**environment, **as_environment(**settings)}, tmp_path / name, name, *arguments)

    return start


@pytest.fixture
def a_process(process_environment, rabbitmq_url, tmp_path):
    """A command as a process with the apps of `tests.support.apps.<app>` and this broker: `a_process("inbox_consume", …)`.

    Options by keyword are those of the inbox.
    """

    def start(command, *arguments, app="worker", log="", outbox=None, **inbox):
        given = as_environment(
            INBOX={"BROKER_URL": rabbitmq_url, "EXCHANGE": EXCHANGE, "GROUP": GROUP, **inbox},
            OUTBOX={"BROKER_URL": rabbitmq_url, "EXCHANGE": EXCHANGE, **(outbox or {})},
        )
        environment = {**process_environment, **given, "DJANGO_SETTINGS_MODULE": f"tests.support.apps.{app}.settings"}
        return Process(environment, tmp_path / f"{log or command}.log", command, *arguments)

    return start


@pytest.fixture
def broker(rabbitmq_url):
    """The URL of a broker that is empty."""
    return rabbitmq_url


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
        return import_string("inbox.joins.joined_handler")(all_of=topics, name=name, **arguments)(function)

    return register


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
