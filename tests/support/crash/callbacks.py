"""The effect of a callback: one row per call, and nothing in the database that would stop a second one."""

from __future__ import annotations

import os

from outbox import SettledMessage, on_published
from tests.support.apps.effects.models import Effect
from tests.support.crash.failpoints import record


@on_published("crash.told")
def tell(message: SettledMessage) -> None:
    record("RUNS", str(message.id))
    Effect.objects.create(name=str(message.id), detail=f"{os.getpid()}:{message.call}")
