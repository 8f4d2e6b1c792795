"""A reading of the database by a thread and on a connection of its own, for those who must answer even if it never does.

A frozen database never answers. A probe that waits for it would itself look dead, and each further one would hold a thread.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from django.db import connections

from exactly_once.process.clock import monotonic
from exactly_once.process.main_thread import is_private
from exactly_once.sql.connections import is_postgresql

_Result = TypeVar("_Result")

_SHORT_TIMEOUTS = {
    "connect_timeout": 2,
    "tcp_user_timeout": 2_000,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 2,
}
"""Options of libpq, so that a connection that was cut off does not make later readings fail."""


class Reading(Generic[_Result]):
    """Reads a database again and again, once at a time: those who ask together share one reading.

    Args:
        name: of the thread.
        alias: the database.
    """

    def __init__(self, name: str, alias: str) -> None:
        self._name, self._alias = name, alias
        self._lock = threading.Lock()
        self._future: Future[_Result] | None = None
        self._began_at = 0.0

    def result(self, read: Callable[[], _Result], within: float) -> _Result:
        """What `read` returns, or the present reading; its exceptions, too. In a test's transaction this thread reads.

        Args:
            within: seconds since the reading began.

        Raises:
            TimeoutError: it has not ended.
        """
        if is_private(connections[self._alias]):
            return read()
        with self._lock:
            if self._future is None:
                self._future, self._began_at = Future(), monotonic()
                threading.Thread(target=self._run, args=[read, self._future], name=self._name, daemon=True).start()
            future, left = self._future, self._began_at + within - monotonic()
        return future.result(max(left, 0.0))

    def _run(self, read: Callable[[], _Result], future: Future[_Result]) -> None:
        try:
            connection = connections[self._alias]
            if is_postgresql(connection):
                given = {name: value for name, value in connection.settings_dict["OPTIONS"].items() if name != "pool"}
                connection.settings_dict = {**connection.settings_dict, "OPTIONS": {**given, **_SHORT_TIMEOUTS}}
            future.set_result(read())
        except Exception as error:  # noqa: BLE001 - those who wait for the result raise it
            future.set_exception(error)
        finally:
            with self._lock:
                self._future = None
            connections.close_all()
