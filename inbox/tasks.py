"""The backend for `django.tasks`, by the short name that the `TASKS` setting gives it: see `inbox.contrib.tasks`.

It is imported on first use, because Celery imports the module `tasks` of each app, also where there is no `django.tasks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inbox.contrib.tasks.backend import ExactlyOnceBackend

__all__ = ["ExactlyOnceBackend"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from inbox.contrib.tasks.backend import ExactlyOnceBackend  # noqa: PLC0415

    return ExactlyOnceBackend
