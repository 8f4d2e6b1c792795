"""Celery tasks whose effect happens once, however often they are sent, delivered or begun.

    from inbox.celery import idempotent_task

    @idempotent_task(biz_id="order_id", retry=Retry(max_attempts=5), autoretry_for=[ConnectionError])
    def charge(order_id, amount):
        Payment.objects.create(order_id=order_id, amount=amount)

A run is one database transaction: an inbox row that names the task and its business id, the effect, and the commit sentinel.
The message is acknowledged after the commit. Everything else stays Celery's: routes, retries, results, time limits.

A project's celery.py imports this before Django's models can be, so what needs them is imported at the first run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, ClassVar, NoReturn, Self

from celery import shared_task
from celery.contrib.django.task import DjangoTask
from django.db import DEFAULT_DB_ALIAS

from inbox.celery import statistics
from inbox.celery.retrying import celery_options, refuse_impossible
from inbox.errors import NotCallable
from inbox.handlers.options import Retry
from outbox.kernel.clock import utcnow

BizId = str | Callable[..., object] | None

_SENT_AT = "inbox_sent_at"
"""The header that says when a task was called, for its age: Celery's own messages do not say."""

_NEEDED = {
    "acks_late": "its message would be gone before it runs, and a worker that dies would lose it.",
    "reject_on_worker_lost": "its message would be acknowledged when its process dies in the middle, and the task lost.",
}

_taken: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("deliveries at work: name and id of the task", default=())


class IdempotentTask(DjangoTask):  # type: ignore[misc] # celery is not typed
    """A task whose effect happens once per business id. `idempotent_task` makes them; so does `@app.task(base=…)`.

    Attributes:
        biz_id: what it is deduplicated on: an argument by name or a path into one ("order_id", "order.id"), or a function that
            takes the task's arguments; None is the task id.
        using: the database alias of the inbox row and the effect.
    """

    biz_id: ClassVar[BizId] = None
    using: ClassVar[str] = DEFAULT_DB_ALIAS
    acks_late = True
    reject_on_worker_lost = True
    retry_on_worker_lost = False
    run: Callable[..., Any]
    _as_the_app_has_them: ClassVar[bool] = False
    _retry: ClassVar[Retry | None] = None

    def __new__(cls) -> Self:
        # Not in __init__: that is for task classes of a project, and Celery's own examples of them call no super().
        made = _on_the_base_of_its_app(cls) if cls._as_the_app_has_them else cls
        if cls._retry is not None:
            _have_celery_retry(made, cls._retry)
        task: Self = super().__new__(made)
        task._make_idempotent()
        return task

    def _make_idempotent(self) -> None:
        function, kind = self.run, type(self)
        signature = inspect.signature(function)
        _refuse_mistakes(
            self.name or kind.__name__, kind.biz_id, signature.parameters, {option: getattr(self, option) for option in _NEEDED}
        )

        # Around the function and inside whatever `autoretry_for` puts around `run`: that must see a commit that fails.
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            request = self.request
            # A task that calls itself as a function does so under the request of its delivery.
            delivery = (self.name, str(request.id))
            if request.called_directly or delivery in _taken.get():
                return function(*args, **kwargs)

            from inbox.celery.receiving import receive_task  # noqa: PLC0415 - models are not ready when this module is imported

            if not request.is_eager:
                statistics.begin(kind.using)
            with _at_work(delivery):
                return receive_task(self, function, signature, args, kwargs, sent_at=_sent_at(request))

        self.run = run

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
        """As Celery's, with a header that says when; a retry keeps the first."""
        options["headers"] = {_SENT_AT: utcnow().isoformat(), **(options.get("headers") or {})}
        return super().apply_async(args, kwargs, task_id, producer, link, link_error, shadow, **options)

    def retry(self, args: Any = None, kwargs: Any = None, exc: Any = None, *further: Any, **options: Any) -> Any:
        """As Celery's, but no retry is made of a refusal, whatever `autoretry_for` says."""
        from inbox.celery.receiving import REFUSALS  # noqa: PLC0415 - as above

        if isinstance(exc, REFUSALS):
            raise exc
        return super().retry(args, kwargs, exc, *further, **options)

    def map(self, it: Any) -> NoReturn:
        self._refuse_rows_of_calls("map")

    def starmap(self, it: Any) -> NoReturn:
        self._refuse_rows_of_calls("starmap")

    def chunks(self, it: Any, n: int) -> NoReturn:
        self._refuse_rows_of_calls("chunks")

    def _refuse_rows_of_calls(self, how: str) -> NoReturn:
        raise NotCallable(
            f"{self.name}.{how}() would call the function many times inside one task of Celery's own, where nothing is "
            "deduplicated. Use a group of signatures: each is a message of its own."
        )


def idempotent_task(
    function: Callable[..., Any] | None = None,
    *,
    biz_id: BizId = None,
    using: str = DEFAULT_DB_ALIAS,
    retry: Retry | None = None,
    base: type | None = None,
    **options: Any,
) -> Any:
    """Make a Celery task of the decorated function, its effect exactly once per business id.

    A `shared_task` with `acks_late` and `reject_on_worker_lost`, on the task class of its app. Called as a function it is still
    that function. A delivery whose effect has happened answers with what the first run returned, if that was JSON.

    Args:
        biz_id: an argument by name or a path into one ("order_id", "order.id"), or a function that takes the task's arguments
            and answers with non-empty text, a whole number, a UUID, a Decimal or a date; default: the task id, which
            Celery keeps over redeliveries and retries, so that only a second call is a second effect.
        using: the database alias that the effect is written to.
        retry: how often Celery tries a task that has failed, and when: after every error but `Reject`, unless `autoretry_for`
            and `dont_autoretry_for` name others. Celery doubles the delays, or with `factor=1` keeps them; default: as the
            other options say, so not at all.
        base: a task class of yours, for its hooks and attributes; default: the `task_cls` of the app.
        options: everything `shared_task` takes: `name`, `bind`, `autoretry_for`, `ignore_result`, `rate_limit` …

    Raises:
        ValueError: `biz_id` names no argument of the function, `acks_late` or `reject_on_worker_lost` is off, or `retry` has
            another factor or stands beside an option of Celery that decides the same.
        TypeError: `biz_id` is not text and not a function, or `retry` is not a Retry.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        parameters = dict(inspect.signature(function).parameters)
        if options.get("bind"):
            parameters.pop(next(iter(parameters), ""), None)
        name = options.get("name") or f"{function.__module__}.{function.__qualname__}"
        _refuse_mistakes(name, biz_id, parameters, options)
        if retry is not None:
            refuse_impossible(name, retry, options)
        ours = {"biz_id": biz_id, "using": using, "_retry": retry, "_as_the_app_has_them": base is None}
        return shared_task(base=_idempotent(base), **ours, **options)(function)

    return decorate if function is None else decorate(function)


def _idempotent(base: type | None) -> type:
    if base is None:
        return IdempotentTask
    if issubclass(base, IdempotentTask):
        return base
    return type(base.__name__, (IdempotentTask, base), {"__module__": base.__module__})


def _have_celery_retry(task: type[IdempotentTask], retry: Retry) -> None:
    """Set what Celery reads from the class that it has just made for a function. Which errors are retried may be said there."""
    for option, value in celery_options(retry).items():
        if option not in {"autoretry_for", "dont_autoretry_for"} or not hasattr(task, option):
            setattr(task, option, value)


def _on_the_base_of_its_app(task: type) -> type:
    """The class that Celery has just made for a function, with the app's `task_cls` under ours."""
    namespace = {name: value for name, value in vars(task).items() if name not in {"__dict__", "__weakref__"}}
    below = namespace["app"].Task
    return type(task.__name__, (below,) if issubclass(below, IdempotentTask) else (*task.__bases__, below), namespace)


@contextmanager
def _at_work(delivery: tuple[str, str]) -> Iterator[None]:
    token = _taken.set((*_taken.get(), delivery))
    try:
        yield
    finally:
        _taken.reset(token)


def _refuse_mistakes(
    name: str, biz_id: object, parameters: Mapping[str, inspect.Parameter], options: Mapping[str, object]
) -> None:
    for option, fate in _NEEDED.items():
        if not options.get(option, True):
            raise ValueError(f"The task {name} has {option}=False: {fate} Leave {option} out.")
    if biz_id is None or callable(biz_id):
        return
    if not isinstance(biz_id, str):
        raise TypeError(f"The biz_id of the task {name} is {biz_id!r}: it must be a path of its arguments, or a function.")
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if biz_id.partition(".")[0] not in parameters and not takes_any:
        raise ValueError(f"The biz_id of the task {name} is {biz_id!r}, and it has no such argument: {', '.join(parameters)}.")


def _sent_at(request: Any) -> datetime | None:
    try:
        instant = datetime.fromisoformat(str((request.headers or {}).get(_SENT_AT)))
    except ValueError:
        return None
    return instant if instant.tzinfo else None
