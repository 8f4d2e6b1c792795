"""The connection is lost with the answer to a commit: it may cost a wrong count, and never an effect."""

from __future__ import annotations

import threading

import psycopg
import pytest
from django.db import connection

from inbox import store
from inbox.models import State
from inbox.outcomes import Received
from tests.aliases import the_default_at
from tests.deliveries import A_WHILE, InAThread, an_envelope, deliver, drain, effects, the_effect, the_row, wait_until
from tests.servers import FaultProxy

pytestmark = [pytest.mark.django_db(transaction=True)]


def test_on_the_careful_path_a_delivery_meets_the_row_that_it_has_stored_itself(handles, process_environment):
    """The message is in the database, so it is acknowledged; but its row says that it had come once before."""
    handler = handles(the_effect)
    ready, deaf = threading.Event(), threading.Event()

    def deliver_two():
        deliver(handler, an_envelope(biz_id="first"))
        ready.set()
        assert deaf.wait(A_WHILE)
        return deliver(handler, an_envelope(biz_id="second"), redelivered=True)

    with (
        psycopg.connect(process_environment["DATABASE_URL"], autocommit=True) as straight,
        FaultProxy("127.0.0.1", connection.settings_dict["PORT"]) as proxy,
        the_default_at(HOST="127.0.0.1", PORT=proxy.port),
        InAThread(deliver_two) as run,
    ):
        assert ready.wait(A_WHILE)
        proxy.drop_server_to_client(True)
        deaf.set()
        wait_until(lambda: straight.execute("SELECT 1 FROM inbox_inboxmessage WHERE biz_id = 'second'").fetchone())
        proxy.drop_server_to_client(False)
        proxy.cut()

    assert run.answer is Received.DUPLICATE
    assert (the_row(biz_id="second").state, effects("second")) == (State.RECEIVED, 0)
    assert drain() == 1
    row = the_row(biz_id="second")
    assert (row.state, row.attempts, effects("second")) == (State.DONE, 1, 1)
    assert (row.duplicates, row.redeliveries) == (1, 1)
    assert store.balance("default").delivered == 2 + 1
