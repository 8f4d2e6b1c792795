"""Send messages straight to the broker at a steady pace; print how many, and in how many seconds.

    python -m benchmarks.actors.flood COUNT PER_SECOND

It makes up for lost time as far as the broker confirms. It writes with the outbox's own transport, which leaves the
processor to the measured processes.
"""

from __future__ import annotations

import json
import sys
import time

import django

from benchmarks.lab.deliveries import envelope
from benchmarks.lab.workload import many_customers

PER_BATCH = 250
SILENCE_SECONDS = 30.0


def main() -> None:
    from exactly_once.process.clock import monotonic  # noqa: PLC0415
    from exactly_once.transport.interface import OutgoingMessage, PublishOutcome  # noqa: PLC0415
    from outbox.conf import outbox_options  # noqa: PLC0415 - needs Django
    from outbox.transports import open_transport  # noqa: PLC0415

    count, per_second = int(sys.argv[1]), float(sys.argv[2])
    options = outbox_options()
    transport = open_transport(options.BROKER_URL, alias="default", exchange=options.EXCHANGE)
    transport.connect()
    confirmed, began = 0, time.monotonic()
    for first in range(0, count, PER_BATCH):
        time.sleep(max(0.0, began + first / per_second - time.monotonic()))
        numbers = range(first, min(first + PER_BATCH, count))
        messages = [OutgoingMessage(position=number, envelope=envelope(number, many_customers(number))) for number in numbers]
        answer = transport.send(messages, monotonic() + SILENCE_SECONDS)
        confirmed += sum(verdict.outcome is PublishOutcome.CONFIRMED for verdict in answer.verdicts.values())
    seconds = time.monotonic() - began
    transport.close()
    if confirmed != count:
        raise SystemExit(f"{confirmed} of {count} messages were confirmed")
    print(json.dumps({"messages": count, "seconds": seconds}))


if __name__ == "__main__":
    django.setup()
    main()
