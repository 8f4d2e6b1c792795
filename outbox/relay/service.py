"""A relay as a process: signals, watchdog, companions, an orderly end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from outbox.conf import outbox_options
from outbox.kernel.broker import masked
from outbox.kernel.loop import StopRequest, Watchdog, running_until_signalled
from outbox.kernel.transport import Companion
from outbox.relay.relay import Relay
from outbox.transports import open_transport

logger = logging.getLogger(__name__)


def serve(alias: str, *, drain: bool = False, stop: StopRequest | None = None) -> int:
    """Relay the messages of `alias` until SIGTERM or SIGINT, or with `drain` until nothing is due; how many went out.

    What is in hand is finished first. A handler or broker that does not come to an end within `SHUTDOWN_GRACE` is cut off;
    its work is uncommitted and goes to the next process.
    """
    options = outbox_options()
    stop = StopRequest() if stop is None else stop
    watchdog = Watchdog(stop, limit=options.WATCHDOG, grace=options.SHUTDOWN_GRACE)
    transport = open_transport(options.BROKER_URL, alias=alias, exchange=options.EXCHANGE)
    relay = Relay(alias, transport, options, stop=stop, watchdog=watchdog)
    logger.info("Relaying %r to %s.", alias, masked(options.BROKER_URL))
    with running_until_signalled(stop), watchdog.watching():
        if drain:
            _drain(relay, transport.companions(), watchdog, stop)
        else:
            _run(relay, transport.companions(), watchdog, stop)
    logger.info("The relay has ended; it published %d messages.", relay.published)
    return relay.published


def _run(relay: Relay, companions: Sequence[Companion], watchdog: Watchdog, stop: StopRequest) -> None:
    threads = [
        threading.Thread(target=companion.run, args=[stop], name=type(companion).__name__, daemon=True)
        for companion in companions
    ]
    for thread in threads:
        thread.start()
    try:
        relay.run()
    finally:
        stop.set()
        with watchdog.suspended():
            for thread in threads:
                thread.join()


def _drain(relay: Relay, companions: Sequence[Companion], watchdog: Watchdog, stop: StopRequest) -> None:
    """Relay and companions in turn: what a handler publishes while it is drained is due, too."""
    done = 1
    while done and not stop:
        relay.run(drain=True)
        with watchdog.suspended():
            done = sum(companion.drain(stop) for companion in companions)
