"""The retry of a Celery task by an operator. The inbox does not run tasks, so it is sent to Celery again."""

from __future__ import annotations

from exactly_once.wire.text import describe
from inbox.errors import TaskNotSent
from inbox.models import InboxMessage


def resend(alias: str, row: int) -> None:
    """Send the task of this row again, in the transaction that made the row due. A task that arrives before the commit waits.

    Raises:
        TaskNotSent: it cannot be sent.
    """
    stored = InboxMessage.objects.using(alias).get(pk=row)
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
