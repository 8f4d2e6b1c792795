"""Messages of a key are handled one at a time, once each, in the order of the queue, in random schedules; and no key is stuck.

`Machine` runs two consumers, three runners and an operator, and kills them. The broker may give the queue to the second
consumer before the first has noticed. Each actor stops at every step until the schedule resumes it, or waits for a lock that
another holds. The seed is the schedule. The last test changes the product in ways that break the order, and proves that the
schedules find each.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from django.db import DatabaseError, InterfaceError, connection

from exactly_once.process.clock import monotonic, utcnow
from exactly_once.process.loop import StopRequest
from exactly_once.sql.now import DatabaseTime
from exactly_once.sql.prepared_statements import PreparedStatement
from inbox import Ordered, RetryLater
from inbox.consumer.runner import Runner
from inbox.errors import Reject
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.operators import decisions
from inbox.receiving.admit import admit
from inbox.receiving.reading import read
from inbox.states import Outcome, State
from inbox.store import arrivals, claims, dialect, due, failure_columns, ordering, sentinel
from inbox.transactions.running import DatabaseUnavailable, committed
from tests.integration.ordering.actors import Actor, Killed, gates, this_actor
from tests.support import decisions as by_operators
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import an_envelope, options
from tests.support.inbox_rows import delete_messages
from tests.support.sql import executed, fetched
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]

SECONDS = 30.0
STEPS = 400
KEYS = ("a", "a", "a", "b", "b", "c", "")
OPTIONS = options(MAX_ATTEMPTS=2, DUPLICATE_TIMEOUT=timedelta(minutes=1))
OPEN = (State.RECEIVED, State.RETRYING, State.WAITING, State.DEAD)
GATES = {
    arrivals: ["hold_gates", "insert_many", "_headless", "admit"],
    sentinel: ["promote_next", "finish"],
    claims: ["begin_stored", "begun", "fail_stored", "give_back"],
    ordering: ["hold_gates", "promote_next"],
    decisions: ["hold_gates", "is_head", "promote_next", "_write"],
    by_operators: ["decide"],
}


class LockingActor(Actor):
    """An actor that does one kind of work, and may wait for a lock of another."""

    seconds = SECONDS

    def __init__(self, machine, work):
        self.blocked = False
        self.works_by = work
        self._pid = 0
        super().__init__(machine)

    @property
    def is_idle(self):
        return super().is_idle and not self.blocked

    def is_blocked(self):
        """Does it still wait for the lock that it was found waiting for?"""
        if self.blocked:
            self.goes_on()
        return self.blocked

    def goes_on(self):
        if not self.blocked:
            self._go.release()
        self._arrives()

    def dies(self):
        if not self.blocked:
            super().dies()

    def ends(self):
        self.killed = True
        super().ends()

    def stop_at(self, gate):
        if self.killed:
            raise Killed  # the code that runs on is not there any more
        self._pid = connection.connection.info.backend_pid if connection.connection else 0
        super().stop_at(gate)

    def _arrives(self):
        deadline = monotonic() + SECONDS
        while not self._came.acquire(timeout=0.01):
            self.blocked = self._waits_for_a_lock()
            if self.blocked:
                return
            assert monotonic() < deadline, self._hangs()
        self.blocked = False
        self._raise_its_error()

    def _waits_for_a_lock(self):
        if not self._pid:
            return False
        return fetched("SELECT cardinality(pg_blocking_pids(%s)) > 0", [self._pid])

    def works(self):
        with suppress(Killed):
            while True:
                connection.ensure_connection()  # to be known by
                self.stop_at("idle")
                pid = self._pid
                try:
                    self.works_by(self)
                except (Killed, DatabaseError, InterfaceError, DatabaseUnavailable):
                    connection.close()
                if self.killed:
                    self._forget(pid)
                    if self._ended:
                        return
                    self.killed = False

    def _forget(self, pid):
        """Wait until the server has rolled back what a killed actor was doing."""
        self.machine.forget(self)
        gone = "SELECT NOT EXISTS (SELECT 1 FROM pg_stat_activity WHERE pid = %s AND pid <> pg_backend_pid())"
        wait_until(lambda: fetched(gone, [pid]))


@dataclass
class Progress:
    """What a consumer knows: how far it has stored the queue, and how far the broker has delivered it."""

    taken: int
    delivered: int = 0


@dataclass
class Machine:
    handler: object
    seed: int
    wrong: list = field(default_factory=list)

    def __post_init__(self):
        self.chance = random.Random(self.seed)
        self.step = 0
        self.queue = []
        self.acked = 0
        self._moods = random.Random(f"{self.seed}-moods")
        self._all_succeed = False
        self._running = {}
        self._lock = threading.Lock()
        self._progress = {}
        self._names = 0
        self.rounds_left = 40

    def __str__(self):
        return f"seed {self.seed}, step {self.step}"

    def run(self):
        """Take all steps, then let every handler succeed; what went wrong is in `wrong`."""
        consumers = [LockingActor(self, self._consume) for _ in range(2)]
        runners = [LockingActor(self, self._run_stored) for _ in range(3)]
        operator = LockingActor(self, self._operate)
        self._current = consumers[0]
        self._progress = {actor: Progress(0) for actor in consumers}
        actors = [*consumers, *runners, operator]
        try:
            while self.step < STEPS and not self.wrong:
                self.step += 1
                what = self.chance.choices(["go", "publish", "due", "fail over", "kill"], [80, 7, 6, 2, 2])[0]
                if what == "go":
                    self._resume_an_actor(actors)
                elif what == "publish":
                    self._publish()
                elif what == "due":
                    self._make_due()
                elif what == "fail over":
                    self._fail_over(self.chance.choice(consumers))
                else:
                    self._kill(self.chance.choice([*consumers, *runners]), consumers)
            if not self.wrong:
                self._drain(actors)
        finally:
            for actor in actors:
                actor.ends()
        return self.wrong

    def _resume_an_actor(self, actors):
        ready = [actor for actor in actors if not actor.is_blocked() and (not actor.is_idle or self._has_work(actor))]
        if ready:
            actor = self.chance.choice(ready)
            for _ in range(self.chance.choice([1, 1, 2, 8])):
                actor.goes_on()

    def _has_work(self, actor):
        if progress := self._progress.get(actor):
            return progress.taken < (len(self.queue) if actor is self._current else progress.delivered)
        if actor.works_by == self._operate:
            return self.chance.random() < 0.2
        return bool(due.due_handlers("default", [self.handler.name]))

    # --------------------------------------------------------------------------------------------------------------- the queue

    def _publish(self):
        for _ in range(self.chance.choice([1, 3, 6])):
            if self.queue and self.chance.random() < 0.1:
                self.queue.append(self.chance.choice(self.queue))  # sent again
                continue
            name, key = f"{self._names:03}", self.chance.choice(KEYS)
            self._names += 1
            age = timedelta(days=400 if self.chance.random() < 0.04 else 0)  # too old is dead from the start
            self.queue.append(an_envelope({}, biz_id=name, key=key, created_at=utcnow() - age))

    def _consume(self, actor):
        progress = self._progress[actor]
        if actor is self._current:
            progress.delivered = min(len(self.queue), max(progress.delivered, progress.taken + 8))
        start, end = progress.taken, min(progress.delivered, progress.taken + self.chance.randint(1, 5))
        if start == end:
            return
        part = [read(self.handler, one, OPTIONS) for one in self.queue[start:end]]
        became = admit(self.handler, part, OPTIONS)
        progress.taken = end
        if actor is self._current and self._progress[actor] is progress:
            self.acked = max(self.acked, end)
        assert {*became} <= {Outcome.STORED, Outcome.DUPLICATE, Outcome.DEAD, Outcome.DEFERRED}

    def _fail_over(self, actor):
        """The broker gives the queue to another consumer; the current one may not have noticed yet."""
        if actor is not self._current:
            self._current = actor
            self._progress[actor] = Progress(self.acked)

    def _kill(self, actor, consumers):
        if actor.is_idle or actor.blocked:
            return
        actor.dies()
        if actor in consumers:
            self._progress[actor] = Progress(self.acked)
            self._fail_over(next(other for other in consumers if other is not actor))

    # ----------------------------------------------------------------------------------------------------- runners and operator

    def _run_stored(self, actor):
        runner = Runner(OPTIONS, reports_unknown=False)
        runner._swept_at = dict.fromkeys(["default"], float("inf"))  # the release of stuck keys would hide the errors
        runner._turn(raising=True)

    def handle(self, message):
        actor = this_actor()
        with self._lock:
            if message.key and message.key in self._running.values():
                self.wrong.append(f"{message.biz_id} runs concurrently with another of {message.key!r}; {self}")
            self._running[actor] = message.key
        try:
            Effect.objects.create(name=message.biz_id, detail=message.key)
            if actor is not None:
                for _ in range(self._moods.choice([1, 1, 5])):  # some take long
                    actor.stop_at("handling")
            mood = "do" if self._all_succeed else self._moods.choices(["do", "fail", "later", "reject"], [74, 10, 4, 12])[0]
            if mood == "fail":
                raise ValueError("not this time")
            if mood == "later":
                raise RetryLater
            if mood == "reject":
                raise Reject("never")
        finally:
            self._ends_running(actor)

    def _ends_running(self, actor):
        with self._lock:
            if actor is None or not actor.killed:
                self._running.pop(actor, None)

    def forget(self, actor):
        with self._lock:
            self._running.pop(actor, None)

    def _operate(self, actor):
        of = (State.DEAD,) if self.chance.random() < 0.5 else OPEN
        rows = list(InboxMessage.objects.filter(state__in=of).order_by("pk").values_list("pk", flat=True))
        if not rows:
            return
        row = self.chance.choice(rows)
        if self.chance.random() < 0.6:
            _ = by_operators.retry("default", row) or by_operators.override_maximum_age("default", row)
        else:
            by_operators.skip("default", row, "not wanted")

    def _make_due(self):
        waiting = InboxMessage.objects.filter(state__in=[State.RECEIVED, State.RETRYING], next_attempt_at__isnull=False)
        some = [pk for pk in waiting.values_list("pk", flat=True) if self.chance.random() < 0.8]
        # Rows that an actor is running are skipped: the update would wait for their locks.
        sql = (
            f"UPDATE {dialect.TABLE} SET next_attempt_at = statement_timestamp() WHERE next_attempt_at IS NOT NULL "
            f"AND id IN (SELECT id FROM {dialect.TABLE} WHERE id = ANY(%s) FOR UPDATE SKIP LOCKED)"
        )
        # An actor that goes on after a wait for a lock may be moving one of them to history, which is a collision.
        committed("default", lambda alias: executed(sql, [some], using=alias))

    # ------------------------------------------------------------------------------------------------------------------ the end

    def _drain(self, actors):
        """No key may be stuck, and then every message is handled that the operator has not skipped."""
        self._all_succeed = True
        while not all(actor.is_idle for actor in actors):
            for actor in actors:
                if not actor.is_idle:
                    actor.goes_on()
        while self._progress[self._current].taken < len(self.queue) or not self._current.is_idle:
            self._current.goes_on()
        released = ordering.release_stuck("default", [], None)
        if released.stuck:
            self.wrong.append(f"{released.stuck} keys were stuck; {self}")
        while InboxMessage.objects.filter(state__in=OPEN).exists() and self.rounds_left:
            self.rounds_left -= 1
            for row in InboxMessage.objects.filter(state=State.DEAD).values_list("pk", flat=True):
                _ = by_operators.retry("default", row) or by_operators.override_maximum_age("default", row)
            InboxMessage.objects.filter(state__in=[State.RECEIVED, State.RETRYING]).update(next_attempt_at=DatabaseTime())
            Runner(OPTIONS).drain(StopRequest())
        self._judge()

    def _judge(self):
        left = list(InboxMessage.objects.filter(state__in=OPEN).values_list("biz_id", "state"))
        if left:
            self.wrong.append(f"{left} are not settled; {self}")
        arrived = list(dict.fromkeys(one.biz_id for one in self.queue))
        states = dict(InboxMessage.objects.values_list("biz_id", "state"))
        effects = defaultdict(list)
        for name, key in Effect.objects.order_by("pk").values_list("name", "detail"):
            effects[key].append(name)
        done = sorted(name for names in effects.values() for name in names)
        if done != sorted(name for name in arrived if states.get(name) == State.DONE):
            self.wrong.append(f"effects {done} of {states}; {self}")
        passed = set(InboxMessage.objects.filter(ordered=False).exclude(key="").values_list("biz_id", flat=True))
        if passed and not self.handler.skips_dead:
            self.wrong.append(f"{passed} have no place; {self}")
        for key, names in effects.items():
            kept = [name for name in names if name not in passed]
            if key and kept != sorted(kept):
                self.wrong.append(f"{key!r} was handled as {names}, of which {sorted(passed)} had been passed over; {self}")


def wrong_in(handles, seed, on_dead):
    delete_messages()
    Effect.objects.all().delete()
    machine = Machine(None, seed)
    machine.handler = handles(machine.handle, ordered=Ordered(on_dead=on_dead), name="tests.ordered")
    try:
        with gates([(module, name) for module, names in GATES.items() for name in names]):
            return machine.run()
    finally:
        registry.remove("tests.ordered")


@pytest.mark.parametrize("on_dead", ["block", "skip"])
@pytest.mark.parametrize("schedule", [*range(3), "any"])
def test_messages_of_a_key_are_handled_once_and_in_order_in_any_schedule(handles, schedule, on_dead):
    """Never two at a time, and no key is stuck at the end."""
    seed = random.randrange(2**32) if schedule == "any" else schedule

    assert not wrong_in(handles, seed, on_dead), f"seed {seed}"


def do_nothing(*args, **kwargs):
    return None


def change(patch, module, name, old, new):
    """Replace a part of a prepared statement."""
    statement = getattr(module, name)
    assert old in statement.text
    patch.setattr(module, name, PreparedStatement(f"{name}_changed", statement.types, statement.text.replace(old, new)))


DEAD_IS_SETTLED = ordering.OPEN.replace("'done'", "'done', 'dead'")
BLOCK, SKIP = "block", "skip"
MUTATIONS = {
    "storing does not lock the key": (BLOCK, lambda patch: patch.setattr(arrivals, "hold_gates", do_nothing)),
    "settling does not lock the key": (
        BLOCK,
        lambda patch: change(patch, sentinel, "_FINISH", "pg_advisory_xact_lock($6)", "$6"),
    ),
    "done does not promote the next": (
        BLOCK,
        lambda patch: (
            patch.setattr(sentinel, "can_commit", lambda guard, result: False),
            patch.setattr(sentinel, "promote_next", do_nothing),
        ),
    ),
    "skip does not promote the next": (BLOCK, lambda patch: patch.setattr(decisions, "promote_next", do_nothing)),
    "on_dead skip does not promote the next": (
        SKIP,
        lambda patch: [patch.setattr(module, "promote_behind", do_nothing) for module in (failure_columns, claims)],
    ),
    "message after a duplicate waits": (BLOCK, lambda patch: patch.setattr(arrivals, "_headless", lambda *given: [])),
    "retry ignores the head": (BLOCK, lambda patch: patch.setattr(decisions, "is_head", lambda *order: True)),
    "dead does not block its key": (
        BLOCK,
        lambda patch: (
            change(patch, arrivals, "_MANY_ORDERED", f"AND {ordering.OPEN}", f"AND {DEAD_IS_SETTLED}"),
            change(patch, arrivals, "_MANY_RECORDED", f"AND {ordering.OPEN}", f"AND {DEAD_IS_SETTLED}"),
            change(patch, ordering, "PROMOTE_HEAD", f"AND {ordering.OPEN}", f"AND {DEAD_IS_SETTLED}"),
            change(patch, sentinel, "PROMOTE_HEAD", f"AND {ordering.OPEN}", f"AND {DEAD_IS_SETTLED}"),
            change(patch, sentinel, "FOLLOW", f"AND {ordering.OPEN}", f"AND {DEAD_IS_SETTLED}"),
        ),
    ),
    "out of order runs concurrently": (SKIP, lambda patch: change(patch, claims, "_BEGIN", ordering.RUN_LOCK, "true")),
}


FOUND_BY = {
    "settling does not lock the key": 37,
    "on_dead skip does not promote the next": 1,
    "retry ignores the head": 1,
    "message after a duplicate waits": 34,
    "out of order runs concurrently": 17,
}
"""The seed to begin with, for mutations that the first seed does not find."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_model_check_of_handling_order_detects_each_seeded_bug(handles, monkeypatch, mutation):
    on_dead, mutate = MUTATIONS[mutation]
    mutate(monkeypatch)

    for seed in dict.fromkeys([FOUND_BY.get(mutation, 0), *range(24)]):
        if wrong_in(handles, seed, on_dead):
            return
    pytest.fail("no schedule has found the mutation")
