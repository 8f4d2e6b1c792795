"""Relays and consumers as processes of their own, which operators pause, resume, drain and stop through the database."""

from functools import partial

import kombu
import pytest

from inbox.consumer.topology import queue_name
from inbox.store.heartbeats import consumers
from outbox.store.heartbeats import relays
from tests.support.workers import EXCHANGE, GROUP, broker_options


class Service:
    """A project with the handlers of `tests.support.apps.worker`."""

    def __init__(self, command, broker, **inbox):
        self._command = command
        self._inbox = {"GROUP": GROUP, **inbox}
        self.broker = broker
        self.set_outbox()

    def set_outbox(self, **options):
        self._outbox = {"BROKER_URL": self.broker, "EXCHANGE": EXCHANGE, **options}

    def runs(self, name, *options, log=""):
        return self._command(name, *options, log=log, OUTBOX=self._outbox, INBOX=self._inbox)

    def waiting(self, handler):
        """How many messages the broker holds for a handler that are delivered to no consumer."""
        queue = queue_name(handler, broker_options(self.broker))
        with kombu.Connection(self.broker) as connection:
            return connection.default_channel.queue_declare(queue, passive=True).message_count


@pytest.fixture
def service(command):
    return partial(Service, command)


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
