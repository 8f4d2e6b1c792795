"""A handler whose effect is one row."""

from __future__ import annotations

from benchmarks.lab.workload import TOPIC
from benchmarks.shop.models import Effect
from inbox import Message, idempotent_handler


@idempotent_handler(TOPIC)
def write_effect(message: Message) -> None:
    Effect.objects.create(number=message.payload["order"])
