"""Running a task: call its function, and write its result.

In a transaction the result is written with the effect and the receipt, in one commit. Under a lease the call is a step of its
message: a run that dies after the call finds the value that it returned, and writes the result without calling it again.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import Any

from django.db import connections, transaction
from django.dispatch import Signal
from django.utils import timezone

from exactly_once.wire.identity import process_name
from inbox.contrib.tasks import results
from inbox.contrib.tasks.compat import TaskResultStatus, is_heard, normalize_json, task_backends, task_finished, task_started
from inbox.contrib.tasks.queues import queue_of, topic_of
from inbox.contrib.tasks.task import ExactlyOnceContext, NotImportable, ResultNotJson, is_call, load, own_options
from inbox.errors import Reject
from inbox.handlers.message import Message
from inbox.handlers.options import Retry

_STEP = "task"


def run(backend: str, message: Message) -> None:
    """Run a task in the transaction of its message."""
    result = _begin(backend, message)
    _end(message, result, _call(message, result))


def run_leased(backend: str, message: Message) -> None:
    """Run a task under the lease of its message."""
    result = _begin(backend, message)
    _end(message, result, message.step(_STEP, partial(_call, message, result)))


def end_failed(backend: str, message: Message) -> None:
    """Write the result of a task whose message is dead, as the handler of its dead letters."""
    queue = queue_of(message.topic)
    alias = task_backends[backend].given.of(queue).alias
    if not is_call(message.payload) or (result := results.failed(alias, message)) is None:
        return
    results.write(alias, result, key=message.key, leased=message.topic != topic_of(queue))
    if is_heard(task_finished):
        transaction.on_commit(partial(_announce, task_finished, result), using=alias, robust=True)


def retry_of(backend: str, message: Message) -> Retry:
    """The attempts of a task and the delays between them: its own, else those of its queue."""
    own = None
    with suppress(NotImportable):
        own = own_options(load(message.payload["task"]))["retry"]
    given = task_backends[backend].given.of(queue_of(message.topic)).retry
    return own or given or Retry()


def _begin(backend: str, message: Message) -> Any:
    """The result of a task that runs now, announced."""
    if not is_call(message.payload):
        raise Reject("It is not the call of a task: enqueue tasks with their enqueue().")
    load(message.payload["task"])
    queue = queue_of(message.topic)
    result = results.running(message, queue, task_backends[backend].given.of(queue).alias, process_name())
    _announce(task_started, result)
    return result


def _call(message: Message, result: Any) -> Any:
    """What the function returns, as JSON.

    Raises:
        ResultNotJson: it is not.
        Exception: what the function raises.
    """
    task = result.task
    context = [ExactlyOnceContext(task_result=result, message=message)] if task.takes_context else []
    returned = task.call(*context, *result.args, **result.kwargs)
    try:
        value = normalize_json(returned)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise ResultNotJson(f"The task {task.module_path} returned {type(returned).__name__}, not JSON: {error}.") from error
    return value


def _end(message: Message, result: Any, value: Any) -> None:
    """Write the result, and announce it after the commit."""
    alias = task_backends[result.backend].given.of(result.task.queue_name).alias
    object.__setattr__(result, "status", TaskResultStatus.SUCCESSFUL)
    object.__setattr__(result, "finished_at", timezone.now())
    results.ended(result, value)
    results.write(alias, result, value, key=message.key, leased=message.topic != topic_of(result.task.queue_name))
    if is_heard(task_finished):
        transaction.on_commit(partial(_announce, task_finished, result), using=alias, robust=True)


def _announce(signal: Signal, result: Any) -> None:
    """Send a signal. A receiver that raises changes nothing: inside a transaction its statements are rolled back."""
    if not is_heard(signal):
        return
    backend = task_backends[result.backend]
    connection = connections[backend.given.of(result.task.queue_name).alias]
    inside = connection.in_atomic_block
    mark = transaction.savepoint(connection.alias) if inside else None
    answers = signal.send_robust(type(backend), task_result=result)
    if mark is None:
        return
    if any(isinstance(answer, Exception) for _, answer in answers):
        transaction.savepoint_rollback(mark, connection.alias)
        connection.needs_rollback = False
    else:
        transaction.savepoint_commit(mark, connection.alias)
