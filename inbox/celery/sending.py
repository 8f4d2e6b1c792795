"""Sending a Celery task with a confirm by RabbitMQ, before the delivery or the row that it replaces is settled.

kombu's `confirm_publish` is not used. It accepts any confirm, so a late one counts for the next message; it waits without a
limit; and it reports a message as sent that RabbitMQ could not route to a queue. Here each task is published on a separate
channel, whose first confirm is that of the task, and the confirm has a deadline.

Other brokers have no confirms: there a task is sent when the transport's method returns.
"""

import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from kombu.exceptions import OperationalError
from kombu.pools import connections

from exactly_once.process.clock import monotonic

_CONFIRM_SECONDS = 30.0
_CONFIRMING = "py-amqp"
_BOUNDED = {"read_timeout": _CONFIRM_SECONDS, "write_timeout": _CONFIRM_SECONDS}
"""Socket timeouts: a broker that does not answer must not block a worker."""


class NotConfirmed(Exception):
    """The broker refused the task, could not route it to a queue, or did not confirm it in time."""


def send(app: Any, signature: Any) -> None:
    """Send the task of `signature` to the broker of `app`.

    Raises:
        NotConfirmed: see there; the task may have been sent.
        Exception: what Celery, kombu or the broker raised.
    """
    with connections[_write_connection(app)].acquire(block=True) as connection, _past_the_outbox():
        try:
            _send(app, connection, signature)
        except (OperationalError, *connection.connection_errors):
            # The broker may have closed an idle connection of the pool, which shows only when it is used.
            _send(app, connection, signature)


def _past_the_outbox() -> AbstractContextManager[None]:
    """An OutboxTask would write a row in the open transaction of an operator's decision, and no confirm would arrive."""
    outbox = sys.modules.get("outbox.celery")
    return outbox.sent_at_once() if outbox else nullcontext()


def _write_connection(app: Any) -> Any:
    connection = app.connection_for_write()
    bounded = connection.transport.driver_name == _CONFIRMING
    return app.connection_for_write(transport_options=_BOUNDED) if bounded else connection


def _send(app: Any, connection: Any, signature: Any) -> None:
    try:
        if connection.transport.driver_name == _CONFIRMING:
            _send_confirmed(app, connection, signature)
        else:
            signature.apply_async(producer=app.amqp.Producer(connection.default_channel), retry=False)
    except BaseException:
        # A late answer on this connection must not be taken for that of the next task.
        connection.collect()
        raise


def _send_confirmed(app: Any, connection: Any, signature: Any) -> None:
    connection.connect()
    channel = connection.channel()
    confirm = _Confirm(channel)
    # With retry, Celery would publish it again on another channel.
    signature.apply_async(producer=app.amqp.Producer(channel), retry=False, mandatory=True)
    confirm.wait(connection)
    channel.close()


class _Confirm:
    """RabbitMQ's answer to the first publish on a channel. Celery may publish an event after it."""

    def __init__(self, channel: Any) -> None:
        self._answer: str | None = None
        self._returned = ""
        channel.confirm_select()
        channel.events["basic_ack"].add(self._on_ack)
        channel.events["basic_nack"].add(self._on_nack)
        channel.events["basic_return"].add(self._on_return)

    def wait(self, connection: Any) -> None:
        deadline = monotonic() + _CONFIRM_SECONDS
        while self._answer is None:
            left = deadline - monotonic()
            if left <= 0:
                raise NotConfirmed(f"the broker did not confirm it within {_CONFIRM_SECONDS:.0f} s")
            with suppress(TimeoutError):
                connection.drain_events(timeout=left)
        if self._answer:
            raise NotConfirmed(self._answer)

    def _on_ack(self, tag: int, multiple: bool) -> None:
        if self._answer is None:
            self._answer = self._returned

    def _on_nack(self, tag: int, multiple: bool) -> None:
        if self._answer is None:
            self._answer = "the broker refused it"

    def _on_return(self, error: Exception, exchange: str, routing_key: str, message: object) -> None:
        # RabbitMQ sends it before the ack of the message.
        self._returned = f"the broker has no queue for it ({exchange!r}, {routing_key!r})"
