"""Measure the layout of a page in a browser: what is wider than its box, clipped, broken into letters, or covered.

    assert not faults(page)

Each fault is a line of text that names the element. Colours are not measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_MEASURE = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")


def faults(page: Any) -> list[str]:
    """The faults of the page as it is now, in its present window."""
    found: list[str] = page.evaluate(_MEASURE)
    return found
