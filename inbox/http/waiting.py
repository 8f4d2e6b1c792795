"""Long polling: a request waits for messages without a database connection, and under ASGI without a thread.

It polls, at growing intervals, and closes the connection before each pause. A notification by the database would need a
connection for each process that waits, and SQLite has none.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http import HTTPStatus
from typing import TypeVar

from asgiref.sync import sync_to_async
from django.db import connections

from outbox.console.http.problems import RETRY_AFTER, Problem
from outbox.kernel.clock import monotonic

_Found = TypeVar("_Found")

_SHORTEST_PAUSE_SECONDS = 0.05


class Waiting:
    """The clients that wait in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    @contextmanager
    def one_more(self, most: int) -> Iterator[None]:
        """
        Raises:
            Problem: `most` wait already.
        """
        with self._lock:
            if self._count >= most:
                raise Problem(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    f"{most} clients wait for messages in this process already. Repeat the request later, or do not wait.",
                    headers=RETRY_AFTER,
                )
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1


waiting = Waiting()


async def until_found(
    find: Callable[[], _Found], *, alias: str, wait: timedelta, longest_pause: timedelta, most: int
) -> _Found:
    """What `find` returns, once it is not empty or `wait` has passed.

    Args:
        most: clients that may wait at the same time.

    Raises:
        Problem: too many clients wait.
    """
    until = monotonic() + wait.total_seconds()
    found = await sync_to_async(find)()
    if found or not wait:
        return found
    pause = _SHORTEST_PAUSE_SECONDS
    with waiting.one_more(most):
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
