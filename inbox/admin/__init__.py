"""The inbox in Django's admin."""

from inbox.admin import messages, overview, paused  # noqa: F401 - importing them registers the pages
