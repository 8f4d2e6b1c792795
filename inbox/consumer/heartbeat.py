"""Heartbeats of a process that runs handlers. They show operators which processes run, their handlers, and what each waits for.

Separate threads send them, one for each database: neither the thread that owns the broker connection nor a worker ever waits
for them. The watchdog, not the heartbeat, ends a process whose loops are silent. No guarantee depends on a heartbeat: a failure
to send one affects only what operators see.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from django.db import connections

from exactly_once.process.clock import monotonic
from exactly_once.process.loop import StopRequest
from exactly_once.process.main_thread import beside
from exactly_once.sql.connections import drop_unusable_connections
from exactly_once.upkeep.heartbeat_table import AFTER_FAILURE_SECONDS, HEARTBEAT_SECONDS, HeartbeatWriter, ProcessIdentity
from exactly_once.wire.text import one_line
from inbox.consumer.runner import Runner
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.leases import renewal as lease_heartbeat
from inbox.store import counting
from inbox.store.handler_rows import consumers

_SHUTDOWN_WAIT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Activity:
    """The current activity of a process.

    Attributes:
        handlers: the handlers that it receives messages for.
        received: deliveries since its start.
        ran: stored messages that it has run since its start.
        waits_for: why it waits for the broker, for people; "" if it does not.
        broker_seconds: the last round trip to the broker; None without one.
        queued: by handler, the messages in its queues at the broker, as it last read them.
        waits: what stops single handlers from working, for people.
    """

    handlers: Sequence[Handler]
    received: int = 0
    ran: int = 0
    waits_for: str = ""
    broker_seconds: float | None = None
    queued: Mapping[str, int] = field(default_factory=dict)
    waits: Sequence[str] = ()


def activity_of(runner: Runner, handlers: Sequence[Handler]) -> Activity:
    """That of a process which only runs stored messages."""
    return Activity(handlers=handlers, ran=runner.ran, waits=runner.outages.waits)


class Heartbeats:
    """The heartbeats of this process. Other threads call `activity` for their content.

    Args:
        stop: carries out the requests of operators.
    """

    def __init__(self, activity: Callable[[], Activity], stop: StopRequest | None = None) -> None:
        self._activity = activity
        self._stop = StopRequest() if stop is None else stop
        self._identity = ProcessIdentity()
        self._started_at = monotonic()
        self._end = StopRequest()

    def sending(self, aliases: Collection[str]) -> AbstractContextManager[None]:
        """Send heartbeats to these databases during the block, and mark the rows as stopped at its end."""
        # In a test's transaction, no other connection would see the row.
        outside_transactions = sorted(alias for alias in aliases if not connections[alias].in_atomic_block)
        loops = []
        for alias in outside_transactions:
            tally = counting.tallies[alias]
            tally.take()  # what was counted before
            writer = HeartbeatWriter(consumers, alias, self._identity, tally, self._stop, self._started_at)
            loops.append((f"heartbeat-{alias}", partial(self._send_to, alias, writer)))
        return beside(loops, self._end, seconds=_SHUTDOWN_WAIT_SECONDS)

    def _send_to(self, alias: str, writer: HeartbeatWriter) -> None:
        try:
            while not self._end:
                drop_unusable_connections()
                activity = self._activity()
                handlers = sorted((one for one in activity.handlers if one.using == alias), key=lambda one: one.name)
                writer.send(
                    monotonic(),
                    done=activity.received + activity.ran,
                    waits_for=activity.waits_for,
                    without_broker=bool(activity.waits_for),
                    facts={
                        "handlers": [handler.name for handler in handlers],
                        "threads": {handler.name: handler.concurrency for handler in handlers if handler.concurrency},
                        "queued": {one.name: activity.queued[one.name] for one in handlers if one.name in activity.queued},
                        "received": activity.received,
                        "ran": activity.ran,
                        "waits": [one_line(words) for words in activity.waits],
                    },
                    broker_seconds=activity.broker_seconds,
                )
                self._end.wait(AFTER_FAILURE_SECONDS if writer.is_failing else HEARTBEAT_SECONDS)
            activity = self._activity()
            writer.close(received=activity.received, ran=activity.ran)
        finally:
            connections.close_all()


class RunnerHeartbeats:
    """The heartbeats of a relay that runs this service's handlers (local://)."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, stop: StopRequest) -> None:
        heartbeats = Heartbeats(lambda: activity_of(self._runner, registry.all()), stop)
        with heartbeats.sending({handler.using for handler in registry.all()}):
            while not stop.wait(HEARTBEAT_SECONDS):
                pass
            lease_heartbeat.announce_stop()

    def drain(self, stop: StopRequest) -> int:
        """Write the statistics of the runs so far; return 0, because it makes no message ready."""
        for alias, tally in counting.tallies.items():
            if not tally.is_empty:
                counting.writer(alias).write()
        return 0
