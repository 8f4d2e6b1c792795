"""An operator's retry of a stored message. The inbox does not run Celery tasks, so their retry is sent to Celery."""

from __future__ import annotations

from collections.abc import Callable

from django.db import transaction

from exactly_once.wire.formats import CELERY_TOPICS
from exactly_once.wire.text import describe
from inbox.errors import TaskNotSent
from inbox.models import InboxMessage

Transition = Callable[[str, int], bool]


def resending(transition: Transition) -> Transition:
    """`transition`; for the row of a Celery task, also send the task again in the same transaction.

    A task that arrives before the commit waits for it. If the task cannot be sent, the transition is rolled back.

    Raises:
        TaskNotSent: the task cannot be sent.
    """

    def decide(alias: str, row: int) -> bool:
        with transaction.atomic(using=alias):
            if not transition(alias, row):
                return False
            stored = InboxMessage.objects.using(alias).get(pk=row)
            if stored.handler == stored.topic and stored.topic.startswith(CELERY_TOPICS):
                _send(stored)
            return True

    return decide


def _send(stored: InboxMessage) -> None:
    try:
        from celery import current_app  # noqa: PLC0415 - Celery is optional; such a row exists only with it

        from inbox.celery.calls import signature_of  # noqa: PLC0415 - imports Celery, too
        from inbox.celery.sending import send  # noqa: PLC0415
    except ImportError as error:
        raise TaskNotSent(f"{stored.handler} cannot be sent: {describe(error)}") from error
    signature = signature_of(stored)
    if signature is None:
        raise TaskNotSent(
            f"{stored.handler} cannot be sent: its arguments were not JSON. Call the task from code, then skip this message."
        )
    if not (current_app.conf.broker_url or current_app.conf.broker_write_url):
        raise TaskNotSent(
            f"{stored.handler} cannot be sent: this process has no Celery app with a broker_url. Import it in the project's "
            "__init__.py."
        )
    try:
        send(current_app, current_app.signature(signature))
    except Exception as error:
        raise TaskNotSent(f"{stored.handler} cannot be sent: {describe(error)}") from error
