"""Servers and databases for the tests. A server starts when a test asks for it, once in each worker; RabbitMQ once for all."""

import os
from urllib.parse import quote

import hypothesis
import pytest
from django.db import connections

from inbox.handlers.decorator import batch_handler, idempotent_handler, leased_handler
from inbox.handlers.registry import registry
from tests import databases, parallel
from tests.support import ROOT
from tests.support.emptying import empty_after_each_test
from tests.support.servers import PostgresServer, RabbitServer, RedisServer

# How long an example takes is up to the machine, and proves nothing.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="session")
def postgres_server(pytestconfig):
    """The PostgreSQL of the session. The suite's own database is usually on it: to kill one, take `mortal_postgres`."""
    with pytestconfig.stash.get(databases.postgres, None) or PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def shared_rabbitmq(pytestconfig):
    """The RabbitMQ of all tests, in all workers, that do not end or reconfigure it."""
    if server := pytestconfig.stash.get(parallel.rabbitmq, None):
        yield server.answering()
        return
    with RabbitServer(spins=False) as server:
        yield server


@pytest.fixture(scope="session")
def _mortal_rabbitmq():
    with RabbitServer(spins=False) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server():
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def _mortal_postgres():
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def _databases_are_emptied_quickly():
    empty_after_each_test()


@pytest.fixture(autouse=True)
def _own_schedules():
    """The schedules that a test declares are forgotten after it, so that no relay of a later one publishes their ticks."""
    from outbox.contrib.recurring.declarations import declarations, problems  # noqa: PLC0415 - it needs Django

    before = dict(declarations), dict(problems)
    yield
    for kept, given in zip((declarations, problems), before, strict=True):
        kept.clear()
        kept.update(given)


@pytest.fixture
def mortal_postgres(_mortal_postgres):
    """A second PostgreSQL, for tests that kill, stop or stall it. Running at the start of every test."""
    return _mortal_postgres.start()


@pytest.fixture
def mortal_rabbitmq(_mortal_rabbitmq):
    """A second RabbitMQ, for tests that kill, stop or reconfigure it: their `rabbitmq_url` is on it. It runs at their start."""
    return _mortal_rabbitmq.start()


@pytest.fixture
def rabbitmq_server(request):
    """The server of `rabbitmq_url`."""
    return request.getfixturevalue("mortal_rabbitmq" if "mortal_rabbitmq" in request.fixturenames else "shared_rabbitmq")


@pytest.fixture
def rabbitmq_url(rabbitmq_server):
    """The URL of a virtual host of this test's own."""
    url = rabbitmq_server.new_vhost()
    yield url
    rabbitmq_server.start().delete_vhost(url)


@pytest.fixture
def redis_url(redis_server):
    """The URL of an empty Redis database."""
    redis_server.start().flush()
    return redis_server.url


@pytest.fixture(scope="session")
def django_db_modify_db_settings(pytestconfig, request):
    """Start the server the settings already point to, just before pytest-django makes the test databases."""
    server = pytestconfig.stash.get(databases.postgres, None)
    if server is not None and os.environ["DATABASE_URL"] == server.url:
        request.getfixturevalue("postgres_server")


@pytest.fixture
def handles():
    """Register functions as handlers for this test: `handles(function, topic=…, name=…)` is the handler.

    With `size` or `wait` it takes batches, with `lease` it runs under a lease.
    """
    names = []

    def register(function, *, topic="shop.order.placed", name=None, **arguments):
        name = name or f"tests.handler{len(names)}"
        decorator = idempotent_handler
        if "lease" in arguments:
            decorator = leased_handler
        elif {"size", "wait"} & {*arguments}:
            decorator = batch_handler
        topics = [topic] if isinstance(topic, str) else topic
        decorator(*topics, name=name, **arguments)(function)
        names.append(name)
        return registry.get(name)

    yield register
    for name in names:
        registry.remove(name)


@pytest.fixture
def own_handlers():
    """Handlers that this test registers are removed at its end."""
    before = {handler.name for handler in registry.all()}
    yield
    for handler in registry.all():
        if handler.name not in before:
            registry.remove(handler.name)


@pytest.fixture
def process_environment(transactional_db):
    """The environment of a process that shall see this test's databases: committed rows only, so no `db` fixture."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DATABASE_URL": _url("default"),
        "OTHER_DATABASE_URL": _url("other"),
    }


def _url(alias):
    settings = connections[alias].settings_dict
    if connections[alias].vendor == "sqlite":
        return f"sqlite:///{settings['NAME']}"
    user, password = quote(settings["USER"]), quote(settings["PASSWORD"])
    address = f"{settings['HOST']}:{settings['PORT'] or 5432}"
    return f"postgres://{user}{':' if password else ''}{password}@{address}/{settings['NAME']}"
