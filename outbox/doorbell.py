"""The doorbell: a publisher notifies idle relays after it has committed a message.

On PostgreSQL it is a NOTIFY without a payload, sent *after* the business transaction, in its own transaction on the same
connection. Inside the business transaction it would serialise commits: PostgreSQL holds one lock of the whole cluster while a
notifying transaction commits, including flushing and replicating (measured with 16 clients and 20 ms per commit: 736
transactions a second without NOTIFY, 48 with it). A transaction that only notifies flushes nothing, and a process sends at most
one NOTIFY every 50 ms.

A lost ring loses no message, because relays poll. The effects of a ring that is not sent or not received:

- A ring suppressed within 50 ms of the last one costs nothing. The last ring makes a relay poll every few milliseconds for
  100 ms, and those polls see the rows that were committed before the suppressed ring.
- If the notification fails, the process dies between commit and ring, an earlier hook of the same commit raises, or no relay is
  listening at that moment, the message waits for the next poll (`OutboxOptions.poll_seconds`).

Relays of the same process are rung directly, on every database (`local://` runs its handlers there, and they may publish).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cache

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.process.clock import monotonic, utcnow
from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import Bell
from outbox.conf import outbox_options

logger = escaping_logger(__name__)

CHANNEL = "outbox_doorbell"
"""Channel of NOTIFY in one database. A second outbox in another schema of the database shares it, without harm."""

ALERT_SECONDS = 0.1
"""How long a relay must poll every few milliseconds after a ring."""

_QUIET_SECONDS = 0.05
_AFTER_FAILURE_SECONDS = 1.0
_LONGEST_WAIT = "50ms"
# Another application that notifies in a long commit holds the cluster's lock, and our publisher must not wait for that. The
# setting is local to the statement's own transaction, so it is safe behind a transaction-pooling proxy.
_NOTIFY = f"SELECT set_config('lock_timeout', '{_LONGEST_WAIT}', true), pg_notify('{CHANNEL}', '')"


def ring_after_commit(alias: str) -> None:
    """Wake the relays of `alias` after the open transaction has committed a message that is ready.

    A transaction rings once, however often this is called, and does not ring if it is rolled back.
    """
    if outbox_options().LISTEN_ALIAS is None:
        return
    connection = connections[alias]
    if connection.vendor != "postgresql" and alias not in _in_this_process:
        return
    ring = _ring_of(alias)
    # A registered hook runs at the commit: the hooks of a savepoint that was rolled back have been removed.
    if any(hook[1] is ring for hook in connection.run_on_commit):
        return
    # The transaction of a TestCase never commits, and the test may count its own hooks.
    if not getattr(connection.atomic_blocks[0], "_from_testcase", False):
        connection.on_commit(ring, robust=True)


def ring_if_soon(alias: str, due: timedelta | datetime | None) -> None:
    """Ring for a message that is due after this duration, at this instant, or now. The timer finds later messages by itself.

    It uses this process's clock, so a ring may be superfluous or missing; the timer then finds the message a moment later.
    """
    delay = due - utcnow() if isinstance(due, datetime) else due
    if delay is None or delay <= outbox_options().horizon:
        ring_after_commit(alias)


@contextmanager
def heard_in_this_process(alias: str, bells: Sequence[Bell]) -> Iterator[None]:
    """Ring `bells` for every commit of this process."""
    with _registering:
        _in_this_process[alias] = (*_in_this_process.get(alias, ()), *bells)
    try:
        yield
    finally:
        with _registering:
            left = tuple(bell for bell in _in_this_process.pop(alias) if bell not in bells)
            if left:
                _in_this_process[alias] = left


class _Doorbell:
    """The doorbell of one alias, for all threads of the process."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._quiet_until = 0.0

    def ring(self) -> None:
        """The hook: the transaction has committed."""
        for bell in _in_this_process.get(self._alias, ()):
            bell.ring()
        now = monotonic()
        if now < self._quiet_until:
            return
        connection = connections[self._alias]
        if not _can_notify(connection):
            return
        # Without a lock: two threads may ring at the same time, and a lock held during a fork would never be released.
        self._quiet_until = now + _QUIET_SECONDS
        try:
            _notify(connection)
        except Exception as error:  # noqa: BLE001 - the caller's transaction has committed, so it must not fail
            self._quiet_until = monotonic() + _AFTER_FAILURE_SECONDS
            logger.info("The doorbell of %r was not rung; relays find the message by polling: %s", self._alias, error)


def _can_notify(connection: BaseDatabaseWrapper) -> bool:
    """Is the connection open and in no transaction? An earlier hook may have closed it or begun a transaction."""
    return (
        connection.vendor == "postgresql"
        and connection.connection is not None
        and connection.autocommit
        and not connection.in_atomic_block
    )


def _notify(connection: BaseDatabaseWrapper) -> None:
    # On the driver's connection, because Django's cursor would reconnect, count as a query of the caller, and call its execute
    # wrappers.
    with connection.wrap_database_errors, connection.connection.cursor() as cursor:
        cursor.execute(_NOTIFY)


_registering = threading.Lock()
_in_this_process: dict[str, tuple[Bell, ...]] = {}


@cache
def _ring_of(alias: str) -> Callable[[], None]:
    """The same object on every call, so that a registered hook is recognised."""
    return _Doorbell(alias).ring
