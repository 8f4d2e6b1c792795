"""The consumer on RabbitMQ and on Redis, which promises less: the inbox promises the same."""

import pytest
from django.db import transaction

from exactly_once.console.operators.message_history import history_of
from inbox.models import InboxMessage
from inbox.states import State
from outbox import publish
from outbox.models import OutboxMessage
from tests.support.deliveries import TOPIC, effects, fails, the_effect
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, consuming, relay, send

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]


@pytest.fixture(params=["rabbitmq", "redis"])
def broker(request):
    """The URL of a broker that is empty."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.mark.long
class TestEndToEnd:
    def test_messages_published_by_the_outbox_take_effect_once_and_leave_the_broker(self, handling, broker, is_empty):
        handler, options = handling(the_effect), broker_options(broker)
        with transaction.atomic():
            for number in range(20):
                publish(TOPIC, {"order_id": number}, biz_id=f"order-{number}")
        relay(broker)

        with consuming([handler], options):
            wait_until(lambda: effects() == 20)
            wait_until(lambda: is_empty(handler))

        assert {effects(f"order-{number}") for number in range(20)} == {1}
        assert set(InboxMessage.objects.values_list("state", "attempts", "duplicates")) == {(State.DONE, 1, 0)}
        assert set(OutboxMessage.objects.values_list("state", flat=True)) == {"published"}

    def test_handler_of_several_topics_gets_the_messages_of_each_through_one_queue(self, handling, broker, is_empty):
        handler, options = handling(the_effect, topic=["shop.created", "shop.cancelled"]), broker_options(broker)
        for topic in (*handler.topics, "shop.other"):
            send(broker, topic, {}, message_id=f"of {topic}", headers={"cloudEvents:type": topic, "cloudEvents:id": "one"})

        with consuming([handler], options):
            wait_until(lambda: effects() == 2)
            wait_until(lambda: is_empty(handler))

        assert sorted(InboxMessage.objects.values_list("topic", "state")) == [
            (topic, "done") for topic in sorted(handler.topics)
        ]

    def test_message_arrives_with_every_field_as_published(self, handling, broker):
        got = []
        handler, options = handling(got.append), broker_options(broker)
        with transaction.atomic():
            published = publish(
                TOPIC, {"name": "Zoë", "n": [1, None]}, biz_id="b", key="k", headers={"tenant": "acme", "n": 2, "yes": True}
            )
        relay(broker)

        with consuming([handler], options):
            (message,) = wait_until(lambda: list(got))
            wait_until(lambda: InboxMessage.objects.filter(state=State.DONE).exists())

        assert (message.id, message.biz_id, message.key, message.topic) == (str(published.id), "b", "k", TOPIC)
        assert message.payload == {"name": "Zoë", "n": [1, None]}
        assert message.headers == {"tenant": "acme", "n": 2, "yes": True}
        assert message.created_at == OutboxMessage.objects.get().created_at
        assert (message.correlation_id, message.causation_id) == (str(published.id), "")
        assert (message.attempt, message.redelivered) == (1, False)
        life = [(moment.where, moment.became) for moment in history_of(message.id).moments]
        assert life == [("outbox", "ready"), ("outbox", "published"), (handler.name, "received"), (handler.name, "done")]

    def test_every_handler_of_a_topic_gets_its_own_copy(self, handling, broker, is_empty):
        handlers = [handling(the_effect, name="tests.good"), handling(fails, name="tests.bad")]
        send(broker, TOPIC, {}, message_id="m")

        with consuming(handlers, broker_options(broker)):
            wait_until(lambda: InboxMessage.objects.count() == 2)
            wait_until(lambda: all(map(is_empty, handlers)))

        states = dict(InboxMessage.objects.values_list("handler", "state"))
        assert states == {"tests.good": State.DONE, "tests.bad": State.RETRYING}


class TestForeignProducers:
    @pytest.mark.long
    def test_plain_json_is_handled_once_and_its_copies_are_duplicates(self, handling, broker, is_empty):
        handler, options = handling(the_effect), broker_options(broker)
        for _ in range(3):
            send(broker, TOPIC, {"a": 1}, message_id="m-1")

        with consuming([handler], options):
            wait_until(lambda: InboxMessage.objects.filter(duplicates=2).exists())
            wait_until(lambda: is_empty(handler))

        assert effects("m-1") == 1

    @pytest.mark.parametrize(
        ("body", "properties", "reason"),
        [
            pytest.param(b"{", {}, "is not JSON", id="body is not JSON"),
            pytest.param(b"\xff\xfe", {"content_encoding": "binary"}, "is not JSON", id="body is not text"),
            pytest.param("ü".encode("latin-1"), {"content_encoding": "latin-1"}, "is not JSON", id="body is latin-1"),
            pytest.param(
                b"cos\nsystem\n.", {"content_type": "application/x-python-serialize"}, "is not accepted", id="body is pickle"
            ),
            pytest.param(b"{}", {"message_id": None}, "no identity", id="no identity"),
            pytest.param(
                b"{}",
                {"headers": {"compression": "application/x-gzip"}},
                "cannot be decompressed",
                id="gzip header, plain body",
            ),
            pytest.param(b"{}", {"headers": {"compression": "no-such-thing"}}, "no-such-thing", id="unknown compression"),
        ],
    )
    def test_unreadable_message_is_a_dead_letter_and_delays_no_other(
        self, stored_beside_another, broker, body, properties, reason
    ):
        given = body if "content_encoding" in properties else body.decode()

        row = stored_beside_another(lambda: send(broker, TOPIC, None, body=given, **{"message_id": "odd", **properties}))

        assert (row.state, bytes(row.body), row.attempts) == (State.DEAD, body, 0)
        assert reason in row.last_error
        assert effects() == 1
