"""Running a task: call its function, and write its result.

In a transaction the result is written with the effect and the receipt, in one commit. Under a lease the call is a step of its
message: a run that dies after the call finds the value that it returned, and writes the result without calling it again.
"""

from __future__ import annotations

import json
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

from asgiref.sync import async_to_sync
from django.db import DatabaseError, connections, transaction
from django.dispatch import Signal
from django.utils import timezone

from exactly_once.wire.identity import process_name
from exactly_once.wire.text import storable
from inbox.contrib.tasks import results
from inbox.contrib.tasks.compat import TaskResultStatus, normalize_json, task_backends, task_finished, task_started
from inbox.contrib.tasks.queues import QueueOptions, is_leased, queue_of
from inbox.contrib.tasks.task import ExactlyOnceContext, NotImportable, ResultNotJson, is_call, load, own_options
from inbox.errors import Reject
from inbox.handlers.decorator import as_coroutine
from inbox.handlers.message import Message
from inbox.handlers.options import Retry

CALL = "inbox.contrib.tasks"
"""The step that is the call of a leased task, beside the steps that it takes itself."""


class _ReceiverFailed(Exception):
    """A receiver of a signal has raised."""


def run(backend: str, message: Message) -> None:
    """Run a task, in the transaction of its message or under its lease."""
    if not is_call(message.payload):
        raise Reject("It is not the call of a task: enqueue tasks with their enqueue().")
    load(message.payload["task"])
    options = _options(backend, message)
    if message.attempt == 1 and not is_leased(message.topic):
        results.mark(options.alias, message)
    result = results.running(message, backend, options.alias, process_name())
    _announce(backend, message, task_started, result)
    call = partial(_call, message, result, options.timeout)
    value = message.step(CALL, call) if is_leased(message.topic) else call()
    object.__setattr__(result, "status", TaskResultStatus.SUCCESSFUL)
    object.__setattr__(result, "finished_at", timezone.now())
    _end(backend, message, results.ended(result, value), value)


def end_failed(backend: str, message: Message) -> None:
    """Write the result of a task whose message is dead, as the handler of its dead letters."""
    result, value = results.failed(_options(backend, message).alias, message, CALL)
    if result is not None:
        _end(backend, message, result, value)


def retry_of(backend: str, message: Message) -> Retry:
    """The attempts of a task and the delays between them: its own, else those of its queue."""
    own = None
    with suppress(NotImportable):
        own = own_options(load(message.payload["task"]))["retry"]
    return own or _options(backend, message).retry or Retry()


def _options(backend: str, message: Message) -> QueueOptions:
    options: QueueOptions = task_backends[backend].given.of(queue_of(message.topic))
    return options


def _call(message: Message, result: Any, timeout: timedelta | None) -> Any:
    """What the function returns, as JSON.

    Raises:
        ResultNotJson: it is not.
        Exception: what the function raises.
    """
    task = result.task
    context = [ExactlyOnceContext(task_result=result, message=message)] if task.takes_context else []
    # An event loop cancels a coroutine. What waits for it cannot be interrupted.
    call = async_to_sync(as_coroutine(task.func, timeout)) if iscoroutinefunction(task.func) else task.call
    returned = call(*context, *result.args, **result.kwargs)
    try:
        return _as_json(returned)
    except (TypeError, ValueError) as error:
        raise ResultNotJson(f"The task {task.module_path} returned {type(returned).__name__}, not JSON: {error}.") from error


def _as_json(returned: Any) -> Any:
    value = normalize_json(returned)
    storable(json.dumps(value, allow_nan=False, ensure_ascii=False))
    return value


def _end(backend: str, message: Message, result: Any, value: Any = None) -> None:
    """Write the result, and announce it after the commit."""
    options = _options(backend, message)
    results.write(options, result, message, value)
    announce = partial(_announce, backend, message, task_finished, result)
    if _is_heard(task_finished):
        transaction.on_commit(announce, using=options.alias, robust=True)
    else:
        announce()


def _is_heard(signal: Signal) -> bool:
    """Has it a receiver besides Django's own? That only writes a line of the log, which is not worth a savepoint and a hook."""
    return len(signal.receivers) > 1


def _announce(backend: str, message: Message, signal: Signal, result: Any) -> None:
    """Send a signal. A receiver that raises changes nothing: inside a transaction its statements are rolled back."""
    alias = _options(backend, message).alias
    guarded = _is_heard(signal) and connections[alias].in_atomic_block
    with suppress(_ReceiverFailed, DatabaseError), transaction.atomic(using=alias) if guarded else nullcontext():
        answers = signal.send_robust(type(task_backends[backend]), task_result=result)
        if any(isinstance(answer, Exception) for _, answer in answers):
            raise _ReceiverFailed
