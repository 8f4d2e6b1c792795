"""For Django, which looks for the pages here: see `console.admin`."""

from exactly_once.console import admin  # noqa: F401 - registers the pages
