"""The result of a task: read where it is, and written once it has ended.

A task that has ended well has a row of `Result`. Before that its status is that of its open message in the inbox, or in the
outbox. A dead message is a task that has failed; if an operator retries it, it is READY again. The receipt, which outlives all
of them, distinguishes a deleted result from a task that waits at the broker.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any

from django.apps import apps
from django.db import connections
from django.db.models import F, QuerySet
from django.utils import timezone

from exactly_once.failures import DEFERRED, NEVER_ENDED, REFUSED
from exactly_once.packages import label_of
from exactly_once.sql.connections import execute, fetch, is_postgresql
from exactly_once.sql.days import LIVE
from exactly_once.sql.deletions import delete_matching
from exactly_once.sql.now import now_after
from exactly_once.sql.partitions import lately, newest
from exactly_once.transport.broker import is_local
from exactly_once.wire.body import Undecodable, decode_payload
from exactly_once.wire.identity import uuid_in
from inbox.conf import inbox_options
from inbox.contrib.tasks.compat import TaskError, TaskResult, TaskResultDoesNotExist, TaskResultStatus
from inbox.contrib.tasks.models import Result, Status
from inbox.contrib.tasks.queues import PREFIX, QueueOptions, is_leased, queue_of
from inbox.contrib.tasks.task import TaskCancelled, TaskNotRun, call_of, is_call, run_after_of, task_of
from inbox.handlers.message import FailedAttempt, Message
from inbox.models import InboxMessage, Receipt, TrailEntry
from inbox.operators.processes import Run, where_run
from inbox.states import DUE, State
from inbox.store import claims, lease_rows
from inbox.store.dialect import adapted

_WITHDRAWN = ("cancelled", "expired", "dead", "rolled_back")
"""The states of a message in the outbox that is not delivered, unless an operator restores it."""
_SUCCESSFUL = TaskResultStatus.SUCCESSFUL
_TIMES = ("enqueued_at", "started_at", "last_attempted_at", "finished_at")
_SENT = "published"
_UNKNOWN = "unknown"
"""The worker of an attempt that runs, or whose process died."""
_MARK = "hashtextextended(%s, hashtextextended('run of a task', 0))"
"""The key of an advisory lock."""
_FAILED_ATTEMPT = {"was__in": ["", *DUE], "became__in": [State.RETRYING, State.DEAD]}


def get_result(backend: Any, result_id: str) -> Any:
    """The present result of a task.

    Raises:
        TaskResultDoesNotExist: there is no such task, or its result is deleted.
    """
    for alias in dict.fromkeys(backend.given.of(queue).alias for queue in sorted(backend.queues)):
        if (found := _present(alias, result_id)) is not None:
            return found
    raise TaskResultDoesNotExist(result_id)


def _present(alias: str, result_id: str) -> Any:
    """In the order in which a message moves, so that it is found wherever it moves to in between."""
    if (written := _written(alias, result_id, status=Status.SUCCESSFUL)) is not None:
        return written
    sent = _newest(_outbox(alias).filter(message_id=uuid_in(result_id), topic__startswith=PREFIX))
    if sent is not None and sent.state != _SENT:
        return _waiting(sent)
    if (found := _arrived(alias, result_id)) is not None or sent is None:
        return found
    return _at_the_broker(alias, sent)


def _at_the_broker(alias: str, sent: Any) -> Any:
    """The result of a published message that had not arrived; or that of the task whose biz-id it has."""
    result_id = str(sent.message_id)
    # A process that was killed has a heartbeat until it is silent for long enough, and no mark.
    is_marked = is_postgresql(connections[alias]) and not is_leased(sent.topic)
    marked_since = _marked_since(alias, result_id) if is_marked else None
    run = where_run(alias, sent.topic, result_id) if marked_since or not is_marked else None
    started_at = marked_since or (run and run.since)
    receipt = Receipt.objects.using(alias).filter(handler=sent.topic, topic=sent.topic, biz_id=sent.biz_id).first()
    if receipt is None:
        return _waiting(sent, started_at, _worker(run))
    if receipt.message_id == result_id:
        # It has arrived since. Or its result is deleted; one that was skipped has none, and the inbox may have forgotten it.
        found = _arrived(alias, result_id)
        is_forgotten = found is None and _newest(_of_queues(alias).filter(message_id=result_id)) is None
        return _waiting(sent, cancelled="It was skipped or dropped.") if is_forgotten else found
    first = _present(alias, receipt.message_id)
    if first is None:
        return _waiting(sent, cancelled="An earlier task with its biz-id has ended, and the result of that one is deleted.")
    return ended(replace(first, id=result_id), first.return_value if first.status == _SUCCESSFUL else None)


def _arrived(alias: str, result_id: str) -> Any:
    """The result of a message that the inbox has received."""
    rows = _of_queues(alias).filter(message_id=result_id)
    if (row := rows.filter(day=LIVE).first()) is not None:
        return received(alias, row)
    if (written := _written(alias, result_id)) is not None:
        return written
    row = _newest(rows.exclude(state=State.DONE))
    return None if row is None else received(alias, row)


def _newest(rows: QuerySet[Any]) -> Any:
    """The newest of these rows, which is most likely one of the last days; None without one."""
    return rows.filter(day__in=lately()).order_by("-pk").first() or next(iter(newest(rows, 1)), None)


def _of_queues(alias: str) -> QuerySet[InboxMessage]:
    """Messages of the handlers of queues. A project may have others for these topics."""
    return InboxMessage.objects.using(alias).filter(topic__startswith=PREFIX, handler=F("topic"))


def failed(alias: str, message: Message, step: str) -> tuple[Any, Any]:
    """The result of a task whose message is dead, and is locked here against a retry; and what its call has returned.

    None: it is not dead any more; or, under a lease, its last process died between its success and the end of its lease.

    Args:
        step: the step that is the call under a lease. A task whose last process died behind that has succeeded.
    """
    row = _of_queues(alias).filter(message_id=message.id, topic=message.topic, day=LIVE, state=State.DEAD)
    dead = row.select_for_update().first()
    if dead is None or _written(alias, message.id, status=Status.SUCCESSFUL) is not None:
        return None, None
    result, returned = received(alias, dead), lease_rows.steps_of(alias, dead.pk).get(step)
    if returned is None:
        return result, None
    times = {"started_at": result.started_at or dead.received_at, "last_attempted_at": dead.settled_at}
    result = replace(result, status=_SUCCESSFUL, **times)
    return ended(result, value := json.loads(returned)), value


def _outbox(alias: str) -> QuerySet[Any]:
    return QuerySet(apps.get_model(label_of("outbox"), "OutboxMessage"), using=alias)


def _written(alias: str, result_id: str, **status: Status) -> Any:
    row = Result.objects.using(alias).filter(message_id=result_id, **status).first()
    return None if row is None else of_row(row)


def of_row(row: Result) -> Any:
    """The result that is written."""
    given: dict[str, Any] = {name: getattr(row, name) for name in (*_TIMES, "worker_ids")}
    given |= {"status": TaskResultStatus(row.status), "errors": [TaskError(**error) for error in row.errors]}
    result = _result(row.message_id, row.queue, json.loads(bytes(row.body)), **given)
    return ended(result, row.return_value)


def received(alias: str, row: InboxMessage) -> Any:
    """The result of a message in the inbox that is not done: open, dead, skipped or shed."""
    begun, errors, finished_at = _begun(row), _failures(row), row.settled_at
    is_held = claims.is_held(alias, row)
    workers, status = _workers(alias, row, row.attempts - is_held), TaskResultStatus.READY
    if is_held:
        status = TaskResultStatus.RUNNING
        run = where_run(alias, row.handler, row.message_id)
        if run and row.failed_at and run.since <= row.failed_at:
            run = None  # a heartbeat of an earlier attempt
        begun = [*begun, run.since] if run else begun
        workers = [*workers, _worker(run)]
    elif finished_at is not None:
        status = TaskResultStatus.FAILED
        if row.state != State.DEAD:
            errors = [*errors, _error(TaskCancelled, row.last_error or str(State(row.state).label))]
    times = {"started_at": min(begun, default=None), "last_attempted_at": max(begun, default=None), "finished_at": finished_at}
    given = {"status": status, "worker_ids": workers, "errors": errors}
    return _result(row.message_id, queue_of(row.topic), _call_in(row), row.created_at, **given, **times)


def _worker(run: Run | None) -> str:
    return f"{run.process.host}:{run.process.pid}:{run.thread}" if run else _UNKNOWN


def mark(alias: str, message: Message) -> None:
    """Let other sessions see that this transaction runs a task of which they see no row before it commits."""
    if is_postgresql(connections[alias]) and not is_local(inbox_options().broker_url):
        fetch(connections[alias], f"SELECT pg_advisory_xact_lock_shared({_MARK})", [message.id])


def _marked_since(alias: str, result_id: str) -> datetime | None:
    """When the transaction that has marked this task as running began; None: there is none."""
    # Not a try of the lock, which could hold up a run.
    sql = (
        "SELECT min(COALESCE(a.xact_start, now())) FROM pg_locks l JOIN pg_stat_activity a USING (pid) "  # noqa: S608 - our own name
        "WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND l.locktype = 'advisory' "
        f"AND l.objsubid = 1 AND (l.classid::int8 << 32) + l.objid::int8 = {_MARK}"
    )
    since: datetime | None = fetch(connections[alias], sql, [result_id])[0][0]
    return since


def _waiting(sent: Any, running_since: datetime | None = None, worker: str = "", *, cancelled: str = "") -> Any:
    """The result of a message that has no row in the inbox.

    Args:
        running_since: it runs for the first time.
        cancelled: why it will never run; one that was not published has its own reason.
    """
    given: dict[str, Any] = {"status": TaskResultStatus.READY}
    if running_since is not None:
        times = dict.fromkeys(("started_at", "last_attempted_at"), running_since)
        given = {"status": TaskResultStatus.RUNNING, "worker_ids": [worker], **times}
    elif cancelled or sent.state in _WITHDRAWN:
        why = _error(TaskCancelled, cancelled or sent.last_error or sent.get_state_display())
        given = {"status": TaskResultStatus.FAILED, "finished_at": sent.settled_at, "errors": [why]}
    return _result(str(sent.message_id), queue_of(sent.topic), _call_in(sent), sent.created_at, **given)


def ended(result: Any, value: Any) -> Any:
    """The result, with what its task has returned."""
    object.__setattr__(result, "_return_value", value)
    return result


def running(message: Message, backend: str, alias: str, worker: str) -> Any:
    """The result of a task that runs now."""
    errors: list[Any] = []
    earlier: Sequence[str] = []
    now = timezone.now()
    started_at = now
    if message.attempt > 1:
        rows = InboxMessage.objects.using(alias).filter(message_id=message.id, handler=message.topic, day=LIVE)
        if (row := rows.first()) is not None:
            errors, started_at = _failures(row), min(_begun(row), default=now)
            earlier = _workers(alias, row, message.attempt - 1)
    given = {"started_at": started_at, "last_attempted_at": now, "errors": errors, "worker_ids": [*earlier, worker]}
    payload = _with_run_after({**message.payload, "backend": backend}, message.headers)
    return _result(message.id, queue_of(message.topic), payload, message.created_at, status=TaskResultStatus.RUNNING, **given)


def write(options: QueueOptions, result: Any, message: Message, value: Any = None) -> None:
    """Write the result of a task that has ended. The success of one that had failed replaces its failure."""
    connection, is_success, task = connections[options.alias], result.status == _SUCCESSFUL, result.task
    given: dict[str, Any] = {
        "message_id": result.id,
        "queue": task.queue_name,
        "task": task.module_path,
        "body": json.dumps({**call_of(task, result.args, result.kwargs, result.backend), **run_after_of(task)}).encode(),
        "return_value": None if value is None else json.dumps(value),
        "errors": json.dumps([asdict(error) for error in result.errors]),
        "worker_ids": json.dumps(result.worker_ids),
        "key": message.key,
        "leased": is_leased(message.topic),
        "status": str(result.status),
        "expires_at": options.keep_results,
        **{name: getattr(result, name) for name in _TIMES},
    }
    if is_success:
        # What is not earlier than this attempt is by the clock of this process.
        given |= {name: given[name] - result.finished_at for name in _TIMES[1:] if given[name] >= result.last_attempted_at}
    else:
        # Not an update: a process whose lease has ended may write at this moment that it has succeeded.
        delete_matching(Result.objects.using(options.alias).filter(message_id=result.id, status=Status.FAILED))
    after = now_after(connection)
    places = (after if isinstance(each, timedelta) else "%s" for each in given.values())
    values = [each.total_seconds() if isinstance(each, timedelta) else adapted(connection, each) for each in given.values()]
    replaced = ", ".join(f"{name} = excluded.{name}" for name in given)
    execute(
        connection,
        # Written by hand: with the ORM it takes three times as long, and a process spent a quarter of its time on it.
        f"INSERT INTO {Result._meta.db_table} ({', '.join(given)}) VALUES ({', '.join(places)}) "  # noqa: S608 - our own names
        f"ON CONFLICT (message_id) DO {f'UPDATE SET {replaced}' if is_success else 'NOTHING'}",
        values,
    )


def _call_in(row: Any) -> Any:
    """The call that is a message. None: another service has published something else to the topic of a queue."""
    with suppress(Undecodable):
        payload = decode_payload(bytes(row.body), "application/json")
        return _with_run_after(payload, row.headers) if is_call(payload) else None


def _with_run_after(payload: Any, headers: Mapping[str, Any]) -> Any:
    return {**payload, **{name: headers[name] for name in {"run_after"} & headers.keys()}}


def _result(result_id: str, queue: str, payload: Any, enqueued_at: Any = None, **given: Any) -> Any:
    """The result of a call. None: it is not one."""
    if payload is None:
        return None
    task, call = task_of(payload, queue), {name: payload[name] for name in ("args", "kwargs", "backend")}
    missing = {**dict.fromkeys(_TIMES), "enqueued_at": enqueued_at, "errors": [], "worker_ids": []}
    return TaskResult(task=task, id=result_id, **{**call, **missing, **given})


def _failures(row: InboxMessage) -> list[Any]:
    """The latest failed attempts; a dead message that was never run has its reason."""
    kept = [(one["class"], one["traceback"] or one["error"]) for one in row.failures or ()]
    if not kept and row.state == State.DEAD:
        kept = [(row.error_class, row.traceback or row.last_error)]
    return [_error(name, text) for name, text in kept]


def _begun(row: InboxMessage) -> list[datetime]:
    """When the latest failed attempts began, or had failed, where it is not known how long they lasted."""
    attempts = map(FailedAttempt.from_row, row.failures or ())
    return [one.at - (one.lasted or timedelta()) for one in attempts if one.lasted is not None or one.traceback]


def _error(kind: str | type[Exception], traceback: str) -> Any:
    """An error with the path of a class; what has none, as an attempt whose process died, is `TaskNotRun`."""
    path = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    if " " in path or path in {"", REFUSED, DEFERRED}:
        path = f"{TaskNotRun.__module__}.{TaskNotRun.__qualname__}"
    return TaskError(exception_class_path=path if "." in path else f"builtins.{path}", traceback=traceback)


def _workers(alias: str, row: InboxMessage, attempts: int) -> list[str]:
    """Who ran the latest attempts, by the trail, which does not know those whose process died."""
    if not attempts:
        return []
    entries = TrailEntry.objects.using(alias).filter(message_id=row.message_id, handler=row.handler, **_FAILED_ATTEMPT)
    known = [*entries.order_by("pk").values_list("process", flat=True)]
    if row.state == State.DEAD and row.error_class == NEVER_ENDED:
        # Who made it a dead letter has not run it.
        del known[-1:]
    known = known[-attempts:]
    return [*known, *[_UNKNOWN] * (attempts - len(known))]
