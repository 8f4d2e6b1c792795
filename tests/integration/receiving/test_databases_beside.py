"""A handler or its `biz_id` queries another database: an outage of that one counts no attempt, and only this handler waits."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from html import unescape

import pytest
from django.db import connections

from exactly_once.console.cli.halves import process_table
from exactly_once.process.clock import monotonic
from exactly_once.process.loop import StopRequest
from exactly_once.upkeep.minutes import database_time
from inbox import Lease
from inbox.admin.overview import _attention
from inbox.consumer.heartbeat import Heartbeats
from inbox.consumer.runner import Runner
from inbox.models import InboxMessage
from inbox.operators import accounting
from inbox.states import Outcome, State
from inbox.store.handler_rows import consumers
from tests.support.aliases import an_alias, unresolvable
from tests.support.deliveries import (
    OPTIONS,
    TOPIC,
    an_envelope,
    deliver,
    effects,
    options,
    run_to_the_end,
    stored_due,
    the_effect,
    the_row,
)
from tests.support.sql import executed, fetched
from tests.support.waiting import A_WHILE, wait_until
from tests.support.workers import broker_options, consuming, declare, send, send_all

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

ELSEWHERE = "shop.elsewhere"
ONCE = options(MAX_ATTEMPTS=1)


def asks_other(message, sql="SELECT 1"):
    executed(sql, using="other")
    the_effect(message)


def shown():
    """What the overview, and `exactly_once_status`, say about the processes."""
    rows, now = [*consumers.rows("default")], database_time("default")
    attention = _attention("default", accounting.counts("default"), rows, now)
    waiting = " ".join(str(one.text) for one in attention if one.condition == "waiting")
    return unescape(waiting), str(process_table(rows, brief=False))


@pytest.mark.long
@pytest.mark.parametrize("given", [{}, {"ordered": True}, {"group_commit": 4}], ids=["single", "ordered", "group_commit"])
def test_handler_waits_for_another_database_and_the_others_continue(handles, rabbitmq_url, caplog, given):
    broker = broker_options(rabbitmq_url, MAX_ATTEMPTS=1)
    waits, other = handles(asks_other, topic=ELSEWHERE, name="tests.waits", **given), handles(the_effect)
    for handler in (waits, other):
        declare(handler, broker)
    stored_due(waits, an_envelope(topic=ELSEWHERE, biz_id="stored"))
    with ExitStack() as stack:
        stack.enter_context(unresolvable("other"))
        consumer = stack.enter_context(consuming([waits, other], broker))
        stack.enter_context(Heartbeats(consumer.activity).sending(["default"]))
        send_all(rabbitmq_url, ELSEWHERE, [(f"m{number}", {}) for number in range(8)])
        wait_until(lambda: "The database 'other', which tests.waits uses, is unavailable" in caplog.text)
        send_all(rabbitmq_url, TOPIC, [(f"n{number}", {}) for number in range(8)])
        wait_until(lambda: effects() == 8)
        wait_until(lambda: all("the database 'other' for tests.waits" in text for text in shown()))
    assert not InboxMessage.objects.filter(handler="tests.waits").exclude(state=State.RECEIVED).exists()

    with consuming([waits, other], broker):
        wait_until(lambda: effects() == 17)
    assert set(InboxMessage.objects.values_list("state", flat=True)) == {State.DONE}
    assert [record for record in caplog.records if record.exc_info] == []


def test_handler_continues_when_the_other_database_is_available_again(handles, rabbitmq_url, caplog):
    broker = broker_options(rabbitmq_url, MAX_ATTEMPTS=1)
    waits = handles(asks_other, topic=ELSEWHERE)
    declare(waits, broker)
    with consuming([waits], broker) as consumer:
        with unresolvable("other"):
            send_all(rabbitmq_url, ELSEWHERE, [(f"m{number}", {}) for number in range(8)])
            wait_until(lambda: "is unavailable" in caplog.text)
        wait_until(lambda: effects() == 8)
        wait_until(lambda: "is available again" in caplog.text)
        assert consumer.activity().waits == []


def test_messages_of_a_handler_that_waits_keep_no_other_handler_from_running_its_own_one_after_another(handles, monkeypatch):
    monkeypatch.setattr("inbox.consumer.runner._SUCCESSORS_SECONDS", A_WHILE)
    waits, other = handles(asks_other, topic=ELSEWHERE), handles(the_effect)
    stored_due(waits, an_envelope(topic=ELSEWHERE, biz_id="waits"))
    for biz_id in ("a", "b", "c"):
        stored_due(other, an_envelope(biz_id=biz_id))
    runner = Runner(ONCE, handlers=lambda: [waits, other])
    with unresolvable("other"):
        connections["other"].close()
        assert [runner.turn() for _ in range(2)] in ([0, 3], [3, 0])


def test_drain_ends_if_another_process_has_run_what_waited_for_the_other_database(handles):
    waits = handles(asks_other)
    stored_due(waits)
    runner = Runner(ONCE, handlers=lambda: [waits])
    with unresolvable("other"):
        connections["other"].close()
        runner.turn()
    assert Runner(ONCE, handlers=lambda: [waits]).turn() == 1

    began_at = monotonic()
    assert runner.drain(StopRequest()) == 0
    assert monotonic() - began_at < 30


def test_run_under_a_lease_counts_no_attempt_and_names_the_database(handles):
    handler = handles(asks_other, lease=Lease(duration=timedelta(minutes=1)))
    with unresolvable("other"):
        connections["other"].close()
        assert deliver(handler, given=ONCE) is Outcome.STORED
    row = the_row()
    assert (row.state, row.attempts) == (State.RETRYING, 0)
    assert row.last_error.startswith("the database 'other' was unavailable: ")


def test_full_disk_of_another_database_counts_no_attempt(handles):
    """Its own database would have refused the row of the inbox."""
    handler = handles(lambda message: asks_other(message, raises("53100")), lease=Lease(duration=timedelta(minutes=1)))
    assert deliver(handler, given=ONCE) is Outcome.STORED
    assert the_row().attempts == 0


def raises(sqlstate):
    return f"DO $$ BEGIN RAISE EXCEPTION 'raised' USING ERRCODE = '{sqlstate}'; END $$"


@pytest.mark.parametrize(
    "sql",
    [
        pytest.param("SET statement_timeout = 1; SELECT pg_sleep(10)", id="statement_timeout"),
        pytest.param("SELECT pg_terminate_backend(pg_backend_pid())", id="its own session ended"),
        pytest.param(raises("53400"), id="limit of a setting"),
        pytest.param(raises("53200"), id="out of memory or locks"),
        pytest.param("SELECT 1/0", id="values"),
        pytest.param("SELECT * FROM missing", id="missing table"),
    ],
)
def test_error_that_a_handler_provokes_on_another_database_counts(handles, sql):
    handler = handles(lambda message: asks_other(message, sql))
    assert deliver(handler, given=ONCE) is Outcome.DEAD
    assert (the_row().attempts, effects()) == (1, 0)


@pytest.mark.parametrize("given", [{}, {"lease": Lease(duration=timedelta(minutes=1))}], ids=["transaction", "lease"])
def test_outage_of_an_alias_that_exists_only_during_the_run_counts_and_is_stored_as_it_was_raised(handles, given):
    def asks_a_tenant(message):
        # Not by ensure_connection(), which a test case forbids for an alias that it does not know.
        with an_alias("tenant", HOST="database.invalid"), connections["tenant"].wrap_database_errors:
            connections["tenant"].connect()

    assert deliver(handles(asks_a_tenant, **given), given=ONCE) is Outcome.DEAD
    assert the_row().last_error.startswith("OperationalError: ")


def takes_too_much(message):
    if message.payload.get("large"):
        executed("DO $$ BEGIN RAISE EXCEPTION 'too large' USING ERRCODE = '53400'; END $$")
    return message.id


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
def test_messages_wait_while_the_name_of_the_database_of_their_biz_id_does_not_resolve(handles, rabbitmq_url, caplog, ordered):
    broker = broker_options(rabbitmq_url)

    def reads_elsewhere(message):
        return fetched("SELECT %s", [message.id], using="other")

    handler = handles(the_effect, biz_id=reads_elsewhere, ordered=ordered)
    declare(handler, broker)
    connections["other"].close()
    with unresolvable("other"):
        for number in range(10):
            send(rabbitmq_url, TOPIC, {}, message_id=f"m-{number}")
        with consuming([handler], broker):
            wait_until(lambda: "database.invalid" in caplog.text)
            assert not InboxMessage.objects.filter(state=State.DEAD).exists()
    with consuming([handler], broker):
        wait_until(lambda: effects() == 10)
    assert [record for record in caplog.records if record.exc_info] == []
    assert not InboxMessage.objects.filter(attempts__gt=1).exists()


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
def test_others_are_handled_while_one_message_cannot_be_identified(handles, rabbitmq_url, ordered):
    broker = broker_options(rabbitmq_url)
    handler = handles(the_effect, biz_id=takes_too_much, ordered=ordered)
    declare(handler, broker)
    send(rabbitmq_url, TOPIC, {"large": True}, message_id="m-large")
    for number in range(5):
        send(rabbitmq_url, TOPIC, {}, message_id=f"m-{number}")
    with consuming([handler], broker):
        wait_until(lambda: effects() == 5)
        wait_until(InboxMessage.objects.filter(message_id="m-large", last_error__contains="too large").exists)
    assert the_row(message_id="m-large").attempts >= 1


def test_stored_message_that_cannot_be_identified_runs_out_of_attempts(handles):
    deliver(handles(the_effect, biz_id=takes_too_much), an_envelope({"large": True}), redelivered=True)
    run_to_the_end()
    row = the_row()
    assert (row.state, row.attempts) == (State.DEAD, OPTIONS.MAX_ATTEMPTS)
    assert "too large" in row.last_error
