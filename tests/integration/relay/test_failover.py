"""Several brokers in one URL: the first that answers is used, and the next when it dies."""

import socket
from functools import partial

import pytest
from django.core.checks import run_checks
from django.test import override_settings

from exactly_once.transport import broker
from outbox.states import State
from outbox.transports import transport_class
from tests.support.deliveries import effects, the_effect
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.relaying import (
    TOPIC,
    Queue,
    connected,
    ids,
    one_pass,
    published,
    relaying,
    row_of,
    states,
    waiting,
)
from tests.support.servers import FaultProxy
from tests.support.servers.private import free_port
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, consuming, declare, send


@pytest.fixture
def second():
    with FakeAmqpPeer() as peer:
        yield peer


@pytest.fixture
def silent_broker():
    """A server that accepts connections and never answers, as a half-dead host does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"amqp://guest:guest@127.0.0.1:{listener.getsockname()[1]}//"


def dead(url):
    return f"{url.partition(':')[0]}://127.0.0.1:{free_port()}//"


def several(*urls):
    return ";".join(urls)


class TestUrl:
    LIST = several(*(f"amqp://user:secret@host-{n}//" for n in range(3)))

    @pytest.mark.parametrize(
        ("url", "scheme"),
        [
            ("amqps://a;amqp://b;pyamqp://c", "amqps"),
            ("redis://a;redis://b", "redis"),
            ("amqp://a;redis://b", ""),
            ("amqp://a;", ""),
            ("local://;local://", ""),
        ],
    )
    def test_scheme_of_a_list_is_common_to_all_its_urls_or_empty(self, url, scheme):
        assert broker.scheme_of(url) == scheme
        assert broker.speaks_amqp(url) == scheme.startswith("amqp")

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            *((url, None) for url in (LIST, "amqps://a;amqp://b", "redis://a/0;redis://b/0")),
            ("amqp://a;redis://b", "of different kinds, amqp:// and redis://"),
            ("redis://a;rediss://b", "of different kinds"),
            ("local://;amqp://a", "cannot be part of a list"),
            ("amqp://a;local://", "cannot be part of a list"),
            ("amqp://a;;amqp://b", "it is not a URL (number 2 of its 3 URLs"),
            ("amqp://user:pass;word@a", "and ';' as %2F, %3F, %23 and %3B (number 1 of its 2 URLs"),
            ("amqp://a;amqp://b ", "a space before or after it (number 2"),
            ("amqp://user:pass/word@a//", "in a user or password write '/', '?', '#' and ';' as %2F"),
            ("amqp://a;nonsense://b", "does not know this transport (number 2"),
        ],
    )
    def test_unusable_url_is_reported_with_the_reason(self, url, words):
        assert broker.why_unusable(url) is None if words is None else words in broker.why_unusable(url)

    @pytest.mark.parametrize("url", ["amqp://a;redis://b", "amqp://a;local://", "amqp://a;nothing"])
    def test_list_of_urls_of_different_kinds_has_no_transport(self, url):
        with pytest.raises(ImportError):
            transport_class(url)

    @pytest.mark.parametrize("count", [1, 2, 3, 8])
    def test_connect_timeout_bounds_all_brokers_of_a_list_together(self, count):
        url = several(*["amqp://host//"] * count)

        assert broker.connection_options(url)["connect_timeout"] * count <= 15
        assert broker.connection_attempts(url)["max_retries"] >= count - 1
        assert broker.connection_attempts(url)["timeout"] < 30, "well below the watchdog"


class TestChecks:
    def found(self, url, **inbox):
        with override_settings(OUTBOX={"BROKER_URL": url}, INBOX=inbox, DEBUG=True):
            return {message.id: message for message in run_checks() if message.id.startswith(("outbox.", "inbox."))}

    @pytest.mark.parametrize("url", ["amqp://a;redis://b", "local://;amqp://b", "amqp://a;", "amqp://a ;amqp://b"])
    def test_checks_reject_urls_of_different_kinds_with_a_hint_and_accept_several_rabbitmq_urls(self, url):
        found = self.found(url, BROKER_URL=url)

        assert {"outbox.E002", "inbox.E004"} <= set(found)
        for name in ("outbox.E002", "inbox.E004"):
            assert "all of one kind" in found[name].hint
        assert set(self.found(url)) == {"outbox.E002"}, "the inbox takes it from the outbox"
        assert self.found("amqp://a//;amqp://b//;amqps://c//") == {}

    def test_checks_warn_once_of_the_weakness_of_several_redis_urls_without_passwords(self):
        found = self.found("redis://:first-secret@a/0;redis://:second-secret@b/0")

        assert set(found) == {"outbox.W001"}
        assert "redis://***@a/0;redis://***@b/0" in found["outbox.W001"].msg


class TestConnecting:
    def test_first_broker_that_answers_is_connected(self, peer, second):
        with connected(several(peer.url, second.url)):
            assert (peer.open_connections, second.connections) == (1, 0)

    @pytest.mark.long
    def test_broker_that_accepts_connections_and_never_answers_is_skipped(self, silent_broker, peer):
        with connected(several(silent_broker, peer.url)):
            assert peer.open_connections == 1

    def test_new_connection_goes_to_the_first_broker_when_it_is_available_again(self, peer, second):
        peer.refuse_connections = True
        with connected(several(peer.url, second.url)) as transport:
            peer.refuse_connections = False
            second.drop()
            transport.idle()
            transport.connect()

            assert peer.open_connections == 1


@pytest.mark.django_db(transaction=True)
class TestBrokerThatDiesWithinABatch:
    def test_second_broker_gets_only_what_the_dying_one_did_not_confirm(self, peer, second):
        messages = [published(biz_id=str(n)) for n in range(6)]

        def die(message):
            if len(peer.published) < 6:
                return []
            peer.refuse_connections = True
            return [partial(peer.ack, 1), partial(peer.ack, 3), peer.drop]

        peer.script = die
        with connected(several(peer.url, second.url)) as transport:
            report = one_pass(transport)
            assert report.broken
            assert states() == [State.PUBLISHED, State.READY, State.PUBLISHED, *[State.READY] * 3]

            transport.connect()
            one_pass(transport)

        assert ids(second.published) == ids([messages[1], *messages[3:]]), "the confirmed ones are not sent again"
        assert states() == [State.PUBLISHED] * 6
        assert {row_of(message).attempts for message in messages} == {1}


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestProcesses:
    @pytest.mark.parametrize("url", ["rabbitmq_url", "redis_url"])
    def test_relay_publishes_to_the_third_broker_when_two_are_dead(self, url, request):
        url = request.getfixturevalue(url)
        messages = [published() for _ in range(5)]

        with Queue(url) as queue, relaying(several(dead(url), dead(url), url)):
            wait_until(lambda: not waiting())
            assert ids(queue.take(5)) == ids(messages)

    def test_consumer_continues_through_the_second_url_when_the_first_is_cut(self, rabbitmq_server, rabbitmq_url, handles):
        """Two URLs of one broker, as two nodes of a cluster lead to one queue."""
        handler, options = handles(the_effect), broker_options(rabbitmq_url)
        declare(handler, options)
        with FaultProxy("127.0.0.1", rabbitmq_server.port) as proxy:
            both = broker_options(several(proxy.through(rabbitmq_url), rabbitmq_url))
            with consuming([handler], both):
                send(rabbitmq_url, TOPIC, {}, message_id="one")
                wait_until(lambda: effects() == 1)
                assert proxy.connections == 1
                proxy.refuse()
                proxy.cut()
                send(rabbitmq_url, TOPIC, {}, message_id="two")
                wait_until(lambda: effects() == 2)
