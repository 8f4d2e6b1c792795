"""Publish messages beside a running relay, again and again; print the microseconds of each step of its passes as JSON.

python -m benchmarks.actors.steps TIMES MESSAGES
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from queue import SimpleQueue
from threading import Thread
from typing import Any
from unittest.mock import patch

import django
from django.db import transaction

from benchmarks.lab.workload import TOPIC, payload


def main() -> None:
    from exactly_once.process.loop import StopRequest, Watchdog  # noqa: PLC0415 - needs Django, as the others
    from outbox import Draft, publish_many  # noqa: PLC0415
    from outbox.conf import outbox_options  # noqa: PLC0415
    from outbox.relay.heartbeat import Heartbeat  # noqa: PLC0415
    from outbox.relay.passes import Pass  # noqa: PLC0415
    from outbox.relay.relay import Relay  # noqa: PLC0415
    from outbox.store import claiming, looking  # noqa: PLC0415
    from outbox.transports import open_transport  # noqa: PLC0415

    steps = {
        "look for work": (looking, "look"),
        "lock tables and shards": (claiming, "_lock"),
        "read": (claiming, "read_ready"),
        "lock the rows": (claiming, "_lock_rows"),
        "encode, send, await the confirms": (Pass, "_send"),
        "settle and commit": (Pass, "_settle"),
        "a whole pass": (Pass, "run"),
    }
    times, messages = map(int, sys.argv[1:])
    options, drafts = outbox_options(), [Draft(TOPIC, payload(n)) for n in range(messages)]
    taken: dict[str, list[float]] = {step: [] for step in steps}
    stop, settled = StopRequest(), SimpleQueue[int]()
    with ExitStack() as running:
        transport = running.enter_context(
            closing(open_transport(options.BROKER_URL, alias="default", exchange=options.EXCHANGE))
        )
        watchdog, heartbeat = Watchdog(limit=options.WATCHDOG), Heartbeat("default")
        relay = Relay("default", transport, options, stop=stop, watchdog=watchdog, heartbeat=heartbeat)
        for step, (place, name) in steps.items():
            running.enter_context(patch.object(place, name, _timed(getattr(place, name), taken[step], settled)))
        thread = Thread(target=relay.run, daemon=True)
        thread.start()
        for _ in range(times):
            with transaction.atomic():
                publish_many(drafts)
            relay.bell.ring()
            left = messages
            while left:
                left -= settled.get(timeout=30)
        stop.set()
        thread.join()
    # The first ones connect and prepare statements.
    print(json.dumps({step: [1e6 * seconds for seconds in values[len(values) // 5 :]] for step, values in taken.items()}))


def _timed(function: Callable[..., Any], taken: list[float], settled: SimpleQueue[int]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        result = function(*args, **options)
        if getattr(result, "shards", True):  # not a look that found nothing
            taken.append(time.perf_counter() - began)
        if number := getattr(result, "settled", 0):
            settled.put(number)
        return result

    return timed


if __name__ == "__main__":
    django.setup()
    main()
