"""The join: one row per run, and nothing in the database that would stop a second one."""

import os
from datetime import timedelta

from inbox import idempotent_handler
from inbox.joins import Join
from tests.support.apps.effects.models import Effect
from tests.support.apps.joined import TOPICS

DEADLINE = timedelta(seconds=float(os.environ.get("JOIN_DEADLINE_SECONDS", "3600")))


@idempotent_handler(all_of=TOPICS, correlate="run_id", deadline=DEADLINE)
def report(join: Join) -> None:
    Effect.objects.create(name=join.run_id, detail=",".join(join.messages))
