"""A relay process: watchdog, two lanes, the timer, the doorbell, companions, and an orderly end."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from django.db import connections
from django.utils.module_loading import import_string

from exactly_once.conf.masking import masked
from exactly_once.process.logs import Reminder, escaping_logger
from exactly_once.process.loop import StopRequest, Watchdog
from exactly_once.process.outage import OutageLog
from exactly_once.sql.connections import leave_pools
from exactly_once.transport.interface import Companion, Transport
from exactly_once.upkeep.alerting import alerting
from exactly_once.upkeep.executing import Operations
from outbox.conf import outbox_options
from outbox.models import SHARDS
from outbox.relay.callback_worker import askers, callers
from outbox.relay.elsewhere import companions_elsewhere
from outbox.relay.heartbeat import Heartbeat
from outbox.relay.housekeeping import housekeepers
from outbox.relay.listening import Listener
from outbox.relay.relay import Relay
from outbox.relay.releasing import Release
from outbox.relay.starting import starters
from outbox.relay.timer import Timer
from outbox.transports import open_transport

logger = escaping_logger(__name__)

_LANES = 2
"""Relays in one process. While one waits for the broker's confirms the other claims, encodes and settles."""


def serve(alias: str, *, drain: bool = False, stop: StopRequest | None = None, transport: Transport | None = None) -> int:
    """Relay the messages of `alias` until asked to stop, or with `drain` until nothing is due; return the number published.

    At a stop request it finishes the current pass first.

    Args:
        transport: replaces the one to `BROKER_URL`. It must be transactional, so that a single lane uses it.
    """
    leave_pools()
    options = outbox_options()
    stop = StopRequest() if stop is None else stop
    watchdog = Watchdog(limit=options.WATCHDOG, kind="relay")
    heartbeat = Heartbeat(alias, stop)
    broker_log, database_log, errors = OutageLog("the broker"), OutageLog("the database"), Reminder()
    transport = transport or open_transport(options.BROKER_URL, alias=alias, exchange=options.EXCHANGE)
    transports = [transport]
    if _several_help(alias, transport):
        transports += [open_transport(options.BROKER_URL, alias=alias, exchange=options.EXCHANGE) for _ in range(1, _LANES)]

    def lanes(stop: StopRequest, *, timed: bool) -> list[Relay]:
        """Each lane has its own shards, so that the lanes do not conflict; another process may conflict with both."""
        release = Release(alias, Reminder())
        made = [
            Relay(
                alias,
                each,
                options,
                stop=stop,
                watchdog=watchdog,
                heartbeat=heartbeat,
                shards=range(number, SHARDS, len(transports)),
                timed=timed,
                broker_log=broker_log,
                database_log=database_log,
                errors=errors,
                release=release,
            )
            for number, each in enumerate(transports)
        ]
        for lane in made:
            lane.siblings = [other for other in made if other is not lane]
        return made

    published = 0
    with watchdog.watching(), closing(heartbeat), alerting(() if drain else [alias], stop):
        logger.info("relay: sending the messages of database %r to %s.", alias, masked(options.BROKER_URL))
        calling = callers(alias, options, database_log=database_log)
        asking = askers(alias, options, database_log=database_log)
        companions = [*transport.companions(), *calling, *asking, *housekeepers(alias, options)]
        if not connections[alias].in_atomic_block:  # as in a test
            companions.append(Operations("outbox", [alias]))
        companions += starters(alias, options, is_local=transport.capabilities.transactional)
        for made in companions_elsewhere:
            companions += import_string(made)(alias, options, database_log=database_log)
        if not drain:
            # An operator's request to drain ends this phase only.
            phase = stop.follower()
            running = lanes(phase, timed=True)
            for lane in running:
                lane.callers = calling
            timer = Timer(alias, options, watchdog=watchdog, ring=partial(_ring, running), database_log=database_log)
            with Listener(alias, [timer.bell, *(lane.bell for lane in running)], options).listening():
                _run(running, [timer.run, *(companion.run for companion in companions)], watchdog, phase)
            published += sum(lane.published for lane in running)
        if drain or (stop.is_draining and not stop):
            draining = lanes(stop, timed=False)
            _drain(draining, companions, watchdog, stop)
            published += sum(lane.published for lane in draining)
    logger.info("relay: stopped. Messages published: %d.", published)
    return published


def _ring(lanes: Sequence[Relay]) -> None:
    for lane in lanes:
        lane.bell.ring()


def _several_help(alias: str, transport: Transport) -> bool:
    # Only one connection sees the messages in the transaction of a test.
    return not (transport.capabilities.transactional or connections[alias].in_atomic_block)


def _run(lanes: Sequence[Relay], loops: Sequence[Callable[[StopRequest], None]], watchdog: Watchdog, stop: StopRequest) -> None:
    """Run the first lane, and beside it the others and these loops."""
    with _in_threads([*(lane.run for lane in lanes[1:]), *(partial(loop, stop) for loop in loops)], watchdog, stop):
        try:
            lanes[0].run()
            logger.info("relay: stopping; what has begun is finished first. Signal again to end at once.")
        finally:
            stop.set()


def _drain(lanes: Sequence[Relay], companions: Sequence[Companion], watchdog: Watchdog, stop: StopRequest) -> None:
    """Run relay and companions in turn, because a handler may publish messages while it is drained.

    A lane may make messages of another lane ready, so several lanes repeat until none finds any work.
    """
    worked = True
    while worked and not stop:
        with _in_threads([partial(lane.run, drain=True) for lane in lanes[1:]], watchdog, stop) as others:
            found = lanes[0].run(drain=True)
        worked = bool(others) and (found or any(other.result() for other in others))
        with watchdog.suspended():
            for companion in companions:
                worked |= companion.drain(stop) > 0


@contextmanager
def _in_threads(
    functions: Sequence[Callable[[], object]], watchdog: Watchdog, stop: StopRequest
) -> Iterator[list[Future[Any]]]:
    """Run `functions` in threads beside the block, and wait for them. If one fails, all of them stop."""

    def run(function: Callable[[], object]) -> object:
        try:
            return function()
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(max(len(functions), 1), thread_name_prefix="lane") as pool:
        running = [pool.submit(run, function) for function in functions]
        yield running
        with watchdog.suspended():
            for future in running:
                future.result()
