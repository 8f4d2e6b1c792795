"""A join for the tests: its topics, its function, and its messages as they come."""

from __future__ import annotations

from inbox.contrib.joins import Join
from inbox.handlers.registry import registry
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import an_envelope, deliver

TOPICS = ["orders.exported", "stock.exported", "prices.exported"]
NAME = "tests.report"


def report(join: Join):
    Effect.objects.create(name=join.run_id, detail=",".join([*join.messages, *(f"-{topic}" for topic in join.missing)]))


def part(topic, run_id="monday", **payload):
    return an_envelope({"run_id": run_id, **payload}, topic=topic)


def comes(topic, run_id="monday", *, name=NAME, redelivered=False, **payload):
    return deliver(registry.get(f"{name}/{topic}"), part(topic, run_id, **payload), redelivered=redelivered)


def effects():
    return list(Effect.objects.order_by("pk").values_list("name", "detail"))
