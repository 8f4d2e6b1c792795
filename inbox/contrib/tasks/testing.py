"""Helpers for tests of tasks.

result = send_receipt.enqueue(17)
assert run_tasks() == [result.id]

assert_effect_once("tasks.default", task_message(send_receipt, 17), effect=Receipt.objects.count)
"""

from __future__ import annotations

from typing import Any

from django.utils.module_loading import import_string

from inbox.contrib.tasks.compat import normalize_json, task_backends
from inbox.contrib.tasks.models import Result
from inbox.contrib.tasks.queues import topic_of
from inbox.contrib.tasks.task import call_of, own_options
from inbox.handlers.message import Message
from inbox.testing import make_message

__all__ = ["run_tasks", "task_message"]


def run_tasks(*, using: str = "default", raise_errors: bool = True) -> list[str]:
    """Relay and run all that is due, as `outbox.testing.run_relay` does; returns the ids of the tasks that have ended by it.

    Args:
        using: the database of the outbox.
        raise_errors: raise what a task raised.

    Raises:
        Exception: what a task raised.
        RuntimeError: it is called inside `transaction.atomic()` (that of a test case is allowed), or not in a test.
    """
    __tracebackhide__ = True
    rows = Result.objects.using(using).order_by("finished_at", "pk")
    before = dict(rows.values_list("message_id", "finished_at"))
    # By its name: the inbox imports only public names of the outbox for publishing.
    import_string("outbox.testing.run_relay")(using=using, raise_errors=raise_errors)
    return [name for name, at in rows.values_list("message_id", "finished_at") if before.get(name) != at]


def task_message(task: Any, *args: Any, **kwargs: Any) -> Message:
    """The message of a call of a task, for `deliver` and `assert_effect_once`."""
    own, backend = own_options(task), task_backends[task.backend]
    topic = topic_of(task.queue_name, lease=own["lease"])
    return make_message(topic, call_of(task, normalize_json(args), normalize_json(kwargs), backend.alias))
