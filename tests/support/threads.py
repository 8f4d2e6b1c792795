"""Functions that run beside a test, in threads with database connections of their own."""

import threading
from contextlib import contextmanager

from django.db import connections

SECONDS = 60.0
"""How long a thread may take before the test gives up on it."""


@contextmanager
def in_threads(*functions, stop=None):
    """Run the functions beside the block, then wait for their end. What one of them raises, the block raises."""
    errors = []

    def run(function):
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - it is raised in the test's own thread
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=[function]) for function in functions]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        if stop is not None:
            stop.set()
        for thread in threads:
            thread.join(2 * SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
