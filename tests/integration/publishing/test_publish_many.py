"""publish_many() writes the same rows as publish(), in few statements."""

import json
import threading
from datetime import UTC, datetime, timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils.timezone import get_fixed_timezone

import outbox.api
from exactly_once.process.clock import utcnow
from exactly_once.telemetry.tracing import Cause, caused_by
from outbox import Draft, publish, publish_many
from outbox.models import OutboxMessage
from outbox.store import writing
from tests.support.deliveries import at_once
from tests.support.relaying import TOPIC, row_of

pytestmark = [pytest.mark.every_database, pytest.mark.django_db]

HOUR = timedelta(hours=1)
# In milliseconds, which is as exact as every database can be.
AN_INSTANT = (utcnow() + timedelta(days=365)).replace(microsecond=123_000).astimezone(get_fixed_timezone(330))
INSTANTS = ("deliver_at", "available_at", "expires_at")

DRAFTS = {
    "nothing but a payload": Draft(TOPIC, {}),
    "names": Draft("käse.🍰", None, biz_id='"\\N"', key="customer\\.'4'"),
    "payload": Draft(TOPIC, {"text": 'a\\b\n"🍰\x00', "list": [1, 2.5, None, True]}),
    "headers": Draft(TOPIC, {}, headers={"text": "grün\\", "n": -(2**63), "f": 0.5, "yes": True, "traceparent": "00-a-b-01"}),
    "priority": Draft(TOPIC, {}, priority=9),
    "delay": Draft(TOPIC, {}, delay=HOUR + timedelta(microseconds=2_000)),
    "no delay": Draft(TOPIC, {}, delay=timedelta()),
    "instant": Draft(TOPIC, {}, deliver_at=AN_INSTANT),
    "past": Draft(TOPIC, {}, deliver_at=datetime(1999, 1, 1, tzinfo=UTC)),
    "expiry": Draft(TOPIC, {}, expires_in=HOUR),
    "expiry after a delay": Draft(TOPIC, {}, delay=HOUR, expires_in=HOUR),
    "expiry after an instant": Draft(TOPIC, {}, deliver_at=AN_INSTANT, expires_in=HOUR),
}


@pytest.fixture(params=["inserted", "copied"])
def few_or_many(request, monkeypatch):
    """The two ways of writing: with INSERT, and on PostgreSQL with COPY, whatever their number."""
    monkeypatch.setattr(writing, "_COPIED_FROM", 1 if request.param == "copied" else 1_000_000)


def arguments(draft):
    return {name: value for name, value in vars(draft).items() if name not in {"topic", "payload"}}


def comparable(row):
    """The columns of a row that two rows can share: without its id, its position and its instants."""
    own = str(row.message_id)
    columns = {field.attname: getattr(row, field.attname) for field in row._meta.fields}
    for name in ("id", "message_id", "shard", "created_at", *INSTANTS):
        del columns[name]
    exactly = {name: getattr(row, name) in {row.created_at, row.available_at, AN_INSTANT, None} for name in INSTANTS}
    return {name: "own" if value == own else value for name, value in columns.items()} | {
        "ready_position": row.ready_position > 0,
        "body": bytes(row.body),
        "due at once": row.available_at == row.created_at,
        "exactly": exactly,
    }


def times(row):
    return [instant and (instant - row.created_at).total_seconds() for instant in (getattr(row, name) for name in INSTANTS)]


@pytest.mark.usefixtures("few_or_many")
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_publish_many_writes_the_same_row_as_publish(draft):
    with transaction.atomic(), caused_by(Cause("the-cause", "the-first", "00-c-d-01")):
        single = publish(draft.topic, draft.payload, **arguments(draft))
        answers = publish_many([draft, draft])
    with transaction.atomic():
        [uncaused] = publish_many([draft])

    one = row_of(single)
    for row in map(row_of, answers):
        assert comparable(row) == comparable(one)
        assert times(row) == [seconds and pytest.approx(seconds, abs=20) for seconds in times(one)]
    assert row_of(uncaused).correlation_id == str(uncaused.id)


@pytest.mark.usefixtures("few_or_many")
def test_message_ready_at_once_is_due_at_its_instant_of_creation():
    """To the last digit: the relay's stream is an index of such rows."""
    with transaction.atomic():
        ready = [publish(TOPIC, {}), publish(TOPIC, {}, expires_in=HOUR), *publish_many([Draft(TOPIC, {})] * 3)]
        later = publish_many([Draft(TOPIC, {}, delay=HOUR), Draft(TOPIC, {}, deliver_at=AN_INSTANT)])

    assert all(row_of(message).available_at == row_of(message).created_at for message in ready)
    assert not any(row_of(message).available_at == row_of(message).created_at for message in later)


@pytest.mark.usefixtures("few_or_many")
def test_publish_many_returns_the_messages_that_the_rows_hold():
    drafts = [Draft(f"topic.{n % 7}", {"n": n}, biz_id=f"b{n}") for n in range(1_203)]
    with transaction.atomic():
        answers = publish_many(drafts)

    rows = OutboxMessage.objects.order_by("pk")
    assert [(row.pk, row.message_id, row.topic, row.biz_id) for row in rows] == [
        (answer.position, answer.id, answer.topic, answer.biz_id) for answer in answers
    ]
    assert [(row.biz_id, json.loads(bytes(row.body))) for row in rows] == [(draft.biz_id, draft.payload) for draft in drafts]


@pytest.mark.usefixtures("few_or_many")
def test_publish_many_raises_the_database_errors_of_django(monkeypatch):
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(transaction.TransactionManagementError):
            publish_many([Draft(TOPIC, {}), Draft(TOPIC, {})])
    ids = outbox.api.new_message_ids
    monkeypatch.setattr(outbox.api, "new_message_ids", lambda count: ids(1) * count)
    with pytest.raises(IntegrityError), transaction.atomic():
        publish_many([Draft(TOPIC, {}), Draft(TOPIC, {})])

    assert not OutboxMessage.objects.exists()


def statements(published):
    with CaptureQueriesContext(connection) as queries, transaction.atomic():
        published()
    return [query["sql"].split()[0] for query in queries if query["sql"].split()[0] in {"SELECT", "INSERT", "COPY"}]


def test_publishing_takes_few_statements_that_execute_wrappers_see():
    is_postgres = connection.vendor == "postgresql"

    assert statements(lambda: publish_many([])) == []
    assert statements(lambda: publish(TOPIC, {})) == ["INSERT"]
    assert statements(lambda: publish_many([Draft(TOPIC, {})] * 5)) == ["INSERT"]
    assert statements(lambda: publish(TOPIC, {}, biz_id="b", unique=True)) == ["INSERT", "INSERT"], "its name, and the message"
    assert statements(lambda: publish(TOPIC, {}, biz_id="b", unique=True)) == ["INSERT", "SELECT"]
    drafts = [Draft(TOPIC, {}, biz_id=f"b{n % 200}", unique=n % 3 > 0) for n in range(400)]
    expected = ["INSERT", *(["SELECT", "COPY"] if is_postgres else ["INSERT"])]
    assert statements(lambda: publish_many(drafts)) == expected
    assert statements(lambda: publish_many(drafts)) == ["INSERT", "SELECT", *expected[1:]]
    many = statements(lambda: publish_many([Draft(TOPIC, {})] * 1_500))
    assert many == (["SELECT", "COPY"] if is_postgres else ["INSERT"] * 3)


@pytest.mark.skipif("connection.vendor != 'postgresql'")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("given_up", [False, True])
def test_batches_of_unique_messages_in_opposite_order_do_not_deadlock(given_up):
    drafts = [Draft(TOPIC, {}, biz_id=f"b{n}", unique=True) for n in range(300)]
    if given_up:
        with transaction.atomic():
            publish_many(drafts)
        OutboxMessage.objects.all().delete()
    start, answers = threading.Barrier(2), []

    def publish_all(drafts):
        start.wait()
        with transaction.atomic():
            answers.extend(publish_many(drafts))

    for _ in range(5):
        at_once([lambda: publish_all(drafts), lambda: publish_all(drafts[::-1])])
        OutboxMessage.objects.all().delete()

    created = [answer.created for answer in answers]
    assert (len(created), sum(created)) == (5 * 600, 5 * 300)
