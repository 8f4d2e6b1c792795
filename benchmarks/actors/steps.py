"""Publish messages and relay them, again and again; print the microseconds of each step of a pass as JSON.

python -m benchmarks.actors.steps TIMES MESSAGES
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
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
    from outbox.store import claiming  # noqa: PLC0415
    from outbox.transports import open_transport  # noqa: PLC0415

    steps = {
        "look for work": (claiming, "look"),
        "lock tables and shards": (claiming, "_lock"),
        "read": (claiming, "_read"),
        "lock the rows": (claiming, "_lock_rows"),
        "encode, send, await the confirms": (Pass, "_send"),
        "settle and commit": (Pass, "_settle"),
        "a whole pass": (Pass, "run"),
    }
    times, messages = map(int, sys.argv[1:])
    options, drafts = outbox_options(), [Draft(TOPIC, payload(n)) for n in range(messages)]
    taken: dict[str, list[float]] = {step: [] for step in steps}
    with (
        closing(open_transport(options.BROKER_URL, alias="default", exchange=options.EXCHANGE)) as transport,
        ExitStack() as timing,
    ):
        watchdog = Watchdog(limit=options.WATCHDOG)
        relay = Relay("default", transport, options, stop=StopRequest(), watchdog=watchdog, heartbeat=Heartbeat("default"))
        for step, (place, name) in steps.items():
            timing.enter_context(patch.object(place, name, _timed(getattr(place, name), taken[step])))
        for _ in range(times):
            with transaction.atomic():
                publish_many(drafts)
            relay.run(drain=True)
    # The first ones connect and prepare statements.
    print(json.dumps({step: [1e6 * seconds for seconds in values[len(values) // 5 :]] for step, values in taken.items()}))


def _timed(function: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            taken.append(time.perf_counter() - began)

    return timed


if __name__ == "__main__":
    django.setup()
    main()
