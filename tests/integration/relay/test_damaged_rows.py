"""The database refuses instants that Python cannot represent. Of other damaged rows only the message is
refused, with the reason; no relay, timer, page or command fails because of it."""

import io
import json
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.db import IntegrityError
from django.db.models import DateTimeField
from django.urls import reverse

from exactly_once.process.clock import utcnow
from exactly_once.transport.interface import PublishOutcome, Verdict
from outbox import cancel, on_dead, publish_now, reschedule, restore
from outbox.models import OutboxMessage, PausedTopic, PendingCallback, TrailEntry
from outbox.states import State
from outbox.store import paused_topics
from tests.support.admin_names import DETAIL, LIST, VIEW
from tests.support.admin_pages import staff_client
from tests.support.commands import output_of
from tests.support.relaying import TOPIC, Queue, a_backlog, ids, published, relaying, row_of, state_of
from tests.support.sql import executed
from tests.support.waiting import wait_until
from tests.support.workers import relay

pytestmark = [pytest.mark.every_database, pytest.mark.django_db(transaction=True), pytest.mark.long]

HOUR = timedelta(hours=1)
REFUSED = {
    **{f"headers = {value}": "headers" for value in ("'5'", "'[1, 2]'", "'null'", "'\"text\"'")},
    f"headers = '{{\"n\": {'9' * 5000}}}'": "headers",
}
"""Changes that damage a row, with the column that the reason names."""
HARMLESS = (
    "body = ''",
    "correlation_id = '\u202e'",
)
"""Changes after which the message can still be sent."""


def damaged(change, message=None, **options):
    """A committed message whose row was changed by hand."""
    message = message or published(**options)
    executed(f"UPDATE outbox_outboxmessage SET {change} WHERE id = {message.position}")
    return message


def last_errors(messages):
    found = OutboxMessage.objects.filter(pk__in=[message.position for message in messages])
    return dict(found.values_list("pk", "last_error"))


def of_every_damage():
    return {change: damaged(change) for change in (*REFUSED, *HARMLESS)}


@pytest.mark.parametrize("instant", ["infinity", "-infinity", "12026-01-01 00:00:00", "0001-01-01 00:00:00"])
def test_instant_that_python_cannot_represent_is_refused_by_the_database(instant):
    message = published(delay=HOUR, expires_in=HOUR)
    paused_topics.pause_refused("default", TOPIC, Verdict(PublishOutcome.NACKED, "full"), 1.0, HOUR)
    row = PendingCallback(message_id=message.id, event="published", callback="c", settled_at=utcnow(), available_at=utcnow())
    row.save()
    restore(cancel(message.id) and message.id)

    for model in (OutboxMessage, PausedTopic, PendingCallback, TrailEntry):
        columns = [field.column for field in model._meta.fields if isinstance(field, DateTimeField)]
        assert model.objects.exists(), model
        for column in columns:
            with pytest.raises(IntegrityError, match="instants"):
                executed(f"UPDATE {model._meta.db_table} SET {column} = '{instant}'")


@pytest.mark.parametrize("change", ["priority = 10", "attempts = 2147483647", "shard = 64"])
def test_number_that_the_outbox_never_writes_is_refused_by_the_database(change):
    message = published()

    with pytest.raises(IntegrityError, match="outbox_message_numbers"):
        damaged(change, message)


class TestRelay:
    def test_damaged_rows_are_dead_with_the_reason_and_all_other_messages_are_published(
        self, rabbitmq_url, caplog, add_callback
    ):
        called = add_callback(on=on_dead)
        refused = {change: damaged(change) for change in REFUSED}
        sendable = [*a_backlog(200), *(damaged(change) for change in HARMLESS)]
        unreadable = damaged("wire = 'not JSON'")

        with Queue(rabbitmq_url, "#") as queue:
            relay(rabbitmq_url)
            arrived = ids(queue.take_all())

        assert sorted(arrived) == sorted(ids(sendable)), "each of them once, and nothing else"
        errors = last_errors(refused.values())
        for change, message in refused.items():
            assert state_of(message) == State.DEAD, change
            reason = errors[message.position]
            assert f"its row is damaged: {REFUSED[change]} " in reason
            assert "Correct the row, then restore the message" in reason
            assert f"{message.id} ({TOPIC}, biz-id {message.id}) is dead at attempt 1: {reason}" in caplog.text
        assert (state_of(unreadable), "cannot be encoded" in row_of(unreadable).last_error) == (State.RETRYING, True)
        assert sorted(settled.id for settled in called) == sorted(message.id for message in refused.values())
        assert all(settled.headers == {} for settled in called)

    def test_damaged_rows_are_refused_alone_in_front_of_local_handlers(self, handles):
        handled = []
        handles(lambda message: handled.append(message.id), topic=TOPIC)
        refused = [damaged(change) for change in REFUSED]
        others = a_backlog(20)

        relay("local://")

        assert {state_of(message) for message in refused} == {State.DEAD}
        assert sorted(map(str, handled)) == sorted(ids(others))

    def test_corrected_and_restored_message_is_published_before_the_later_ones_of_its_key(self, rabbitmq_url):
        first, *later = [published(key="a") for _ in range(3)]
        damaged("headers = '5'", first)
        with Queue(rabbitmq_url) as queue:
            relay(rabbitmq_url)
            assert queue.take_all() == [], "the later messages of its key wait"
            reason = row_of(first).last_error
            call_command("outbox_restore", str(first.id), stdout=io.StringIO())
            relay(rabbitmq_url)
            assert (state_of(first), row_of(first).last_error) == (State.DEAD, reason)

            damaged("""headers = '{"tenant": "acme"}'""", first)
            call_command("outbox_restore", str(first.id), stdout=io.StringIO())
            relay(rabbitmq_url)

            arrived = queue.take_all()
        assert ids(arrived) == ids([first, *later])
        assert arrived[0].headers["tenant"] == "acme"


def test_scheduled_messages_are_published_at_their_time_beside_damaged_ones(rabbitmq_url, caplog):
    soon = timedelta(seconds=0.2)
    for change in REFUSED:
        damaged(change, delay=soon)
    other = published(delay=soon)

    with Queue(rabbitmq_url) as queue, relaying(rabbitmq_url, timed=True):
        wait_until(lambda: state_of(other) == State.PUBLISHED)
        wait_until(lambda: OutboxMessage.objects.filter(state=State.DEAD).count() == len(REFUSED))
        assert str(other.id) in ids(queue.take_all())

    assert not [record for record in caplog.records if record.exc_info], caplog.text


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestPeople:
    """Pages, commands and actions for operators while such rows exist."""

    def test_every_page_and_status_command_survives_damaged_rows(self):
        rows = of_every_damage()
        damaged("wire = 'not JSON'")
        damaged(f"headers = '{{\"nested\": {'[' * 990}{']' * 990}}}'")
        OutboxMessage.objects.filter(pk=rows["headers = '5'"].position).update(state="lost")

        client = staff_client(VIEW, "view_overview")
        pages = [reverse(LIST), *(reverse(LIST, query={"state": state}) for state in State)]
        for page in [*pages, reverse("admin:exactly_once_overview_changelist")]:
            assert client.get(page).status_code == 200
        for position in OutboxMessage.objects.values_list("pk", flat=True):
            assert client.get(reverse(DETAIL, args=[position])).status_code == 200
        output_of("exactly_once_trail", str(rows["headers = '5'"].id))
        output_of("exactly_once_status")
        output_of("outbox_restore", "--all", "--dry-run")
        output_of("exactly_once_purge", "--dry-run")
        assert json.loads(output_of("exactly_once_status", "--json"))["outbox"]["states"]["ready"]

    def test_damaged_messages_can_be_rescheduled_cancelled_and_restored(self):
        messages = of_every_damage()
        for change, message in messages.items():
            assert reschedule(message.id, delay=HOUR), change
            assert publish_now(message.id), change
            assert cancel(message.id), change
        for message in messages.values():
            restore(message.id)

        assert set(OutboxMessage.objects.values_list("state", flat=True)) <= {State.READY, State.SCHEDULED}
