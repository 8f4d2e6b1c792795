"""The inbox in Django's admin."""

from inbox.admin import messages, overview, paused_handlers  # noqa: F401 - importing them registers the pages
