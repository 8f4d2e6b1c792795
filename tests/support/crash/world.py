"""The test's side of a crash test: the processes, the load, the wait for the end.

Producers are threads of the test, everything else is a process of its own. A test waits for conditions only; the one thing
measured by the clock is how long it is ready to wait.
"""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import kombu
from django.db import transaction
from django.db.models import Max

from inbox.models import InboxMessage
from inbox.states import DUE, Outcome, State
from outbox.models import OutboxMessage
from tests.support.crash import operations
from tests.support.crash.operations import commit_operation, next_number, write
from tests.support.crash.oracle import Verdict, rows_due, verdict
from tests.support.servers.private import LOOPBACK, free_port
from tests.support.sql import executed
from tests.support.threads import in_threads
from tests.support.workers import Process, catches

PATIENCE_SECONDS = 60.0
OPEN = ("ready", "scheduled", "retrying", "waiting", "paused", "prepared")
RELAY, CONSUMER = "outbox_relay", "inbox_consume"
DEFERRED = re.compile(rf"Deliveries: .*?(\d+) {Outcome.DEFERRED.value}")


class Worker(Process):
    """One process, which has been started."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        super().__init__(environment, log, *command)
        self.command, self.environment = command, environment
        self.start()

    @property
    def is_alive(self) -> bool:
        return not self.has_ended()

    @property
    def is_ready(self) -> bool:
        """Whether it has a handler for SIGTERM; before that, Python ends at once."""
        return self.is_alive and catches(self.pid, signal.SIGTERM)

    @property
    def is_stopped(self) -> bool:
        return _state(self.pid) == "T"

    def has_said(self, words: str) -> bool:
        return words in self.said()

    def kill(self) -> None:
        super().kill()
        self._process.wait()

    def ask_to_end(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def abort(self) -> None:
        """End it; with PYTHONFAULTHANDLER it first prints the stack of every thread."""
        self._process.send_signal(signal.SIGABRT)
        self.thaw()
        self._process.wait()

    def ends(self) -> int:
        """Its exit status, once it has one; negative is the signal that ended it."""
        try:
            return super().ends()
        except AssertionError:
            self.abort()
            raise AssertionError(f"{self.command} does not end\n{self.tail()}") from None

    def tail(self, lines: int = 60) -> str:
        how = "alive" if self.is_alive else self._process.returncode
        return "\n".join([f"--- {self.log.name}, {how}", *self.said().splitlines()[-lines:]])


@dataclass
class World:
    """Everything one test has: a database, a broker or none (`rabbit`), and its processes."""

    environment: dict[str, str]
    directory: Path
    rabbit: Any
    broker_url: str
    workers: list[Worker] = field(default_factory=list)
    seed: int = field(default_factory=lambda: random.randrange(2**32))
    inbox_options: dict[str, Any] = field(default_factory=dict)
    """For every process of this test."""

    # ------------------------------------------------------------------------------------------------------------ processes

    def relay(self, **how: Any) -> Worker:
        return self._start(RELAY, **how)

    def consumer(self, **how: Any) -> Worker:
        return self._start(CONSUMER, **how)

    def listening(self, **how: Any) -> Worker:
        """A consumer that is subscribed already: from now on nothing is unroutable."""
        worker = self.consumer(**how)
        self.wait_until(lambda: worker.has_said("consumer: receiving from"), "the consumer is subscribed")
        return worker

    def command(self, *words: str, **how: Any) -> Worker:
        return self._start(*words, **how)

    def web_server(self, failpoint: str = "") -> tuple[Worker, int]:
        """A web server that listens, and its port."""
        port = free_port()
        worker = self.command("runserver", f"{LOOPBACK}:{port}", "--noreload", failpoint=failpoint)
        self.wait_until(lambda: _listens(port), "the server listens")
        return worker, port

    def again(self, worker: Worker) -> Worker:
        """The same process once more, as a supervisor would start it."""
        return self._spawn(worker.command, worker.environment)

    def dies_at(self, point: str, start: Callable[..., Worker], **how: Any) -> Worker:
        """A process that must die at this failpoint; else the test would prove nothing."""
        return self.dead(start(failpoint=f"kill {point}", **how), point)

    @staticmethod
    def dead(victim: Worker, point: str) -> Worker:
        assert victim.ends() == -signal.SIGKILL, f"the failpoint {point!r} was never reached\n{victim.tail()}"
        return victim

    def end_all(self) -> None:
        """End every process before the test ends."""
        for worker in self.workers:
            if worker.is_alive:
                worker.kill()

    def tails(self) -> str:
        return "\n".join(worker.tail() for worker in self.workers[-6:])

    def _start(
        self,
        *command: str,
        failpoint: str = "",
        bug: str = "",
        broker_url: str = "",
        database_url: str = "",
        outbox: dict[str, Any] | None = None,
        inbox: dict[str, Any] | None = None,
    ) -> Worker:
        environment = {
            **self.environment,
            "BROKER_URL": broker_url or self.broker_url,
            "DATABASE_URL": database_url or self.environment["DATABASE_URL"],
            "PGAPPNAME": command[0],
            "OUTBOX": json.dumps(outbox or {}),
            "INBOX": json.dumps({**self.inbox_options, **(inbox or {})}),
            "PYTHONFAULTHANDLER": "1",
            "FAILPOINT": failpoint,
            "BUG": bug,
            "DELIVERIES": str(self.deliveries_file),
            "RUNS": str(self.runs_file),
            "GATE": str(self.gate),
        }
        return self._spawn([*command], environment)

    def _spawn(self, command: list[str], environment: dict[str, str]) -> Worker:
        worker = Worker(command, environment, self.directory / f"{len(self.workers)}-{command[0]}.log")
        self.workers.append(worker)
        return worker

    # ------------------------------------------------------------------------------------------------------------- the load

    def operate(self, number: int, *, how: str = "", prefix: str = "", **options: Any) -> None:
        """Commit `number` business changes, each with its message."""
        for _ in range(number):
            commit_operation(f"{prefix or f'{how}-'}{next_number()}", how=how, **options)

    def operate_together(self, number: int, *, how: str = "", padding: int = 0) -> None:
        """Commit `number` operations that one relay claims together: one transaction, no keys, one shard."""
        with transaction.atomic():
            for _ in range(number):
                write(f"together-{next_number()}", how, padding)
            OutboxMessage.objects.filter(state="ready").update(shard=1)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Handlers of operations that are `held` do not end before the block does."""
        self.gate.touch()
        try:
            yield
        finally:
            self.gate.unlink()

    @contextmanager
    def load(
        self, producers: int = 2, pause_seconds: float = 0.03, kinds: Mapping[str, int] = operations.PLAIN
    ) -> Iterator[Counter[str]]:
        """Producers at work for the length of the block; what they did, by outcome."""
        enough = threading.Event()
        tally: Counter[str] = Counter()
        work = [
            partial(operations.Producer(tally, random.Random(f"{self.seed}-{n}"), kinds).run, enough, pause_seconds)
            for n in range(producers)
        ]
        with operations.a_checker(), in_threads(*work, stop=enough):
            yield tally

    def flows(self, enough: int = 20) -> None:
        """Wait until some more messages were handled."""
        before = self.inbox()["done"]
        self.wait_until(lambda: self.inbox()["done"] >= before + enough, "the load is flowing")

    # -------------------------------------------------------------------------------------------------------- what is there

    @property
    def deliveries_file(self) -> Path:
        return self.directory / "deliveries"

    @property
    def runs_file(self) -> Path:
        return self.directory / "runs"

    @property
    def gate(self) -> Path:
        return self.directory / "gate"

    def deliveries(self) -> Counter[str]:
        """Raw deliveries by message id, recorded before the consumer processes them."""
        return _lines(self.deliveries_file)

    def runs(self) -> Counter[str]:
        """Calls of the handler by operation, the ones that were rolled back among them."""
        return _lines(self.runs_file)

    def redelivered(self) -> int:
        """Deliveries beyond the first of each message, without those deferred because a duplicate was being handled.

        A consumer logs the number of deferred deliveries when it ends.
        """
        logs = [worker.said() for worker in self.workers]
        deferred = sum(int(count) for log in logs for count in DEFERRED.findall(log))
        return sum(times - 1 for times in self.deliveries().values()) - deferred

    def outbox(self) -> Counter[str]:
        return Counter(OutboxMessage.objects.values_list("state", flat=True))

    def snapshot(self) -> tuple[Counter[str], int]:
        """The outbox by state, and how many rows there must be, as one transaction sees both."""
        with transaction.atomic():
            executed("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            return self.outbox(), rows_due().total()

    def inbox(self) -> Counter[str]:
        return Counter(InboxMessage.objects.values_list("state", flat=True))

    def suppressed(self) -> int:
        """The number of duplicates that the inbox has counted."""
        return sum(InboxMessage.objects.values_list("duplicates", flat=True))

    def published(self) -> int:
        return OutboxMessage.objects.filter(state="published").count()

    def most_attempts(self) -> int:
        return OutboxMessage.objects.aggregate(most=Max("attempts"))["most"] or 0

    def in_broker(self) -> int:
        return sum(self.rabbit.queue_lengths(self.broker_url).values()) if self.rabbit else 0

    def delete_queues(self) -> None:
        """Delete all queues, as if no consumer had ever declared one."""
        with kombu.Connection(self.broker_url) as broker:
            for queue in self.rabbit.queue_lengths(self.broker_url):
                broker.default_channel.queue_delete(queue)

    def let_the_broker_remember_its_queues(self) -> None:
        """RabbitMQ 3.10 stores late which quorum queues it leads: one killed in its first second never has a leader again."""
        self.rabbit.evaluate("lists:foreach(fun dets:sync/1, dets:all()).")

    def is_quiet(self) -> bool:
        """No message is unfinished in the outbox, in the broker or in the inbox."""
        before = OutboxMessage.objects.count()
        if OutboxMessage.objects.filter(state__in=OPEN).exists():
            return False
        if self.in_broker() or InboxMessage.objects.filter(state__in=[*DUE, State.WAITING]).exists():
            return False
        return OutboxMessage.objects.count() == before

    # ---------------------------------------------------------------------------------------------------------- the ending

    def wait_until(self, condition: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.1)
        for worker in self.workers:
            if worker.is_alive:
                worker.abort()
        raise AssertionError(
            f"waited {seconds:.0f} s in vain until {what}\noutbox {dict(self.outbox())}, inbox {dict(self.inbox())}, "
            f"{verdict()}\n{self.tails()}"
        )

    def drain(self) -> Verdict:
        """Let healthy processes finish all messages, stop them with SIGTERM, and ask the oracle."""
        alive = [worker for worker in self.workers if worker.is_alive and not worker.is_stopped]
        for command in (RELAY, CONSUMER):
            if not any(worker.command == [command] for worker in alive):
                alive.append(self._start(command))
        self.wait_until(self.is_quiet, "everything was drained", 2 * PATIENCE_SECONDS)
        self.end(*alive)
        return verdict()

    def end(self, *workers: Worker) -> None:
        """SIGTERM; each of them must end with 0."""
        self.wait_until(lambda: all(worker.is_ready for worker in workers), "every process listens to SIGTERM")
        for worker in workers:
            worker.ask_to_end()
        for worker in workers:
            assert worker.ends() == 0, worker.tail()

    def assert_nothing_went_wrong(self, found: Verdict) -> None:
        """No loss, no double, no ghost; every row ever committed has ended as it had to, and none of them is dead."""
        assert found.committed, "nothing was committed, so nothing is proved"
        assert found.is_clean, f"{found}, seed {self.seed}\n{self.tails()}"
        states, due = self.outbox(), rows_due()
        assert states == due, f"{dict(states)} and not {dict(due)}"
        assert set(self.inbox()) == {"done"}, dict(self.inbox())
        assert self.inbox().total() == states["published"] + len(found.overtaken)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


def _lines(place: Path) -> Counter[str]:
    return Counter(place.read_text().splitlines()) if place.exists() else Counter()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        ps = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return ps.stdout.strip()[:1]
