"""RabbitMQ closes the channel because of one message: no other message is stopped, and the refusal is reported once."""

from collections import Counter
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import transaction

from outbox import Draft, publish_many
from outbox.models import OutboxMessage, PausedTopic
from outbox.states import State
from tests.support.relaying import EXCHANGE, Queue, ids

pytestmark = pytest.mark.django_db(transaction=True)

FORBIDDEN, PERMITTED = "closed.orders", "open.orders"
PAUSED = "paused, because the broker forbids it"
QUICK = {"BACKOFF": (timedelta(seconds=0.2), timedelta(seconds=0.4)), "POLL_INTERVAL": timedelta(seconds=0.1)}


@pytest.fixture
def relay(command, rabbitmq_url):
    """`outbox_relay` in a process of its own."""
    logs = iter("abc")

    def start(*arguments, **options):
        outbox = {"BROKER_URL": rabbitmq_url, **QUICK, **options}
        return command("outbox_relay", *arguments, log=next(logs), OUTBOX=outbox)

    return start


@pytest.fixture
def permit(rabbitmq_server, rabbitmq_url):
    """From now on the relay's user may write to the topics, or exchanges, that match this pattern only."""

    def given(function, *texts):
        quoted = ", ".join(f'<<"{text}">>' for text in ("guest", vhost_of(rabbitmq_url), *texts, ".*", "guest"))
        rabbitmq_server.evaluate(f"rabbit_auth_backend_internal:{function}({quoted}).")

    return SimpleNamespace(
        topics=lambda pattern: given("set_topic_permissions", EXCHANGE, pattern),
        exchanges=lambda pattern: given("set_permissions", ".*", pattern),
    )


@contextmanager
def bodies_of_at_most(server, size):
    """New channels accept no larger bodies."""
    # RabbitMQ 4 reads the setting once, into a persistent term.
    limit = "application:set_env(rabbit, max_message_size, {0}), persistent_term:put(max_message_size, {0})."
    before = server.evaluate("element(2, application:get_env(rabbit, max_message_size)).")
    server.evaluate(limit.format(size))
    try:
        yield
    finally:
        server.evaluate(limit.format(before))


def vhost_of(url):
    return url.rpartition("/")[2]


def publish_committed(*drafts):
    with transaction.atomic():
        return publish_many(drafts)


def among(others, *drafts):
    """Publish the drafts, spread evenly among `others` messages of PERMITTED."""
    mixed = [Draft(PERMITTED, {"n": n}) for n in range(others)]
    for n, draft in enumerate(drafts, 1):
        mixed.insert(n * others // (len(drafts) + 1), draft)
    return publish_committed(*mixed)


def of(topic):
    return OutboxMessage.objects.filter(topic=topic)


def count(topic, state):
    return of(topic).filter(state=state).count()


def copies(messages):
    return Counter(ids(messages))


class TestForbiddenTopic:
    @pytest.mark.parametrize(("relays", "topics"), [(1, 1), (2, 1), (1, 12)])
    def test_forbidden_topics_are_paused_and_every_other_message_is_published(
        self, relay, relays, topics, permit, rabbitmq_url
    ):
        permit.topics("^open")
        with Queue(rabbitmq_url, "open.#") as queue, ExitStack() as stack:
            among(300, *(Draft(f"closed.{n % topics}", {}) for n in range(12)))
            processes = [stack.enter_context(relay()) for _ in range(relays)]
            processes[0].until(lambda: count(PERMITTED, State.PUBLISHED) == 300)
            processes[0].until(lambda: PausedTopic.objects.filter(topic__startswith="closed.").count() == topics)
            arrived = copies(queue.take(300))

            assert len(arrived) == 300
            assert max(arrived.values()) <= 2, "once more, because the confirm was lost with the channel"
            assert set(of(PERMITTED).values_list("attempts", flat=True)) == {1}
            assert "ACCESS_REFUSED" in processes[0].said() + processes[-1].said()

    def test_messages_published_while_a_topic_is_forbidden_arrive_once_and_it_is_reported_once(
        self, relay, permit, rabbitmq_url
    ):
        """The probes of the forbidden topic close the channel, and must not take other messages with it."""
        permit.topics("^open")
        with Queue(rabbitmq_url, "open.#") as queue, relay() as process:
            publish_committed(Draft(FORBIDDEN, {}))
            process.until(lambda: PAUSED in process.said())
            permitted = []
            while of(FORBIDDEN).get().attempts < 2:
                permitted += publish_committed(*(Draft(PERMITTED, {}) for _ in range(20)))
                process.until(lambda: not count(PERMITTED, State.READY))

            assert copies(queue.take(len(permitted))) == Counter(ids(permitted))
            [report] = [line for line in process.said().splitlines() if FORBIDDEN in line]
            assert PAUSED in report
            assert "set_topic_permissions" in report
            assert "Traceback" not in process.said()
            assert "The broker is unavailable" not in process.said()

    def test_forbidden_head_holds_back_its_key_and_no_other_until_it_is_permitted(self, relay, permit, rabbitmq_url):
        permit.topics("^open")
        with Queue(rabbitmq_url, "#") as queue, relay(MAX_ATTEMPTS=1) as process:
            head, behind = publish_committed(Draft(FORBIDDEN, {}, key="k"), Draft(PERMITTED, {}, key="k"))
            others = publish_committed(*(Draft(PERMITTED, {}, key=f"key-{n}") for n in range(20)))
            process.until(lambda: count(PERMITTED, State.PUBLISHED) == 20)
            assert set(ids(queue.take(20))) == set(ids(others))
            process.until(lambda: PAUSED in process.said())
            assert not count(FORBIDDEN, State.DEAD)
            permit.topics(".*")

            assert ids(queue.take(2)) == ids([head, behind])


def test_relay_that_may_not_write_to_the_exchange_waits_and_names_the_permission(relay, permit, rabbitmq_url):
    with Queue(rabbitmq_url, "#") as queue:
        messages = publish_committed(*(Draft(f"topic.{n}", {}) for n in range(20)))
        permit.exchanges("^somewhere else$")
        with relay() as process:
            process.until(lambda: "set_permissions" in process.said())
            assert set(OutboxMessage.objects.values_list("state", "attempts")) == {(State.READY, 0)}
            assert PAUSED not in process.said()
            permit.exchanges(".*")

            process.until(lambda: OutboxMessage.objects.filter(state=State.PUBLISHED).count() == 20)
        assert set(ids(queue.take(20))) == set(ids(messages))


class TestRefusedMessage:
    def test_message_too_large_for_the_broker_is_dead_and_all_others_are_published(self, mortal_rabbitmq, relay, rabbitmq_url):
        with (
            bodies_of_at_most(mortal_rabbitmq, 20_000),
            Queue(rabbitmq_url, "open.#") as queue,
            relay(MAX_ATTEMPTS=3) as process,
        ):
            among(200, Draft(PERMITTED, {"padding": "x" * 30_000}, biz_id="large"))
            process.until(lambda: count(PERMITTED, State.PUBLISHED) == 200)
            process.until(lambda: count(PERMITTED, State.DEAD) == 1)
            arrived = copies(queue.take(200))

        large = OutboxMessage.objects.get(biz_id="large")
        assert (large.state, large.attempts) == (State.DEAD, 3)
        assert "larger than" in large.last_error
        assert len(arrived) == 200
        # Each half that holds it is sent once more; its second and third attempt disturb nothing.
        assert sum(arrived.values()) <= 3 * 200
        assert set(OutboxMessage.objects.exclude(pk=large.pk).values_list("attempts", flat=True)) == {1}
