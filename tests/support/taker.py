"""A process that takes as many tokens of a rate as it gets, `python -m tests.support.taker`.

Each line of its input names the handler and the duration. It answers with a line: how many it took, and when by the
database's clock.
"""

import json
import sys
import threading
import time

import django
from django.db import connection

if __name__ == "__main__":
    django.setup()

from inbox.handlers.handler import Handler
from inbox.limits.limiter import limiter_of


def database_clock():
    """Seconds, by the one clock that all processes share."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8")
        else:
            cursor.execute("SELECT (JULIANDAY('now') - 2440587.5) * 86400.0")
        return cursor.fetchone()[0]


def take_for(seconds, *, name, rate, threads):
    """Take with so many threads for so long; work for them never ends."""
    limiter = limiter_of(Handler(name=name, topics=("t",), function=print, biz_id=None, using="default", rate_limit=rate))
    begun, until = database_clock(), time.monotonic() + seconds
    taken, begun_at = [0] * threads, threading.Event()

    def work(one):
        while time.monotonic() < until:
            now = limiter.take(10)
            taken[one] += now
            if now:
                begun_at.set()
            else:
                time.sleep(min(limiter.wait_seconds(), 0.05))

    working = [threading.Thread(target=work, args=[one]) for one in range(threads)]
    for thread in working:
        thread.start()
    begun_at.wait(seconds)
    first = database_clock()
    for thread in working:
        thread.join()
    return {"taken": sum(taken), "begun": begun, "first": first, "ended": database_clock()}


def main():
    for line in sys.stdin:
        print(json.dumps(take_for(**json.loads(line))), flush=True)  # noqa: T201 - its answer


if __name__ == "__main__":
    main()
