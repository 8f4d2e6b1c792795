"""Celery tasks whose effect happens once per business id: `from inbox.celery import idempotent_task`."""

from inbox.celery.task import IdempotentTask, idempotent_task

__all__ = ["IdempotentTask", "idempotent_task"]
