"""One handler whose effect is one row for each message, in the form that a benchmark chooses."""

from __future__ import annotations

from collections.abc import Sequence

from django.conf import settings
from django.db import connection

from benchmarks.lab.workload import HANDLER, NEXT_TOPIC, TOPIC
from benchmarks.shop.models import Effect
from inbox import Lease, Message, batch_handler, idempotent_handler, leased_handler
from outbox import publish


def by_sql(message: Message) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO shop_effect (number) VALUES (%s)", [message.payload["order"]])


def by_orm(message: Message) -> None:
    Effect.objects.create(number=message.payload["order"])


def and_publish(message: Message) -> None:
    by_sql(message)
    publish(NEXT_TOPIC, message.payload, biz_id=message.biz_id)


def in_bulk(messages: Sequence[Message]) -> None:
    Effect.objects.bulk_create([Effect(number=message.payload["order"]) for message in messages])


KINDS = {"sql": by_sql, "orm": by_orm, "publish": and_publish, "bulk": in_bulk}

_options = dict(settings.BENCH_HANDLER)
_kind = _options.pop("kind")
if _kind == "bulk":
    batch_handler(TOPIC, name=HANDLER, **_options)(in_bulk)
elif "lease" in _options:
    leased_handler(TOPIC, name=HANDLER, lease=Lease(duration=_options.pop("lease")), **_options)(KINDS[_kind])
else:
    idempotent_handler(TOPIC, name=HANDLER, **_options)(KINDS[_kind])
