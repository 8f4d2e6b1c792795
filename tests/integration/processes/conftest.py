"""Relays and consumers as processes of their own, which operators pause, resume, drain and stop through the database."""

from contextlib import ExitStack

import kombu
import pytest

from inbox.consumer.topology import queue_name
from inbox.store.handler_rows import consumers
from outbox.relay.heartbeat import relays
from tests.support.workers import broker_options


@pytest.fixture
def running():
    """A function that enters a context, such as that of a process, until the end of the test."""
    with ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture
def waiting(broker):
    """How many messages the broker holds for a handler that are delivered to no consumer."""

    def count(handler):
        with kombu.Connection(broker) as connection:
            queue = queue_name(handler, broker_options(broker))
            return connection.default_channel.queue_declare(queue, passive=True).message_count

    return count


class Heartbeats:
    """The rows of one kind of process."""

    def __init__(self, table):
        self._table = table

    def all(self):
        return list(self._table.known("default"))

    @property
    def only(self):
        rows = list(self._table.rows("default"))
        return rows[0] if len(rows) == 1 else None

    def request(self, request, by="ada in the admin"):
        assert self._table.request("default", self.only.pk, request, by)

    def is_in(self, mode):
        """Has the only process acknowledged its request, and written this mode?"""
        row = self.only
        return row is not None and row.mode == mode and row.acknowledged_at is not None

    def goes_on(self, process, times=2):
        """Wait until the process has sent this many more heartbeats: its loops have run in between."""
        for _ in range(times):
            before = self.only.beat_at
            process.until(lambda before=before: self.only is not None and self.only.beat_at > before)


@pytest.fixture
def relay_rows():
    return Heartbeats(relays)


@pytest.fixture
def consumer_rows():
    return Heartbeats(consumers)
