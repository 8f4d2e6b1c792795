"""Encrypted brokers: the certificate and the host name are verified, and BROKER_SSL has the authority and the client's own.

Both halves connect to a RabbitMQ that demands a certificate of its clients, and to an encrypted Redis.
"""

import logging
import ssl
from dataclasses import replace

import kombu
import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command

from exactly_once.conf.app_options import TlsOptions
from exactly_once.transport import broker
from exactly_once.transport.management_api import QueueDepths
from inbox.consumer.service import serve
from outbox.states import State
from tests.support.certificates import Authority
from tests.support.deliveries import effects, the_effect
from tests.support.relaying import TOPIC, published, published_many, relaying, row_of, waiting
from tests.support.servers import RabbitServer
from tests.support.servers.encrypted import encrypted
from tests.support.servers.private import LOOPBACK, free_port
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, consuming

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "localhost"
FAILS = "The certificate of the broker"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def client(authority):
    """The BROKER_SSL of a client that the brokers accept."""
    return {"ca_certs": authority.ca_certs, **authority.issue("client")._asdict()}


@pytest.fixture(scope="module")
def ports(authority):
    """Of a RabbitMQ: of its encrypted AMQP, and of its encrypted management API."""
    issued, amqps, https = authority.issue(NAME), free_port(), free_port()
    files = {"cacertfile": authority.ca_certs, **issued._asdict()}
    settings = {
        "listeners__ssl__1": f"{LOOPBACK}:{amqps}",
        "ssl_options__verify": "verify_peer",
        "ssl_options__fail_if_no_peer_cert": "true",
        "management__ssl__port": str(https),
        "management__ssl__ip": LOOPBACK,
    }
    for name, path in files.items():
        settings |= {f"ssl_options__{name}": path, f"management__ssl__{name}": path}
    with RabbitServer(spins=False, plugins=["rabbitmq_management"], **settings):
        yield amqps, https


@pytest.fixture
def url(ports):
    return f"amqps://guest:guest@{NAME}:{ports[0]}//"


@pytest.fixture
def with_tls(settings):
    """Set BROKER_SSL of the outbox, which the inbox takes, too."""

    def set_tls(given):
        settings.OUTBOX = {**settings.OUTBOX, "BROKER_SSL": given}

    return set_tls


def certificate_errors(caplog):
    return [record for record in caplog.records if record.getMessage().startswith(FAILS)]


@pytest.mark.long  # a broker of its own
class TestRabbitMQ:
    def test_messages_of_any_size_are_published_and_handled(self, url, client, with_tls, handles):
        with_tls(client)
        handler = handles(the_effect, topic=TOPIC)
        sizes = [10, 16_384, 100_000, 900_000]
        with consuming([handler], broker_options(url)), relaying(url):
            published_many(200)
            for size in sizes:
                published(payload={"text": "x" * size})
            wait_until(lambda: not waiting() and effects() == 200 + len(sizes))

    def test_certificate_of_another_host_is_refused(self, ports, client, with_tls, caplog):
        with_tls(client)
        message = published()
        with relaying(f"amqps://guest:guest@127.0.0.1:{ports[0]}//"):
            wait_until(lambda: certificate_errors(caplog))
        assert (row_of(message).state, row_of(message).attempts) == (State.READY, 0)
        assert "'amqps://***@127.0.0.1:" in certificate_errors(caplog)[0].getMessage()
        assert "BROKER_SSL['ca_certs']" in certificate_errors(caplog)[0].getMessage()

    @pytest.mark.parametrize(
        ("changes", "host"),
        [({"check_hostname": False}, LOOPBACK), ({"server_hostname": NAME}, LOOPBACK), ({}, f"{LOOPBACK};{NAME}")],
        ids=["not compared", "given", "each of a list its own"],
    )
    def test_name_to_compare_can_be_given_or_not_compared(self, ports, client, with_tls, caplog, changes, host):
        with_tls(client | changes)
        message = published()
        with relaying(";".join(f"amqps://guest:guest@{each}:{ports[0]}//" for each in host.split(";"))):
            wait_until(lambda: row_of(message).attempts)
        assert not certificate_errors(caplog)

    def test_unknown_authority_is_refused_by_both_halves(self, url, with_tls, handles, caplog):
        with_tls({})
        handler = handles(the_effect, topic=TOPIC)
        with consuming([handler], broker_options(url)), relaying(url):
            wait_until(lambda: len(certificate_errors(caplog)) == 2)

    def test_client_without_a_certificate_is_refused_by_the_broker(self, url, authority, with_tls, caplog):
        with_tls({"ca_certs": authority.ca_certs})
        caplog.set_level(logging.WARNING)
        with relaying(url):
            wait_until(lambda: "The broker is unavailable" in caplog.text)

    def test_management_api_is_verified_by_the_same_options(self, url, ports, client):
        api = f"https://{NAME}:{ports[1]}"
        assert wait_until(lambda: QueueDepths(url, api, TlsOptions(**client)).known() is not None)
        assert QueueDepths(url, api, TlsOptions()).known() is None
        assert QueueDepths(url, api.replace(NAME, LOOPBACK), TlsOptions(**client)).known() is None


class TestRedis:
    @pytest.fixture
    def port(self, redis_server, redis_url, authority):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*authority.issue(NAME))
        with encrypted(redis_server.port, context) as port:
            yield port

    def test_messages_are_published_and_handled(self, port, client, with_tls, handles):
        with_tls(client)
        url = f"rediss://{NAME}:{port}/0"
        handler = handles(the_effect, topic=TOPIC)
        with consuming([handler], broker_options(url)), relaying(url):
            published_many(20)
            wait_until(lambda: effects() == 20)

    @pytest.mark.parametrize(
        ("host", "trusted"), [("127.0.0.1", True), (NAME, False)], ids=["another host", "unknown authority"]
    )
    def test_certificate_of_another_host_or_authority_is_refused(self, port, client, with_tls, caplog, host, trusted):
        with_tls(client if trusted else {})
        with relaying(f"rediss://{host}:{port}/0"):
            wait_until(lambda: certificate_errors(caplog))

    def test_options_in_the_url_have_precedence(self, port, authority, with_tls):
        with_tls({"ca_certs": "/nowhere.pem"})
        url = f"rediss://{NAME}:{port}/0?ssl_cert_reqs=required&ssl_ca_certs={authority.ca_certs}"
        assert broker.why_unusable(url) is None
        connection = broker.BrokerConnection(url, tls=TlsOptions(ca_certs="/nowhere.pem"))
        connection.ensure_connection(max_retries=1)
        connection.release()


class TestConfiguration:
    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("amqps://h//?ssl_certfile=/x.pem", "its option 'ssl_certfile' is not understood; options of TLS are given in"),
            ("amqp://h//?ssl=1", "its option 'ssl' is not understood"),
            ("amqps://h//?connect_timeout=5", "its option 'connect_timeout' is not understood"),
            ("amqp://h//?heartbeat=often", "has a wrong value: 'heartbeat'"),
            (
                "amqp://a//;amqp://b//?cacertfile=x",
                "its option 'cacertfile' is not understood; options of TLS are given in BROKER_SSL (number 2",
            ),
            ("rediss://h/0?ssl_ca_cert=x", "its option 'ssl_ca_cert' is not understood"),
            ("rediss://h/0?ssl_cert_reqs=maybe", "has a wrong value: 'ssl_cert_reqs'"),
            ("redis://h/0?timeout=5", "is not understood, or has a wrong value: 'timeout'"),
        ],
    )
    def test_option_in_the_url_that_is_not_understood_is_an_error(self, settings, url, words):
        assert words in broker.why_unusable(url)
        settings.OUTBOX = {"BROKER_URL": url}
        assert "outbox.E002" in {found.id for found in run_checks()}
        with pytest.raises(ImproperlyConfigured, match=r"is not understood|has a wrong value"):
            serve(drain=True)

    def test_options_that_are_understood_are_accepted_and_those_of_tls_only_for_an_encrypted_connection(self):
        for url in (
            "amqp://h//?heartbeat=30&login_method=PLAIN",
            "rediss://h/0?ssl_cert_reqs=none",
            "rediss://h/0?ssl_check_hostname=false",
        ):
            assert broker.why_unusable(url) is None
        assert "would not be encrypted" in broker.why_unusable("amqp://h//", TlsOptions())
        assert broker.why_unusable("amqp://h//;amqps://h//", TlsOptions()) is None
        assert "server_hostname" in broker.why_unusable("rediss://h/0", TlsOptions(server_hostname="x"))
        assert not broker.BrokerConnection("amqp://h//").ssl
        assert not kombu.Connection("redis://h/0").ssl == broker.BrokerConnection("redis://h/0").ssl is True
        assert replace(TlsOptions(), cert_reqs=ssl.CERT_NONE).for_amqp("h") == {"cert_reqs": ssl.CERT_NONE}

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"ca_cert": "x"}, "Did you mean 'ca_certs'?"),
            ({"cert_reqs": "none"}, "it must be a VerifyMode"),
            ({"check_hostname": "yes"}, "it must be a bool"),
            ({"keyfile": "x"}, "certfile, which is not set"),
            ({"check_hostname": False, "server_hostname": "h"}, "the host name is not compared"),
        ],
    )
    def test_invalid_options_are_an_error_of_both_settings(self, settings, given, words):
        for name, app in (("OUTBOX", "outbox"), ("INBOX", "inbox")):
            setattr(settings, name, {"BROKER_SSL": given})
            [problem] = [found for found in run_checks() if found.id == f"{app}.E001"]
            assert words in problem.msg
            setattr(settings, name, {})

    def test_option_of_the_lease_store_that_is_not_understood_is_an_error(self, settings):
        for url, ids in (("rediss://h/0?ssl_ca_certs=x", set()), ("rediss://h/0?ca_certs=x", {"inbox.E007"})):
            settings.INBOX = {"LEASE_STORE": url}
            assert {found.id for found in run_checks()} & {"inbox.E007"} == ids

    def test_files_that_cannot_be_used_are_warned_of_and_refused_by_the_processes(self, settings, tmp_path):
        """Only a warning, because a process of the web may not have them, and does not need them."""
        settings.OUTBOX = {"BROKER_URL": "amqps://h//", "BROKER_SSL": {"ca_certs": str(tmp_path / "missing.pem")}}
        assert {"outbox.W009"} == {found.id for found in run_checks() if "missing.pem" in found.msg}
        with pytest.raises(CommandError, match=r"missing\.pem"):
            call_command("outbox_relay", drain=True)
        with pytest.raises(ImproperlyConfigured, match=r"missing\.pem"):
            serve(drain=True)

    def test_each_host_of_a_list_has_its_own_name_compared_also_in_a_clone(self):
        connection = broker.BrokerConnection("amqps://a//;amqps://b//;amqp://c//")
        names = []
        for _ in range(3):
            names.append(connection.ssl and connection.ssl["server_hostname"])
            assert connection.clone().ssl == connection.ssl
            connection.maybe_switch_next()
        assert names == ["a", "b", False]
