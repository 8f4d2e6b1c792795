"""Load the templates of the console without the project's template loaders.

Loaders search the directories of installed apps, and each app may be installed without the other. So this module reads the
template file itself. The project's own engine renders it, and finds the admin templates that it extends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.http import HttpRequest
from django.template import engines
from django.template.backends.django import DjangoTemplates

_HTML = Path(__file__).parent / "html"


class Page:
    """A template for a `TemplateResponse`."""

    def __init__(self, file: str) -> None:
        self._file = _HTML / file

    def render(self, context: Any = None, request: HttpRequest | None = None) -> str:
        # The engine that the admin's own check (admin.E403) requires.
        engine = next(engine for engine in engines.all() if isinstance(engine, DjangoTemplates))
        return engine.from_string(self._file.read_text(encoding="utf-8")).render(context, request)
