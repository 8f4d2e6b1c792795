"""`manage.py check` for queues of tasks. Django asks each backend; before 6.0 the app django_tasks does."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.db import connections, router
from django.utils.module_loading import import_string

from inbox.contrib.tasks.backend import ExactlyOnceBackend
from inbox.contrib.tasks.compat import task_backends
from inbox.contrib.tasks.queues import QueueOptions, why_unusable

_DAY = timedelta(days=1)


def problems(backend: Any) -> Iterator[CheckMessage]:
    """inbox_tasks.E001 to E005, of one backend."""
    where = f"TASKS[{backend.alias!r}]"
    if not apps.is_installed("inbox.contrib.tasks"):
        yield Error(
            f'{where} needs the app of its results: add "inbox.contrib.tasks" to INSTALLED_APPS and run migrate.',
            id="inbox_tasks.E001",
        )
        return
    if not backend.queues:
        yield Error(
            f"{where} has no queues, so no process runs its tasks.",
            hint='Name them: "QUEUES": ["default"].',
            id="inbox_tasks.E002",
        )
    for queue in sorted({*backend.given.queues} - backend.queues):
        yield Error(
            f"{where} has OPTIONS for the queue {queue!r}, which is not in its QUEUES.",
            hint="Add the queue, or remove its options.",
            id="inbox_tasks.E002",
        )
    for queue in sorted(backend.queues):
        others = [alias for alias in task_backends if alias < backend.alias and _has(task_backends[alias], queue)]
        if others:
            yield Error(
                f"{where} and TASKS[{others[0]!r}] have the queue {queue!r}, which can have one handler only.",
                hint="Give the queues of each backend names of their own in QUEUES.",
                id="inbox_tasks.E003",
            )
        elif reason := why_unusable(queue):
            yield Error(f"{where} has the queue {queue!r}, whose topic cannot be used: {reason}.", id="inbox_tasks.E002")
        yield from _of_results(f"{where}: the queue {queue!r}", backend.given.of(queue))


def _has(other: Any, queue: str) -> bool:
    return isinstance(other, ExactlyOnceBackend) and queue in other.queues


def _of_results(name: str, options: QueueOptions) -> Iterator[CheckMessage]:
    """inbox_tasks.E004 and E005, of one queue."""
    # By its name: the inbox imports only public names of the outbox for publishing.
    kept = import_string("outbox.conf.outbox_options")().KEEP_HISTORY
    if kept is not None and options.keep_results < kept + _DAY:
        yield Error(
            f'{name} has keep_results={options.keep_results}, but OUTBOX["KEEP_HISTORY"] is {kept}: enqueue() with unique=True '
            "finds messages whose results are deleted.",
            hint="Make keep_results at least a day longer: history is deleted by whole days.",
            id="inbox_tasks.E004",
        )
    results = apps.get_model("inbox_tasks", "Result")
    if options.alias not in connections or not router.allow_migrate_model(options.alias, results):
        yield Error(
            f"{name} has using={options.alias!r}, but that database has no table of results.",
            hint="Allow inbox_tasks to be migrated there in the database routers, or set using to another alias.",
            id="inbox_tasks.E005",
        )
