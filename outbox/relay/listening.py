"""Hearing the doorbell: one connection that LISTENs, for all loops of a relay process.

LISTEN is a property of a session, so the connection is this module's own: outside Django's registry and outside any pool,
whose end of life would silence it. It is asked for a sign of life when it has been quiet, because a connection whose other
end is gone looks the same as one that nobody rings. When it is lost it is made anew, and everything rung meanwhile is made up
for by ringing once.

A pooler that gives out server connections by the transaction would take the LISTEN and keep it, on a connection that is
somebody else's a moment later. So unless the project names an alias to listen by, a connection whose server process is not
the one that it was promised is not listened on.

Nothing rests on this thread but speed. It raises nothing, and whatever happens to it relays go on polling.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from django.db import connections

from outbox import doorbell
from outbox.conf import OutboxOptions
from outbox.kernel.loop import Bell, StopRequest
from outbox.kernel.outage import Outage

logger = logging.getLogger(__name__)

APPLICATION_NAME = "outbox listener"
_PULSE_SECONDS = 10.0
_ANSWER_SECONDS = 10.0
_LONGEST_GOODBYE_SECONDS = 1.0
_PATIENCE = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
"""How long a network that swallows packets is believed, unless the database's OPTIONS say otherwise."""

_POOLED = (
    "There is a pooler before the database %r, and a LISTEN may not pass it: this relay only polls. Set OUTBOX['LISTEN_ALIAS'] "
    "to an alias that goes past the pooler, or to %r if it pools sessions and not transactions; or set OUTBOX['DOORBELL'] to "
    "False."
)


class Listener:
    """Rings `bells` whenever somebody has committed a message to the outbox of `alias`."""

    def __init__(self, alias: str, bells: Sequence[Bell], options: OutboxOptions) -> None:
        self._alias = alias
        self._named_alias = options.LISTEN_ALIAS
        self._bells = tuple(bells)
        self._wanted = options.DOORBELL
        self._end = StopRequest()
        self._outage = Outage("the doorbell")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen during the block: always to this process, on PostgreSQL to all others as well."""
        if not self._wanted:
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
                # Not longer: it may be reaching for a server that is not there, and a daemon keeps nobody from ending.
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
            except Exception as error:  # noqa: BLE001 - the server, the network, the settings: relays poll meanwhile
                self._set_connected(False)
                if not self._end:
                    self._outage.wait(error, self._end)

    def _connect(self) -> Any:
        wrapper = self._wrapper()
        # Asked anew every time: a backend may get its password from somewhere that changes it.
        parameters = {**_PATIENCE, **wrapper.get_connection_params(), "application_name": APPLICATION_NAME}
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
        logger.info("LISTEN needs psycopg 3 and this is %s: the relay polls.", wrapper.Database.__name__)
        return False
    return True


class _Line:
    """A psycopg connection, spoken to in libpq's own way: wait for the socket, take what came, see what it was.

    So nothing waits for longer than it wants to, nor past the end. Every method raises when the connection is lost, when its
    other end is silent, and when `end` is asked for.
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
        """Its answer's first value, or ""."""
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
        """Any at all? However many there are, they say the same."""
        some = False
        self._connection.consume_input()
        while self._connection.notifies() is not None:
            some = True
        return some

    def is_pooled(self) -> bool:
        """Is the process that answers another than the one that the connection was said to have?"""
        return self.ask("SELECT pg_backend_pid()") != str(self._connection.backend_pid)
