"""The doorbell: a publisher tells idle relays that it has just committed something for them.

On PostgreSQL it is a NOTIFY without a payload, sent *after* the business transaction, in a transaction of its own on the same
connection. Inside the business transaction it would serialise commits: PostgreSQL holds one lock of the whole cluster while a
notifying transaction commits, flushing and replicating included (measured with 16 clients and 20 ms a commit: 736 transactions
a second without, 48 with it). One that only notifies flushes nothing, and a process sends at most one every 50 ms.

A ring may be lost and nothing else is: relays poll. What is lost when:

- A ring withheld because of the last 50 ms costs nothing. A relay that was rung polls every few milliseconds for 100 ms from
  then on, which is longer, and what was committed before its withheld ring is visible to those polls.
- The notification failed, the process died between commit and ring, an earlier hook of the same commit raised, nobody was
  listening at that moment: the message waits for the next poll (`OutboxOptions.poll_seconds`).

Relays of this very process (`local://` has its handlers there, and they publish, too) are rung directly, on every database.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from django.db import connections

from outbox.conf import outbox_options
from outbox.kernel.clock import monotonic, utcnow
from outbox.kernel.loop import Bell

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger(__name__)

CHANNEL = "outbox_doorbell"
"""Of NOTIFY; a channel belongs to one database. A second outbox in another schema of it shares the channel, harmlessly."""

ALERT_SECONDS = 0.1
"""How long a relay that was rung must go on polling every few milliseconds."""

_QUIET_SECONDS = 0.05
_AFTER_FAILURE_SECONDS = 1.0
_LONGEST_WAIT = "50ms"
# A stranger that notifies in a long commit has the cluster's lock, and that must not become our publisher's wait. A setting
# local to a statement's own transaction outlives nothing, so it may go through a transaction-pooling proxy.
_NOTIFY = f"SELECT set_config('lock_timeout', '{_LONGEST_WAIT}', true), pg_notify('{CHANNEL}', '')"


def ring_after_commit(alias: str) -> None:
    """Wake the relays of `alias` once the transaction that is open on it has committed a message that is ready.

    Call it as often as you like; a transaction rings once, and one that is rolled back does not.
    """
    if not outbox_options().DOORBELL:
        return
    connection = connections[alias]
    if connection.vendor != "postgresql" and alias not in _in_this_process:
        return
    ring = _ring_of(alias)
    # A hook that is still there runs when we commit: those of a savepoint that was rolled back have been removed.
    if any(hook[1] is ring for hook in connection.run_on_commit):
        return
    # The transaction of a TestCase never commits, and its hooks are the test's own to count.
    if not getattr(connection.atomic_blocks[0], "_from_testcase", False):
        connection.on_commit(ring, robust=True)


def ring_if_soon(alias: str, due: timedelta | datetime | None) -> None:
    """The same for a message that is due after that span, at that instant, or now: what is due later, a timer finds by itself.

    By this process's clock, so a ring may come for nothing, or not; then the timer finds the message a moment later.
    """
    span = due - utcnow() if isinstance(due, datetime) else due
    if span is None or span <= outbox_options().horizon:
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
    """One alias's, for all threads of the process."""

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
        # Without a lock: two threads that come here together ring twice, and a lock held during a fork is held for ever.
        self._quiet_until = now + _QUIET_SECONDS
        try:
            _notify(connection)
        except Exception as error:  # noqa: BLE001 - the caller's transaction has committed, that is what counts
            self._quiet_until = monotonic() + _AFTER_FAILURE_SECONDS
            logger.info("The doorbell of %r was not rung, so relays find out by polling: %s", self._alias, error)


def _can_notify(connection: BaseDatabaseWrapper) -> bool:
    """Has the connection just committed, and is it free? An earlier hook may have closed it or begun something new."""
    return (
        connection.vendor == "postgresql"
        and connection.connection is not None
        and connection.autocommit
        and not connection.in_atomic_block
    )


def _notify(connection: BaseDatabaseWrapper) -> None:
    # On the driver's connection, because Django's cursor would connect anew, count as a query of the caller's, and ask its
    # execute wrappers.
    with connection.wrap_database_errors, connection.connection.cursor() as cursor:
        cursor.execute(_NOTIFY)


_registering = threading.Lock()
_in_this_process: dict[str, tuple[Bell, ...]] = {}
_rings: dict[str, Callable[[], None]] = {}


def _ring_of(alias: str) -> Callable[[], None]:
    """The same object every time, by which a hook is known again."""
    return _rings.get(alias) or _rings.setdefault(alias, _Doorbell(alias).ring)
