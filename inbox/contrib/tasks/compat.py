"""`django.tasks`: Django's own since 6.0; before that the package django-tasks, from which it was taken."""

from importlib import import_module
from typing import Any

from django import VERSION
from django.dispatch import Signal

PACKAGE = "django.tasks" if VERSION >= (6, 0) else "django_tasks"


def _module(name: str = "") -> Any:
    return import_module(f"{PACKAGE}{name}")


_base, _exceptions, _signals = _module(".base"), _module(".exceptions"), _module(".signals")

BaseTaskBackend: Any = _module(".backends.base").BaseTaskBackend
Task: Any = _base.Task
TaskContext: Any = _base.TaskContext
TaskError: Any = _base.TaskError
TaskResult: Any = _base.TaskResult
TaskResultStatus: Any = _base.TaskResultStatus
InvalidTask: Any = getattr(_exceptions, "InvalidTask", None) or _exceptions.InvalidTaskError
TaskResultDoesNotExist: Any = _exceptions.TaskResultDoesNotExist
normalize_json: Any = (import_module("django.utils.json") if VERSION >= (6, 0) else _module(".utils")).normalize_json
task_backends: Any = _module().task_backends
task_enqueued: Signal = _signals.task_enqueued
task_started: Signal = _signals.task_started
task_finished: Signal = _signals.task_finished
