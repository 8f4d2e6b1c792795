"""Fixtures of the tests of relays."""

from math import inf

import pytest

from exactly_once.process import logs
from exactly_once.process.loop import Bell, StopRequest
from outbox.relay import breaker
from outbox.store import unwritable_rows


@pytest.fixture
def reported_once(monkeypatch):
    """What is reported once a minute is reported once, however long the test takes."""
    monkeypatch.setattr(logs, "_REMINDER_SECONDS", inf)


@pytest.fixture
def short_pauses(monkeypatch):
    """A topic that the broker refuses has the number of pauses of an hour's outage within some seconds."""
    monkeypatch.setattr(breaker, "_FIRST_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(breaker, "_LONGEST_PAUSE_SECONDS", 0.4)


@pytest.fixture
def bell():
    return Bell()


@pytest.fixture
def never():
    return StopRequest()


@pytest.fixture
def unhurried_search(monkeypatch):
    """A search for unwritable rows finds all of them, however slow the machine is; else it continues after their backoff."""
    monkeypatch.setattr(unwritable_rows, "_LONGEST_SEARCH_SECONDS", inf)
