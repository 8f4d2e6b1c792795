from pathlib import Path

import pytest

from tests.support import mortal
from tests.support.crash.witness import Witness
from tests.support.crash.world import World
from tests.support.workers import migrate

SECONDS = 300
"""The default for a test: it starts many processes, each of which takes long on a slow machine."""

mortal_database = mortal.mortal_database


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture
def world(process_environment, rabbitmq_server, rabbitmq_url, tmp_path):
    """The test's own database and a virtual host of its own."""
    yield from _world(process_environment, tmp_path, rabbitmq_server, rabbitmq_url)


@pytest.fixture
def local_world(process_environment, tmp_path):
    """The test's own database and no broker."""
    yield from _world(process_environment, tmp_path, None, "local://")


@pytest.fixture
def mortal_world(mortal_postgres, mortal_database, process_environment, rabbitmq_server, rabbitmq_url, tmp_path):
    """A database on a server that may be killed, for the processes and for the test itself."""
    environment = {**process_environment, "DATABASE_URL": mortal_database}
    migrate(environment, tmp_path / "migrate.log")
    yield from _world(environment, tmp_path, rabbitmq_server, rabbitmq_url)


@pytest.fixture
def witness(world):
    """Of the broker of `world`."""
    return Witness(world.broker_url)


def _world(environment, directory, rabbit, broker_url):
    environment = {**environment, "DJANGO_SETTINGS_MODULE": "tests.support.crash.settings"}
    world = World(environment, directory, rabbit, broker_url)
    yield world
    world.end_all()


@pytest.fixture
def engine(pytestconfig):
    return pytestconfig.getoption("--db")
