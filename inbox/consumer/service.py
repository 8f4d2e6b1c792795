"""A consumer process: consumer, runner, watchdog, companions, and an orderly shutdown."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from django.core.exceptions import ImproperlyConfigured

from exactly_once.conf.masking import masked
from exactly_once.process.logs import escaping_logger
from exactly_once.process.loop import StopRequest, Watchdog
from exactly_once.process.main_thread import beside
from exactly_once.sql.connections import leave_pools
from exactly_once.transport.broker import is_local, why_unusable
from exactly_once.transport.interface import Companion
from exactly_once.upkeep.alerting import alerting
from exactly_once.upkeep.executing import Operations
from inbox.conf import inbox_options
from inbox.consumer.consumer import Consumer
from inbox.consumer.heartbeat import Heartbeats, activity_of
from inbox.consumer.pool import Pool
from inbox.consumer.runner import Runner
from inbox.handlers.handler import Handler
from inbox.handlers.registry import registry
from inbox.housekeeping import databases, housekeepers
from inbox.leases import renewal
from inbox.limits.slots import limited_by_default

logger = escaping_logger(__name__)

_WATCHDOG_INTERVAL_SECONDS = 0.5
_LONGEST_GOODBYE_SECONDS = 5.0


def serve(
    *,
    drain: bool = False,
    concurrency: int | None = None,
    stop: StopRequest | None = None,
    only: Sequence[Handler] | None = None,
) -> None:
    """Receive from the broker and run stored messages until asked to stop, or with `drain` until nothing is due.

    With local:// it runs only the messages that the relay has handed over.

    Args:
        concurrency: worker threads; default: INBOX["CONCURRENCY"].
        only: the handlers that this process receives and runs; default: all of the project.

    Raises:
        ImproperlyConfigured: the broker URL cannot be used.
    """
    leave_pools()
    options = inbox_options()
    local = is_local(options.broker_url)
    if not local and (reason := why_unusable(options.broker_url, options.own_tls) or options.tls.why_unloadable()):
        raise ImproperlyConfigured(f"{options.broker_setting} is {masked(options.broker_url)}, which cannot be used: {reason}.")
    stop = StopRequest() if stop is None else stop
    watchdog = Watchdog(limit=options.WATCHDOG, kind="consumer")
    size = options.CONCURRENCY if concurrency is None else concurrency
    options = replace(options, CONCURRENCY=size)
    handlers = limited_by_default(registry.all() if only is None else only, size)
    runner = Runner(options, stop, handlers=lambda: handlers)
    if not handlers:
        logger.warning(
            "consumer: no handler is registered, so no message is handled. Define handlers in an installed app's handlers.py."
        )
    consumer: Consumer | None = None
    if not local:
        consumer = Consumer(handlers, options, stop=stop, watchdog=watchdog, runner=runner)
    heartbeats = Heartbeats(consumer.activity if consumer else lambda: activity_of(runner, handlers), stop)
    aliases = {handler.using for handler in handlers}
    bulk, housekeeping = Operations("inbox", databases()), housekeepers()
    companions: Sequence[Companion] = () if drain else (bulk, *housekeeping)
    end = stop.follower()
    loops = beside(
        [(type(each).__name__, partial(each.run, end)) for each in companions], end, seconds=_LONGEST_GOODBYE_SECONDS
    )
    with watchdog.watching(), heartbeats.sending(aliases), alerting(() if drain else aliases, stop), loops:
        if consumer is not None:
            consumer.run(drain=drain)
            counts = ", ".join(f"{count} {outcome.value}" for outcome, count in consumer.outcomes.items())
            logger.info("consumer: stopped. Deliveries: %s.", counts or "none")
        elif not drain:
            run_on_threads(runner, size, stop, watchdog)
        if drain or stop.is_draining:
            with watchdog.suspended():
                while runner.drain(stop) + bulk.drain(stop):
                    pass
                for housekeeper in housekeeping if drain else ():
                    housekeeper.drain(stop)
        logger.info("runner: stopped. Stored messages run: %d.", runner.ran)


def run_on_threads(runner: Runner, size: int, stop: StopRequest, watchdog: Watchdog) -> None:
    """Run stored messages on `size` threads until asked to stop or to drain."""
    # Handlers run on separate threads, so that a long one does not trigger the watchdog.
    pool = Pool(runner, size=size)
    pool.start()
    logger.info("runner: running stored messages on %d threads.", size)
    limit = inbox_options().STUCK_AFTER
    while not (stop or stop.is_draining):
        watchdog.beat()
        pool.refuse_if_ended()
        pool.report_overdue(limit)
        stop.wait(_WATCHDOG_INTERVAL_SECONDS)
    renewal.announce_stop()
    pool.close()
    while pool.alive:
        watchdog.beat()
        pool.join(_WATCHDOG_INTERVAL_SECONDS)
