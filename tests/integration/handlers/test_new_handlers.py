"""A new handler gets its past from the outbox's history, before anything new, and the other handlers see nothing of it."""

import json
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from django.core.checks import run_checks
from django.core.management import call_command
from django.db import Error, transaction
from django.test import override_settings
from psycopg import IsolationLevel

from exactly_once.process.loop import StopRequest
from exactly_once.sql.days import day_of
from exactly_once.sql.now import DatabaseTime
from inbox import idempotent_handler
from inbox.conf import inbox_options
from inbox.models import HandlerStart, InboxMessage
from inbox.store import handler_rows
from outbox import Draft, publish_many
from outbox.models import OutboxMessage
from outbox.relay import starting
from outbox.relay.service import serve
from outbox.states import State
from outbox.store import backfilling
from outbox.store.dialect import begin_bounded
from tests.support.aliases import the_default_at
from tests.support.apps import newcomer
from tests.support.apps.effects.models import Effect
from tests.support.commands import output_of
from tests.support.deliveries import effects, the_effect
from tests.support.inbox_rows import rename_messages, store_message
from tests.support.open_transactions import OpenTransaction
from tests.support.relaying import EXCHANGE, SECONDS, TOPIC, in_threads, published, set_columns
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, consuming, declare

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

everywhere = pytest.mark.every_database
KEYS = ("k0", "k1", "k2")


def published_many(count, since=0, topic=TOPIC):
    """Numbered messages; every third one of each key."""
    with transaction.atomic():
        publish_many([Draft(topic, {"n": n}, key=f"k{n % 3}", biz_id=f"order-{n}") for n in range(since, since + count)])


def relay_all():
    call_command("outbox_relay", drain=True)


status = partial(output_of, "exactly_once_status")


def notes(message):
    Effect.objects.create(name=message.key, detail=str(message.payload["n"]))


def handled():
    """What `notes` was called with, by key, in that order."""
    rows = list(Effect.objects.order_by("pk").values_list("name", "detail"))
    return {key: [int(n) for name, n in rows if name == key] for key in KEYS}


def of_each_key(count):
    """Every message once, in the order of its key."""
    return {key: list(range(number, count, 3)) for number, key in enumerate(KEYS)}


def has_its_past(handler):
    return HandlerStart.objects.filter(handler=handler.name, complete_at__isnull=False).exists()


class TestLocally:
    """With `local://`."""

    pytestmark = everywhere

    @pytest.fixture(autouse=True)
    def _local(self):
        with override_settings(OUTBOX={"BROKER_URL": "local://"}, INBOX={}):
            yield

    @pytest.mark.long
    def test_from_the_first_it_sees_every_message_once_in_the_order_of_its_key_before_new_ones(self, handles, monkeypatch):
        monkeypatch.setattr(starting, "_BATCH", 4)
        other = handles(the_effect, topic=TOPIC, name="other")
        published_many(15)
        relay_all()
        Effect.objects.all().delete()

        handles(notes, topic=TOPIC, name="new", ordered=True, start_from="beginning")
        published_many(6, since=15)
        relay_all()

        assert handled() == of_each_key(21)
        assert not InboxMessage.objects.filter(handler=other.name, duplicates__gt=0).exists()
        assert InboxMessage.objects.filter(handler=other.name).count() == 21

    @pytest.mark.long
    def test_past_of_which_a_whole_batch_is_purged_meanwhile_is_handed_over_without_it(self, handles, monkeypatch):
        monkeypatch.setattr(starting, "_BATCH", 3)
        read_published = backfilling.read_published

        def read_after_a_purge(alias, positions):
            OutboxMessage.objects.filter(biz_id__in=["order-0", "order-1", "order-2"]).delete()
            return read_published(alias, positions)

        handles(the_effect, topic=TOPIC, name="other")
        published_many(6)
        relay_all()
        Effect.objects.all().delete()

        new = handles(notes, topic=TOPIC, name="new", start_from="beginning")
        monkeypatch.setattr(backfilling, "read_published", read_after_a_purge)
        relay_all()

        assert has_its_past(new)
        assert handled() == {"k0": [3], "k1": [4], "k2": [5]}

    @pytest.mark.long
    def test_from_the_first_it_sees_the_messages_of_all_its_topics_in_the_order_of_their_keys(self, handles, monkeypatch):
        monkeypatch.setattr(starting, "_BATCH", 4)
        handles(the_effect, topic=[TOPIC, "shop.cancelled", "shop.other"], name="other")
        for since, topic in ((0, TOPIC), (6, "shop.cancelled"), (12, TOPIC), (18, "shop.other")):
            published_many(6, since=since, topic=topic)
        relay_all()
        Effect.objects.all().delete()

        new = handles(notes, topic=[TOPIC, "shop.cancelled"], name="new", ordered=True, start_from="beginning")
        relay_all()

        assert has_its_past(new)
        assert handled() == of_each_key(18)

    @pytest.mark.long
    def test_start_from_an_instant_hands_over_messages_published_since(self, handles):
        handles(the_effect, topic=TOPIC, name="other")
        old, _new = published(payload={"n": 1}), published(payload={"n": 2})
        relay_all()
        set_columns(old, state=State.PUBLISHED, settled_at=DatabaseTime(timedelta(days=-2)))

        handler = handles(notes, topic=TOPIC, start_from=datetime.now(UTC) - timedelta(days=1))
        relay_all()

        assert list(Effect.objects.filter(detail="2").values_list("detail")) == [("2",)]
        assert InboxMessage.objects.filter(handler=handler.name).count() == 1

    @pytest.mark.long
    def test_from_the_last_it_sees_new_messages_only(self, handles):
        handles(the_effect, topic=TOPIC, name="other")
        published()
        relay_all()

        handler = handles(the_effect, topic=TOPIC, name="new", start_from="now")
        published()
        relay_all()

        assert InboxMessage.objects.filter(handler=handler.name).count() == 1
        assert not HandlerStart.objects.exists()

    def test_a_handler_that_has_handled_messages_does_not_start_again(self, handles):
        handles(the_effect, topic=TOPIC, name="known")
        published()
        relay_all()
        rename_messages(biz_id="another")

        handler = handles(the_effect, topic=TOPIC, name="known", start_from="beginning")
        published()
        relay_all()

        assert InboxMessage.objects.filter(handler=handler.name).count() == 2
        assert has_its_past(handler)
        assert HandlerStart.objects.get().handed_over == 0

    @pytest.mark.long
    @pytest.mark.parametrize("biz_id", [None, lambda message: message.payload["n"]], ids=["its own biz-id", "biz_id="])
    def test_the_maximum_message_age_does_not_apply_to_the_past(self, handles, biz_id):
        handles(the_effect, topic=TOPIC, name="other")
        message = published(payload={"n": 1})
        relay_all()
        OutboxMessage.objects.filter(message_id=message.id).update(created_at=DatabaseTime(-2 * inbox_options().RETENTION))

        handler = handles(the_effect, topic=TOPIC, name="new", start_from="beginning", biz_id=biz_id)
        relay_all()

        assert InboxMessage.objects.get(handler=handler.name).state == "done"

    def test_unpublished_messages_are_not_handed_to_a_new_handler_as_history(self, handles):
        handles(the_effect, topic=TOPIC, name="other")
        set_columns(published(), state=State.CANCELLED, settled_at=DatabaseTime())
        set_columns(published(), state=State.DEAD)

        handler = handles(the_effect, topic=TOPIC, name="new", start_from="beginning")
        relay_all()

        assert has_its_past(handler)
        assert not InboxMessage.objects.filter(handler=handler.name).exists()

    @pytest.mark.parametrize("waits", [False, True], ids=["from its beginning", "when history ends"])
    def test_without_history_it_gets_new_messages_at_once(self, handles, settings, waits):
        handler = handles(the_effect, topic=TOPIC, name="new", start_from="beginning")
        if waits:
            assert handler_rows.waiting_among("default", {"new": handler.starts_at}) == {"new"}
        settings.OUTBOX = {"BROKER_URL": "local://", "KEEP_HISTORY": None}
        published()

        relay_all()

        assert InboxMessage.objects.filter(handler=handler.name).count() == 1
        assert has_its_past(handler)
        (warning,) = [one for one in run_checks() if one.id == "inbox.W005"]
        assert "KEEP_HISTORY" in warning.msg

    def test_check_and_status_say_in_words_what_a_handler_gets_since_an_instant(self, handles):
        since = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
        handler = handles(the_effect, topic=TOPIC, name="new", start_from=since)
        words = "all messages of its topics in the outbox's history since 2026-03-01 12:30:00+00:00"
        assert handler_rows.waiting_among("default", {"new": handler.starts_at}) == {"new"}

        with override_settings(OUTBOX={"BROKER_URL": "local://", "KEEP_HISTORY": None}):
            (warning,) = [one for one in run_checks() if one.id == "inbox.W005"]

        assert f"The handler new wants {words} (start_from), but" in warning.msg
        assert words in status()
        assert "waits for its past" in status()
        (shown,) = json.loads(status(json=True))["inbox"]["starting_handlers"]
        assert (shown["handler"], shown["topics"], shown["handed_over"], shown["gets"]) == ("new", [TOPIC], 0, words)


def test_the_last_step_sees_what_was_published_while_it_waited_at_every_isolation_level(handles, monkeypatch):
    stop_passes = backfilling.stop_passes

    def stopped_late(alias):
        monkeypatch.setattr(backfilling, "stop_passes", stop_passes)
        with in_threads(publish_one):
            pass
        stop_passes(alias)

    def publish_one():
        published()
        OutboxMessage.objects.update(state=State.PUBLISHED, settled_at=DatabaseTime(), day=day_of("default"))

    monkeypatch.setattr(backfilling, "stop_passes", stopped_late)
    repeatable = the_default_at(OPTIONS={"isolation_level": IsolationLevel.REPEATABLE_READ})
    with override_settings(OUTBOX={"BROKER_URL": "local://"}, INBOX={}), repeatable:
        handler = handles(the_effect, topic=TOPIC, name="new", start_from="beginning")
        relay_all()

    assert InboxMessage.objects.filter(handler=handler.name).count() == 1


def test_the_server_ends_the_transaction_of_a_relay_that_is_frozen_with_all_shards():
    other = OpenTransaction()

    def freeze_until_the_other_has_all_shards():
        with transaction.atomic():
            begin_bounded("default", timedelta(milliseconds=50))
            backfilling.stop_passes("default")
            other.does(backfilling.stop_passes, "default").result(SECONDS)

    try:
        with pytest.raises(Error):
            freeze_until_the_other_has_all_shards()
    finally:
        other.rolls_back()
        other.ends()


class TestFromABroker:
    @pytest.fixture
    def options(self, rabbitmq_url, monkeypatch):
        monkeypatch.setattr(starting, "_CLOCK_STEP", timedelta())
        given = {"BROKER_URL": rabbitmq_url, "EXCHANGE": EXCHANGE}
        options = broker_options(rabbitmq_url, EXCHANGE=EXCHANGE)
        with override_settings(OUTBOX=given, INBOX={"BROKER_URL": rabbitmq_url, "GROUP": options.GROUP}):
            yield options

    def relayed_to_another(self, handles, options, count):
        """Another handler of the topic, whose queue has so many messages."""
        other = handles(lambda message: None, topic=TOPIC, name="other")
        declare(other, options)
        published_many(count)
        relay_all()
        return other

    def test_it_sees_every_message_once_in_the_order_of_its_key_while_new_ones_keep_coming(self, handles, options, monkeypatch):
        monkeypatch.setattr(starting, "_BATCH", 10)
        other = self.relayed_to_another(handles, options, 60)

        new = handles(notes, topic=TOPIC, name="new", ordered=True, start_from="beginning")
        stop = StopRequest()
        relays = [partial(serve, "default", stop=stop)] * 2
        with consuming([other, new], options), in_threads(*relays, stop=stop):
            for since in range(60, 120, 6):
                published_many(6, since=since)
            wait_until(lambda: effects() == 120)
            wait_until(lambda: InboxMessage.objects.filter(handler=other.name).count() == 120)

        assert handled() == of_each_key(120)
        assert not InboxMessage.objects.filter(handler=other.name, duplicates__gt=0).exists()

    def test_without_start_from_it_gets_only_what_is_relayed_after_its_queue_was_declared(self, handles, options):
        other = self.relayed_to_another(handles, options, 3)

        new = handles(notes, topic=TOPIC, name="new")
        declare(new, options)
        published_many(3, since=3)
        relay_all()
        with consuming([other, new], options):
            wait_until(lambda: InboxMessage.objects.filter(handler=other.name).count() == 6)
            wait_until(lambda: effects() >= 3)

        assert handled() == {"k0": [3], "k1": [4], "k2": [5]}

    def test_its_past_ends_where_its_queue_begins_while_as_many_are_published_as_are_read(self, handles, options, monkeypatch):
        monkeypatch.setattr(starting, "_BATCH", 3)
        read_past, published_meanwhile = backfilling.read_past, []

        def read_while_others_publish(*arguments):
            if len(published_meanwhile) < 10:
                published_meanwhile.append(published_many(3))
                new_ones = OutboxMessage.objects.filter(state=State.READY)
                new_ones.update(state=State.PUBLISHED, settled_at=DatabaseTime(), day=day_of("default"))
            return read_past(*arguments)

        self.relayed_to_another(handles, options, 6)
        OutboxMessage.objects.update(settled_at=DatabaseTime(timedelta(minutes=-1)))
        new = handles(the_effect, topic=TOPIC, name="new", start_from="beginning")
        handler_rows.waiting_among("default", {new.name: new.starts_at})
        monkeypatch.setattr(backfilling, "read_past", read_while_others_publish)
        relay_all()

        assert has_its_past(new)
        assert HandlerStart.objects.get().handed_over == 6

    def test_new_messages_wait_in_its_queue_until_a_relay_has_handed_its_past_over(self, handles, options, caplog):
        self.relayed_to_another(handles, options, 3)

        new = handles(notes, topic=TOPIC, name="new", ordered=True, start_from="beginning")
        with consuming([new], options):
            wait_until(lambda: handler_rows.waiting_handlers("default") == ["new"])
            wait_until(lambda: "no relay has begun to hand over the past of new" in caplog.text)
            assert "No relay has begun to hand over the past of: new." in status()
            assert [shown["begun"] for shown in json.loads(status(json=True))["inbox"]["starting_handlers"]] == [False]
            published_many(3, since=3)
            from_here = StopRequest()
            # A pass of a relay that knows nothing of the inbox's starts.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(starting, "_STARTS", f"{__name__}.no_starts")
                serve("default", drain=True, stop=from_here)
            assert effects() == 0
            relay_all()
            wait_until(lambda: effects() == 6)

        assert handled() == of_each_key(6)
        assert "No relay has begun" not in status()


def test_a_relay_killed_in_the_middle_is_continued_by_another_which_hands_over_nothing_twice(command):
    with override_settings(OUTBOX={"BROKER_URL": "local://"}, INBOX={}):
        published_many(450, topic=newcomer.TOPIC)
    OutboxMessage.objects.update(state=State.PUBLISHED, settled_at=DatabaseTime(), day=day_of("default"))
    relay = partial(command, "outbox_relay", app="newcomer", OUTBOX={"BROKER_URL": "local://"})
    row = {"handler": newcomer.NAME, "topic": newcomer.TOPIC, "biz_id": "order-300", "message_id": "another", "body": b""}
    # Another transaction has message 300 in hand, so the second batch cannot be stored until it ends.
    other = OpenTransaction()
    try:
        other.does(store_message, received_at=DatabaseTime(), **row).result(SECONDS)
        with relay() as first:
            first.until(lambda: HandlerStart.objects.filter(handed_over=200).exists())
            first.kill()
        assert not HandlerStart.objects.get().complete_at
    finally:
        other.rolls_back()
        other.ends()

    with relay() as second:
        second.until(lambda: effects() == 450)

    assert handled() == of_each_key(450)
    assert InboxMessage.objects.count() == 450


def no_starts(alias, *, is_local):
    """As in a relay whose project has no handler that wants its past."""


@pytest.mark.parametrize("start_from", ["firts", datetime(2026, 3, 1), 5])  # noqa: DTZ001 - it is what is refused
def test_a_wrong_start_is_refused(start_from):
    with pytest.raises((TypeError, ValueError), match="start_from is"):
        idempotent_handler(TOPIC, start_from=start_from)


def test_a_start_on_a_database_without_an_outbox_is_reported(handles, settings):
    needs_it = ("outbox", "inbox.contrib.tasks")
    settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if not app.startswith(needs_it)]
    handles(the_effect, topic=TOPIC, name="tests.new", start_from="beginning")

    (warning,) = [one for one in run_checks() if one.id == "inbox.W005"]

    assert f"outbox_replay --topic {TOPIC} --to-group {inbox_options().group}.tests.new" in warning.hint
