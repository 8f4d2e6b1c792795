"""The inbox in Django's admin."""

from inbox.admin import consumers, messages  # noqa: F401 - importing them registers the pages
