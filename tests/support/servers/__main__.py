"""`python -m tests.support.servers`: the three servers until Ctrl-C, and where they are as lines for a shell."""

from __future__ import annotations

import sys
from contextlib import ExitStack

from exactly_once.process.loop import StopRequest, running_until_signalled
from tests.support.servers import PostgresServer, RabbitServer, RedisServer

VARIABLES = {"DATABASE_URL": PostgresServer, "BROKER_URL": RabbitServer, "REDIS_URL": RedisServer}
FOREVER_SECONDS = 3600.0


def main() -> None:
    with running_until_signalled(StopRequest()) as stop, ExitStack() as stack:
        for variable, server in VARIABLES.items():
            running = stack.enter_context(server())
            print(f"export {variable}={running.url}", flush=True)
        print("# running until Ctrl-C", file=sys.stderr, flush=True)
        while not stop.wait(FOREVER_SECONDS):
            pass


if __name__ == "__main__":
    main()
