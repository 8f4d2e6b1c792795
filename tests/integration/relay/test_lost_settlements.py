"""A pass commits without waiting for the disk. A server that crashes then loses the outcomes, and nothing else."""

import os
import signal
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import connection
from django.test import override_settings

from exactly_once.transport.interface import CONFIRMED, Capabilities, Sent, Transport
from inbox.models import InboxMessage
from outbox.models import OutboxMessage, PendingCallback
from outbox.states import State
from tests.support import mortal
from tests.support.deliveries import deliver, effects, the_effect
from tests.support.relaying import connected, one_pass, published, states
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

mortal_database = mortal.mortal_database
SOME = 5


class Broker(Transport):
    """Confirms every message and keeps it."""

    capabilities = Capabilities(confirms=True)

    def __init__(self):
        self.taken = []

    def send(self, messages, deadline, **options):
        self.taken += [message.envelope for message in messages]
        return Sent(verdicts={message.position: CONFIRMED for message in messages})


@pytest.fixture
def lost(mortal_database, mortal_postgres):
    """Kill the database. What it had not flushed at the last commit that waited for the disk is lost."""
    call_command("migrate", verbosity=0)

    def kill():
        connection.close()
        mortal_postgres.kill()
        mortal_postgres.start()

    wait_until(stop_the_walwriter)
    return kill


def stop_the_walwriter():
    """Without it only a commit that waits, or a full buffer, flushes the log. False: it may hold a lock, so it continues."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'")
        (walwriter,) = cursor.fetchone()
        os.kill(walwriter, signal.SIGSTOP)
        wait_until(lambda: ") T " in Path(f"/proc/{walwriter}/stat").read_text())
        cursor.execute("SELECT wait_event FROM pg_stat_activity WHERE pid = %s", [walwriter])
        if cursor.fetchone() == ("WalWriterMain",):
            return True
    os.kill(walwriter, signal.SIGCONT)
    return False


@pytest.fixture
def broker():
    return Broker()


def test_lost_settlements_are_repeated_with_their_callbacks_and_every_effect_happens_once(lost, broker, handles, add_callback):
    add_callback()
    handler = handles(the_effect)
    messages = [published(key="k", biz_id=f"order-{n}") for n in range(SOME)]

    one_pass(broker)
    assert (states(), PendingCallback.objects.count()) == ([State.PUBLISHED] * SOME, SOME)
    lost()

    assert (states(), PendingCallback.objects.count()) == ([State.READY] * SOME, 0), "the outcomes were lost, and no message"
    one_pass(broker)
    for envelope in broker.taken:
        deliver(handler, envelope)
    assert (states(), PendingCallback.objects.count()) == ([State.PUBLISHED] * SOME, SOME)
    assert [envelope.id for envelope in broker.taken] == [str(message.id) for message in messages] * 2, "in order"
    assert effects() == SOME


def test_a_commit_that_follows_makes_settlements_durable(lost, broker):
    published()
    one_pass(broker)
    later = published()

    lost()

    assert states() == [State.PUBLISHED, State.READY]
    assert OutboxMessage.objects.get(state=State.READY).message_id == later.id


def test_publish_that_found_a_published_message_makes_its_settlement_durable(lost, broker):
    first = published(biz_id="order-1", unique=True)
    one_pass(broker)
    again = published(biz_id="order-1", unique=True)
    assert (again.id, again.created, again.state) == (first.id, False, State.PUBLISHED)

    lost()

    assert states() == [State.PUBLISHED]


def test_local_hands_over_and_settles_durably(lost, handles):
    """A row of the inbox may be handled at once, by a process that has effects outside of the database."""
    handles(the_effect)
    published(biz_id="order-1")
    with override_settings(OUTBOX={"BROKER_URL": "local://"}, INBOX={}), connected("local://") as transport:
        one_pass(transport)
    lost()

    assert states() == [State.PUBLISHED]
    assert InboxMessage.objects.values_list("biz_id", flat=True).get() == "order-1"
