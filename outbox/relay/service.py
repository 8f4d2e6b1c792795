"""A relay as a process: signals, watchdog, companions, an orderly end."""

from __future__ import annotations

import threading

from outbox.conf import outbox_options
from outbox.kernel.loop import StopRequest, Watchdog, running_until_signalled
from outbox.kernel.transport import Transport
from outbox.relay.relay import Relay
from outbox.transports import open_transport


def serve(alias: str, *, drain: bool = False, stop: StopRequest | None = None) -> int:
    """Relay the messages of `alias` until SIGTERM or SIGINT, or with `drain` until nothing is due; how many went out.

    What is in hand is finished first. A handler or broker that does not come to an end within `SHUTDOWN_GRACE` is cut off;
    its work is uncommitted and goes to the next process.
    """
    options = outbox_options()
    stop = stop or StopRequest()
    watchdog = Watchdog(stop, limit=options.WATCHDOG, grace=options.SHUTDOWN_GRACE)
    transport = open_transport(options.BROKER_URL, alias=alias, exchange=options.EXCHANGE)
    relay = Relay(alias, transport, options, stop=stop, watchdog=watchdog)
    with running_until_signalled(stop), watchdog.watching():
        if drain:
            relay.run(drain=True)
            # What a handler publishes while it is drained is due, too.
            while not stop and _drain(transport, watchdog, stop):
                relay.run(drain=True)
            return relay.published
        threads = [
            threading.Thread(target=companion.run, args=[stop], name=type(companion).__name__, daemon=True)
            for companion in transport.companions()
        ]
        for thread in threads:
            thread.start()
        try:
            relay.run()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    return relay.published


def _drain(transport: Transport, watchdog: Watchdog, stop: StopRequest) -> int:
    with watchdog.suspended():
        return sum(companion.drain(stop) for companion in transport.companions())
