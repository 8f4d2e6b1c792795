"""A consumer as a process: signals, watchdog, the runner beside it, an orderly end."""

from __future__ import annotations

import logging
import threading

from inbox.conf import LOCAL_BROKER, inbox_options
from inbox.consumer.consumer import Consumer
from inbox.handlers import registry
from inbox.runner import Runner
from outbox.kernel.broker import scheme_of
from outbox.kernel.loop import StopRequest, Watchdog, running_until_signalled

logger = logging.getLogger(__name__)

_BEAT_SECONDS = 0.5


def serve(*, drain: bool = False, stop: StopRequest | None = None) -> None:
    """Receive from the broker and run what is stored until SIGTERM or SIGINT, or with `drain` until nothing is due.

    With local:// there is nothing to receive; then this only runs what the relay handed over.
    """
    options = inbox_options()
    stop = StopRequest() if stop is None else stop
    watchdog = Watchdog(stop, limit=options.WATCHDOG, grace=options.SHUTDOWN_GRACE)
    runner = Runner(options)
    if not registry.all():
        logger.warning(
            "No handler is registered, so there is nothing to do. Handlers are found in the handlers.py of installed apps."
        )
    with running_until_signalled(stop), watchdog.watching():
        if scheme_of(options.broker_url) != scheme_of(LOCAL_BROKER):
            consumer = Consumer(registry.all(), options, stop=stop, watchdog=watchdog)
            _beside(runner, stop, watchdog, consumer, drain=drain)
            counts = ", ".join(f"{count} {received.value}" for received, count in consumer.received.items())
            logger.info("The consumer has ended. Deliveries: %s.", counts or "none")
        elif drain:
            with watchdog.suspended():
                runner.drain(stop)
        else:
            _alone(runner, stop, watchdog)


def _beside(runner: Runner, stop: StopRequest, watchdog: Watchdog, consumer: Consumer, *, drain: bool) -> None:
    if drain:
        consumer.run(drain=True)
        with watchdog.suspended():
            runner.drain(stop)
        return
    thread = threading.Thread(target=runner.run, args=[stop], name="runner", daemon=True)
    thread.start()
    try:
        consumer.run()
    finally:
        stop.set()
        with watchdog.suspended():
            thread.join()


def _alone(runner: Runner, stop: StopRequest, watchdog: Watchdog) -> None:
    # Handlers run on a thread of their own, so that one of them may take its time without the watchdog's notice.
    thread = threading.Thread(target=runner.run, args=[stop], name="runner", daemon=True)
    thread.start()
    while thread.is_alive():
        watchdog.beat()
        thread.join(_BEAT_SECONDS)
