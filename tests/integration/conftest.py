from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.utils.module_loading import import_string

from inbox.handlers.registry import registry
from inbox.operators import decisions
from inbox.receiving.in_hand import in_hand
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.joins import NAME, TOPICS
from tests.support.relaying import connected


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
def joins():
    """Register a function as a join for this test: `joins(function, on_missing=…)`."""
    before = {handler.name for handler in registry.all()}

    def register(function, *, topics=TOPICS, name=NAME, **arguments):
        arguments = {"correlate": "run_id", "deadline": timedelta(hours=2), **arguments}
        return import_string("inbox.joins.joined_handler")(all_of=topics, name=name, **arguments)(function)

    yield register
    for handler in registry.all():
        if handler.name not in before:
            registry.remove(handler.name)


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
