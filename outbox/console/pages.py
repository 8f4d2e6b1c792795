"""The templates of the console, found without the project's template loaders.

Loaders look into the directories of installed apps, and each app may be installed without the other. So a template is read from
here, and rendered by the project's own engine, which finds the templates of the admin that it extends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.http import HttpRequest
from django.template import engines
from django.template.backends.django import DjangoTemplates

_HTML = Path(__file__).parent / "html"


class Page:
    """What a `TemplateResponse` takes as its template."""

    def __init__(self, file: str) -> None:
        self._file = _HTML / file

    def render(self, context: Any = None, request: HttpRequest | None = None) -> str:
        # The engine that the admin's own check (admin.E403) looks for.
        engine = next(engine for engine in engines.all() if isinstance(engine, DjangoTemplates))
        return engine.from_string(self._file.read_text(encoding="utf-8")).render(context, request)
