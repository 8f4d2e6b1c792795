"""A concurrent duplicate waits for a transaction that holds its row far longer than `DUPLICATE_TIMEOUT`."""

from datetime import timedelta

import pytest
from django.db import transaction

from exactly_once.process.clock import monotonic
from inbox.conf import InboxOptions
from inbox.models import InboxMessage
from inbox.operators import accounting
from inbox.receiving.reading import read
from inbox.states import State
from inbox.store import arrivals, sentinel
from tests.support.apps.effects.models import Effect
from tests.support.apps.worker import JOB
from tests.support.deliveries import OPTIONS, an_envelope, the_row
from tests.support.workers import (
    EXCHANGE,
    OF_THE_WORKERS,
    Process,
    as_environment,
    broker_options,
    declare,
    length_of,
    send,
)

OTHERS = 50

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.timeout(240)]


@pytest.mark.parametrize(
    ("ending", "duplicate_timeout"),
    [("commit", timedelta(seconds=0.25)), ("rollback", timedelta(seconds=0.25)), ("commit", InboxOptions().DUPLICATE_TIMEOUT)],
)
def test_a_concurrent_duplicate_blocks_no_other_message_and_waits_for_the_first_transaction(
    process_environment, rabbitmq_server, rabbitmq_url, tmp_path, ending, duplicate_timeout
):
    held = 12 * duplicate_timeout
    options = broker_options(rabbitmq_url)
    declare(OF_THE_WORKERS, options)
    row = read(OF_THE_WORKERS, an_envelope(topic=JOB, biz_id="copy"), OPTIONS).row
    inbox = {"BROKER_URL": rabbitmq_url, "EXCHANGE": EXCHANGE, "GROUP": "tests", "CONCURRENCY": 2}
    given = as_environment(INBOX={**inbox, "DUPLICATE_TIMEOUT": duplicate_timeout})
    environment = {**process_environment, "DJANGO_SETTINGS_MODULE": "tests.support.apps.worker.settings", **given}
    with Process(environment, tmp_path / "log", "inbox_consume") as process:
        with transaction.atomic():
            guard = arrivals.begin_fresh("default", [row], OPTIONS.DUPLICATE_TIMEOUT)
            send(rabbitmq_url, JOB, {}, message_id="copy")
            for number in range(OTHERS):
                send(rabbitmq_url, JOB, {}, message_id=f"other-{number}")
            begun_at = monotonic()
            process.until(lambda: Effect.objects.count() == OTHERS)
            process.until(lambda: length_of(rabbitmq_server, OF_THE_WORKERS, options) == 0)
            process.until(lambda: monotonic() - begun_at > held.total_seconds())
            copy = InboxMessage.objects.exclude(pk=guard.rows[0]).get(message_id="copy")
            assert copy.state == State.RECEIVED, "the inbox keeps the copy, and has not run it"
            if ending == "rollback":
                transaction.set_rollback(True)
            else:
                Effect.objects.create(name="copy", detail="by the first transaction")
                sentinel.finish(guard, 1)
        process.until(lambda: InboxMessage.objects.count() == OTHERS + 1)
        process.until(lambda: InboxMessage.objects.filter(state=State.DONE).count() == OTHERS + 1)
        assert process.end() == 0

    copy = the_row(biz_id="copy")
    assert (copy.state, copy.attempts) == (State.DONE, 1)
    assert copy.duplicates == (ending == "commit")
    assert Effect.objects.filter(name="copy").count() == 1
    assert accounting.balance("default").delivered == OTHERS + 1 + (ending == "commit")
