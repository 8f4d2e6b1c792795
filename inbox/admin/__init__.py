"""The inbox in Django's admin."""

from inbox.admin import consumers, failures, messages  # noqa: F401 - they register themselves
