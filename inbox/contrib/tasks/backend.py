"""The backend: `enqueue` publishes a message, and `get_result` reads what has become of it.

It is imported with the first module that has a task, which may be before Django's models can be.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any
from uuid import UUID

from django.core.checks import CheckMessage
from django.db import transaction
from django.utils import timezone

import outbox
from exactly_once.sql.connections import is_inside_a_transaction
from inbox.contrib.tasks.compat import BaseTaskBackend, InvalidTask, TaskResult, TaskResultStatus, task_enqueued
from inbox.contrib.tasks.queues import options_of, topic_of
from inbox.contrib.tasks.task import (
    KINDS,
    ExactlyOnceTask,
    NotImportable,
    biz_id_of,
    call_of,
    load,
    named,
    own_options,
    run_after_of,
)


class ExactlyOnceBackend(BaseTaskBackend):  # type: ignore[misc] # it is Any, see `compat`
    """A backend of `django.tasks` whose tasks are messages of the outbox, and whose queues are handlers of the inbox."""

    task_class = ExactlyOnceTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    # The inbox's order of due work has none, see decisions/0054. Urgent tasks have a queue of their own.
    supports_priority = False

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.given = options_of(alias, params.get("OPTIONS") or {})

    def validate_task(self, task: Any) -> None:
        """
        Raises:
            InvalidTask: Django's class, or that of the package: the task cannot run on this backend.
        """
        super().validate_task(task)
        own = own_options(task)
        for name, (kinds, wanted) in KINDS.items():
            if not isinstance(own[name], kinds):
                raise InvalidTask(f"{name} is {own[name]!r}: it must be {wanted}.")
        if own["unique"] and own["biz_id"] is None:
            raise InvalidTask("unique=True needs a biz_id: without one every task has a name of its own.")
        if own["lease"] and self.given.of(task.queue_name).lease is None:
            raise InvalidTask(
                f"lease=True needs a lease in the OPTIONS of the backend {self.alias!r}, such as "
                '{"lease": {"duration": "10m", "limit": "1h"}}.'
            )

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Publish the message of the task, in the transaction that is open on the backend's database, or in one of its own.

        Returns:
            the result, READY; with unique=True the present result of the task that it found.

        Raises:
            InvalidTask: the function cannot be imported by the path that it has.
            TypeError, ValueError: an argument is not JSON.
            outbox.InvalidMessage, outbox.PayloadTooLarge: as `publish`.
        """
        self.validate_task(task)
        _require_importable(task)
        times = {"enqueued_at": timezone.now(), "started_at": None, "finished_at": None, "last_attempted_at": None}
        call = {"task": task, "args": list(args), "kwargs": kwargs, "backend": self.alias}
        result = TaskResult(id="", status=TaskResultStatus.READY, errors=[], worker_ids=[], **call, **times)
        using = self.given.of(task.queue_name).alias
        with nullcontext() if is_inside_a_transaction(using) else transaction.atomic(using=using):
            published = self._publish(result, using)
            object.__setattr__(result, "id", str(published.id))
            if not published.created:
                return self.get_result(result.id)
            # Not before the commit: until then there is nothing to announce.
            transaction.on_commit(partial(task_enqueued.send_robust, type(self), task_result=result), using=using, robust=True)
        return result

    def _publish(self, result: Any, using: str) -> outbox.PublishedMessage:
        task, own = result.task, own_options(result.task)
        return outbox.publish(
            topic_of(task.queue_name, lease=own["lease"]),
            call_of(task, result.args, result.kwargs, self.alias),
            key=named(own["key"], result.args, result.kwargs) or "",
            biz_id=biz_id_of(task, result.args, result.kwargs),
            unique=own["unique"],
            deliver_at=task.run_after,
            headers=run_after_of(task),
            using=using,
        )

    def get_result(self, result_id: str | UUID) -> Any:
        """The present result of a task.

        Raises:
            TaskResultDoesNotExist: Django's class, or that of the package: there is no such task, or its result is deleted.
        """
        return import_module("inbox.contrib.tasks.results").get_result(self, str(result_id))

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """See `inbox.contrib.tasks.checks`."""
        return [*import_module("inbox.contrib.tasks.checks").problems(self)]


def _require_importable(task: Any) -> None:
    try:
        found = load(task.module_path)
    except NotImportable as error:
        raise InvalidTask(str(error)) from error
    if found.func is not task.func:
        raise InvalidTask(f"{task.module_path} is the path of another task: a worker would run that one.")
