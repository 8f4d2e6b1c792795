"""Mistakes a careful engineer could make, one at a time.

BUG names the one that this process has. They are patched in from outside, so that the tests can prove that their oracle
would notice: a harness that has never seen a lost message may be unable to see one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from tests.crash.failpoints import patch

BUGS: dict[str, Callable[[], None]] = {}


def install_from_environment() -> None:
    if bug := os.environ.get("BUG"):
        BUGS[bug]()
