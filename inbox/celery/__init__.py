"""Celery tasks whose effect happens once per business id, however often they are sent, delivered or begun.

    from inbox.celery import idempotent_task

    @idempotent_task(biz_id="order_id", retry=Retry(max_attempts=5), autoretry_for=[ConnectionError])
    def charge(order_id, amount):
        Payment.objects.create(order_id=order_id, amount=amount)

A task runs in one database transaction: an inbox row with the task's name and business id, the effect, and the commit sentinel.
The message is acknowledged after the commit. Everything else stays Celery's: routes, retries, results, time limits.

A project's celery.py imports this module before Django's models can be imported, so modules that need models are imported when
a task is run.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, ClassVar, NoReturn, Self

from celery import shared_task
from celery.contrib.django.task import DjangoTask

from exactly_once.process.clock import utcnow
from inbox.celery import worker_statistics
from inbox.conf import inbox_options
from inbox.errors import NotCallable, Reject
from inbox.handlers.decorator import database_of
from inbox.handlers.options import Retry, require_value

__all__ = ["IdempotentTask", "idempotent_task"]

BizId = str | Callable[..., object] | None

_SENT_AT = "inbox_sent_at"
"""The header with the time of the call, for the maximum message age. Celery's own messages do not have it."""

_REQUIRED = {
    "acks_late": "its message would be acknowledged before it runs, and a worker that dies would lose the task.",
    "reject_on_worker_lost": "its message would be acknowledged when its process dies during the run, and the task lost.",
}

_EQUIVALENT = {"max_retries", "retry_backoff", "retry_backoff_max", "retry_kwargs", "default_retry_delay"}
"""Celery's options that a `Retry` is converted to. A `Retry` that Celery cannot apply is refused when the task is declared."""
_CONSTANT, _DOUBLED = 1, 2

_running: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("name and id of the tasks that are being run", default=())


class IdempotentTask(DjangoTask):  # type: ignore[misc] # celery is not typed
    """A task whose effect happens once per business id; the base of `idempotent_task`, and for `@app.task(base=…)`.

    Attributes:
        biz_id: what it is deduplicated on: the name of an argument or a path into one ("order_id", "order.id"), or a function
            of the task's arguments; None is the task id.
        using: the database alias of the inbox row and the effect. Default: that of the database routers.
    """

    biz_id: ClassVar[BizId] = None
    using: ClassVar[str | None] = None
    acks_late = True
    reject_on_worker_lost = True
    retry_on_worker_lost = False
    run: Callable[..., Any]
    _uses_base_of_app: ClassVar[bool] = False
    _retry: ClassVar[Retry | None] = None

    def __new__(cls) -> Self:
        # Not in __init__: a project's task classes have their own, which in Celery's examples does not call super().
        kind = _with_base_of_app(cls) if cls._uses_base_of_app else cls
        if cls._retry is not None:
            _set_retry_options(kind, cls._retry)
        task: Self = super().__new__(kind)
        task._make_idempotent()
        if kind is not cls:
            task.__init__()  # type: ignore[misc] # Python calls it only for an instance of `cls`
        return task

    def _make_idempotent(self) -> None:
        function, kind = self.run, type(self)
        signature = inspect.signature(function)
        options = {option: getattr(self, option) for option in _REQUIRED}
        _refuse_mistakes(self.name or kind.__name__, kind.biz_id, signature.parameters, options)

        # Inside Celery's wrapper for `autoretry_for`, so that Celery also retries when the commit fails.
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            request = self.request
            # If a task calls itself as a function, the request is still that of its delivery.
            delivery = (self.name, str(request.id))
            if request.called_directly or delivery in _running.get():
                return function(*args, **kwargs)

            from inbox.celery.receiving import receive_task  # noqa: PLC0415 - models are not ready before

            using = database_of(kind.using)
            if not request.is_eager:
                worker_statistics.begin(using)
            with _marked_as_running(delivery):
                return receive_task(self, function, signature, args, kwargs, using=using, sent_at=_sent_at(request))

        self.run = run

    def apply_async(self, *given: Any, **options: Any) -> Any:
        """Celery's method, with the time of the call as a header; retries keep the first time."""
        options["headers"] = {_SENT_AT: utcnow().isoformat(), **(options.get("headers") or {})}
        return super().apply_async(*given, **options)

    def retry(self, args: Any = None, kwargs: Any = None, exc: Any = None, *further: Any, **options: Any) -> Any:
        """Celery's method, but a refusal is never retried, whatever `autoretry_for` says."""
        from inbox.celery.receiving import REFUSALS  # noqa: PLC0415 - as above

        if isinstance(exc, REFUSALS):
            raise exc
        return super().retry(args, kwargs, exc, *further, **options)

    def _refuse_many_calls(self, *given: Any) -> NoReturn:
        raise NotCallable(
            f"map(), starmap() and chunks() of {self.name} would call the function many times within one of Celery's own "
            "tasks, without deduplication. Use a group of signatures: each has its own message."
        )

    map = starmap = chunks = _refuse_many_calls


def idempotent_task(
    function: Callable[..., Any] | None = None,
    *,
    biz_id: BizId = None,
    using: str | None = None,
    retry: Retry | None = None,
    base: type | None = None,
    **options: Any,
) -> Any:
    """Make the decorated function a Celery task whose effect happens exactly once per business id.

    It is a `shared_task` with `acks_late` and `reject_on_worker_lost`, and has the task class of its app. A direct call only
    calls the function. A duplicate returns the result of the first run, if that result was JSON.

    Args:
        biz_id: the name of an argument or a path into one ("order_id", "order.id"), or a function of the task's arguments that
            returns non-empty text, a whole number, a UUID, a Decimal or a date; default: the task id, which is the same for
            redeliveries and retries and differs between calls.
        using: the database alias that the effect is written to.
        retry: how often Celery retries a failed task, and when: after every error except `Reject`, unless `autoretry_for` and
            `dont_autoretry_for` name others. Celery doubles the delays, or with `factor=1` keeps them; default: Celery's own
            options, so by default no retry.
        base: the project's own task class, for its hooks and attributes; default: the `task_cls` of the app.
        options: all options of `shared_task`: `name`, `bind`, `autoretry_for`, `ignore_result`, `rate_limit` …

    Raises:
        ValueError: `biz_id` is not an argument of the function, `acks_late` or `reject_on_worker_lost` is off, or `retry` has
            a factor other than 1 and 2, has `retry_on`, or contradicts an option of Celery.
        TypeError: `biz_id` is neither text nor a function, or `retry` is not a Retry.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        parameters = dict(inspect.signature(function).parameters)
        if options.get("bind"):
            parameters.pop(next(iter(parameters), ""), None)
        name = options.get("name") or f"{function.__module__}.{function.__qualname__}"
        _refuse_mistakes(name, biz_id, parameters, options)
        if retry is not None:
            _refuse_impossible(name, retry, options)
        attributes = {"biz_id": biz_id, "using": using, "_retry": retry, "_uses_base_of_app": base is None}
        return shared_task(base=_idempotent(base), **attributes, **options)(function)

    return decorate if function is None else decorate(function)


def _idempotent(base: type | None) -> type:
    if base is None:
        return IdempotentTask
    if issubclass(base, IdempotentTask):
        return base
    return type(base.__name__, (IdempotentTask, base), {"__module__": base.__module__})


def _set_retry_options(task: Any, retry: Retry) -> None:
    """Set Celery's options, as closely as Celery can retry by `retry`, on the class that it has made for a function.

    The class may already name the errors to retry.
    """
    policy = retry.over(inbox_options().retry)
    base, cap = (math.ceil(delay.total_seconds()) for delay in (policy.base, policy.cap))
    task.max_retries, task.default_retry_delay, task.retry_backoff_max = policy.max_attempts - 1, base, cap
    task.retry_backoff = False if retry.backoff.factor == _CONSTANT else base
    task.autoretry_for = getattr(task, "autoretry_for", (Exception,))
    excepted = getattr(task, "dont_autoretry_for", (Reject,))
    task.dont_autoretry_for = (*excepted, *retry.dead_on) if retry.dead_on else excepted


def _refuse_impossible(name: str, retry: Retry, others: Iterable[str]) -> None:
    """Refuse a `retry` of the task `name` that Celery cannot apply, or that contradicts its `others`.

    Raises:
        TypeError: it is not a Retry.
        ValueError: its factor is neither 1 nor 2, it has `retry_on`, or one of `others` is an equivalent option of Celery.
    """
    require_value("retry", retry, Retry, "Retry(max_attempts=5)")
    factor = retry.backoff.factor
    if factor not in {None, _CONSTANT, _DOUBLED}:
        raise ValueError(
            f"The task {name} has a retry with the factor {factor}: Celery either doubles the delay after each failure or "
            "keeps it. Set the factor to 2 or 1, or remove it."
        )
    if retry.retry_on:
        raise ValueError(
            f"The task {name} has a retry with retry_on, but Celery has one policy for all errors of a task: remove retry_on, "
            "or call self.retry(countdown=...) in the task."
        )
    if equivalent := sorted(_EQUIVALENT & {*others}):
        raise ValueError(f"The task {name} has both retry= and {', '.join(equivalent)}, which conflict: remove one of them.")


def _with_base_of_app(task: type) -> type:
    """The class that Celery has made for a function, with the app's `task_cls` as an additional base."""
    namespace = {name: value for name, value in vars(task).items() if name not in {"__dict__", "__weakref__"}}
    base = namespace["app"].Task
    return type(task.__name__, (base,) if issubclass(base, IdempotentTask) else (*task.__bases__, base), namespace)


@contextmanager
def _marked_as_running(delivery: tuple[str, str]) -> Iterator[None]:
    token = _running.set((*_running.get(), delivery))
    try:
        yield
    finally:
        _running.reset(token)


def _refuse_mistakes(
    name: str, biz_id: object, parameters: Mapping[str, inspect.Parameter], options: Mapping[str, object]
) -> None:
    for option, reason in _REQUIRED.items():
        if not options.get(option, True):
            raise ValueError(f"The task {name} has {option}=False: {reason} Remove {option}.")
    if biz_id is None or callable(biz_id):
        return
    if not isinstance(biz_id, str):
        raise TypeError(f"The biz_id of the task {name} is {biz_id!r}: it must be a path into its arguments, or a function.")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if biz_id.partition(".")[0] not in parameters and not takes_any:
        raise ValueError(
            f"The biz_id of the task {name} is {biz_id!r}, which is not one of its arguments: {', '.join(parameters)}."
        )


def _sent_at(request: Any) -> datetime | None:
    try:
        instant = datetime.fromisoformat(str((request.headers or {}).get(_SENT_AT)))
    except ValueError:
        return None
    return instant if instant.tzinfo else None
