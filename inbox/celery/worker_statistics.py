"""Write the statistics of a Celery worker, whose processes send no heartbeats.

A thread begins with the first task of a worker process and writes once a minute while there is something to write. It closes
its connection after each write. What is left is written when the process ends in an orderly way. Outside of workers nothing is
written: an eager task, or one that a test calls, belongs to its caller's transaction.

Celery imports this before Django's models can be imported, so what needs them is imported when the worker runs.
"""

import os
import threading
from typing import Any

from celery.signals import worker_process_init, worker_process_shutdown, worker_ready, worker_shutdown
from django.db import connections

_LOOK_SECONDS = 5.0
_LONGEST_GOODBYE_SECONDS = 2.0


class _Writing:
    """The writing thread of this process."""

    def __init__(self) -> None:
        self._is_worker = False
        self._pid = 0
        self._aliases: set[str] = set()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def begin_worker(self, **arguments: object) -> None:
        self._is_worker = True

    def begin(self, alias: str) -> None:
        """A task runs on this database. In a worker, its statistics are written from now on."""
        if not self._is_worker or (alias in self._aliases and self._pid == os.getpid()):
            return
        if self._pid != os.getpid():  # the first task, or a fork has left the thread behind
            self._pid, self._aliases, self._thread = os.getpid(), set(), None
            self._end = threading.Event()
        self._aliases = {*self._aliases, alias}
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="statistics", daemon=True)
            self._thread.start()

    def end(self, **arguments: object) -> None:
        if self._thread is not None and self._pid == os.getpid():
            self._end.set()
            self._thread.join(_LONGEST_GOODBYE_SECONDS)

    def _run(self) -> None:
        from inbox.store import counting  # noqa: PLC0415 - see the module's docstring

        writers: dict[str, Any] = {}
        ended = False
        while not ended:
            ended = self._end.wait(_LOOK_SECONDS)
            for alias in self._aliases:
                if alias not in writers:
                    writers[alias] = counting.writer(alias)
                (writers[alias].write if ended else writers[alias].write_if_due)()
            connections.close_all()


_writing = _Writing()
begin = _writing.begin
for _signal in (worker_process_init, worker_ready):
    _signal.connect(_writing.begin_worker)
for _signal in (worker_process_shutdown, worker_shutdown):
    _signal.connect(_writing.end)
