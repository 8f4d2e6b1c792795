"""The handler's effect as a Celery task: plain, in a transaction, once per business id by hand, and with the inbox."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from celery import shared_task
from django.db import connection, transaction

from benchmarks.actors.hand_written import RECEIVE_SETTLED
from benchmarks.shop.models import Effect
from inbox.celery import idempotent_task


@shared_task(acks_late=True, reject_on_worker_lost=True, ignore_result=True)
def plain(order: int, filler: str) -> None:
    Effect.objects.create(number=order)


@shared_task(acks_late=True, reject_on_worker_lost=True, ignore_result=True)
def atomic(order: int, filler: str) -> None:
    with transaction.atomic():
        Effect.objects.create(number=order)


@shared_task(bind=True, acks_late=True, reject_on_worker_lost=True, ignore_result=True)
def by_hand(self: Any, order: int, filler: str) -> None:
    """As `idempotent`, with the rows that its inbox has, and without its proof and its policies."""
    body, task_id = json.dumps({"order": order, "filler": filler}).encode(), str(self.request.id)
    digest, json_type = hashlib.sha256(body).hexdigest(), "application/json"
    row = [self.name, self.name, str(order), task_id, "", json_type, body, digest, "{}", "", task_id, "", "", None]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(RECEIVE_SETTLED, row)
        if cursor.rowcount:
            Effect.objects.create(number=order)


@idempotent_task(biz_id="order", ignore_result=True)
def idempotent(order: int, filler: str) -> None:
    Effect.objects.create(number=order)
