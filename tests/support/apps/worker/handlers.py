"""Handlers for the processes that tests start and kill. The message says what they do: `{"do": …}`."""

import os
import socket
import threading

import amqp
from django.db import connection, transaction

from inbox import idempotent_handler
from outbox import publish
from tests.support.apps.effects.models import Effect, Unique
from tests.support.apps.worker import CHAINED, JOB, NAMED
from tests.support.waiting import wait_until


@idempotent_handler(JOB)
def work(message):
    WAYS[message.payload.get("do", "work")](message)


@idempotent_handler(CHAINED)
def chained(message):
    Effect.objects.create(name=f"chained {message.biz_id}", detail=message.causation_id)


def name_in_the_payload(message):
    """Ends the process when the payload says so, like a body that needs more memory than is available."""
    if message.payload.get("kills"):
        os._exit(13)
    return message.payload["name"]


@idempotent_handler(NAMED, biz_id=name_in_the_payload)
def named(message):
    _work(message)


def _work(message):
    Effect.objects.create(name=message.biz_id, detail=str(message.attempt))


def _chain(message):
    _work(message)
    publish(CHAINED, {}, biz_id=message.biz_id)


def _fail_once(message):
    _work(message)
    if message.attempt == 1:
        raise ValueError("not yet")


def _kill_the_process(message):
    _work(message)
    os._exit(13)


def _kill_the_process_after_the_commit(message):
    """Once: the process that gets the message again must survive to record it."""
    _work(message)
    transaction.on_commit(lambda: os._exit(13))


def _wait_for_the_word(message):
    """Records outside its transaction that it has begun, and waits for the test."""
    Effect.objects.using("other").create(name=f"begun {message.biz_id}")
    wait_until(lambda: Unique.objects.filter(name=f"go {message.biz_id}").exists())
    _work(message)


def _chain_at_the_word(message):
    _wait_for_the_word(message)
    publish(CHAINED, {}, biz_id=message.biz_id)


def _never_end(message):
    Effect.objects.using("other").create(name=f"begun {message.biz_id}")
    threading.Event().wait()


def _silence_the_main_loop(message):
    """A socket that never answers, and ignores its timeout."""
    amqp.Connection.drain_events = lambda *args, **arguments: threading.Event().wait()
    Effect.objects.using("other").create(name=f"begun {message.biz_id}")


def _record_the_session(message):
    """What both sides of its connection do to notice that the other one has vanished."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('tcp_keepalives_idle'), current_setting('tcp_user_timeout')")
        server = cursor.fetchone()
    with socket.socket(fileno=os.dup(connection.connection.fileno())) as client:
        options = (socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT)
        ours = [client.getsockopt(socket.IPPROTO_TCP, option) for option in options]
    Effect.objects.create(name=message.biz_id, detail=" ".join(map(str, [*ours, *server])))


WAYS = {
    "work": _work,
    "chain": _chain,
    "fail once": _fail_once,
    "kill the process": _kill_the_process,
    "kill the process after the commit": _kill_the_process_after_the_commit,
    "wait for the word": _wait_for_the_word,
    "chain at the word": _chain_at_the_word,
    "never end": _never_end,
    "silence the main loop": _silence_the_main_loop,
    "record the session": _record_the_session,
}
