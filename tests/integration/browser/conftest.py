"""The fixtures of a real browser, and of the real processes behind the pages."""

from datetime import timedelta

import pytest

from tests.support.browser import browser, operator  # noqa: F401 - fixtures
from tests.support.workers import GROUP


@pytest.fixture
def both(command, rabbitmq_url):
    """A consumer, which gives every message one attempt, and a relay."""
    inbox = {"GROUP": GROUP, "MAX_ATTEMPTS": 1, "POLL_INTERVAL": timedelta(seconds=0.1)}
    return [command(name, OUTBOX={"BROKER_URL": rabbitmq_url}, INBOX=inbox) for name in ("inbox_consume", "outbox_relay")]


@pytest.fixture
def running(both):
    """A relay and a consumer; the consumer, for waiting while it lives."""
    consumer, relay = both
    with consumer, relay:
        consumer.until(lambda: "receiving from" in consumer.said())
        yield consumer
