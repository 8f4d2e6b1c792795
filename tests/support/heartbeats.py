"""Rows of relays and consumers, as these write them."""

import uuid
from datetime import timedelta

from exactly_once.models import Process
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.heartbeat_table import ProcessIdentity
from inbox.store.handler_rows import consumers
from outbox.relay.heartbeat import relays


def write_beat(alias="default", **given):
    """Write the row of a relay, which has worked for five hours or as `given`; return its identity."""
    identity = {"id": uuid.uuid4(), "host": "relay-1", "pid": 4711, "version": "1.2.3"}
    identity.update({name: given.pop(name) for name in list(given) if name in identity})
    columns = {
        "running_for": timedelta(hours=5),
        "last_pass_at": timedelta(minutes=4),
        "rate": 812.5,
        "waits_for": "",
        "running": [],
    }
    facts = {name: given.pop(name, default) for name, default in {"published": 1_234_567, "shards": 0}.items()}
    process = ProcessIdentity(**identity)
    relays.write(alias, process, facts=facts, **{**columns, **given})
    return process


def a_relay(*, silent_for=None, **given):
    """The row of a relay, by its identity; with `silent_for`, of one that was killed that long ago."""
    identity = write_beat(**given)
    if silent_for is not None:
        fall_silent(silent_for, pk=identity.id)
    return identity


def fall_silent(duration, **which):
    Process.objects.filter(app="outbox", **which).update(beat_at=DatabaseTime(-duration))


def a_consumer(*, silent_for=None, using="default", host="consumer-1", pid=4712, **given):
    """The row of a consumer, by its identity; with `silent_for`, of one that was killed that long ago."""
    identity = ProcessIdentity(host=host, pid=pid, version="1.2.3")
    defaults = {"handlers": ["shop.reserve_stock"], "received": 1_234_567, "ran": 89, "threads": {}, "queued": {}}
    facts = {name: given.pop(name, default) for name, default in defaults.items()}
    values = {"running_for": timedelta(hours=5), "waits_for": "", "running": []}
    consumers.write(using, identity, facts=facts, **{**values, **given})
    if silent_for is not None:
        let_consumers_fall_silent(silent_for, pk=identity.id)
    return identity


def let_consumers_fall_silent(duration, **which):
    Process.objects.filter(app="inbox", **which).update(beat_at=DatabaseTime(-duration))
