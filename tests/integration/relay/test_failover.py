"""Several brokers in one URL: the first that answers is used, and the next when it dies."""

import socket
from functools import partial

import pytest
from django.core.checks import run_checks
from django.test import override_settings

from outbox.kernel import broker
from outbox.kernel.transport import BrokerUnavailable
from outbox.models import State
from outbox.transports import open_transport, transport_class
from tests.support.deliveries import effects, the_effect, wait_until
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.relaying import (
    EXCHANGE,
    TOPIC,
    Queue,
    connected,
    eventually,
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
from tests.support.workers import broker_options, consuming, declare, send

SECRETS = ("first-secret", "second-secret", "third-secret")


@pytest.fixture
def peer():
    with FakeAmqpPeer() as peer:
        yield peer


@pytest.fixture
def second():
    with FakeAmqpPeer() as peer:
        yield peer


@pytest.fixture
def mute():
    """It takes connections, as a half-dead host does, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"amqp://guest:guest@127.0.0.1:{listener.getsockname()[1]}//"


def dead(scheme="amqp"):
    return f"{scheme}://127.0.0.1:{free_port()}//"


def several(*urls):
    return ";".join(urls)


class TestTheUrl:
    LIST = several(*(f"amqp://user:{secret}@host-{n}//" for n, secret in enumerate(SECRETS)))

    def test_shows_every_broker_and_no_password(self):
        assert broker.masked(self.LIST) == "amqp://user:***@host-0//;amqp://user:***@host-1//;amqp://user:***@host-2//"

    @pytest.mark.parametrize(
        "url",
        [
            "amqp://user:first-secret;second-secret@host//",
            "amqp://user:first-secret;second-secret@host//;amqp://user:third-secret@host//",
            "amqp://user@host//;redis://:first-secret@host/0",
            "amqp://user:first-secret@host//;",
            "amqp://user:first-secret@host// ; AMQPS://user:second-secret@host//",
        ],
    )
    def test_that_cannot_be_used_shows_no_password_either(self, url):
        said = f"{broker.masked(url)} {broker.why_unusable(url)}"

        assert not [secret for secret in SECRETS if secret in said]

    @pytest.mark.parametrize(
        ("url", "scheme"),
        [
            ("amqp://a;amqp://b", "amqp"),
            ("amqps://a;amqp://b;pyamqp://c", "amqps"),
            ("redis://a;redis://b", "redis"),
            ("amqp://a;redis://b", ""),
            ("amqp://a;", ""),
            ("local://;local://", ""),
            ("local://;amqp://a", ""),
            ("amqp://a;local://", ""),
        ],
    )
    def test_has_one_scheme_or_none(self, url, scheme):
        assert broker.scheme_of(url) == scheme
        assert broker.speaks_amqp(url) == scheme.startswith("amqp")

    @pytest.mark.parametrize("url", [LIST, "amqps://a;amqp://b", "redis://a/0;redis://b/0"])
    def test_of_one_kind_is_usable(self, url):
        assert broker.why_unusable(url) is None

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("amqp://a;redis://b", "of different kinds, amqp:// and redis://"),
            ("redis://a;rediss://b", "of different kinds"),
            ("local://;amqp://a", "must stand alone"),
            ("amqp://a;local://", "must stand alone"),
            ("local://;local://", "must stand alone"),
            ("amqp://a;", "it is no URL (number 2 of its 2 URLs"),
            ("amqp://a;;amqp://b", "it is no URL (number 2 of its 3 URLs"),
            ("amqp://user:pass;word@a", "it is no URL (number 2 of its 2 URLs"),
            ("amqp://a;amqp://b ", "a space before or after it (number 2"),
            ("amqp://a; amqp://b", "a space before or after it (number 2"),
            ("amqp://a;nonsense://b", "knows no transport called 'nonsense' (number 2"),
        ],
    )
    def test_that_cannot_work_says_why(self, url, words):
        assert words in broker.why_unusable(url)

    @pytest.mark.parametrize("url", ["amqp://a;redis://b", "local://;amqp://a", "amqp://a;local://", "amqp://a;nothing"])
    def test_that_is_no_list_of_equals_opens_no_transport(self, url):
        with pytest.raises(ImportError):
            transport_class(url)

    @pytest.mark.parametrize("count", [1, 2, 3, 8])
    def test_bounds_the_time_for_all_of_them_together(self, count):
        url = several(*["amqp://host//"] * count)

        assert broker.connection_options(url)["connect_timeout"] * count <= 15
        assert broker.connection_attempts(url)["max_retries"] >= count - 1
        assert broker.connection_attempts(url)["timeout"] < 30, "well below the watchdog"


class TestTheChecks:
    def found(self, url):
        with override_settings(OUTBOX={"BROKER_URL": url}, DEBUG=True):
            return {message.id: message for message in run_checks() if message.id.startswith(("outbox.", "inbox."))}

    @pytest.mark.parametrize(
        "url", ["amqp://a;redis://b", "amqp://a;local://", "local://;amqp://b", "amqp://a;", "amqp://a ;amqp://b"]
    )
    def test_refuse_what_is_no_list_of_equals_and_tell_the_remedy(self, url):
        found = self.found(url)

        assert {"outbox.E002", "inbox.E004"} <= set(found)
        for name in ("outbox.E002", "inbox.E004"):
            assert "all of one kind" in found[name].hint

    def test_take_several_rabbitmqs(self):
        assert self.found("amqp://a//;amqp://b//;amqps://c//") == {}

    def test_say_once_that_several_brokers_promise_less_and_no_password_of_them(self):
        found = self.found("redis://:first-secret@a/0;redis://:second-secret@b/0")

        assert set(found) == {"outbox.W001"}
        assert "redis://:***@a/0;redis://:***@b/0" in found["outbox.W001"].msg


class TestConnecting:
    def test_reaches_the_third_when_two_are_dead(self, peer):
        with connected(several(dead(), dead(), peer.url)):
            assert peer.open_connections == 1

    def test_uses_the_first_that_answers(self, peer, second):
        with connected(several(peer.url, second.url)):
            assert (peer.open_connections, second.connections) == (1, 0)

    def test_passes_by_one_that_hangs_up_at_once(self, peer, second):
        peer.refuse_connections = True

        with connected(several(peer.url, second.url)):
            assert second.open_connections == 1

    def test_passes_by_one_that_takes_connections_and_says_nothing(self, mute, peer):
        with connected(several(mute, peer.url)):
            assert peer.open_connections == 1

    def test_to_nobody_is_unavailable(self):
        transport = open_transport(several(dead(), dead(), dead()), alias="default", exchange=EXCHANGE)

        with pytest.raises(BrokerUnavailable):
            transport.connect()

    def test_returns_to_the_first_once_it_is_back(self, peer, second):
        peer.refuse_connections = True
        with connected(several(peer.url, second.url)) as transport:
            peer.refuse_connections = False
            second.drop()
            transport.idle()
            transport.connect()

            assert peer.open_connections == 1

    def test_to_redis_reaches_the_third_when_two_are_dead(self, redis_url):
        with connected(several(dead("redis"), dead("redis"), redis_url)) as transport:
            assert transport.capabilities.weakness


@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
class TestABrokerThatDiesInMidBatch:
    def test_leaves_its_unknowns_to_the_second_and_settles_nothing_it_did_not_confirm(self, peer, second):
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

        assert ids(second.published) == ids([messages[1], *messages[3:]]), "and the confirmed ones are not sent again"
        assert states() == [State.PUBLISHED] * 6
        assert {row_of(message).attempts for message in messages} == {1}

    def test_is_an_outage_of_one_broker_only(self, peer, second, caplog):
        peer.hold()
        with relaying(several(peer.url, second.url)):
            before = published()
            peer.wait_for_published(1)
            peer.refuse_connections = True
            peer.drop()
            after = published()
            eventually(lambda: not waiting())

        assert set(ids(second.published)) == set(ids([before, after]))
        assert {row_of(message).attempts for message in (before, after)} == {1}

    def test_keeps_the_order_of_a_key(self, peer, second):
        messages = [published(biz_id=str(n), key="k") for n in range(5)]

        def die_at_the_third(message):
            if len(peer.published) < 3:
                return [partial(peer.ack, message)]
            peer.refuse_connections = True
            return [peer.drop]

        peer.script = die_at_the_third
        with relaying(several(peer.url, second.url)):
            eventually(lambda: not waiting())

        assert ids(peer.published) == ids(messages[:3])
        assert ids(second.published) == ids(messages[2:])


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestARealBroker:
    def test_behind_two_dead_ones_gets_everything(self, rabbitmq_url):
        messages = [published() for _ in range(5)]

        with Queue(rabbitmq_url) as queue, relaying(several(dead(), dead(), rabbitmq_url)):
            eventually(lambda: not waiting())
            assert ids(queue.take(5)) == ids(messages)

    def test_is_consumed_from_when_the_first_is_dead(self, rabbitmq_url, handles):
        handler, options = handles(the_effect), broker_options(rabbitmq_url)
        declare(handler, options)
        send(rabbitmq_url, TOPIC, {}, message_id="one")

        with consuming([handler], broker_options(several(dead(), rabbitmq_url))):
            wait_until(effects)

    def test_is_consumed_from_when_the_first_two_are_dead(self, rabbitmq_url, handles):
        handler, options = handles(the_effect), broker_options(rabbitmq_url)
        declare(handler, options)
        send(rabbitmq_url, TOPIC, {}, message_id="one")

        with consuming([handler], broker_options(several(dead(), dead(), rabbitmq_url))):
            wait_until(effects)

    def test_is_consumed_from_again_when_the_first_way_to_it_is_cut(self, rabbitmq_server, rabbitmq_url, handles):
        """Two ways to one broker, as two nodes of a cluster are two ways to one queue."""
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
