"""The join: one row per run, and nothing in the database that would stop a second one."""

from datetime import timedelta

from inbox import idempotent_handler
from inbox.joins import Join
from tests.support.apps.effects.models import Effect
from tests.support.apps.joined import TOPICS


@idempotent_handler(all_of=TOPICS, correlate="run_id", deadline=timedelta(hours=1))
def report(join: Join) -> None:
    Effect.objects.create(name=join.run_id, detail=",".join(join.messages))
