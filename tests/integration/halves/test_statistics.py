"""The statistics of each minute: what the processes write, when, and what happens if they cannot."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, transaction

from exactly_once.operators.minutes import KEPT, MinuteWriter, _beginning, database_time
from exactly_once.process.clock import utcnow
from exactly_once.telemetry.statistics import ALL, Tally
from inbox.models import MinuteStatistics as InboxStatistics
from outbox.models import MinuteStatistics as OutboxStatistics
from outbox.store.statistics import minutes
from tests.support.apps.worker import JOB
from tests.support.relaying import TOPIC, published
from tests.support.workers import GROUP, Process, as_environment, send

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.every_database]

HOUR = timedelta(hours=1)


def summed(model, subject, *names):
    rows = model.objects.filter(subject=subject).values_list(*names)
    return [sum(column) for column in zip(*rows, strict=True)]


def timed(model, subject, name):
    """How many durations the histograms of a subject have."""
    rows = model.objects.filter(subject=subject).values_list(name, flat=True)
    return sum(sum(histogram.values()) for histogram in rows)


@pytest.fixture
def service(process_environment, tmp_path):
    """Start a command of a project with handlers, on this broker."""

    def start(broker, command, *arguments):
        given = as_environment(OUTBOX={"BROKER_URL": broker}, INBOX={"GROUP": GROUP})
        environment = {**process_environment, "DJANGO_SETTINGS_MODULE": "tests.support.apps.worker.settings", **given}
        return Process(environment, tmp_path / f"{command}.log", command, *arguments)

    return start


def test_relay_writes_what_it_published_by_topic_and_the_latency(service, rabbitmq_url):
    with service(rabbitmq_url, "inbox_consume") as consumer:
        consumer.until(lambda: "receiving from" in consumer.said())
        for _ in range(3):
            published(topic=JOB, payload={})
        published(topic="nobody.listens", payload={})
        with service(rabbitmq_url, "outbox_relay") as relay:
            relay.until(lambda: OutboxStatistics.objects.filter(subject=JOB).exists())
            relay.terminate()
            assert relay.ends() == 0
        consumer.terminate()
        assert consumer.ends() == 0

    assert summed(OutboxStatistics, JOB, "published", "retried") == [3, 0]
    assert summed(OutboxStatistics, ALL, "published") == [3]
    assert summed(OutboxStatistics, "nobody.listens", "retried")[0] >= 1
    assert timed(OutboxStatistics, JOB, "to_broker") == 3


def test_consumer_writes_handled_failed_and_duplicate_messages_and_latencies(service, rabbitmq_url):
    with service(rabbitmq_url, "inbox_consume") as consumer:
        consumer.until(lambda: "receiving from" in consumer.said())
        now = utcnow().isoformat()
        headers = {"cloudEvents:id": "m-1", "cloudEvents:time": now, "cloudEvents:type": JOB, "cloudEvents:source": "/shop"}
        headers["cloudEvents:specversion"] = "1.0"
        send(rabbitmq_url, JOB, {}, headers=headers)
        send(rabbitmq_url, JOB, {}, headers=headers)
        send(rabbitmq_url, JOB, {"do": "fail"}, message_id="m-2")
        name = "testworker.work"
        consumer.until(lambda: InboxStatistics.objects.filter(subject=name).exists())
        consumer.until(lambda: consumer.said().count("m-2") >= 1)
        consumer.terminate()
        assert consumer.ends() == 0

    assert summed(InboxStatistics, name, "handled", "failed", "resends", "dead") == [1, 1, 1, 0]
    assert timed(InboxStatistics, name, "to_effect") == 1
    assert timed(InboxStatistics, name, "to_inbox") >= 1


def test_messages_that_are_handed_over_are_counted_by_both_halves(service):
    published(topic=JOB, payload={})
    with service("local://", "outbox_relay", "--drain") as relay:
        assert relay.ends() == 0

    assert summed(OutboxStatistics, JOB, "published") == [1]
    assert summed(InboxStatistics, "testworker.work", "handled") == [1]


def test_rows_are_written_once_a_minute_and_first_an_empty_one():
    tally = Tally()
    writer = MinuteWriter(OutboxStatistics, "default", tally)
    writer.write_if_due()
    assert [(row.subject, row.published) for row in OutboxStatistics.objects.all()] == [(ALL, 0)]
    assert minutes.is_kept("default")

    tally.count(TOPIC, "published")
    writer.write_if_due()
    tally.count(TOPIC, "published")
    writer.write_if_due()

    assert [row.published for row in OutboxStatistics.objects.filter(subject=TOPIC)] == [1]
    assert tally.ahead is not None


def test_nothing_is_written_inside_a_transaction():
    tally = Tally()
    tally.count(TOPIC, "published")

    with transaction.atomic():
        MinuteWriter(OutboxStatistics, "default", tally).write()

    assert not OutboxStatistics.objects.exists()
    assert not tally.is_empty


def test_failed_write_raises_nothing_and_loses_no_count():
    tally = Tally()
    writer = MinuteWriter(OutboxStatistics, "default", tally)
    tally.count(TOPIC, "published", 2)
    with connection.schema_editor() as editor:
        editor.alter_db_table(OutboxStatistics, "outbox_minutestatistics", "elsewhere")
    try:
        writer.write()
    finally:
        with connection.schema_editor() as editor:
            editor.alter_db_table(OutboxStatistics, "elsewhere", "outbox_minutestatistics")

    writer.write()

    assert summed(OutboxStatistics, TOPIC, "published") == [2]


def test_old_rows_are_deleted_by_the_process_that_writes():
    now = utcnow()
    for ago in (KEPT + timedelta(hours=1), KEPT - timedelta(hours=1)):
        OutboxStatistics.objects.create(minute=now - ago, process="host:1", subject=ALL)
    tally = Tally()
    tally.count(TOPIC, "published")

    MinuteWriter(OutboxStatistics, "default", tally).write()

    assert OutboxStatistics.objects.filter(minute__lt=now - KEPT).count() == 0
    assert OutboxStatistics.objects.filter(minute__lt=now - timedelta(days=7)).count() == 1


def test_steps_add_the_rows_of_all_processes_and_leave_the_present_minute_out():
    now = _beginning(database_time("default"))
    for ago in (1, 1, 3):
        at = now - timedelta(minutes=ago)
        OutboxStatistics.objects.create(minute=at, process="host:1", subject=ALL, published=5, to_broker={"3": 2})
    OutboxStatistics.objects.create(minute=now, process="host:1", subject=ALL, published=100)

    steps = minutes.steps("default", HOUR, timed=["to_broker"])

    assert len(steps) == 60
    assert [step.counted.counts["published"] for step in steps[-3:]] == [5, 0, 10]
    assert steps[-1].counted.times["to_broker"] == {3: 4}
    assert minutes.sum("default", HOUR).counts["published"] == 115


def test_instants_belong_to_the_minute_that_they_are_in():
    assert _beginning(datetime(2026, 3, 1, 12, 34, 56, tzinfo=UTC)) == datetime(2026, 3, 1, 12, 34, tzinfo=UTC)
