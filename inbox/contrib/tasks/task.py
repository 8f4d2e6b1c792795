"""A task with what a message has besides: an ordering key, a biz-id, retries of its own, a lease."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import cache
from typing import Any

from django.utils.module_loading import import_string

from exactly_once.wire.text import did_you_mean
from inbox.contrib.tasks.compat import Task, TaskContext
from inbox.errors import InboxError, Reject
from inbox.handlers.message import Message
from inbox.handlers.options import Retry

_CHANGEABLE = ("priority", "queue_name", "run_after", "backend", "key", "biz_id", "unique", "lease")
Named = str | Callable[..., str]
"""Text, or a function of the task's arguments that returns it."""
KINDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "key": ((str, Callable), "text or a function that returns it"),
    "biz_id": ((str, Callable, type(None)), "text or a function that returns it"),
    "unique": ((bool,), "True or False"),
    "retry": ((Retry, type(None)), "a Retry"),
    "lease": ((bool,), "True or False"),
}
"""What a task adds to those of Django: the types, and how they are called."""


@dataclass(frozen=True, kw_only=True)
class ExactlyOnceTask(Task):  # type: ignore[misc] # it is Any, see `compat`
    """A task of this backend. What it adds is given to `@task(...)`, or but for `retry` to `.using(...)`.

    Attributes:
        key: the ordering key of its message, or a function of the arguments that returns it.
        biz_id: names the business fact. A later call of this function with the same biz-id has no effect of its own and the
            result of the first. The biz-id of its message begins with the path of the function.
        unique: `enqueue` returns the result of an earlier task with the same biz-id, and writes nothing.
        retry: its attempts and the delays between them; default: those of the backend's OPTIONS, else of `INBOX`.
        lease: run it outside any transaction, under the lease of OPTIONS: at least once, for effects outside the database.
    """

    key: Named = ""
    biz_id: Named | None = None
    unique: bool = False
    retry: Retry | None = None
    lease: bool = False

    def using(self, **changes: Any) -> ExactlyOnceTask:
        """A copy with other values, but for `retry`, which the process that runs it reads from the code.

        Raises:
            TypeError: there is no such value.
            InvalidTask: Django's class, or that of the package: the copy cannot run on its backend.
        """
        if unknown := changes.keys() - {*_CHANGEABLE}:
            raise TypeError(f"using() has no argument {min(unknown)!r}. {did_you_mean(min(unknown), _CHANGEABLE)}".rstrip())
        return replace(self, **{name: value for name, value in changes.items() if value is not None or name == "biz_id"})


@dataclass(frozen=True, kw_only=True)
class ExactlyOnceContext(TaskContext):  # type: ignore[misc] # it is Any, see `compat`
    """What a task with `takes_context=True` gets first.

    Attributes:
        message: the message of this run: its `step` for a task under a lease, its `fence`, its `correlation_id`.
    """

    message: Message


class NotImportable(InboxError):
    """The function of a task cannot be imported, or is not a task. A failed attempt: a later release may have it."""


class ResultNotJson(Reject, TypeError):
    """A task returned a value that JSON cannot represent. Its effect is rolled back and it is not run again."""


class TaskCancelled(InboxError):
    """A task was cancelled, has expired or was dropped before it ended. Its status is FAILED: Django has no word of its own."""


class TaskNotRun(InboxError):
    """A task has failed without an exception: its process died during each attempt, or its message was refused."""


def load(path: str) -> Any:
    """The task at this path.

    Raises:
        NotImportable: there is none.
    """
    try:
        found = import_string(path)
    except Exception as error:
        raise NotImportable(
            f"The task {path} cannot be imported ({type(error).__name__}: {error}). Deploy the code that has it, or retry the "
            "task where it is."
        ) from error
    if not isinstance(found, Task):
        raise NotImportable(f"{path} is {type(found).__name__}, not a task: decorate the function with @task.")
    return found


def is_call(payload: object) -> bool:
    """Is it what `enqueue` publishes? Another service may publish anything to the topic of a queue."""
    kinds = {"task": str, "args": list, "kwargs": dict, "backend": str}
    return isinstance(payload, dict) and all(isinstance(payload.get(name), kind) for name, kind in kinds.items())


def call_of(task: Any, args: Any, kwargs: Any, backend: str) -> dict[str, Any]:
    """What is published for a call of a task, as JSON has it."""
    return {"task": task.module_path, "args": args, "kwargs": kwargs, "backend": backend}


def run_after_of(task: Any) -> dict[str, str]:
    """The header with its `run_after`, which the payload does not have: one that is enqueued again, for later, is the same."""
    return {} if task.run_after is None else {"run_after": task.run_after.isoformat()}


def biz_id_of(task: Any, args: Any, kwargs: Any) -> Any:
    """The biz-id of a call of a task, among those of all functions of its queue."""
    own = named(own_options(task)["biz_id"], args, kwargs)
    return f"{task.module_path}:{own}" if own and isinstance(own, str) else own


def task_of(payload: Any, queue: str) -> Any:
    """The task that was enqueued with this payload; one without its function if that cannot be imported any more.

    It is not validated: its queue, its lease or its backend may have been removed since.
    """
    try:
        found = load(payload["task"])
        kind, values = type(found), {field.name: getattr(found, field.name) for field in fields(found)}
    except NotImportable:
        # In Django 6.0 its fields have no defaults.
        missing = {"priority": 0, "takes_context": False, "func": _missing(payload["task"])}
        kind, values = Task, dict.fromkeys(field.name for field in fields(Task)) | missing
    run_after = datetime.fromisoformat(payload["run_after"]) if "run_after" in payload else None
    task = object.__new__(kind)
    for name, value in {**values, "queue_name": queue, "backend": payload["backend"], "run_after": run_after}.items():
        object.__setattr__(task, name, value)
    return task


@cache
def _missing(path: str) -> Callable[..., None]:
    """A function with this path, which is not there."""

    def missing(*args: object, **kwargs: object) -> None:
        load(path)

    missing.__module__, _, missing.__qualname__ = path.rpartition(".")
    missing.__name__ = missing.__qualname__
    return missing


def own_options(task: Any) -> dict[str, Any]:
    """What a task adds to those of Django. One that was defined for another backend has the defaults."""
    own = [field for field in fields(ExactlyOnceTask) if field.name in ExactlyOnceTask.__annotations__]
    return {field.name: getattr(task, field.name, field.default) for field in own}


def named(value: Named | None, args: Any, kwargs: Any) -> str | None:
    """A `Named` for these arguments."""
    return value(*args, **kwargs) if callable(value) else value
