"""The fixtures of a real browser, and of the real processes behind the pages."""

from datetime import timedelta

import pytest

from tests.support.browser import browser, operator  # noqa: F401 - fixtures
from tests.support.workers import GROUP, Process, as_environment


@pytest.fixture
def environment(process_environment, rabbitmq_url):
    """That of a relay, and of a consumer which gives every message one attempt."""
    given = as_environment(
        OUTBOX={"BROKER_URL": rabbitmq_url}, INBOX={"GROUP": GROUP, "MAX_ATTEMPTS": 1, "POLL_INTERVAL": timedelta(seconds=0.1)}
    )
    return {**process_environment, "DJANGO_SETTINGS_MODULE": "tests.support.apps.worker.settings", **given}


@pytest.fixture
def running(environment, tmp_path):
    """A relay and a consumer; the consumer, for waiting while it lives."""
    consumer = Process(environment, tmp_path / "consumer.log", "inbox_consume")
    relay = Process(environment, tmp_path / "relay.log", "outbox_relay")
    with consumer, relay:
        consumer.until(lambda: "receiving from" in consumer.said())
        yield consumer
