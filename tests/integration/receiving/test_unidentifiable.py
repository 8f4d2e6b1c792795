"""One message whose `biz_id` fails as if its database were unavailable does not stop its handler."""

import pytest
from django.db import connections

from inbox.models import InboxMessage
from inbox.states import State
from tests.support.aliases import unresolvable
from tests.support.deliveries import OPTIONS, TOPIC, an_envelope, deliver, effects, run_to_the_end, the_effect, the_row
from tests.support.sql import executed, fetched
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, consuming, declare, send

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]


def takes_too_much(message):
    if message.payload.get("large"):
        executed("DO $$ BEGIN RAISE EXCEPTION 'too large' USING ERRCODE = '53400'; END $$")
    return message.id


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
def test_messages_wait_while_the_name_of_the_database_of_their_biz_id_does_not_resolve(handles, rabbitmq_url, caplog, ordered):
    options = broker_options(rabbitmq_url)

    def reads_elsewhere(message):
        return fetched("SELECT %s", [message.id], using="other")

    handler = handles(the_effect, biz_id=reads_elsewhere, ordered=ordered)
    declare(handler, options)
    connections["other"].close()
    with unresolvable("other"):
        for number in range(10):
            send(rabbitmq_url, TOPIC, {}, message_id=f"m-{number}")
        with consuming([handler], options):
            wait_until(lambda: "database.invalid" in caplog.text)
            assert not InboxMessage.objects.filter(state=State.DEAD).exists()
    with consuming([handler], options):
        wait_until(lambda: effects() == 10)
    assert [record for record in caplog.records if record.exc_info] == []
    assert not InboxMessage.objects.filter(attempts__gt=1).exists()


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
def test_others_are_handled_while_one_message_cannot_be_identified(handles, rabbitmq_url, ordered):
    options = broker_options(rabbitmq_url)
    handler = handles(the_effect, biz_id=takes_too_much, ordered=ordered)
    declare(handler, options)
    send(rabbitmq_url, TOPIC, {"large": True}, message_id="m-large")
    for number in range(5):
        send(rabbitmq_url, TOPIC, {}, message_id=f"m-{number}")
    with consuming([handler], options):
        wait_until(lambda: effects() == 5)
        wait_until(InboxMessage.objects.filter(message_id="m-large", last_error__contains="too large").exists)
    assert the_row(message_id="m-large").attempts >= 1


def test_stored_message_that_cannot_be_identified_runs_out_of_attempts(handles):
    deliver(handles(the_effect, biz_id=takes_too_much), an_envelope({"large": True}), redelivered=True)
    run_to_the_end()
    row = the_row()
    assert (row.state, row.attempts) == (State.DEAD, OPTIONS.MAX_ATTEMPTS)
    assert "too large" in row.last_error
