"""What the tests share: servers, processes, test apps and helpers. `tests/README.md` lists them."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Of the checkout."""
