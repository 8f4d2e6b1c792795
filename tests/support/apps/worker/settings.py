"""The tests' settings for a process of its own: with handlers, and with options as JSON in the environment.

A duration is written `{"seconds": 1.5}`.
"""

import json
import os
from datetime import timedelta

from tests.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.apps.worker"]


def _options(variable):
    return {name: _read(value) for name, value in json.loads(os.environ.get(variable, "{}")).items()}


def _read(value):
    if isinstance(value, list):
        return [_read(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return timedelta(**value) if set(value) == {"seconds"} else {name: _read(inner) for name, inner in value.items()}


INBOX = _options("INBOX")
OUTBOX = _options("OUTBOX")
