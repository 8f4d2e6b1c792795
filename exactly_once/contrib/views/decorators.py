"""The decorator of an idempotent view."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from datetime import timedelta
from functools import partial, wraps
from inspect import isawaitable, unwrap
from typing import Any, TypeVar, overload

from asgiref.sync import async_to_sync, iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.http.response import HttpResponseBase

from exactly_once.contrib.views.answering import Idempotency, NotStorable, TransactionBroken
from exactly_once.contrib.views.requests import by_token, by_user

__all__ = ["NotStorable", "TransactionBroken", "by_token", "by_user", "idempotent_view"]

_View = TypeVar("_View", bound=Callable[..., Any])
_SAFE = {"GET", "HEAD", "OPTIONS", "TRACE"}

declared: set[str] = set()
"""The database aliases of all decorated views, and of what else is answered in this way."""


@overload
def idempotent_view(view: _View, /) -> _View: ...


@overload
def idempotent_view(
    *,
    scope: Callable[[Any], str] = ...,
    required: bool = ...,
    expires_in: timedelta = ...,
    store_errors: Collection[int] = ...,
    using: str = ...,
    response_limit: int = ...,
) -> Callable[[_View], _View]: ...


def idempotent_view(view: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Give repeated requests with the same `Idempotency-Key` one effect and one answer. GET, HEAD, OPTIONS and TRACE pass.

    Args:
        view: a function that takes the request, also an asynchronous one; or a method, by `method_decorator`.
        scope: takes the request; returns whose key it is, so that no client gets the answer of another. Default: `by_user`.
        required: a request without a key is answered with 400. False: it runs as without the decorator.
        expires_in: how long a response is stored, by default for a day. After that the same request runs the view again.
        store_errors: statuses from 400 to 499 that are results, such as 402: committed and stored like a success, also if Ninja
            answers an exception with them. Every other status of 400 and above rolls the view back, and is not stored.
        using: the database of the effect.
        response_limit: maximum size of a stored response in bytes, by default 1 MiB.

    Raises:
        TypeError, ValueError: an argument is unknown, or unfit.
        NotStorable: when the view is called: its response is a stream, or too large. It was rolled back.
        TransactionBroken: when the view is called: its transaction cannot commit. What the view has not committed by itself was
            rolled back. If it has, each repeated request raises this until the key expires.
    """
    idempotency = Idempotency(**options)
    declared.add(idempotency.using)

    def decorated(view: _View) -> _View:
        @wraps(view)
        def idempotent(request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.method in _SAFE:
                return view(request, *args, **kwargs)

            def respond() -> HttpResponseBase:
                response = view(request, *args, **kwargs)
                return async_to_sync(_awaited)(response) if isawaitable(response) else response

            # Django has no asynchronous transactions: this one is in a thread, which also runs the ORM calls of the view.
            answer = sync_to_async(idempotency.answer) if _is_async(view) else idempotency.answer
            return answer(request, respond)

        if iscoroutinefunction(view):
            markcoroutinefunction(idempotent)
        return idempotent  # type: ignore[return-value] # it takes what the view takes

    return decorated if view is None else decorated(view)


def _is_async(view: Any) -> bool:
    """Does it return an awaitable? `dispatch` of a class, which `method_decorator` makes partial, does if its handlers do."""
    bound: Any = getattr(unwrap(view, stop=lambda inner: isinstance(inner, partial)), "func", None)
    is_dispatch = getattr(bound, "__name__", "") == "dispatch"
    return iscoroutinefunction(view) or (is_dispatch and getattr(bound.__self__, "view_is_async", False))


async def _awaited(response: Awaitable[HttpResponseBase]) -> HttpResponseBase:
    return await response
