"""What the tests share: servers, processes, test apps, and the words they are written in. `tests/README.md` is the map."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Of the checkout."""
