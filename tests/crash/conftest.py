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
def world(request, process_environment, rabbitmq_server, rabbitmq_url, tmp_path):
    """The test's own database and a virtual host of its own."""
    yield from _world(request, process_environment, tmp_path, rabbitmq_server, rabbitmq_url)


@pytest.fixture
def local_world(request, process_environment, tmp_path):
    """The test's own database and no broker."""
    yield from _world(request, process_environment, tmp_path, None, "local://")


@pytest.fixture
def mortal_world(request, mortal_postgres, mortal_database, process_environment, rabbitmq_server, rabbitmq_url, tmp_path):
    """A database on a server that may be killed, for the processes and for the test itself."""
    environment = {**process_environment, "DATABASE_URL": mortal_database}
    migrate(environment, tmp_path / "migrate.log")
    yield from _world(request, environment, tmp_path, rabbitmq_server, rabbitmq_url)


@pytest.fixture
def witness(world):
    """Of the broker of `world`."""
    return Witness(world.broker_url)


def _world(request, environment, directory, rabbit, broker_url):
    """Its processes have the SETTINGS of the module of the test, if it names them."""
    settings = getattr(request.module, "SETTINGS", "tests.support.crash.settings")
    environment = {**environment, "DJANGO_SETTINGS_MODULE": settings}
    world = World(environment, directory, rabbit, broker_url)
    yield world
    world.end_all()


@pytest.fixture
def engine(pytestconfig):
    return pytestconfig.getoption("--db")
