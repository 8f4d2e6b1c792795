"""Converts a `Retry` to Celery's options.

Celery counts the retries and computes the delays. A `Retry` that it cannot apply is refused when the task is declared.
"""

import math
from collections.abc import Iterable
from typing import Any

from inbox.conf import inbox_options
from inbox.errors import Reject
from inbox.handlers.options import Retry, require_value

_EQUIVALENT = {"max_retries", "retry_backoff", "retry_backoff_max", "retry_kwargs", "default_retry_delay"}
_CONSTANT, _DOUBLED = 1, 2


def refuse_impossible(name: str, retry: object, others: Iterable[str]) -> None:
    """Refuse a `retry` of the task `name` that Celery cannot apply, or that contradicts its `others`.

    Raises:
        TypeError: it is not a Retry.
        ValueError: its factor is neither 1 nor 2, it has `retry_on`, or one of `others` is an equivalent option of Celery.
    """
    if not isinstance(retry, Retry):
        require_value("retry", retry, Retry, "Retry(max_attempts=5)")
        return
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


def celery_options(retry: Retry) -> dict[str, Any]:
    """The attributes of a task that Celery retries by `retry`, as closely as Celery can."""
    policy = retry.over(inbox_options().retry)
    base, cap = (math.ceil(delay.total_seconds()) for delay in (policy.base, policy.cap))
    constant = retry.backoff.factor == _CONSTANT
    return {
        "autoretry_for": (Exception,),
        "dont_autoretry_for": (Reject, *retry.dead_on),
        "max_retries": policy.max_attempts - 1,
        "default_retry_delay": base,
        "retry_backoff": False if constant else base,
        "retry_backoff_max": cap,
    }
