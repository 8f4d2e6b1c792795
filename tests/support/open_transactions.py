"""Transactions that publish with a key, each on a connection of its own, in the order that a test chooses."""

from concurrent.futures import ThreadPoolExecutor

from django.db import connections, transaction

from outbox import publish
from tests.support.relaying import SECONDS, TOPIC
from tests.support.sql import fetched

KEY = "customer-1"


def lock_waits(which="true"):
    """How many locks sessions of the server wait for, of those that this condition on `pg_locks` selects."""
    return fetched(f"SELECT count(*) FROM pg_locks WHERE NOT granted AND {which}")


class OpenTransaction:
    """A transaction in its own thread and on its own connection, step by step."""

    def __init__(self):
        self._thread = ThreadPoolExecutor(1)
        self._atomic = transaction.atomic()
        self.does(self._atomic.__enter__).result(SECONDS)

    def does(self, what, *arguments, **options):
        """Begin it; its end is the future's."""
        return self._thread.submit(what, *arguments, **options)

    def publishes(self, key=KEY, *, topic=TOPIC, strict_order=True):
        return self.does(publish, topic, {}, key=key, strict_order=strict_order)

    def commits(self):
        self.does(self._atomic.__exit__, None, None, None).result(SECONDS)

    def rolls_back(self):
        self.does(transaction.set_rollback, True).result(SECONDS)
        self.commits()

    def ends(self):
        self._thread.submit(connections.close_all)
        return self._thread
