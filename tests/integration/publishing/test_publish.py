"""A message exists if and only if the transaction that wrote it committed."""

import threading
import uuid
from contextlib import ExitStack
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from zoneinfo import ZoneInfo

import pytest
from django.db import connection, transaction
from django.utils import timezone

from exactly_once.telemetry.tracing import Cause, caused_by
from outbox import Draft, PublishedOutsideTransaction, cancel, publish, publish_many
from outbox.models import SHARDS, OutboxMessage
from outbox.states import GIVEN_UP, State
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import InAThread, at_once
from tests.support.open_transactions import lock_waits
from tests.support.relaying import SECONDS, TOPIC, in_state, published, row_of, state_of
from tests.support.sql import executed
from tests.support.waiting import wait_until

# Most of these need no real commit. Those that look from another thread say so.
pytestmark = [pytest.mark.every_database, pytest.mark.django_db(databases=["default", "other"])]
committed = pytest.mark.django_db(transaction=True)
BERLIN = ZoneInfo("Europe/Berlin")


class Surprise(Exception):
    """An unexpected error in the business code."""


class Topics(str, Enum):  # noqa: UP042 - str() of a StrEnum is its value
    """Names of a project. `str()` gives "Topics.ORDER"."""

    ORDER = TOPIC
    FACT = "order-17"


@committed
def test_members_of_an_enumeration_are_stored_by_their_value_also_by_prepared_statements():
    """A connection prepares what it has executed five times."""
    for number in range(8):
        with transaction.atomic():
            publish(Topics.ORDER, {}, biz_id=Topics.FACT, key=Topics.FACT, unique=number > 5)

    assert {*OutboxMessage.objects.values_list("topic", "biz_id", "key")} == {(TOPIC, "order-17", "order-17")}
    assert cancel(topic=Topics.ORDER, biz_id=Topics.FACT)


@pytest.mark.parametrize(
    "at", [datetime(2027, 3, 28, 1, 30, tzinfo=BERLIN), datetime(2027, 10, 31, 2, 15, tzinfo=BERLIN, fold=1)]
)
@pytest.mark.parametrize("count", [1, 20])
def test_message_expires_as_long_after_it_is_due_as_it_says_although_the_clocks_change(at, count):
    with transaction.atomic():
        publish_many([Draft(TOPIC, {}, deliver_at=at, expires_in=timedelta(minutes=90))] * count)

    row = OutboxMessage.objects.first()
    assert row.expires_at - row.available_at == timedelta(minutes=90)


class TestPublishInTransaction:
    def test_commit_stores_the_message_together_with_the_change(self):
        with transaction.atomic():
            Effect.objects.create(name="order")
            message = publish(TOPIC, {"order": 1})

        assert Effect.objects.count() == 1
        assert row_of(message).state == State.READY

    def test_rollback_discards_the_message_together_with_the_change(self):
        def place():
            with transaction.atomic():
                Effect.objects.create(name="order")
                publish(TOPIC, {"order": 1})
                raise Surprise

        with pytest.raises(Surprise):
            place()

        assert not Effect.objects.exists()
        assert not OutboxMessage.objects.exists()

    def test_savepoint_rollback_discards_only_the_messages_of_the_savepoint(self):
        def attempt():
            with transaction.atomic():
                publish(TOPIC, {"try": 1}, biz_id="inside")
                raise Surprise

        with transaction.atomic():
            publish(TOPIC, {}, biz_id="before")
            with pytest.raises(Surprise):
                attempt()
            publish(TOPIC, {}, biz_id="after")

        assert list(OutboxMessage.objects.order_by("pk").values_list("biz_id", flat=True)) == ["before", "after"]

    @committed
    def test_message_is_invisible_to_other_transactions_before_the_commit(self):
        with transaction.atomic():
            publish(TOPIC, {})
            seen = at_once([OutboxMessage.objects.count])

        assert seen == [0]

    def test_message_is_written_to_the_database_given_by_using(self):
        message = published(using="other")

        assert row_of(message, "other").state == State.READY
        assert not OutboxMessage.objects.using("default").exists()


class TestPublishOutsideTransaction:
    @committed
    @pytest.mark.parametrize(
        "publishing", [lambda: publish(TOPIC, {}), lambda: publish_many([Draft(TOPIC, {})]), lambda: publish_many([])]
    )
    def test_publish_in_autocommit_is_refused_with_the_remedy(self, publishing):
        with pytest.raises(PublishedOutsideTransaction, match=r"'default'.*transaction\.atomic\(\)"):
            publishing()

        assert not OutboxMessage.objects.exists()


class TestStoredMessage:
    def test_body_is_the_payload_byte_for_byte_as_it_will_be_sent(self):
        payload = {
            "text": "Käse 🍰",
            "total": Decimal("9.90"),
            "day": date(2026, 3, 1),
            "id": uuid.UUID(int=7),
            "rest": timedelta(minutes=1),
            "none": None,
            "list": [1, 2.5, True],
        }
        message = published(payload=payload)

        body = bytes(row_of(message).body)
        assert (
            body
            == (
                '{"text":"Käse 🍰","total":"9.90","day":"2026-03-01","id":"00000000-0000-0000-0000-000000000007",'
                '"rest":"P0DT00H01M00S","none":null,"list":[1,2.5,true]}'
            ).encode()
        )

    def test_publish_returns_the_topic_id_and_position_and_the_biz_id_defaults_to_the_message_id(self):
        first, second = published(), published("other.topic", biz_id="order-17")

        assert (first.topic, second.topic) == (TOPIC, "other.topic")
        assert (first.created, first.id.version) == (True, 7)
        assert first.position == row_of(first).pk < second.position
        assert first.biz_id == row_of(first).biz_id == str(first.id)
        assert second.biz_id == row_of(second).biz_id == "order-17"

    def test_message_published_by_a_handler_continues_the_correlation_chain(self):
        first = published(headers={"traceparent": "00-aa-bb-01", "tenant": "acme"})
        trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        with caused_by(Cause(str(first.id), "the-first-of-all", trace)):
            second = published()

        row = row_of(first)
        assert (row.correlation_id, row.causation_id) == (str(first.id), "")
        assert (row.traceparent, row.headers) == ("00-aa-bb-01", {"tenant": "acme"})
        row = row_of(second)
        assert (row.correlation_id, row.causation_id, row.traceparent) == ("the-first-of-all", str(first.id), trace)

    def test_messages_of_one_key_share_a_shard(self):
        rows = [row_of(published(key=key)) for key in ("customer-1", "customer-1", "", "", "", "")]

        assert rows[0].shard == rows[1].shard
        assert all(0 <= row.shard < SHARDS for row in rows)

    @pytest.mark.parametrize("key", ["customer-{}", ""], ids=["keys", "no keys"])
    def test_messages_of_many_keys_or_of_none_spread_over_all_shards(self, key):
        with transaction.atomic():
            publish_many([Draft(TOPIC, {}, key=key.format(n)) for n in range(2_000)])

        assert OutboxMessage.objects.values("shard").distinct().count() == SHARDS

    def test_number_of_shards_is_64(self):
        """With another number, the next message of a key could have another shard than the last and overtake it."""
        assert SHARDS == 64


class TestUnique:
    def test_unique_returns_the_first_message_and_writes_no_second(self):
        first = published(payload={"n": 1}, biz_id="order-1", unique=True)
        second = published(payload={"n": 2}, biz_id="order-1", unique=True)

        assert first.created
        assert not second.created
        assert (second.id, second.position, second.biz_id) == (first.id, first.position, "order-1")
        assert bytes(OutboxMessage.objects.get().body) == b'{"n":1}'

    def test_unique_applies_per_topic_and_biz_id_and_ignores_messages_published_without_it(self):
        published("a", biz_id="1")
        for topic, biz_id in [("a", "1"), ("a", "2"), ("b", "1")]:
            assert published(topic, biz_id=biz_id, unique=True).created
        assert published("a", biz_id="1").created
        assert OutboxMessage.objects.count() == 5

    @pytest.mark.parametrize("state", sorted(set(State) - set(GIVEN_UP)))
    def test_unique_returns_the_first_message_with_its_state_unless_it_was_given_up(self, state):
        first = in_state(state, biz_id="order-1", unique=True)

        found = published(biz_id="order-1", unique=True)

        assert (found.id, found.created, found.state) == (first.id, False, state)

    @pytest.mark.parametrize("state", GIVEN_UP)
    def test_unique_after_a_message_that_was_given_up_writes_a_new_one(self, state):
        first = in_state(state, biz_id="order-1", unique=True)

        second = published(biz_id="order-1", unique=True)

        assert second.created
        assert second.id != first.id
        assert (state_of(first), state_of(second)) == (state, State.READY)
        assert published(biz_id="order-1", unique=True).id == second.id

    def test_message_can_be_replaced_in_one_transaction(self):
        first = published(payload={"n": 1}, biz_id="order-1", unique=True, delay=timedelta(hours=1))
        with transaction.atomic():
            assert cancel(topic=TOPIC, biz_id="order-1")
            second = publish(TOPIC, {"n": 2}, biz_id="order-1", unique=True)

        assert (second.created, state_of(first), state_of(second)) == (True, State.CANCELLED, State.READY)

    @committed
    @pytest.mark.parametrize("first", [None, State.CANCELLED], ids=["no message", "a cancelled message"])
    def test_unique_leaves_one_row_of_two_concurrent_duplicates(self, first):
        for number in range(20 if first else 0):
            in_state(first, biz_id=f"order-{number}", unique=True)
        answers, start = [], threading.Barrier(2)

        def publish_all():
            for number in range(20):
                start.wait()
                with transaction.atomic():
                    answers.append(publish(TOPIC, {}, biz_id=f"order-{number}", unique=True))

        at_once([publish_all, publish_all])

        for number in range(20):
            one, other = [answer for answer in answers if answer.biz_id == f"order-{number}"]
            assert (one.id, one.position) == (other.id, other.position)
            assert one.created != other.created
        assert OutboxMessage.objects.exclude(state=State.CANCELLED).count() == 20

    def published_during(self, change, ending):
        """The answer to a `publish` in another thread that waits for the end of a transaction with this change."""
        begun = threading.Event()

        def publish_again():
            begun.set()
            return published(biz_id="order-1", unique=True)

        with ExitStack() as beside, transaction.atomic():
            change()
            publishing = beside.enter_context(InAThread(publish_again))
            assert begun.wait(SECONDS)
            if connection.vendor == "postgresql":
                wait_until(lock_waits)
            assert not publishing.ended
            transaction.set_rollback(ending == "rolls back")
        return publishing.answer

    @committed
    @pytest.mark.parametrize("ending", ["commits", "rolls back"])
    def test_unique_waits_for_the_outcome_of_a_concurrent_duplicate(self, ending):
        first = []

        answer = self.published_during(lambda: first.append(publish(TOPIC, {}, biz_id="order-1", unique=True)), ending)

        assert answer.created == (ending == "rolls back")
        assert (answer.id == first[0].id) == (ending == "commits")
        assert OutboxMessage.objects.count() == 1

    @committed
    @pytest.mark.parametrize("ending", ["commits", "rolls back"])
    def test_unique_waits_for_the_outcome_of_a_concurrent_cancel(self, ending):
        first = published(biz_id="order-1", unique=True, delay=timedelta(hours=1))

        answer = self.published_during(lambda: cancel(first.id), ending)

        assert (answer.created, answer.state) == ((True, "ready") if ending == "commits" else (False, "scheduled"))
        assert (answer.id == first.id) == (ending == "rolls back")


@pytest.mark.parametrize("number", [1, 20], ids=["inserted", "copied"])
def test_new_message_reports_the_state_it_was_written_in(number):
    hour = timedelta(hours=1)
    times = [{}, {"delay": timedelta()}, {"delay": hour}, {"deliver_at": timezone.now() + hour}, {"delay": "1s"}]
    with transaction.atomic():
        for given in times:
            messages = [publish(TOPIC, {}, **given), *publish_many([Draft(TOPIC, {}, **given)] * number)]

            assert [message.state for message in messages] == [state_of(message) for message in messages]


class TestPublishMany:
    def test_publish_many_returns_the_first_of_unique_messages_and_keeps_the_order_of_a_key(self):
        """The position is what the order of a key goes by."""
        first = published(biz_id="order-1", unique=True)
        names = [("order-2", True), ("order-1", True), ("order-1", False), ("order-3", True), ("order-2", True)]
        with transaction.atomic():
            answers = publish_many([Draft(TOPIC, {}, key="k", biz_id=name, unique=unique) for name, unique in names])

        assert [answer.created for answer in answers] == [True, False, True, True, False]
        assert (answers[1].id, answers[4].id) == (first.id, answers[0].id)
        positions = [answer.position for answer in answers if answer.created]
        assert positions == sorted(positions)
        assert OutboxMessage.objects.count() == 4


def test_stored_instants_can_be_compared_by_the_orm():
    """The rows are written by plain SQL and read by Django: both must use the same format."""
    message = published(delay=timedelta(hours=1), expires_in=timedelta(hours=2))

    row = row_of(message)
    assert isinstance(row.created_at, datetime)
    assert row.available_at == row.deliver_at
    later = OutboxMessage.objects.filter(available_at__gt=row.created_at + timedelta(minutes=59))
    assert later.exists()
    assert not later.filter(available_at__gt=row.created_at + timedelta(minutes=61)).exists()


@pytest.mark.skipif("connection.vendor != 'postgresql'")
@committed
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"unique": True},
        {"delay": timedelta(hours=1), "expires_in": timedelta(hours=2)},
        {"deliver_at": timezone.now().astimezone(timezone.get_fixed_timezone(90)) + timedelta(days=3), "key": "k"},
        {"priority": 3, "expires_in": timedelta(seconds=0.5), "headers": {"tenant": "Zoë 100 %s", "n": 2, "vip": True}},
    ],
    ids=["plain", "unique", "delay", "deliver_at", "priority"],
)
def test_prepared_insert_writes_the_same_row_as_a_plain_one(options):
    """The first messages of a connection are inserted by a cursor, later ones by a prepared statement."""
    connection.close()
    biz_ids = [f"Zoë's \\ {number}" for number in range(9)]
    messages = [published(payload={"text": "\x00ë ☃ %s"}, biz_id=biz_id, **options) for biz_id in biz_ids]
    assert executed("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'outbox_insert%%'") == [(1,)]

    def written(message):
        row = OutboxMessage.objects.values().get(message_id=message.id)
        own = {name: row.pop(name) for name in ("id", "message_id", "biz_id", "correlation_id", "shard")}
        assert own["correlation_id"] == str(own["message_id"])
        created_at = row.pop("created_at")
        instants = {name: row.pop(name) for name in ("available_at", "deliver_at", "expires_at")}
        if "deliver_at" not in options:
            instants = {name: instant and instant - created_at for name, instant in instants.items()}
        is_secondary = row.pop("ready_position") > 0
        return {**row, **instants, "is_secondary": is_secondary, "body": bytes(row["body"]), "biz_id": own["biz_id"][:-1]}

    first, *others = map(written, messages)
    assert all(other == first for other in others)
    assert [message.position for message in messages] == sorted(message.position for message in messages)
