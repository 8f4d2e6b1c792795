"""The database reads the outbox so slowly that a pass cannot read a whole batch in time."""

import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import connection

from outbox.models import OutboxMessage
from outbox.states import State
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.relaying import published_many

pytestmark = pytest.mark.django_db(transaction=True)

MESSAGES = 600
"""Each of the relay's lanes reads half of them."""
DEADLINE = timedelta(seconds=0.4)
"""The database grants a pass two more seconds."""


@contextmanager
def slow_reads(seconds_per_row):
    """For its role, each ready row that is read takes long, as with a slow disk or a costly row security policy."""
    name = connection.settings_dict["NAME"]
    try:
        execute(
            "CREATE ROLE slow_reader LOGIN",
            f'GRANT ALL ON DATABASE "{name}" TO slow_reader',
            "GRANT ALL ON ALL TABLES IN SCHEMA public TO slow_reader",
            "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO slow_reader",
            f"CREATE FUNCTION slowly() RETURNS boolean LANGUAGE sql AS 'SELECT pg_sleep({seconds_per_row}) IS NOT NULL'",
            "CREATE POLICY slow ON outbox_outboxmessage_live USING (state <> 'ready' OR slowly()) WITH CHECK (true)",
            "ALTER TABLE outbox_outboxmessage_live ENABLE ROW LEVEL SECURITY",
        )
        yield "slow_reader"
    finally:
        execute(
            "ALTER TABLE outbox_outboxmessage_live DISABLE ROW LEVEL SECURITY",
            "DROP POLICY IF EXISTS slow ON outbox_outboxmessage_live",
            "DROP FUNCTION IF EXISTS slowly()",
            "DROP OWNED BY slow_reader",
            "DROP ROLE slow_reader",
        )


def execute(*statements):
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def published():
    return OutboxMessage.objects.filter(state=State.PUBLISHED).count()


@pytest.mark.parametrize("seconds_per_row", [0.004, 0.01], ids=["read after the deadline", "statement timeout"])
def test_relay_that_reads_too_slowly_takes_fewer_messages_and_publishes_them(process_environment, command, seconds_per_row):
    published_many(MESSAGES)
    with FakeAmqpPeer() as peer, slow_reads(seconds_per_row) as role:
        scheme, _, rest = process_environment["DATABASE_URL"].partition("://")
        process_environment["DATABASE_URL"] = f"{scheme}://{role}@{rest.rpartition('@')[2]}"
        began_at = time.monotonic()
        with command("outbox_relay", OUTBOX={"BROKER_URL": peer.url, "BATCH_DEADLINE": DEADLINE}) as relay:
            relay.until(lambda: published() >= MESSAGES / 10)
            said = relay.said()
            execute("ALTER TABLE outbox_outboxmessage_live DISABLE ROW LEVEL SECURITY")
            relay.until(lambda: published() == MESSAGES)

    minutes = 1 + (time.monotonic() - began_at) // 60
    assert 1 <= said.count("took too long") <= 2 * minutes, "once a minute for each of its two lanes"
    assert "Traceback" not in said
