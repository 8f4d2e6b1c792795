"""Every delivery that the inbox has acknowledged is a row or a duplicate counted on one, in every state."""

import random
import re
from contextlib import suppress
from datetime import timedelta
from functools import partial

import kombu
import pytest
from django.contrib.admin import site
from django.db import connection
from django.db.models import Count, Q, Sum
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exactly_once.process.clock import utcnow
from inbox import Lease, RetryLater
from inbox.errors import NotEditable
from inbox.models import InboxMessage
from inbox.operators import accounting
from inbox.operators.editing import replace_message
from inbox.receiving.reading import read
from inbox.receiving.receive import receive
from inbox.states import SETTLED, Outcome, State
from tests.support import decisions
from tests.support.apps.effects.models import Effect
from tests.support.commands import output_of
from tests.support.deliveries import (
    OPTIONS,
    Slow,
    admitted,
    an_envelope,
    deliver,
    drain,
    make_due,
    the_effect,
)
from tests.support.inbox_rows import NEXT_ID, RECEIPTS, delete_messages, make_older
from tests.support.sql import executed
from tests.support.waiting import wait_until
from tests.support.workers import CONFIRMED, EXCHANGE, broker_options, consuming, declare, length_of

HISTORY = "inbox_inboxmessage_history"

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]

WAYS = ("succeed", "fail", "reject", "later")
FACTS = st.integers(0, 5)


def do_what_the_payload_says(message):
    """Succeed, fail, reject or ask for a retry, as the payload says."""
    what = message.payload["do"]
    if what == "fail" and message.attempt < 2:
        raise ValueError("no stock")
    if what == "reject":
        raise RuntimeError("never")
    if what == "later" and message.attempt < 2:
        raise RetryLater
    the_effect(message)


def counted_by_hand():
    """The expected balance, from reading every row."""
    rows = InboxMessage.objects
    sums = rows.aggregate(
        **{name: Sum(name, default=0) for name in ("duplicates", "redeliveries", "resends", "replays", "conflicts")}
    )
    by_state = dict(rows.values_list("state").annotate(Count("id")).order_by())
    return sums, {state.value: by_state.get(state, 0) for state in State}


def assert_balanced(delivered):
    balance = accounting.balance("default")
    sums, by_state = counted_by_hand()
    assert balance.states == by_state
    assert balance.edited == InboxMessage.objects.filter(replaces__isnull=False).count()
    assert balance.delivered == sum(by_state.values()) - balance.edited + sums["duplicates"] == delivered
    found = balance.duplicates
    assert (found.suppressed, found.redelivery, found.resend, found.replay, found.conflicting) == tuple(sums.values())
    assert found.business == sums["duplicates"] - sums["redeliveries"] - sums["resends"] - sums["replays"] >= 0
    assert balance.quarantined == InboxMessage.objects.filter(state=State.DEAD, quarantined=True).count()


def correct(alias, row):
    """What an operator does who edits the payload; most messages are not dead."""
    with suppress(NotEditable):
        replace_message(alias, row, '{"do": "succeed", "again": true}', by="by anna")


class World:
    """Three handlers, some facts, and the operations that deliveries and operators perform on them."""

    def __init__(self, **handlers):
        self.handlers = handlers
        self.delivered = 0
        self.sent = {}
        """The first message about each fact, by fact."""

    def deliver(self, to, envelope, *, redelivered=False):
        handler = self.handlers[to]
        if handler.ordered:
            (received,) = admitted(handler, envelope, redelivered=redelivered)
        else:
            received = deliver(handler, envelope, redelivered=redelivered)
        self.count(received)

    def count(self, received):
        self.delivered += received is not Outcome.DEFERRED

    def envelope(self, fact, way="succeed"):
        return self.sent.setdefault(fact, self.a_message(fact, way))

    @staticmethod
    def a_message(fact, way="succeed", **attributes):
        return an_envelope({"do": way}, biz_id=f"fact-{fact}", key=f"key-{fact % 2}", **attributes)

    def fresh(self, to, fact, way):
        self.deliver(to, self.envelope(fact, way))

    def redelivered(self, to, fact, way):
        self.deliver(to, self.envelope(fact, way), redelivered=True)

    def replayed(self, to, fact):
        self.deliver(to, self.envelope(fact)._replace(replayed=True))

    def repeated_by_the_business(self, to, fact, way):
        """A second message about the fact, with another message id and perhaps other content."""
        self.deliver(to, self.a_message(fact, way))

    def unreadable(self, to, fact, *, redelivered):
        self.deliver(to, an_envelope(body=b"not JSON", id=f"bad-{fact}"), redelivered=redelivered)

    def too_old(self, to, fact):
        self.deliver(to, self.a_message(fact, created_at=utcnow() - timedelta(days=400)))

    def stored_for_later(self, fact, *, redelivered):
        self.count(*admitted(self.handlers["plain"], self.envelope(fact), redelivered=redelivered))

    def shed(self, facts):
        for received in admitted(self.handlers["plain"], *map(self.envelope, facts), shed="too many wait"):
            self.count(received)

    def together(self, facts, way):
        plain, envelopes = self.handlers["plain"], [self.envelope(fact, way) for fact in facts]
        received = receive(plain, [read(plain, envelope, OPTIONS) for envelope in envelopes], OPTIONS)
        if received is None:  # one of them failed, so that nothing has happened
            received = [deliver(plain, envelope) for envelope in envelopes]
        for one in received:
            self.count(one)

    def in_order(self, facts, way):
        for received in admitted(self.handlers["ordered"], *(self.envelope(fact, way) for fact in facts)):
            self.count(received)

    def time_passes(self):
        make_due()
        drain()

    def operator(self, decide, which):
        rows = list(InboxMessage.objects.order_by("pk").values_list("pk", flat=True))
        if rows:
            decide("default", rows[which % len(rows)])

    def purge(self):
        gone = InboxMessage.objects.filter(state__in=SETTLED, conflicting_at=None)
        sums = gone.aggregate(rows=Count("id", filter=Q(replaces__isnull=True)), duplicates=Sum("duplicates", default=0))
        make_older(gone, OPTIONS.RETENTION + timedelta(days=1))
        # Together with their receipts, because a copy of a message without history has no row to be counted in.
        output_of("exactly_once_purge", app="inbox")
        self.delivered -= sum(sums.values())


def steps_of_the_world():
    def step(name, **arguments):
        return st.tuples(st.just(name), st.fixed_dictionaries(arguments))

    way, some = st.sampled_from(WAYS), st.lists(FACTS, min_size=1, max_size=4)
    to = st.sampled_from(["plain", "ordered", "leased"])
    transitions = [decisions.retry, partial(decisions.skip, reason="not wanted"), decisions.override_maximum_age, correct]
    return st.one_of(
        step("fresh", to=to, fact=FACTS, way=way),
        step("redelivered", to=to, fact=FACTS, way=way),
        step("replayed", to=to, fact=FACTS),
        step("repeated_by_the_business", to=to, fact=FACTS, way=way),
        step("unreadable", to=to, fact=FACTS, redelivered=st.booleans()),
        step("too_old", to=to, fact=FACTS),
        step("stored_for_later", fact=FACTS, redelivered=st.booleans()),
        step("shed", facts=some),
        step("together", facts=some, way=way),
        step("in_order", facts=some, way=way),
        step("time_passes"),
        step("operator", decide=st.sampled_from(transitions), which=st.integers(0, 20)),
        step("purge"),
    )


@pytest.mark.every_database
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(steps_of_the_world(), min_size=5, max_size=30))
def test_balance_counts_every_delivery_after_any_sequence_of_operations(handles, steps):
    delete_messages()
    Effect.objects.all().delete()
    world = World(
        plain=handles(do_what_the_payload_says, name="tests.plain"),
        ordered=handles(do_what_the_payload_says, name="tests.ordered", ordered=True),
        leased=handles(do_what_the_payload_says, name="tests.leased", lease=Lease()),
    )
    for name, arguments in steps:
        getattr(world, name)(**arguments)
        assert_balanced(world.delivered)


def test_deferred_duplicate_is_counted_only_when_it_is_redelivered(handles):
    """The first copy is still running, so the second returns to the broker and is counted when it is redelivered."""
    slow = Slow()
    handler, envelope = handles(slow), an_envelope()
    with slow.inside(lambda: deliver(handler, envelope)) as first:
        received = deliver(handler, envelope)
        assert accounting.balance("default").delivered == 0

    assert (first.answer, received) == (Outcome.HANDLED, Outcome.DEFERRED)
    assert_balanced(1)
    deliver(handler, envelope, redelivered=True)
    assert_balanced(2)


class TestConcurrentDeliveries:
    def test_every_acknowledged_message_is_accounted_for_across_consumer_restarts(self, handles, rabbitmq_server, rabbitmq_url):
        """Hundreds of messages go through the real consumer, which is stopped and started in between."""
        rng = random.Random(7)
        handler = handles(do_what_the_payload_says)
        options = broker_options(rabbitmq_url, BACKOFF=(timedelta(milliseconds=50), timedelta(milliseconds=50)))
        declare(handler, options)
        sent = 300
        with kombu.Connection(rabbitmq_url, transport_options=CONFIRMED) as broker:
            producer = kombu.Producer(broker.default_channel, kombu.Exchange(EXCHANGE, "topic", durable=True))
            for _ in range(sent):
                producer.publish(
                    {"do": rng.choice(WAYS)},
                    routing_key=handler.topics[0],
                    message_id=f"message-{rng.randrange(150)}",
                    headers={"cloudEvents:bizid": f"fact-{rng.randrange(100)}"},
                )

        for _ in range(3):
            with consuming([handler], options):
                taken = accounting.balance("default").delivered
                wait_until(lambda before=taken: accounting.balance("default").delivered >= min(sent, before + 100))
        with consuming([handler], options):
            wait_until(lambda: length_of(rabbitmq_server, handler, options) == 0)

        assert_balanced(sent)
        assert accounting.balance("default").duplicates.suppressed > 100


class TestQueryPlans:
    """Status pages read indexes only, so that their cost does not grow with the number of handled rows."""

    ROWS = 50_000

    @pytest.fixture
    def many_rows(self):
        executed(
            "INSERT INTO inbox_inboxmessage (id, handler, topic, biz_id, message_id, key, state, day, content_type, body, "
            "digest, headers, source, correlation_id, causation_id, traceparent, received_at, settled_at, duplicates, "
            "resends) "
            f"SELECT {NEXT_ID}, 'h', 't', n::text, n::text, '', "
            "CASE mod(n, 5000) WHEN 0 THEN 'dead' WHEN 1 THEN 'shed' ELSE 'done' END, "
            "CASE mod(n, 5000) WHEN 0 THEN 0 ELSE 1 END, "
            "'application/json', decode(repeat('20', 500), 'hex'), '', '{}', '', '', '', '', now(), "
            "CASE WHEN mod(n, 5000) > 0 THEN now() END, (mod(n, 1000) = 2)::int, (mod(n, 1000) = 2)::int "
            "FROM generate_series(1, %s) n",
            [self.ROWS],
        )
        executed(RECEIPTS)
        executed("VACUUM ANALYZE inbox_inboxmessage, inbox_receipt")

    def test_balance_is_computed_from_indexes_without_a_sequential_scan(self, many_rows):
        assert_balanced(self.ROWS + self.ROWS // 1000)

        with CaptureQueriesContext(connection) as captured:
            accounting.balance("default")
        (query,) = captured
        plan = "\n".join(line for (line,) in executed(f"EXPLAIN {query['sql']}"))

        assert not re.search(f"Seq Scan on {HISTORY}", plan)
        assert len(re.findall(f"Index Only Scan using {HISTORY}_default", plan)) == 2, (
            "all of history, and what was not handled"
        )

    def test_admin_filters_use_partial_indexes_without_a_sequential_scan(self, many_rows):
        """The admin counts the rows of the chosen filter on every page of the list, up to a limit."""
        lookups = [{"state": state} for state in State if state != State.DONE]
        for lookup in (*lookups, {"duplicates__gt": 0}, {"conflicts__gt": 0}):
            found = InboxMessage.objects.filter(**lookup)
            plans = found.order_by().values("pk")[:10_001].explain() + found.order_by("-id")[:50].explain()

            assert not re.search(f"Seq Scan on {HISTORY}", plans)
            assert "inbox_inboxmessage_live_pkey" not in plans, lookup

    def test_admin_search_for_a_biz_id_uses_indexes_without_a_sequential_scan(self, many_rows):
        found = InboxMessage.objects.filter(site.get_model_admin(InboxMessage).called("7"))

        assert found.get().biz_id == "7"
        assert not re.search(f"Seq Scan on {HISTORY}", found.explain())
