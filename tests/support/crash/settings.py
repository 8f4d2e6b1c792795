"""Settings of the processes that are killed: those of the tests, and what BROKER_URL, OUTBOX and INBOX say.

OUTBOX and INBOX are JSON; a number given for a duration is in seconds. Durations are short, so that tests are fast.
"""

from __future__ import annotations

import json
import os
from dataclasses import is_dataclass
from datetime import timedelta
from typing import Any

from inbox.conf import InboxOptions
from outbox.conf import OutboxOptions
from tests.settings import *

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.crash"]
ROOT_URLCONF = "tests.support.crash.urls"
ALLOWED_HOSTS = ["127.0.0.1"]


def _options(kind: type, variable: str, **ours: Any) -> dict[str, Any]:
    return _durations(kind, {**ours, **json.loads(os.environ.get(variable, "{}"))})


def _durations(defaults: object, given: dict[str, Any]) -> dict[str, Any]:
    return {name: _value(getattr(defaults, name, None), value) for name, value in given.items()}


def _value(default: object, given: Any) -> Any:
    if is_dataclass(default):
        return _durations(default, given)
    if isinstance(default, tuple) and default:
        return [_value(default[0], one) for one in given]
    return timedelta(seconds=given) if isinstance(default, timedelta) else given


OUTBOX = {
    "BROKER_URL": os.environ.get("BROKER_URL", "local://"),
    **_options(OutboxOptions, "OUTBOX", POLL_INTERVAL=0.1, BACKOFF=(0.2, 1)),
}
INBOX = _options(InboxOptions, "INBOX", POLL_INTERVAL=0.1, BACKOFF=(0.2, 1), REDELIVERY_AFTER=0.5)
