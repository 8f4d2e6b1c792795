"""The fixtures under test, as a project's conftest has them, and what every test here handles."""

from __future__ import annotations

import pytest
from django.db import connection

from inbox.pytest_plugin import (
    assert_duplicate,
    assert_effect_once,
    assert_handled,
    dead,
    deliver,
    drain,
    handled,
    make_message,
    redeliver,
    run_handler,
)
from outbox.pytest_plugin import assert_nothing_published, assert_published, published, run_relay, travel

__all__ = [
    "assert_duplicate",
    "assert_effect_once",
    "assert_handled",
    "assert_nothing_published",
    "assert_published",
    "dead",
    "deliver",
    "drain",
    "handled",
    "make_message",
    "published",
    "redeliver",
    "run_handler",
    "run_relay",
    "travel",
]

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
