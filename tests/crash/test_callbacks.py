"""Processes are killed around a callback: every settled message is reported, and the effect of its callback happens once."""

import pytest
from django.db import transaction

from exactly_once.sql.now import DatabaseTime
from outbox import publish
from outbox.models import PendingCallback
from tests.support.apps.effects.models import Effect

POINTS = {
    "settled and claimed": "before outbox.store.pending_callbacks.begin_call",
    "in the callback, its effect written": "after tests.support.apps.effects.models.Effect.save",
    "returned, not committed": "after outbox.store.pending_callbacks.finish_call",
}
ONE_THREAD = {"CONCURRENCY": 1}
"""So that no other call commits in the moment in which one dies."""


@pytest.mark.every_database
def test_every_callback_takes_effect_once_although_processes_are_killed_at_each_of_its_steps(local_world):
    with transaction.atomic():
        messages = [publish("crash.told", {}) for _ in range(3)]

    for point in POINTS.values():
        local_world.dies_at(point, local_world.relay, outbox=ONE_THREAD)
        assert local_world.published() == len(messages)
        assert not Effect.objects.exists()
        assert PendingCallback.objects.count() == len(messages)
        PendingCallback.objects.update(available_at=DatabaseTime())  # as if the leases had run out
    local_world.relay()
    local_world.wait_until(lambda: not PendingCallback.objects.exists(), "every callback was called")
    local_world.end(local_world.workers[-1])

    assert sorted(Effect.objects.values_list("name", flat=True)) == sorted(str(message.id) for message in messages)
    assert sum(local_world.runs().values()) == len(messages) + 2, (
        "two processes were killed after the call and before its commit"
    )
