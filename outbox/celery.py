"""Celery tasks through the outbox: the call commits together with the business change or not at all.

    from outbox.celery import OutboxTask

    @shared_task(base=OutboxTask)
    def send_receipt(order_id): ...

    with transaction.atomic():
        order.save()
        send_receipt.delay(order.id)

Celery itself creates the message, with its own routes, serialisers, headers and signals. Only the last step differs: the
message becomes a row instead of going to the broker. The relay sends it unchanged, and a worker sees no difference.

A project's celery.py imports this module before Django's models are ready, so code that needs models is imported at the first
call.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, timedelta
from functools import wraps
from types import FrameType
from typing import Any, ClassVar
from weakref import WeakSet

from celery import _state
from celery.app.control import Control
from celery.contrib.django.task import DjangoTask
from celery.local import Proxy
from django.db.backends.base.base import BaseDatabaseWrapper

from exactly_once.process.logs import escaping_logger
from exactly_once.sql.connections import is_inside_a_transaction
from exactly_once.wire.formats import CELERY_TOPICS
from exactly_once.wire.text import fit

logger = escaping_logger(__name__)

PLACE_OPTIONS = frozenset(
    {
        *("fanout_patterns", "fanout_prefix", "global_keyprefix", "predefined_exchanges", "predefined_queues"),
        *("priority_steps", "queue_name_prefix", "sep"),
        *("messages_collection", "queues_collection", "routing_collection", "message_tablename", "queue_tablename"),
        *("conn_string", "control_folder", "data_folder_in", "data_folder_out", "default_database"),
        *("endpoint_url", "is_secure", "master_name", "port", "region", "regioninfo", "sentinel_kwargs", "sts_role_arn"),
    }
)
"""Those of `broker_transport_options` that determine the server, or the names of keys or queues, if it is not RabbitMQ."""

_RUNS_HOOKS = BaseDatabaseWrapper.run_and_clear_commit_hooks.__code__
_warned: set[str] = set()
_bound: WeakSet[Any] = WeakSet()
_at_once: ContextVar[bool] = ContextVar("sent at once, whatever transaction is open", default=False)


class OutboxTask(DjangoTask):  # type: ignore[misc] # celery is not typed
    """A task whose `delay()` and `apply_async()` write to the outbox inside a transaction, and send directly outside of one.

    Attributes:
        outbox_using: the database alias whose open transaction is checked, and to whose outbox the task is written. Default:
            that of the database routers.
    """

    outbox_using: ClassVar[str | None] = None

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> Any:
        """As Celery's; inside `atomic()` of `outbox_using` it writes a row of the outbox.

        It returns an `AsyncResult` with the id of the task, which is known at once. The row is due at the task's `eta` and
        expires at its `expires`. `producer`, `publisher`, `connection`, `retry` and `retry_policy` do not affect a row.

        Raises:
            InvalidMessage, PayloadTooLarge: with the value and the remedy; nothing was written.
            kombu.exceptions.EncodeError: the arguments cannot be serialised; nothing was written.
        """
        from outbox.store.dialect import database_of  # noqa: PLC0415 - models are not ready when this module is imported

        alias = database_of(self.outbox_using)
        app = self._get_app()
        at_once = app.conf.task_always_eager or _at_once.get()
        if at_once or not is_inside_a_transaction(alias):
            if not at_once:
                _warn_of_commit_hook(self, alias)
            return super().apply_async(args, kwargs, task_id, producer, link, link_error, shadow, **options)

        from outbox.task_messages import RowProducer  # noqa: PLC0415 - as above

        for of_a_broker in ("publisher", "connection"):
            options.pop(of_a_broker, None)
        options = _due_in_the_header(app, options)
        rows = RowProducer(app, alias)
        try:
            return super().apply_async(args, kwargs, task_id, rows, link, link_error, shadow, **options)
        finally:
            rows.release()

    @classmethod
    def on_bound(cls, app: Any) -> None:
        # A task class that was never registered is bound to the proxy of the current app.
        _bound.add(app._get_current_object() if isinstance(app, Proxy) else app)  # noqa: SLF001 - as in Celery itself
        super().on_bound(app)

    def retry(self, *args: Any, **options: Any) -> Any:
        """As Celery's, sent at once: it raises `Retry`, which would roll back an enclosing transaction with the row."""
        with sent_at_once():
            return super().retry(*args, **options)

    def on_replace(self, sig: Any) -> Any:
        """As Celery's, sent at once for the same reason as `retry`."""
        if self.request.is_eager:
            return super().on_replace(sig)
        with sent_at_once():
            return super().on_replace(sig)


def _cancelling_rows(revoke: Callable[..., Any]) -> Callable[..., Any]:
    """Celery's `revoke`, which also cancels rows. Workers that start again forget it, and would run what is sent then."""

    @wraps(revoke)
    def with_rows(control: Any, task_id: Any, *args: Any, **options: Any) -> Any:
        try:
            _cancel_rows(control.app, [task_id] if isinstance(task_id, str) else [*task_id])
        finally:
            answer = revoke(control, task_id, *args, **options)
        return answer

    return with_rows


# Every way to revoke a task ends here: that of a result, of a group, of an app. A process that revokes a task need not have
# bound it, so that `on_bound` would be too late.
Control.revoke = _cancelling_rows(Control.revoke)


def _cancel_rows(app: Any, task_ids: Sequence[str]) -> None:
    from outbox.decisions import cancel  # noqa: PLC0415 - models are not ready when this module is imported
    from outbox.store.dialect import database_of  # noqa: PLC0415
    from outbox.store.selecting import live_names  # noqa: PLC0415

    tasks = [task for task in app.tasks.values() if isinstance(task, OutboxTask)]
    names = [fit(str(task_id)) for task_id in task_ids]
    for alias in {database_of(task.outbox_using) for task in tasks}:
        for topic, biz_id in live_names(alias, [fit(f"{CELERY_TOPICS}{task.name}") for task in tasks], names):
            cancel(topic=topic, biz_id=biz_id, by="revoke()", using=alias)


def apps() -> list[Any]:
    """The Celery apps of which this process has bound an `OutboxTask`; if there are none, its default app.

    The call binds no task: Celery binds a task at its first use.
    """
    open_apps = list(_state._get_active_apps())  # noqa: SLF001 - Celery has no public list of open apps
    return [app for app in open_apps if app in _bound] or [app for app in open_apps if app is _state.default_app]


def _warn_of_commit_hook(task: OutboxTask, alias: str) -> None:
    """Warn once per task that is called in a commit hook instead of inside the transaction."""
    if task.name in _warned or not _is_in_a_commit_hook(alias):
        return
    _warned.add(task.name)
    logger.warning(
        "The task %s is called in an on_commit hook of %r: it is lost if this process ends before the hook runs, or if the "
        "broker is unavailable. Call it inside the transaction, without on_commit: then it commits with the transaction.",
        task.name,
        alias,
    )


def _is_in_a_commit_hook(alias: str) -> bool:
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - documented, and the only way to find the caller
    while frame is not None:
        if frame.f_code is _RUNS_HOOKS and frame.f_locals["self"].alias == alias:
            return True
        frame = frame.f_back
    return False


@contextmanager
def sent_at_once() -> Iterator[None]:
    """Calls go to the broker, whatever transaction is open."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


def _due_in_the_header(app: Any, options: dict[str, Any]) -> dict[str, Any]:
    """`options` with the task's time only in the header that the worker reads.

    With quorum queues Celery routes a task that has an `eta` to its own exchanges for delayed delivery. The row has already
    waited, and the message would wait there again.
    """
    countdown, eta = options.pop("countdown", None), options.pop("eta", None)
    if countdown:
        eta = (app.now().astimezone(UTC) + timedelta(seconds=countdown)).astimezone(app.timezone)
    if not eta:
        return options
    due = eta if isinstance(eta, str) else eta.isoformat()
    return {**options, "headers": {**(options.get("headers") or {}), "eta": due}}
