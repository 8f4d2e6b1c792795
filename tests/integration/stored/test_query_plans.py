"""The indexes that the statements of every message use on a large table, with and without planner statistics."""

from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from exactly_once.sql.prepared_statements import KEEP_PLANS
from inbox.contrib.outgoing_webhooks import Endpoint, send_webhooks
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.receiving.reading import read
from inbox.receiving.receive import claim_next, run_stored
from inbox.states import Outcome
from inbox.store import arrivals, claims, ordering, sentinel
from inbox.store.message_rows import Successor
from inbox.testing import deliver, make_message
from tests.support.deliveries import OPTIONS, an_envelope, stored_due, the_effect
from tests.support.inbox_rows import NEXT_ID, RECEIPTS
from tests.support.sql import executed

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.long]

HISTORY = f"""
INSERT INTO inbox_inboxmessage (id, handler, topic, biz_id, message_id, key, content_type, body, digest, headers, source,
    correlation_id, causation_id, traceparent, ordered, state, day, attempts, received_at, settled_at)
SELECT {NEXT_ID}, %s, 'shop.order.placed', n::text, n::text, 'key-' || n %% 500, 'application/json', '', '', '{{}}', '', '', '',
    '', true, CASE WHEN n > 18000 THEN 'waiting' ELSE 'done' END,
    CASE WHEN n > 18000 THEN 0 ELSE 1 END, 1, now(), CASE WHEN n > 18000 THEN NULL ELSE now() END
FROM generate_series(1, 20000) n
"""


STATISTICS = ["analysed", "analysed while nothing was open", "never analysed", "vacuumed beside an open transaction"]


@pytest.fixture(params=STATISTICS)
def handler(request, handles):
    handler = handles(the_effect)
    with connection.cursor() as cursor:
        # TRUNCATE keeps the statistics of the columns, which an earlier test or an autovacuum has made.
        cursor.execute("TRUNCATE inbox_inboxmessage; DELETE FROM pg_statistic WHERE starelid::regclass::text LIKE 'inbox%'")
        # One that begins before the rows are committed would record that the table is empty.
        cursor.execute("ALTER TABLE inbox_inboxmessage_live SET (autovacuum_enabled = off)")
        if request.param == "vacuumed beside an open transaction":
            store_beside_a_vacuum(handler)
        else:
            cursor.execute(HISTORY, [handler.name])
        cursor.execute(RECEIPTS)
        if request.param == "analysed while nothing was open":
            cursor.execute("UPDATE inbox_inboxmessage SET state = 'done', day = 1 WHERE state = 'waiting' RETURNING id")
            opened = [row for (row,) in cursor.fetchall()]
            cursor.execute("VACUUM ANALYZE inbox_inboxmessage")
            cursor.execute("UPDATE inbox_inboxmessage SET state = 'waiting', day = 0 WHERE id = ANY(%s)", [opened])
        if request.param == "analysed":
            cursor.execute("ANALYZE inbox_inboxmessage")
    yield handler
    executed("ALTER TABLE inbox_inboxmessage_live RESET (autovacuum_enabled)")


def store_beside_a_vacuum(handler):
    """PostgreSQL then believes that the pages, which it has seen, have no row."""
    other = connection.copy()
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(HISTORY, [handler.name])
            with other.cursor() as beside:
                beside.execute("VACUUM inbox_inboxmessage_live")
                beside.execute("SELECT reltuples, relpages > 0 FROM pg_class WHERE relname = 'inbox_inboxmessage_live'")
                assert beside.fetchone() == (0, True)
    finally:
        other.close()


def explained(sql, parameters=()):
    return "\n".join(line for (line,) in executed(f"EXPLAIN {sql}", parameters or None))


def finish_of_a_fresh_row(row):
    guard = arrivals.begin_fresh("default", [row], OPTIONS.DUPLICATE_TIMEOUT)
    sentinel._PROVE_ONE.execute(connection, guard.rows)
    return explained("EXECUTE inbox_prove (1)")


def finish_of_several_fresh_rows(row):
    guard = arrivals.begin_fresh("default", [row, replace(row, biz_id="another")], OPTIONS.DUPLICATE_TIMEOUT)
    sentinel._PROVE_MANY.execute(connection, [f"{{{','.join(map(str, guard.rows))}}}"])
    return explained("EXECUTE inbox_prove_many ('{1, 2}')")


def finish_of_a_stored_row(row):
    arrivals.store_due("default", row, OPTIONS.DUPLICATE_TIMEOUT)
    stored = claims.claim_due("default", [row.handler], timedelta(seconds=10))
    sentinel.finish(claims.begin_stored("default", stored))
    return explained("EXECUTE inbox_finish (1, 1, '1', true, NULL, NULL, NULL, false)")


@pytest.mark.parametrize("finish", [finish_of_a_fresh_row, finish_of_several_fresh_rows, finish_of_a_stored_row])
def test_commit_sentinel_uses_the_primary_key(handler, finish):
    row = read(handler, an_envelope(), OPTIONS).row
    for _ in range(7):  # after five executions PostgreSQL may use a generic plan
        with transaction.atomic():
            plan = finish(row)
            transaction.set_rollback(True)

    assert "inbox_inboxmessage_live_pkey" in plan or "inbox_receipt_pkey" in plan
    assert "inbox_open" not in plan
    assert "inbox_due" not in plan


def test_next_message_of_a_key_is_found_by_the_order_index(handler):
    for _ in range(7):
        with transaction.atomic():
            ordering.promote_next("default", handler.name, "key-1")
            plan = explained("EXECUTE inbox_promote ('tests.handler0', 'key-1')")
            transaction.set_rollback(True)

    assert "inbox_order" in plan
    assert "inbox_inboxmessage_live_pkey" in plan
    assert "inbox_open" not in plan


CLAIMS = {
    "inbox_follow": "EXECUTE inbox_follow ('tests.handler0', 'key-1', 10, '[\"tests.handler0\"]')",
    "inbox_claim": "EXECUTE inbox_claim ('[\"tests.handler0\"]', 10)",
    "inbox_claim_unquarantined": "EXECUTE inbox_claim_unquarantined ('[\"tests.handler0\"]', 10)",
}


def claim_by_each(handler):
    """Prepare and plan each statement that claims."""
    stored_due(handler)
    successor = Successor(timedelta(seconds=10), lambda: [handler.name])
    assert run_stored(*claim_next([handler], "default", OPTIONS), OPTIONS, successor) is Outcome.HANDLED
    assert claims.claim_due("default", [handler.name], timedelta(seconds=10), quarantined=False) is None


def plan_that_is_kept(statement):
    with transaction.atomic():
        executed(f"SELECT {KEEP_PLANS}")
        return explained(CLAIMS[statement])


def refuse_wrong_indexes(statement):
    plan = plan_that_is_kept(statement)
    assert "inbox_due" in plan
    assert ("inbox_order" in plan) == (statement == "inbox_follow")
    assert "Seq Scan" not in plan
    assert "inbox_open" not in plan
    assert "inbox_once" not in plan


@pytest.mark.parametrize("statement", CLAIMS)
def test_claim_uses_the_indexes_of_due_messages_and_of_the_order(handler, statement):
    claim_by_each(handler)

    refuse_wrong_indexes(statement)


@pytest.mark.parametrize("statement", CLAIMS)
def test_claim_that_was_planned_while_one_message_was_stored_uses_the_same_indexes(handles, statement):
    handler = handles(the_effect)
    row = read(handler, an_envelope(), OPTIONS).row
    arrivals.store_due("default", row, OPTIONS.DUPLICATE_TIMEOUT, after=timedelta(hours=1))
    executed("VACUUM ANALYZE inbox_inboxmessage")
    claim_by_each(handler)
    executed(HISTORY, [handler.name])

    refuse_wrong_indexes(statement)


def test_message_is_stored_for_any_number_of_webhook_endpoints_in_few_statements():
    send_webhooks("shop.order.placed")
    try:
        counts = [statements_of_a_fan_out(number) for number in (10, 990)]
    finally:
        registry.remove("webhooks/shop.order.placed")

    assert counts[1] < counts[0] + 5
    assert InboxMessage.objects.filter(handler__startswith="webhook/", state="received").count() == 10 + 1_000


def statements_of_a_fan_out(more):
    first = Endpoint.objects.count()
    Endpoint.objects.bulk_create(Endpoint(name=f"partner-{first + n}", url="https://example.com") for n in range(more))
    with CaptureQueriesContext(connection) as captured:
        deliver(make_message("shop.order.placed", {"order": more}))
    return len(captured)
