"""`manage.py check` for queues of tasks. Django asks each backend; before 6.0 the app django_tasks does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.core.checks import CheckMessage, Error

from exactly_once.wire.text import why_no_topic
from inbox.contrib.tasks.compat import task_backends
from inbox.contrib.tasks.queues import topic_of
from inbox.handlers.registry import registry


def problems(backend: Any) -> Iterator[CheckMessage]:
    """inbox_tasks.E001 to E004, of one backend."""
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
        if others := [alias for alias in task_backends if alias < backend.alias and queue in task_backends[alias].queues]:
            if any(isinstance(task_backends[alias], type(backend)) for alias in others):
                yield Error(
                    f"{where} and TASKS[{others[0]!r}] have the queue {queue!r}, which can have one handler only.",
                    hint="Give the queues of each backend names of their own in QUEUES.",
                    id="inbox_tasks.E003",
                )
        elif reason := why_no_topic(topic_of(queue)):
            yield Error(f"{where} has the queue {queue!r}, whose topic cannot be used: {reason}.", id="inbox_tasks.E002")
        elif registry.get(topic_of(queue)) is None:
            yield Error(
                f"{where} has the queue {queue!r}, but no handler {topic_of(queue)!r}, so no process runs its tasks.",
                hint="The handlers are made at start from the setting TASKS. Call register_queues() after a change of it.",
                id="inbox_tasks.E004",
            )
