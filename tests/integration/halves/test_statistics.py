"""The statistics of each minute: what the processes write, when, and what happens if they cannot."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from exactly_once.models import Minute
from exactly_once.process.clock import utcnow
from exactly_once.telemetry.statistics import ALL, Tally
from exactly_once.upkeep.minutes import KEPT, Minutes, MinuteWriter, _beginning, database_time
from tests.support.apps.worker import JOB
from tests.support.relaying import TOPIC, published
from tests.support.workers import send

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

HOUR = timedelta(hours=1)
MINUTES = Minutes("outbox")


def rows(app, subject):
    return list(Minute.objects.filter(app=app, subject=subject))


def summed(app, subject, *names):
    return [sum(row.counts.get(name, 0) for row in rows(app, subject)) for name in names]


def timed(app, subject, name):
    """How many durations the histograms of a subject have."""
    return sum(sum(row.times.get(name, {}).values()) for row in rows(app, subject))


def test_relay_writes_what_it_published_by_topic_and_the_latency(a_process):
    with a_process("inbox_consume") as consumer:
        consumer.until(lambda: "receiving from" in consumer.said())
        for _ in range(3):
            published(topic=JOB, payload={})
        published(topic="nobody.listens", payload={})
        with a_process("outbox_relay") as relay:
            relay.until(lambda: rows("outbox", JOB))
            assert relay.end() == 0
        assert consumer.end() == 0

    assert summed("outbox", JOB, "published", "retried") == [3, 0]
    assert summed("outbox", ALL, "published") == [3]
    assert summed("outbox", "nobody.listens", "retried")[0] >= 1
    assert timed("outbox", JOB, "to_broker") == 3


def test_consumer_writes_handled_failed_and_duplicate_messages_and_latencies(a_process, rabbitmq_url):
    with a_process("inbox_consume") as consumer:
        consumer.until(lambda: "receiving from" in consumer.said())
        now = utcnow().isoformat()
        headers = {"cloudEvents:id": "m-1", "cloudEvents:time": now, "cloudEvents:type": JOB, "cloudEvents:source": "/shop"}
        headers["cloudEvents:specversion"] = "1.0"
        send(rabbitmq_url, JOB, {}, headers=headers)
        send(rabbitmq_url, JOB, {}, headers=headers)
        send(rabbitmq_url, JOB, {"do": "fail"}, message_id="m-2")
        name = "worker.work"
        consumer.until(lambda: rows("inbox", name))
        consumer.until(lambda: consumer.said().count("m-2") >= 1)
        assert consumer.end() == 0

    assert summed("inbox", name, "handled", "failed", "resends", "dead") == [1, 1, 1, 0]
    assert timed("inbox", name, "to_effect") == 1
    assert timed("inbox", name, "to_inbox") >= 1


def test_messages_that_are_handed_over_are_counted_by_both_halves(a_process):
    published(topic=JOB, payload={})
    with a_process("outbox_relay", "--drain", outbox={"BROKER_URL": "local://"}, BROKER_URL="local://") as relay:
        assert relay.ends() == 0

    assert summed("outbox", JOB, "published") == [1]
    assert summed("inbox", "worker.work", "handled") == [1]


def test_rows_are_written_once_a_minute_and_first_an_empty_one():
    tally = Tally()
    writer = MinuteWriter("outbox", "default", tally)
    writer.write_if_due()
    assert [(row.subject, row.counts) for row in Minute.objects.all()] == [(ALL, {})]
    assert MINUTES.is_kept("default")

    tally.count(TOPIC, "published")
    writer.write_if_due()
    tally.count(TOPIC, "published")
    writer.write_if_due()

    assert [row.counts for row in rows("outbox", TOPIC)] == [{"published": 1}]
    assert tally.ahead is not None


def test_statistics_of_a_minute_cost_the_time_and_one_insert():
    tally = Tally()
    writer = MinuteWriter("outbox", "default", tally)
    writer.write()  # the first write also deletes old rows
    for topic in (TOPIC, JOB):
        tally.count(topic, "published")

    with CaptureQueriesContext(connection) as asked:
        writer.write()

    statements = [verb for query in asked if (verb := query["sql"].split()[0]) not in {"BEGIN", "COMMIT"}]
    assert statements == (["SELECT", "INSERT"] if connection.vendor == "postgresql" else ["INSERT"])


def test_failed_write_raises_nothing_and_loses_no_count_and_none_is_made_inside_a_transaction():
    tally = Tally()
    writer = MinuteWriter("outbox", "default", tally)
    tally.count(TOPIC, "published", 2)
    with transaction.atomic():
        writer.write()
    assert not Minute.objects.exists()
    with connection.schema_editor() as editor:
        editor.alter_db_table(Minute, "exactly_once_minute", "elsewhere")
    try:
        writer.write()
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(Minute, "elsewhere", "exactly_once_minute")
    assert not tally.is_empty

    writer.write()

    assert summed("outbox", TOPIC, "published") == [2]


def test_old_rows_are_deleted_by_the_process_that_writes():
    now, tally = utcnow(), Tally()
    for ago in (KEPT + HOUR, KEPT - HOUR):
        Minute.objects.create(app="outbox", minute=now - ago, process="host:1", subject=ALL)
    tally.count(TOPIC, "published")

    MinuteWriter("outbox", "default", tally).write()

    assert [row.minute > now - KEPT for row in Minute.objects.filter(minute__lt=now - timedelta(days=7))] == [True]


def test_steps_add_the_rows_of_all_processes_and_leave_the_present_minute_out():
    now = _beginning(database_time("default"))
    for ago in (1, 1, 3):
        at = now - timedelta(minutes=ago)
        Minute.objects.create(
            app="outbox", minute=at, process="host:1", subject=ALL, counts={"published": 5}, times={"to_broker": {"3": 2}}
        )
    Minute.objects.create(app="outbox", minute=now, process="host:1", subject=ALL, counts={"published": 100})

    steps = MINUTES.steps("default", HOUR, timed=["to_broker"])

    assert len(steps) == 60
    assert [step.counted.counts["published"] for step in steps[-3:]] == [5, 0, 10]
    assert steps[-1].counted.times["to_broker"] == {3: 4}
    assert MINUTES.sum("default", HOUR).counts["published"] == 115


def test_instants_belong_to_the_minute_that_they_are_in():
    assert _beginning(datetime(2026, 3, 1, 12, 34, 56, tzinfo=UTC)) == datetime(2026, 3, 1, 12, 34, tzinfo=UTC)
