"""The fixtures under test, as a project's conftest has them, and what every test here handles."""

import pytest
from django.db import connection

from inbox.pytest_plugin import *  # noqa: F403 - its fixtures, as `pytest_plugins` finds them
from outbox.pytest_plugin import *  # noqa: F403

AMQP = "amqp://nobody:nowhere@broker.invalid//"


@pytest.fixture(
    params=[
        pytest.param("inside", marks=pytest.mark.django_db),
        pytest.param("outside", marks=pytest.mark.django_db(transaction=True)),
    ]
)
def transaction_of_the_test(request):
    """A test runs inside a transaction, and without one."""
    assert connection.in_atomic_block == (request.param == "inside")


@pytest.fixture
def amqp(settings):
    """A broker that cannot be reached."""
    settings.OUTBOX = {"BROKER_URL": AMQP}
