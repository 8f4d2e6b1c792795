"""Rows of relays, as those would have written them."""

from __future__ import annotations

import uuid
from datetime import timedelta

from outbox import store
from outbox.kernel.clock import DatabaseTime
from outbox.models import RelayHeartbeat
from outbox.store import Beat


def a_beat(**told):
    """What a relay says that has worked for five hours."""
    values = {
        "id": uuid.uuid4(),
        "host": "relay-1",
        "pid": 4711,
        "version": "1.2.3",
        "running_for": timedelta(hours=5),
        "since_pass": timedelta(minutes=4),
        "published": 1_234_567,
        "rate": 812.5,
        "waits_for": "",
    }
    return Beat(**{**values, **told})


def a_relay(*, silent_for=None, **told):
    """The row of a relay; with `silent_for`, of one that was killed that long ago."""
    beat = a_beat(**told)
    store.beat("default", beat)
    if silent_for is not None:
        fall_silent(silent_for, pk=beat.id)
    return beat


def fall_silent(span, **which):
    RelayHeartbeat.objects.filter(**which).update(beat_at=DatabaseTime(-span))
