"""The page of a chain of messages: from the publish to every effect, and to what the handlers published."""

import re
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from exactly_once.console.operators.message_history import MOST_ROWS, chain_of
from exactly_once.models import AuditEntry
from exactly_once.process.clock import utcnow
from inbox.models import InboxMessage
from outbox.models import OutboxMessage
from outbox.states import State
from tests.support.admin_pages import Page, a_message, staff_client
from tests.support.inbox_rows import store_message
from tests.support.many_rows import multiply
from tests.support.sql import executed

pytestmark = pytest.mark.django_db(databases=["default", "other"])

PAGE = "admin:exactly_once_flow_changelist"
VIEW = ("view_flow", "view_outboxmessage", "view_inboxmessage")


def a_publication(topic, *, cause=None, after=0.0, state=State.PUBLISHED, confirmed=12, using="default", **columns):
    """A message, published by the handler of `cause` or at the beginning of a chain."""
    at = (cause.created_at if cause else utcnow() - timedelta(hours=1)) + timedelta(seconds=after)
    row = a_message(state, topic=topic, using=using, **columns)
    settled_at = at + timedelta(milliseconds=confirmed) if state == State.PUBLISHED else None
    changes = {"created_at": at, "settled_at": settled_at}
    if "correlation_id" not in columns:
        changes["correlation_id"] = cause.correlation_id if cause else str(row.message_id)
    if cause:
        changes["causation_id"] = str(cause.message_id)
    for name, value in changes.items():
        setattr(row, name, value)
    OutboxMessage.objects.using(using).filter(pk=row.pk).update(**changes)
    return row


def an_effect(row, handler, *, after=0.1, took=30, state="done", using="default", **columns):
    at = row.created_at + timedelta(seconds=after)
    names = {name: getattr(row, name) for name in ("topic", "biz_id", "correlation_id", "causation_id", "created_at")}
    settled_at = at + timedelta(milliseconds=took) if state == "done" else None
    values = {"message_id": str(row.message_id), "body": b"{}", "attempts": 1, "received_at": at, "settled_at": settled_at}
    return store_message(using=using, handler=handler, state=state, **{**names, **values, **columns})


def an_order():
    """An order whose handlers publish, and whose payment fails."""
    placed = a_publication("shop.order.placed")
    an_effect(placed, "stock.reserve")
    an_effect(placed, "payments.charge", state="retrying", attempts=3, last_error="GatewayTimeout: no answer")
    reserved = a_publication("stock.reserved", cause=placed, after=0.2)
    an_effect(reserved, "shipments.pack")
    return placed, reserved


def flow(message_id, *permissions):
    return Page(staff_client(*(permissions or VIEW)).get(reverse(PAGE), {"id": str(message_id)}))


def words(page):
    return " ".join(page.text.split())


def names(chain):
    return [(message.depth, message.first.topic) for message in chain.messages]


def test_chain_is_drawn_from_its_publish_to_every_effect_and_what_they_published_with_the_times_between():
    placed, _ = an_order()

    text = words(flow(placed.message_id))

    steps = (
        *("shop.order.placed", "confirmed 12 ms later", "stock.reserve", "received 100 ms after it was published"),
        *("effect 30 ms later", "payments.charge", "3 attempts", "GatewayTimeout: no answer"),
        *("stock.reserved", "200 ms after its cause", "shipments.pack"),
    )
    positions = [text.index(step) for step in steps]
    assert positions == sorted(positions)


def test_chain_is_found_by_any_id_of_it_also_one_of_another_producer_and_each_message_is_shown_once():
    placed, reserved = an_order()
    a_publication("shop.order.placed")
    for name in (placed.message_id, reserved.message_id, str(placed.message_id).upper()):
        assert names(chain_of(str(name))) == [(0, "shop.order.placed"), (1, "stock.reserved")]

    at = utcnow()
    received = {"topic": "bank.paid", "biz_id": "1", "body": b"{}", "received_at": at, "settled_at": at, "state": "done"}
    store_message(message_id="foreign-1", handler="payments.book", **received)
    a_publication("shop.order.paid", correlation_id="foreign-1", causation_id="foreign-1")
    assert names(chain_of("foreign-1")) == [(0, "bank.paid"), (1, "shop.order.paid")]

    one, two = a_publication("one"), a_publication("two")
    for row, cause in ((one, two), (two, one)):
        columns = {"correlation_id": "loop", "causation_id": str(cause.message_id)}
        OutboxMessage.objects.filter(pk=row.pk).update(**columns)
    assert sorted(topic for _depth, topic in names(chain_of("loop"))) == ["one", "two"], "each other's cause"


@pytest.mark.every_database
def test_chain_spans_the_databases_and_the_tree_orders_siblings_by_time():
    placed = a_publication("shop.order.placed")
    a_publication("third", cause=placed, after=3)
    second = a_publication("second", cause=placed, after=2, using="other")
    a_publication("first", cause=placed, after=1)
    a_publication("below", cause=second, after=9)
    an_effect(second, "elsewhere.handle", using="other")

    chain = chain_of(str(second.message_id))

    assert names(chain) == [(0, "shop.order.placed"), (1, "first"), (1, "second"), (2, "below"), (1, "third")]
    assert [leg.database for leg in chain.messages[2].effects] == ["other"]
    assert "(other)" in words(flow(placed.message_id))


@pytest.mark.long
def test_long_chain_is_cut_and_the_page_says_so():
    OutboxMessage.objects.bulk_create(
        OutboxMessage(topic="shop.sms", biz_id=str(number), shard=1, body=b"{}", correlation_id="cart-1",
                      causation_id="", created_at=utcnow(), available_at=utcnow())
        for number in range(MOST_ROWS + 1)
    )  # fmt: skip

    assert len(chain_of("cart-1").messages) == MOST_ROWS
    assert f"only the first {MOST_ROWS} messages of each app are shown" in words(flow("cart-1"))


def test_long_line_of_causes_is_drawn_at_a_limited_depth():
    row = a_publication("hop")
    root = row.message_id
    for _ in range(60):
        row = a_publication("hop", cause=row, after=1)

    page = flow(root)

    assert {depth for depth, _topic in names(chain_of(str(root)))} == set(range(61))
    assert len(page.all("li", **{"class": "flow-message flow-depth-8"})) == 61 - 8


@pytest.mark.parametrize(("permission", "seen", "hidden"), [
    ("view_outboxmessage", "confirmed ", "stock.reserve "),
    ("view_inboxmessage", "stock.reserve ", "confirmed "),
])  # fmt: skip
def test_only_the_app_whose_messages_the_user_may_view_is_shown(permission, seen, hidden):
    placed, _ = an_order()

    text = words(flow(placed.message_id, "view_flow", permission))

    assert seen in text
    assert hidden not in text
    assert "Users with the permission to view the messages of both apps see more of it." in text


def test_ids_on_the_pages_of_messages_and_of_the_audit_log_lead_to_the_flow_if_the_user_may_view_it():
    placed, _ = an_order()
    received = InboxMessage.objects.filter(handler="stock.reserve").get()
    audited = {"app": "outbox", "at": utcnow(), "actor": "ada", "place": "admin", "address": "", "action": "cancel"}
    entry = AuditEntry.objects.create(**audited, kind="message", object_id=str(placed.message_id))
    pages = (("outbox_outboxmessage", placed.pk), ("inbox_inboxmessage", received.pk), ("exactly_once_auditentry", entry.pk))
    link = {"href": f"{reverse(PAGE)}?id={placed.message_id}"}

    for name, pk in pages:
        url = reverse(f"admin:{name}_change", args=[pk])
        assert Page(staff_client(*VIEW, "view_auditentry").get(url)).all("a", **link), name
        assert not Page(staff_client(*VIEW[1:], "view_auditentry").get(url)).all("a", **link), name


def test_cause_that_is_not_in_the_chain_is_named_with_a_link_and_an_unknown_id_is_said_to_be():
    asked = a_publication("bank.transfer.requested", causation_id="outer-message")

    page = flow(asked.message_id)

    assert "Its cause is not in this chain" in page.text
    assert page.all("a", href=f"{reverse(PAGE)}?id=outer-message")
    assert "No message has this message id or correlation id" in words(flow("nothing"))
    assert "This page shows a chain of messages" in words(flow(""))


@pytest.mark.long
@pytest.mark.every_database
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_statements_of_a_chain_use_indexes_among_many_messages():
    if connection.vendor == "postgresql":
        many()
    placed, _ = an_order()
    with CaptureQueriesContext(connection) as captured:
        chain = chain_of(str(placed.message_id))

    assert len(chain.messages) == 2
    prefix = "EXPLAIN" if connection.vendor == "postgresql" else "EXPLAIN QUERY PLAN"
    reads = [query["sql"] for query in captured if query["sql"].startswith("SELECT") and "message" in query["sql"]]
    assert len(reads) >= 4
    for sql in reads:
        lines = [str(line[-1]) for line in executed(f"{prefix} {sql}")]
        # A partition of a few pages, which another test may have left, costs next to nothing to scan.
        plan = "\n".join(line for line in lines if not re.search(r"cost=0\.00\.\.\d\.\d\d ", line))
        # The partition of open messages has few rows here.
        assert "Seq Scan" not in plan.replace("Seq Scan on inbox_inboxmessage_live", ""), (sql, plan)
        assert "SCAN " not in plan, (sql, plan)


def many():
    """Settled and open messages, each the first of its chain; more than a scan would be chosen for."""
    first, open_one = a_publication("shop.order.placed"), a_publication("shop.order.placed", state=State.READY)
    for row in (first, open_one):
        multiply(row, 10_000, correlation_id="gen_random_uuid()::text")
    multiply(an_effect(first, "shop.handle"), 20_000, correlation_id="n::text")
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE outbox_outboxmessage")
        cursor.execute("ANALYZE inbox_inboxmessage")
