"""The operations of producers: business changes, each with its message, of every kind that the outbox offers.

An operation writes its name in the transaction of its business change. Any further fact about its message (cancelled, not
before an instant) is written in the transaction that makes it true. The oracle knows these rows only.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.db import DatabaseError, IntegrityError, InterfaceError, connection, transaction
from django.db.models.functions import Now

from outbox import cancel, prepare, publish, reschedule, restore
from outbox.callbacks import checkers
from outbox.preparing import PreparedMessage
from tests.support.apps.effects.models import Effect, Unique
from tests.support.crash.oracle import CHAINS, EXPIRES, Fact

TOPIC = "crash.done"
SHORTEST_DELAY, LONGEST_DELAY = 100, 1500
"""Milliseconds."""
A_WHILE = timedelta(seconds=2)
"""Long enough for a delayed message to be published meanwhile, short enough for many to be still on their way."""
HOUR = timedelta(hours=1)

PLAIN = {"commit": 45, "chain": 20, "keyed": 20, "rollback": 10, "savepoint": 5}
"""The kinds of operations, by how often each is chosen."""
TIMED = {**PLAIN, "prioritised": 15, "delayed": 15, "cancelled": 25, "rescheduled": 15, "expired": 8}
EVERY_KIND = {**TIMED, "confirmed": 10, "withdrawn": 8, "forgotten": 15}
"""Prepared messages as well. A prepared row is committed before its fact, so a snapshot taken in between misses the fact."""

EVERY_OUTCOME = {
    *("commit", "chain", "keyed", "rollback", "savepoint", "prioritised", "delayed", "expired"),
    *("cancelled", "too late to cancel", "cancellation rolled back", "restored"),
    *("rescheduled", "too late to reschedule"),
    *("confirmed", "withdrawn", "forgotten after it took place", "forgotten before it took place"),
}
"""What must have occurred before a test may say that the load had everything."""


class Changed(Exception):
    """The producer rolls back."""


def commit_operation(name: str, *, how: str = "", **options: Any) -> None:
    with transaction.atomic():
        write(name, how, **options)


def roll_back_operation(name: str) -> None:
    with suppress(Changed), transaction.atomic():
        write(name, "")
        raise Changed


def commit_without_savepoint(name: str) -> None:
    """One operation commits, another that was begun inside it does not."""
    with transaction.atomic():
        with suppress(Changed), transaction.atomic():
            write(f"{name}-undone", "")
            raise Changed
        write(name, "")


def write(name: str, how: str, padding: int = 0, **options: Any) -> uuid.UUID:
    """The business change and its message, in the transaction that is open; the message id."""
    Unique.objects.create(name=name)
    return publish(TOPIC, payload_of(name, how, padding), **options).id


def payload_of(name: str, how: str, padding: int = 0) -> dict[str, str]:
    return {"operation": name, "how": how, "padding": padding * "-"}


def database_now() -> datetime:
    """The database's clock, read in the transaction that is open."""
    instant: datetime = Unique.objects.values_list(Now(), flat=True)[:1].get()
    return instant


class Producer:
    """One thread of load.

    Args:
        tally: what was done, by outcome; all producers share it.
        kinds: which operations, and how often.
    """

    def __init__(self, tally: Counter[str], choice: random.Random, kinds: Mapping[str, int]) -> None:
        self._tally = tally
        self._choice = choice
        self._kinds = kinds
        self._later: list[tuple[float, int, Callable[[], str]]] = []

    def run(self, enough: threading.Event, pause_seconds: float) -> None:
        while not enough.is_set():
            act = self._next()
            try:
                self._tally[act()] += 1
            except (DatabaseError, InterfaceError):
                # The producer cannot know whether it was committed; the oracle does.
                self._tally["unknown"] += 1
                with suppress(DatabaseError, InterfaceError):
                    connection.close()
                enough.wait(0.1)
            enough.wait(pause_seconds)

    def _next(self) -> Callable[[], str]:
        if self._later and self._later[0][0] <= time.monotonic():
            return heapq.heappop(self._later)[-1]
        kind = self._choice.choices([*self._kinds], [*self._kinds.values()])[0]
        operate: Callable[[str], str | None] = getattr(self, f"_{kind}")
        name = f"{kind}-{next_number()}"
        return lambda: operate(name) or kind

    def _do_within(self, duration: timedelta, act: Callable[[], str]) -> None:
        """Do that later, at some moment within that time."""
        at = time.monotonic() + self._choice.uniform(0, duration.total_seconds())
        heapq.heappush(self._later, (at, next_number(), act))

    # ------------------------------------------------------------------------------------------------------- in one go

    _commit = staticmethod(commit_operation)
    _rollback = staticmethod(roll_back_operation)
    _savepoint = staticmethod(commit_without_savepoint)

    def _chain(self, name: str) -> None:
        commit_operation(CHAINS + name, how="chain")

    def _keyed(self, name: str) -> None:
        commit_operation(name, key=f"key-{self._choice.randrange(8)}")

    def _prioritised(self, name: str) -> None:
        commit_operation(name, priority=self._choice.randint(1, 9))

    def _expired(self, name: str) -> None:
        """It has expired when it is written, so its outcome does not depend on the speed of the relays."""
        with transaction.atomic():
            Unique.objects.create(name=EXPIRES + name)
            publish(TOPIC, payload_of(EXPIRES + name, ""), deliver_at=database_now() - HOUR, expires_in=HOUR / 2)

    # --------------------------------------------------------------------------------------------------------- delayed

    def _delayed(self, name: str) -> None:
        self._schedule(name)

    def _cancelled(self, name: str) -> str:
        message_id, due_at, delay = self._schedule(name)
        self._change_mind(name, delay, partial(self._cancel, name, message_id, due_at))
        return "to be cancelled"

    def _rescheduled(self, name: str) -> str:
        message_id, due_at, delay = self._schedule(name)
        self._change_mind(name, delay, partial(self._reschedule, name, message_id, due_at))
        return "to be rescheduled"

    def _schedule(self, name: str) -> tuple[uuid.UUID, datetime, timedelta]:
        delay = self._delay()
        with transaction.atomic():
            Unique.objects.create(name=name)
            due_at = database_now() + delay
            when: dict[str, Any] = self._choice.choice([{"delay": delay}, {"deliver_at": due_at}])
            message = publish(TOPIC, payload_of(name, "timed"), expires_in=HOUR, **when)
            Unique.objects.create(name=Fact.NOT_BEFORE.of(name, due_at))
        return message.id, due_at, delay

    def _change_mind(self, name: str, delay: timedelta, act: Callable[[], str]) -> None:
        """Do that before or after the message is due, or after it was handled, which is certainly too late."""
        if self._choice.random() < 0.1:
            self._do_once_handled(name, act)
        else:
            self._do_within(delay + A_WHILE, act)

    def _do_once_handled(self, name: str, act: Callable[[], str]) -> str:
        if Effect.objects.filter(name=name).exists():
            return act()
        self._do_within(A_WHILE, partial(self._do_once_handled, name, act))
        return "not handled yet"

    def _cancel(self, name: str, message_id: uuid.UUID, due_at: datetime) -> str:
        """The answer decides whether an effect is due.

        A message that is cancelled when it is due already may be in the broker: a relay that died had sent it.
        """
        with suppress(Changed), transaction.atomic():
            if not cancel(message_id):
                return "too late to cancel"
            if self._choice.random() < 0.2:
                raise Changed
            fact = Fact.CANCELLED if database_now() < due_at else Fact.CANCELLED_LATE
            Unique.objects.create(name=fact.of(name))
            if self._choice.random() < 0.3:
                self._do_within(A_WHILE, partial(self._restore, name, message_id))
            return str(fact)
        return "cancellation rolled back"

    def _restore(self, name: str, message_id: uuid.UUID) -> str:
        with transaction.atomic():
            if not restore(message_id):
                return "not restored"
            Unique.objects.filter(name__in=[Fact.CANCELLED.of(name), Fact.CANCELLED_LATE.of(name)]).delete()
        return "restored"

    def _reschedule(self, name: str, message_id: uuid.UUID, due_at: datetime) -> str:
        """One that is due already may be in the broker, as when it is cancelled: then the first instant is all that holds."""
        delay = self._delay()
        with transaction.atomic():
            now = database_now()
            if not reschedule(message_id, delay=delay):
                return "too late to reschedule"
            if database_now() >= due_at:
                return "rescheduled late"
            # It may be due sooner than before.
            Unique.objects.filter(name__startswith=f"{Fact.NOT_BEFORE.of(name)}:").delete()
            Unique.objects.create(name=Fact.NOT_BEFORE.of(name, now + delay))
        return "rescheduled"

    def _delay(self) -> timedelta:
        return timedelta(milliseconds=self._choice.randrange(SHORTEST_DELAY, LONGEST_DELAY))

    # -------------------------------------------------------------------------------------------------------- prepared

    def _confirmed(self, name: str) -> str:
        try:
            with self._prepare(name):
                self._take_place(name)
        except IntegrityError:
            return "ruled out by the checker"
        return "confirmed"

    def _withdrawn(self, name: str) -> None:
        self._prepare(name).rollback()

    def _forgotten(self, name: str) -> str:
        """As if the process had died: only the checker decides."""
        self._prepare(name)
        if self._choice.random() < 0.5:
            return "forgotten before it took place"
        try:
            self._take_place(name)
        except IntegrityError:
            return "ruled out by the checker"
        return "forgotten after it took place"

    def _prepare(self, name: str) -> PreparedMessage:
        half = prepare(TOPIC, payload_of(name, ""))
        Unique.objects.create(name=Fact.PREPARED.of(name))
        return half

    def _take_place(self, name: str) -> None:
        """The business change, in a transaction of its own, unless the checker has ruled it out."""
        with transaction.atomic():
            Unique.objects.create(name=Fact.DECIDED.of(name))
            Unique.objects.create(name=name)


@contextmanager
def a_checker() -> Any:
    """`prepare` requires one in this process; the one that is asked is in the relays."""
    checkers.add(TOPIC, print)
    try:
        yield
    finally:
        checkers.remove(TOPIC)


_numbers = iter(range(10**9))
_numbers_lock = threading.Lock()


def next_number() -> int:
    with _numbers_lock:
        return next(_numbers)
