"""The inbox in Django's admin."""

from inbox.admin import alerts, audit, consumers, failures, messages, paused  # noqa: F401 - importing them registers the pages
