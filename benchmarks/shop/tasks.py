"""The handler's effect as a Celery task: plain, inside a transaction, and once per business id."""

from __future__ import annotations

from celery import shared_task
from django.db import transaction

from benchmarks.shop.models import Effect
from inbox.celery import idempotent_task


@shared_task(acks_late=True, reject_on_worker_lost=True, ignore_result=True)
def plain(order: int, filler: str) -> None:
    Effect.objects.create(number=order)


@shared_task(acks_late=True, reject_on_worker_lost=True, ignore_result=True)
def atomic(order: int, filler: str) -> None:
    with transaction.atomic():
        Effect.objects.create(number=order)


@idempotent_task(biz_id="order", ignore_result=True)
def idempotent(order: int, filler: str) -> None:
    Effect.objects.create(number=order)
