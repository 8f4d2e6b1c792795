"""Long polling: a request waits for messages without a database connection, and under ASGI without a thread.

Under WSGI it occupies a thread of the server, which then publishes and acknowledges for no other client. So few may wait there,
and one client has an equal share of the places.

It polls, at growing intervals, and closes the connection before each pause. A notification by the database would need a
connection for each process that waits, and SQLite has none.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http import HTTPStatus
from typing import NamedTuple, TypeVar

from asgiref.sync import sync_to_async
from django.core.handlers.wsgi import WSGIRequest
from django.db import connections
from django.http import HttpRequest

from exactly_once.conf.app_options import HttpOptions
from exactly_once.problems import RETRY_AFTER, Problem
from exactly_once.process.clock import monotonic

_Found = TypeVar("_Found")

_SHORTEST_PAUSE_SECONDS = 0.05
_UNDER_ASGI = 20


class Places(NamedTuple):
    """How many requests may wait in this process, and how many of one client."""

    most: int
    each: int


def places_for(request: HttpRequest, options: HttpOptions) -> Places:
    most = options.MAX_WAITING
    if most is None:
        most = _UNDER_ASGI
        if isinstance(request, WSGIRequest):
            most = 1 if request.environ["wsgi.multithread"] else 0
    return Places(most, min(most, max(1, most // max(1, len(options.readers)))))


class Waiting:
    """The requests that wait in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_client: Counter[str] = Counter()

    @contextmanager
    def one_more(self, client: str, places: Places) -> Iterator[None]:
        """
        Raises:
            Problem: the places are taken.
        """
        with self._lock:
            if self._by_client.total() >= places.most or self._by_client[client] >= places.each:
                raise Problem(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    f"No message is due. {places.most} requests may wait in this process, {places.each} of one client, and the "
                    "places are taken. Repeat the request later, or do not wait.",
                    headers=RETRY_AFTER,
                )
            self._by_client[client] += 1
        try:
            yield
        finally:
            with self._lock:
                self._by_client[client] -= 1


waiting = Waiting()


async def until_found(
    find: Callable[[], _Found], *, alias: str, wait: timedelta, longest_pause: timedelta, client: str, places: Places
) -> _Found:
    """What `find` returns, once it is not empty or `wait` has passed.

    Raises:
        Problem: too many requests wait.
    """
    until = monotonic() + wait.total_seconds()
    found = await sync_to_async(find)()
    if found or not wait or not places.most:
        return found
    pause = _SHORTEST_PAUSE_SECONDS
    with waiting.one_more(client, places):
        while not found and (left := until - monotonic()) > 0:
            await sync_to_async(_disconnect)(alias)
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, longest_pause.total_seconds())
            found = await sync_to_async(find)()
    return found


def _disconnect(alias: str) -> None:
    connection = connections[alias]
    if not connection.in_atomic_block:  # that of a test case
        connection.close()
