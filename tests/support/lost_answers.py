"""A commit whose answer is lost: it is in the database, and the client does not know that."""

import threading
from unittest.mock import patch

import psycopg
from django.db import connection

from tests.support.aliases import the_default_at
from tests.support.deliveries import A_WHILE, InAThread
from tests.support.servers import FaultProxy
from tests.support.waiting import wait_until


def losing_the_answer(environment, *, before, call, written, after=None):
    """What `call` answers after `before` on the same connection, when that is lost once the query `written` finds a row.

    Args:
        after: a module and the name of its function: nothing is lost before that function has ended.
    """
    ready, deaf = threading.Event(), threading.Event()

    def lose():
        ready.set()
        assert deaf.wait(A_WHILE)

    def run():
        before()
        if after is None:
            lose()
            return call()
        original = getattr(*after)

        def function(*args, **kwargs):
            answer = original(*args, **kwargs)
            if not ready.is_set():
                lose()
            return answer

        with patch.object(*after, function):
            return call()

    with (
        psycopg.connect(environment["DATABASE_URL"], autocommit=True) as straight,
        FaultProxy("127.0.0.1", connection.settings_dict["PORT"]) as proxy,
        the_default_at(HOST="127.0.0.1", PORT=proxy.port),
        InAThread(run) as running,
    ):
        assert ready.wait(A_WHILE)
        proxy.drop_server_to_client()
        deaf.set()
        wait_until(lambda: straight.execute(written).fetchone())
        proxy.cut()
    return running.answer
