"""The inbox in Django's admin."""

from inbox.admin import (  # noqa: F401 - importing them registers the pages
    messages,
    overview,
    paused,
)
