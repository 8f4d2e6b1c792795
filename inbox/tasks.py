"""The backend for `django.tasks`, by the short name that the `TASKS` setting gives it: see `inbox.contrib.tasks`."""

from inbox.contrib.tasks.backend import ExactlyOnceBackend

__all__ = ["ExactlyOnceBackend"]
