"""Replay: published messages are sent again, with the same ids, in the order of their keys, and once per replay."""

import re
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import urlsplit

import kombu
import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from exactly_once.console.operators.audit import Actor
from exactly_once.models import AuditEntry, Operation
from exactly_once.process.clock import utcnow
from exactly_once.process.loop import StopRequest
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep import executing
from exactly_once.upkeep.executing import Operations
from inbox import Ordered
from inbox.conf import inbox_options
from inbox.consumer.topology import declare, queue_name
from inbox.models import InboxMessage, Receipt
from outbox.models import OutboxMessage, TrailEntry
from outbox.operators.replaying import Replay, plan
from outbox.states import State
from outbox.store.selecting import Selection
from outbox.topic_pauses import pause
from tests.support.commands import output_of
from tests.support.deliveries import at_once, drain, the_effect
from tests.support.inbox_rows import delete_messages
from tests.support.relaying import TOPIC, Queue, drained, ids, published, published_many, set_columns
from tests.support.servers import FaultProxy
from tests.support.servers.private import free_port

pytestmark = pytest.mark.django_db(transaction=True)


def replayed(**options):
    """What the command prints."""
    given = {"all": not options.keys() & {"topic", "biz_id", "since", "until"}, "yes": True, "verbosity": 0}
    return output_of("outbox_replay", **{**given, **options})


def sent(count, topic=TOPIC, **options):
    """This many messages that have been published."""
    messages = published_many(count, topic, payload=lambda n: {"n": n}, biz_id=lambda n: f"{topic}-{n}", **options)
    for message in messages:
        set_columns(message, state=State.PUBLISHED, settled_at=DatabaseTime())
    return messages


def planned():
    """What `plan` returns for a replay of everything."""
    actor = Actor(name="operator", place="test", address="")
    return plan("default", Replay(selection=Selection()), rate=500, reason="", actor=actor)


def settled(message, ago):
    set_columns(message, settled_at=DatabaseTime(-ago), state=State.PUBLISHED)


@pytest.fixture
def broker(rabbitmq_url):
    with override_settings(OUTBOX={"BROKER_URL": rabbitmq_url}, INBOX={"BROKER_URL": rabbitmq_url}):
        yield rabbitmq_url


@contextmanager
def through_a_proxy(url, **options):
    """The broker behind a link that can be slow, and can be cut."""
    port = urlsplit(url).port
    with FaultProxy("127.0.0.1", port) as link, override_settings(OUTBOX={"BROKER_URL": link.through(url), **options}):
        yield link


@pytest.fixture
def local():
    with override_settings(OUTBOX={"BROKER_URL": "local://"}, INBOX={}):
        yield


class TestSelection:
    @pytest.fixture(autouse=True)
    def _local(self, local):
        pass

    @pytest.mark.every_database
    def test_dry_run_counts_by_topic_and_state_and_reports_an_instant_before_the_history_and_sends_nothing(self):
        sent(2)
        sent(1, "shop.paid")
        set_columns(published(), state=State.CANCELLED, settled_at=DatabaseTime())
        set_columns(sent(1, "shop.old")[0], expires_at=DatabaseTime(timedelta(hours=-1)))

        shown = replayed(dry_run=True)

        assert re.search(rf"{TOPIC} +published +2 +0 ", shown)
        assert re.search(rf"{TOPIC} +cancelled +1 +0 ", shown)
        assert re.search(r"shop\.paid +published +1 +0 ", shown)
        assert (
            "Published: 4. Of these, 1 have expired and are not sent. The others are sent to every queue of their topic."
            in shown
        )
        assert "In another state and not sent: 1;" in shown
        shown = replayed(since=(utcnow() - timedelta(days=30)).isoformat(), dry_run=True)
        assert "OUTBOX['KEEP_HISTORY'] is 7 days, 0:00:00: messages that were published earlier" in shown
        assert not Operation.objects.exists()

    @pytest.mark.long
    @pytest.mark.every_database
    def test_messages_are_selected_by_period_topic_and_biz_id(self, handles):
        handles(the_effect, topic=TOPIC)
        handles(the_effect, topic="shop.paid", name="paid")
        old, new = sent(2)
        (paid,) = sent(1, "shop.paid")
        settled(old, timedelta(hours=2))
        hour_ago = (utcnow() - timedelta(hours=1)).isoformat()

        def handed_over(**options):
            delete_messages()
            replayed(**options)
            return set(InboxMessage.objects.values_list("message_id", flat=True))

        assert handed_over(since=hour_ago) == set(ids([new, paid]))
        assert handed_over(until=hour_ago) == set(ids([old]))
        assert handed_over(topic="shop.paid") == set(ids([paid]))
        assert handed_over(topic=TOPIC, biz_id=new.biz_id) == set(ids([new]))
        assert handed_over(all=True) == set(ids([old, new, paid]))

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"all": False}, "Select the messages"),
            ({"to_group": "billing.pay"}, "--to-group needs --topic"),
            ({"rate": "fast"}, "--rate is 'fast'"),
            ({"since": "yesterday"}, "--since is 'yesterday'"),
        ],
    )
    def test_a_wrong_option_is_refused(self, options, said):
        with pytest.raises(CommandError, match=said):
            replayed(**options)

    def test_nothing_is_sent_without_a_confirmation(self, monkeypatch):
        sent(1)
        monkeypatch.setattr("builtins.input", lambda _: "n")

        with pytest.raises(CommandError, match="Nothing was sent"):
            replayed(yes=False)

        assert not Operation.objects.exists()


class TestLocally:
    """With `local://`, where the messages are handed to the inbox of the same database."""

    @pytest.fixture(autouse=True)
    def _local(self, local):
        pass

    @pytest.mark.every_database
    def test_messages_that_were_handled_are_suppressed_and_lost_ones_are_handled(self, handles):
        handler = handles(the_effect, topic=TOPIC)
        for n in range(3):
            published(payload={"n": n}, biz_id=f"order-{n}")
        drained("local://")
        drain()
        for kept in (InboxMessage, Receipt):
            kept.objects.filter(biz_id="order-1").delete()

        replayed()
        drain()

        counted = dict(InboxMessage.objects.filter(handler=handler.name).values_list("biz_id", "duplicates"))
        assert counted == {"order-0": 1, "order-1": 0, "order-2": 1}
        assert set(InboxMessage.objects.values_list("state", flat=True)) == {"done"}

    @pytest.mark.parametrize("topics", [TOPIC, [TOPIC, "shop.paid"]], ids=["one topic", "several topics"])
    def test_only_the_given_group_gets_the_messages(self, handles, topics):
        """A handler of several topics is named by its queue."""
        one, _other = handles(the_effect, topic=topics, name="one"), handles(the_effect, topic=TOPIC, name="other")
        sent(2)

        several = queue_name(one, inbox_options())
        replayed(topic=TOPIC, to_group=f"{inbox_options().group}.{one.name}" if topics == TOPIC else several)

        assert set(InboxMessage.objects.values_list("handler", flat=True)) == {"one"}

    @pytest.mark.every_database
    def test_a_replay_does_not_change_the_message_and_is_recorded(self, handles):
        handles(the_effect, topic=TOPIC)
        (message,) = sent(1)
        before = OutboxMessage.objects.values().get()

        replayed(reason="the broker lost its disk")

        assert OutboxMessage.objects.values().get() == before
        entry = AuditEntry.objects.get(action="replay")
        assert entry.parameters["messages"] == 1
        assert entry.parameters["reason"] == "the broker lost its disk"
        trail = TrailEntry.objects.get(message_id=message.id)
        assert (trail.was, trail.became) == ("published", "published")
        assert "sent again" in trail.reason
        assert "the broker lost its disk" in trail.reason

    def test_expired_messages_and_paused_topics_are_left_out(self, handles):
        handles(the_effect, topic=TOPIC)
        _one, expired = sent(2)
        sent(1, "shop.paid")
        set_columns(expired, expires_at=DatabaseTime(timedelta(hours=-1)))
        pause("shop.paid")

        shown = replayed()

        assert "Sent again: 1 of 3." in shown
        assert "Not sent: 1 (it has expired)." in shown
        assert "Not sent: 1 (its topic is paused)." in shown

    def test_the_same_replay_is_not_planned_twice_while_it_is_open(self, handles):
        handles(the_effect, topic=TOPIC)
        sent(3)

        first, second = planned(), planned()
        shown = replayed()

        assert (first.is_new, second.is_new) == (True, False)
        assert first.operation == second.operation == Operation.objects.get()
        assert f"The same replay is operation {first.operation.pk}" in shown
        assert InboxMessage.objects.count() == 3
        assert not InboxMessage.objects.filter(duplicates__gt=0).exists()

    def test_a_running_relay_executes_a_planned_replay(self, handles):
        handles(the_effect, topic=TOPIC)
        sent(2)
        planned()

        call_command("outbox_relay", drain=True)

        assert Operation.objects.get().state == "finished"
        assert InboxMessage.objects.count() == 2


def test_two_operators_who_start_the_same_replay_at_once_get_one_operation(local):
    sent(3)

    found = at_once([planned] * 8)

    assert Operation.objects.count() == 1
    assert sorted(one.is_new for one in found) == [False] * 7 + [True]


class TestRabbitMQ:
    def test_every_queue_of_the_topic_gets_the_same_messages_marked_as_replayed(self, broker):
        with Queue(broker, name="one") as one, Queue(broker, name="other") as other:
            messages = sent(3)
            replayed()
            deliveries = one.take(3)
            assert ids(deliveries) == ids(other.take(3)) == ids(messages)

        assert {delivery.headers["cloudEvents:replay"] for delivery in deliveries} == {"operator"}
        assert [delivery.headers["cloudEvents:bizid"] for delivery in deliveries] == [one.biz_id for one in messages]

    def test_only_the_queue_of_the_given_group_gets_them(self, broker):
        with Queue(broker, name=f"billing.pay@{TOPIC}") as billing, Queue(broker, name=f"stock.reserve@{TOPIC}") as stock:
            messages = sent(3)

            replayed(topic=TOPIC, to_group="billing.pay")

            assert ids(billing.take(3)) == ids(messages)
            assert stock.take_all() == []

    def test_the_partitions_of_one_handler_get_them_by_key(self, broker, handles):
        handler = handles(the_effect, topic=TOPIC, name="parted", ordered=Ordered(partitions=2))
        with kombu.Connection(broker) as connection:
            declare(connection, handler, inbox_options())
            sent(40, key=lambda n: f"k{n}" if n < 20 else "")

            replayed(topic=TOPIC, to_group=f"{inbox_options().group}.{handler.name}")

            name = f"{inbox_options().group}.{handler.name}@{TOPIC}"
            lengths = [connection.default_channel.queue_declare(f"{name}.{number}", passive=True)[1] for number in (0, 1)]
        assert sum(lengths) == 40
        assert all(lengths)

    def test_a_queue_that_does_not_exist_is_reported_for_each_message(self, broker):
        sent(2)

        with pytest.raises(CommandError, match="did not accept: 2"):
            replayed(topic=TOPIC, to_group="billing.unknown")

        assert Operation.objects.get().reasons == {f"unroutable: queue 'billing.unknown@{TOPIC}' does not exist": 2}

    def test_the_rate_is_kept(self, broker, monkeypatch):
        waited = []
        monkeypatch.setattr(StopRequest, "wait", lambda self, seconds: waited.append(seconds))
        monkeypatch.setattr(executing, "monotonic", lambda: 0.0)  # as if a batch took no time
        with Queue(broker):
            sent(25)
            replayed(rate="10/s")

        assert waited == [1, 1, 0.5]

    def test_a_broker_that_cannot_be_reached_is_waited_for(self, rabbitmq_url, caplog):
        sent(2)
        operation = planned().operation

        with override_settings(OUTBOX={"BROKER_URL": f"amqp://guest:guest@127.0.0.1:{free_port()}//"}):
            for _ in range(executing._MOST_ERRORS + 1):
                Operations("outbox", ["default"]).drain(StopRequest())
                Operation.objects.update(leased_until=None)
        assert Operation.objects.get().state == "running"
        assert "an operation on 'default' waits for the broker" in caplog.text

        with override_settings(OUTBOX={"BROKER_URL": rabbitmq_url}), Queue(rabbitmq_url) as queue:
            Operations("outbox", ["default"]).drain(StopRequest())
            assert len(queue.take(2)) == 2
        operation.refresh_from_db()
        assert (operation.state, operation.done) == ("finished", 2)

    def test_replay_of_one_key_over_a_slow_link_ends_and_sends_each_message_once(self, broker):
        """The messages of a key are sent one by one, so one batch of them takes longer than BATCH_DEADLINE."""
        with through_a_proxy(broker, BATCH_DEADLINE=timedelta(seconds=1)) as link, Queue(broker) as queue:
            messages = sent(60, key="k")
            link.delay(0.02)
            replayed()

            deliveries = queue.take_all()
        assert list(dict.fromkeys(ids(deliveries))) == ids(messages)
        assert len(deliveries) < 3 * len(messages)

    @pytest.mark.long
    def test_replay_to_a_broker_that_confirms_fewer_messages_in_time_than_a_batch_has_ends(self, peer):
        """It confirms ten messages of a connection. So a batch of ten is the largest that can be confirmed."""
        messages = sent(60)

        def confirm_ten(arrived):
            return [lambda: peer.ack(arrived)] if arrived.tag <= 10 else []

        peer.script = confirm_ten
        with override_settings(OUTBOX={"BROKER_URL": peer.url, "BATCH_DEADLINE": timedelta(seconds=0.5)}):
            replayed()

        assert set(ids(peer.published)) == set(ids(messages))
        assert Operation.objects.get().done == 60
        assert len(peer.published) < 5 * len(messages)

    @pytest.mark.long
    @pytest.mark.parametrize("batch_bytes", [1, 20], ids=["[a], [k1], [k2]", "[a, k1], [k2]"])
    def test_unconfirmed_message_stops_the_parts_after_it_and_keeps_those_before(self, peer, monkeypatch, batch_bytes):
        """A batch of large messages is sent in parts."""
        messages = sent(1) + sent(2, key="k")
        unconfirmed = []

        def confirm_others(arrived):
            if ids([arrived]) != ids(messages[1:2]) or unconfirmed:
                return [lambda: peer.ack(arrived)]
            unconfirmed.append(arrived)
            return []

        peer.script = confirm_others
        monkeypatch.setattr("outbox.store.messages.BATCH_BYTES", batch_bytes)
        with override_settings(OUTBOX={"BROKER_URL": peer.url, "BATCH_DEADLINE": timedelta(seconds=2)}):
            replayed()

        a, k1, k2 = ids(messages)
        assert ids(peer.published) == [a, k1, k1, k2]
        assert Operation.objects.get().done == 3

    @pytest.mark.parametrize("bytes_before_the_end", [50, 80, 110])
    def test_connection_that_is_reset_while_the_queue_of_a_group_is_looked_up_fails_no_message(
        self, broker, bytes_before_the_end
    ):
        with through_a_proxy(broker) as link, Queue(broker, name=f"billing.pay@{TOPIC}") as billing:
            messages = sent(1)
            replayed(topic=TOPIC, to_group="billing.pay")
            link.cut_after(link.bytes_to_client - bytes_before_the_end, "to_client")

            replayed(topic=TOPIC, to_group="billing.pay")

            assert set(ids(billing.take(2))) == set(ids(messages))
        assert list(Operation.objects.values_list("state", "done", "failed")) == [("finished", 1, 0)] * 2

    def test_a_replay_that_is_killed_is_continued_and_sends_every_message(self, broker, command):
        with Queue(broker) as queue:
            messages = sent(60)
            arguments = ("outbox_replay", "--all", "--yes", "--rate", "20/s")
            with command(*arguments, OUTBOX={"BROKER_URL": broker}) as process:
                process.until(lambda: Operation.objects.filter(done__gte=20).exists())
                process.kill()
            killed_at = Operation.objects.get()
            assert killed_at.state == "running"
            assert 0 < killed_at.done < 60
            # The lease of the killed process ends.
            Operation.objects.update(leased_until=None)

            replayed(rate="20/s")

            deliveries = queue.take(60)
        assert Operation.objects.get().done == 60
        assert set(ids(deliveries)) == set(ids(messages))
        # At most the batch in hand was sent twice.
        assert len(deliveries) <= 80


class TestRedis:
    @pytest.fixture(autouse=True)
    def _redis(self, redis_url):
        with override_settings(OUTBOX={"BROKER_URL": redis_url}):
            yield

    @pytest.mark.parametrize("exchange", ["outbox", "audit"])
    def test_queue_gets_messages_of_a_topic_with_an_exchange_of_its_own(self, redis_url, exchange):
        """It is bound to that exchange, or by a handler to the one of all topics."""
        given = {"BROKER_URL": redis_url, "TOPICS": {TOPIC: {"EXCHANGE": "audit"}}}
        with (
            Queue(redis_url, name=f"billing.pay@{TOPIC}", exchange=exchange) as billing,
            Queue(redis_url, name="other", exchange=exchange) as other,
            override_settings(OUTBOX=given),
        ):
            messages = sent(2)

            replayed(topic=TOPIC, to_group="billing.pay")

            assert ids(billing.take(2)) == ids(messages)
            assert other.take_all() == []

    def test_a_queue_that_is_not_bound_is_reported(self, redis_url):
        sent(1)
        with Queue(redis_url, name="other"), pytest.raises(CommandError, match="did not accept: 1"):
            replayed(topic=TOPIC, to_group="billing.unknown")
