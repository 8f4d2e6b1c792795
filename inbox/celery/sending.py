"""Send a Celery task so that RabbitMQ says that it has it, before what the task stands for is given up.

kombu's `confirm_publish` is not used: it takes any confirm for the one it waits for, and so a late one for that of the next
message; it waits without a limit; and it takes a message that RabbitMQ had no queue for as sent. Here each task is published on
a channel of its own, where its confirm is the first, and is waited for until a deadline.

Other brokers have no confirms: there a task is sent when the transport says so.
"""

from __future__ import annotations

from typing import Any

from kombu.exceptions import OperationalError
from kombu.pools import connections

from outbox.kernel.clock import monotonic

_CONFIRM_SECONDS = 30.0
_CONFIRMING = "py-amqp"
_BOUNDED = {"read_timeout": _CONFIRM_SECONDS, "write_timeout": _CONFIRM_SECONDS}
"""Of a socket: a broker that does not answer keeps no worker."""


class NotConfirmed(Exception):
    """The broker refused to keep the task, had no queue for it, or did not say in time that it has it."""


def send(app: Any, signature: Any) -> None:
    """Send the task of `signature` by the broker of `app`.

    Raises:
        NotConfirmed: see there; it may have been sent all the same.
        Exception: what Celery, kombu or the broker raised.
    """
    with connections[_write_connection(app)].acquire(block=True) as connection:
        try:
            _send(app, connection, signature)
        except (OperationalError, *connection.connection_errors):
            # It may have lain in the pool for so long that the broker has closed it, which shows when it is used.
            _send(app, connection, signature)


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
        # What the broker still says on it must not be taken for an answer to the next task.
        connection.collect()
        raise


def _send_confirmed(app: Any, connection: Any, signature: Any) -> None:
    connection.connect()
    channel = connection.channel()
    confirm = _Confirm(channel)
    # Told to retry, Celery would publish it again on another channel.
    signature.apply_async(producer=app.amqp.Producer(channel), retry=False, mandatory=True)
    confirm.wait(connection)
    channel.close()


class _Confirm:
    """RabbitMQ's answer to the first publish of a channel. Celery may publish an event after it."""

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
                raise NotConfirmed(f"the broker did not confirm it in {_CONFIRM_SECONDS:.0f} s")
            try:
                connection.drain_events(timeout=left)
            except TimeoutError:
                continue
        if self._answer:
            raise NotConfirmed(self._answer)

    def _on_ack(self, tag: int, multiple: bool) -> None:
        if self._answer is None:
            self._answer = self._returned

    def _on_nack(self, tag: int, multiple: bool) -> None:
        if self._answer is None:
            self._answer = "the broker refused to keep it"

    def _on_return(self, error: Exception, exchange: str, routing_key: str, message: object) -> None:
        # It comes before the ack of the message.
        self._returned = f"the broker has no queue for it ({exchange!r}, {routing_key!r})"
