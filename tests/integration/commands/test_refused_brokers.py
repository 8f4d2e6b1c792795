"""A broker that refuses the login or virtual host: an error that names the setting, until it is corrected."""

import re
import secrets

import pytest

from outbox.states import State
from tests.support.relaying import published, state_of
from tests.support.waiting import wait_until
from tests.support.workers import GROUP

pytestmark = pytest.mark.django_db(transaction=True)

SECRET = "Xy7secret7yX"
BOTH = pytest.mark.parametrize("name", ["outbox_relay", "inbox_consume"])


@pytest.fixture
def running(command):
    return lambda name, outbox, **inbox: command(name, OUTBOX={"BROKER_URL": outbox}, INBOX={"GROUP": GROUP, **inbox})


def errors(process):
    return [line for line in process.said().splitlines() if " ERROR " in line]


def tries(server):
    """How many logins RabbitMQ has refused so far."""
    text = server.log.read_text(errors="replace")
    return text.count("PLAIN login refused") + text.count("not found")


@pytest.mark.parametrize(
    ("name", "setting"), [("outbox_relay", "OUTBOX"), ("inbox_consume", "OUTBOX"), ("inbox_consume", "INBOX")]
)
def test_refused_password_is_reported_once_with_the_setting_and_without_the_password(rabbitmq_server, running, name, setting):
    url = rabbitmq_server.url
    refused, before = url.replace("guest:guest", f"guest:{SECRET}"), tries(rabbitmq_server)
    own = {"BROKER_URL": refused} if setting == "INBOX" else {}
    with running(name, url if own else refused, **own) as process:
        process.until(lambda: errors(process))
        process.until(lambda: tries(rabbitmq_server) >= before + 4)
        assert process.end() == 0

    [line] = errors(process)
    assert f'The broker refuses {setting}["BROKER_URL"]' in line
    assert "'amqp://***@127.0.0.1:" in line
    assert "ACCESS_REFUSED" in line
    assert "Correct its user, password or virtual host" in line
    assert SECRET not in process.said()
    assert "Traceback" not in process.said()


def test_refused_login_is_repeated_with_its_duration_until_it_is_corrected(rabbitmq_server, running):
    server = rabbitmq_server
    user = f"late-{secrets.token_hex(4)}"
    url = server.url.replace("guest:guest", f"{user}:{SECRET}")

    with running("outbox_relay", url) as relay, running("inbox_consume", url) as consumer:
        for process in (relay, consumer):
            process.until(lambda process=process: len(errors(process)) >= 2)
        server.ctl("add_user", user, SECRET)
        server.ctl("set_permissions", user, ".*", ".*", ".*")
        try:
            for process in (relay, consumer):
                process.until(lambda process=process: "The broker is available again after" in process.said())
                assert process.end() == 0
        finally:
            server.ctl("delete_user", user)

    for process in (relay, consumer):
        assert re.search(r"This has lasted \d+ s\.", errors(process)[1])
        assert process.said().count("The broker is available again after") == 1
        assert SECRET not in process.said()


@BOTH
def test_missing_virtual_host_is_reported_until_it_is_created(rabbitmq_server, running, name):
    vhost = f"late-{secrets.token_hex(4)}"
    url = rabbitmq_server.url_of(vhost)
    message = published(topic="worker.job", payload={})

    with running(name, url) as process:
        process.until(lambda: errors(process))
        rabbitmq_server.create_vhost(vhost)
        try:
            process.until(lambda: "The broker is available again" in process.said())
            if name == "outbox_relay":
                with running("inbox_consume", url):
                    wait_until(lambda: state_of(message) == State.PUBLISHED)
            assert process.end() == 0
        finally:
            rabbitmq_server.delete_vhost(vhost)

    [line] = errors(process)
    assert "NOT_ALLOWED" in line
    assert 'OUTBOX["BROKER_URL"]' in line


@BOTH
def test_refused_password_of_redis_is_reported_with_the_setting(redis_url, running, name):
    with running(name, redis_url.replace("redis://", f"redis://user:{SECRET}@")) as process:
        process.until(lambda: errors(process))
        assert process.end() == 0

    [line] = errors(process)
    assert 'The broker refuses OUTBOX["BROKER_URL"]' in line
    assert SECRET not in process.said()
