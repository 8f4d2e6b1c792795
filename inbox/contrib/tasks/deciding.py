"""What operators decide about a task that has ended. Others are decided about as messages, on their pages."""

from __future__ import annotations

from dataclasses import fields, replace

from inbox.contrib.tasks.models import Result
from inbox.contrib.tasks.queues import topic_of
from inbox.contrib.tasks.results import of_row
from inbox.models import InboxMessage
from inbox.operators.decisions import decide, retrying


def retry(alias: str, pk: int, *, by: str) -> bool:
    """Retry the dead message of a failed task, under its id. False: it has none."""
    row = Result.objects.using(alias).get(pk=pk)
    topic = topic_of(row.queue, lease=row.leased)
    dead = InboxMessage.objects.using(alias).filter(message_id=row.message_id, handler=topic, state="dead").first()
    return dead is not None and not decide(alias, dead.pk, retrying(by)).unchanged


def enqueue_again(alias: str, pk: int) -> bool:
    """Enqueue a task with the same arguments, now and without its biz-id, so that it runs whatever became of the first.

    Raises:
        InvalidTask: Django's class, or that of the package: it cannot be imported, or is not valid any more.
    """
    row = Result.objects.using(alias).get(pk=pk)
    result = of_row(row)
    own = {"key": row.key, "biz_id": None, "unique": False, "lease": row.leased}
    known = {field.name for field in fields(result.task)}
    task = replace(result.task, run_after=None, **{name: value for name, value in own.items() if name in known})
    task.enqueue(*result.args, **result.kwargs)
    return True
