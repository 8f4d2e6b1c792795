"""A `Retry` in Celery's own options.

Celery keeps the policy: it counts the retries, and computes the delays. What it cannot do is refused when the task is declared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from inbox.conf import inbox_options
from inbox.errors import Reject
from inbox.handlers.options import Retry, require_value

_THE_SAME = {"max_retries", "retry_backoff", "retry_backoff_max", "retry_kwargs", "default_retry_delay"}
_CONSTANT, _DOUBLED = 1, 2


def refuse_impossible(name: str, retry: object, others: Iterable[str]) -> None:
    """Refuse a `retry` of the task `name` that Celery cannot keep, or that contradicts its `others`.

    Raises:
        TypeError: it is not a Retry.
        ValueError: its factor is neither 1 nor 2, or an option of Celery says the same thing.
    """
    require_value("retry", retry, Retry, "Retry(max_attempts=5)")
    factor = retry.backoff.factor if isinstance(retry, Retry) else None
    if factor not in {None, _CONSTANT, _DOUBLED}:
        raise ValueError(
            f"The task {name} has a retry with the factor {factor}: Celery doubles a delay after each failure, or keeps it. "
            "Make the factor 2 or 1, or leave it out."
        )
    if said_twice := sorted(_THE_SAME & {*others}):
        raise ValueError(
            f"The task {name} has both retry= and {', '.join(said_twice)}, which decide the same: leave one of them out."
        )


def celery_options(retry: Retry) -> dict[str, Any]:
    """The attributes of a task that Celery retries like this, as far as it can."""
    policy = retry.over(inbox_options().retry)
    base, cap = (math.ceil(delay.total_seconds()) for delay in (policy.base, policy.cap))
    constant = retry.backoff.factor == _CONSTANT
    return {
        "autoretry_for": (Exception,),
        "dont_autoretry_for": (Reject,),
        "max_retries": policy.max_attempts - 1,
        "default_retry_delay": base,
        "retry_backoff": False if constant else base,
        "retry_backoff_max": cap,
    }
