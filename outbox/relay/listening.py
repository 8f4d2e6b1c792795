"""The doorbell's listener: one connection with LISTEN, for all loops of a relay process.

LISTEN belongs to a session, so the connection is this module's own: outside Django's registry and outside any pool, which could
close it. After a quiet interval the listener sends a query, because a connection with a dead peer looks the same as one without
notifications. It replaces a lost connection, and then rings once, in place of all notifications missed meanwhile.

A pooler in transaction mode would execute the LISTEN on a server connection that it gives to another client a moment later. So
unless the project sets LISTEN_ALIAS, the listener does not use a connection whose server process differs from the one that
opened the session.

This thread affects latency only. It raises nothing, and relays continue to poll whatever happens to it.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from django.db import connections

from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import Bell, StopRequest
from exactly_once.process.outage import Outage
from exactly_once.sql.connections import TIMEOUTS
from outbox import doorbell
from outbox.conf import OutboxOptions

logger = escaping_logger(__name__)

APPLICATION_NAME = "outbox listener"
_PULSE_SECONDS = 10.0
_ANSWER_SECONDS = 10.0
_LONGEST_GOODBYE_SECONDS = 1.0

_POOLED = (
    "The database %r is behind a pooler, which may not support LISTEN: this relay only polls. Set OUTBOX['LISTEN_ALIAS'] to an "
    "alias that bypasses the pooler, or to %r if it pools sessions and not transactions; or to None."
)


class Listener:
    """Rings `bells` when a publisher has committed a message to the outbox of `alias`."""

    def __init__(self, alias: str, bells: Sequence[Bell], options: OutboxOptions) -> None:
        self._alias = alias
        self._named_alias = options.LISTEN_ALIAS
        self._bells = tuple(bells)
        self._end = StopRequest()
        self._outage = Outage("the doorbell")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen during the block: always to this process, on PostgreSQL also to all others."""
        if self._named_alias is None:
            yield
            return
        with doorbell.heard_in_this_process(self._alias, self._bells):
            if not _can_listen(self._wrapper()):
                yield
                return
            thread = threading.Thread(target=self._run, name="doorbell", daemon=True)
            thread.start()
            try:
                yield
            finally:
                self._end.set()
                # Limited, because the thread may be connecting to an unavailable server; as a daemon it does not block the end.
                thread.join(_LONGEST_GOODBYE_SECONDS)

    def _run(self) -> None:
        while not self._end:
            try:
                with closing(self._connect()) as connection:
                    line = _Line(connection.pgconn, self._end)
                    if not self._named_alias and line.is_pooled():
                        logger.warning(_POOLED, self._alias, self._alias)
                        return
                    self._listen(line)
            except Exception as error:  # noqa: BLE001 - the server, the network or the settings: relays poll meanwhile
                self._set_connected(False)
                if not self._end:
                    self._outage.wait(error, self._end)

    def _connect(self) -> Any:
        wrapper = self._wrapper()
        # Read again every time: a database backend may rotate its password.
        parameters = {**TIMEOUTS, **wrapper.get_connection_params(), "fallback_application_name": APPLICATION_NAME}
        return wrapper.Database.connect(**parameters, autocommit=True)

    def _wrapper(self) -> Any:
        return connections[self._named_alias or self._alias]

    def _listen(self, line: _Line) -> None:
        line.ask(f"LISTEN {doorbell.CHANNEL}")
        self._outage.over()
        self._set_connected(True)
        self._ring()
        while True:
            if not line.has_something(_PULSE_SECONDS):
                line.ask("SELECT 1")
            if line.take_notifications():
                self._ring()

    def _set_connected(self, connected: bool) -> None:
        for bell in self._bells:
            bell.is_connected = connected

    def _ring(self) -> None:
        for bell in self._bells:
            bell.ring()


def _can_listen(wrapper: Any) -> bool:
    if wrapper.vendor != "postgresql":
        return False
    if wrapper.Database.__name__ != "psycopg":
        logger.info("LISTEN needs psycopg 3 and the driver is %s: the relay only polls.", wrapper.Database.__name__)
        return False
    return True


class _Line:
    """A psycopg connection, used through libpq's asynchronous functions: wait for the socket, read, process the result.

    So every wait is limited and ends at a stop request. Every method raises if the connection is lost, if the server does not
    answer, and if `end` is set.
    """

    def __init__(self, connection: Any, end: StopRequest) -> None:
        self._connection = connection
        self._end = end
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._poll.register(connection.socket, select.POLLIN)

    def has_something(self, seconds: float) -> bool:
        heard = self._poll.poll(seconds * 1000)
        if self._end:
            raise ConnectionAbortedError("the relay ends")
        return bool(heard)

    def ask(self, query: str) -> str:
        """Run the query; return the first value of its result, or ""."""
        answer = ""
        self._connection.send_query(query.encode())
        while self.has_something(_ANSWER_SECONDS):
            self._connection.consume_input()
            while not self._connection.is_busy():
                result = self._connection.get_result()
                if result is None:
                    return answer
                if result.error_message:
                    raise ConnectionError(result.error_message.decode(errors="replace"))
                answer = result.get_value(0, 0).decode() if result.ntuples else ""
        raise TimeoutError(f"no answer in {_ANSWER_SECONDS:.0f} s")

    def take_notifications(self) -> bool:
        """Read all notifications; True if there was at least one. They have no content."""
        some = False
        self._connection.consume_input()
        while self._connection.notifies() is not None:
            some = True
        return some

    def is_pooled(self) -> bool:
        """Does another server process answer than the one that opened the session?"""
        return self.ask("SELECT pg_backend_pid()") != str(self._connection.backend_pid)
