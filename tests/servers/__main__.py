"""`python -m tests.servers`: the three servers until Ctrl-C, and where they are as lines for a shell."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import ExitStack

from tests.servers import PostgresServer, RabbitServer, RedisServer

VARIABLES = {"DATABASE_URL": PostgresServer, "BROKER_URL": RabbitServer, "REDIS_URL": RedisServer}


def main() -> None:
    asked_to_end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked_to_end.set())
    with ExitStack() as stack:
        for variable, server in VARIABLES.items():
            running = stack.enter_context(server())
            print(f"export {variable}={running.url}", flush=True)
        print("# running until Ctrl-C", file=sys.stderr, flush=True)
        asked_to_end.wait()


if __name__ == "__main__":
    main()
