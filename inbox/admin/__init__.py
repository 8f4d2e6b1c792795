"""The inbox in Django's admin."""

from inbox.admin import consumers, health, messages, overview  # noqa: F401 - importing them registers the pages
