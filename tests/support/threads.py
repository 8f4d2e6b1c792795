"""Functions that run beside a test, in threads with database connections of their own."""

import threading
from contextlib import ExitStack, contextmanager

from django.db import connections

SECONDS = 60.0
"""How long a thread may take before the test gives up on it."""


class InAThread:
    """One job in a thread of its own, for `with`: leaving waits for its end and raises what it raised."""

    def __init__(self, job):
        self._job = job
        self.answer = None
        self._error = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def ended(self):
        return not self._thread.is_alive()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._thread.join(2 * SECONDS)
        assert self.ended, "the thread is still busy"
        if self._error is not None:
            raise self._error

    def _run(self):
        try:
            self.answer = self._job()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self._error = error
        finally:
            connections.close_all()


@contextmanager
def in_threads(*functions, stop=None):
    """Run the functions beside the block, then wait for their end. What one of them raises, the block raises."""
    with ExitStack() as stack:
        threads = [stack.enter_context(InAThread(function)) for function in functions]
        if stop is not None:
            stack.callback(stop.set)
        yield threads
