"""System checks for tasks that go through the outbox."""

import pytest
from celery import Celery
from django.core.checks import run_checks

from outbox.celery import OutboxTask

RABBITMQ = "amqp://user:secret@rabbit.example//"


def do_nothing():
    pass


@pytest.fixture
def checks_of(settings):
    """The messages of the checks about an app that has a task, by their ids."""

    apps = []

    def ask(outbox, broker, **transport_options):
        settings.OUTBOX = {"BROKER_URL": outbox}
        app = Celery("checked", broker=broker, set_as_current=False)
        apps.append(app)
        app.conf.broker_transport_options = transport_options
        app.task(do_nothing, base=OutboxTask, name="tests.nothing", shared=False).name  # noqa: B018 - it is made when it is used
        return {found.id: found.msg for found in run_checks() if "'checked'" in found.msg}

    yield ask
    for app in apps:
        app.close()


@pytest.mark.parametrize(
    ("outbox", "broker"),
    [
        (RABBITMQ, RABBITMQ),
        (RABBITMQ, "pyamqp://another:login@RABBIT.example:5672"),
        (RABBITMQ, "amqp://other.example;amqp://rabbit.example"),
        ("amqp://one.example//;amqp://rabbit.example//", RABBITMQ),
        ("amqp://guest@127.0.0.1//", "amqp://guest@localhost//"),
        ("amqp://localhost//", None),
        ("redis://localhost", "redis://127.0.0.1:6379/0"),
    ],
)
def test_same_broker_under_two_urls_passes_the_check(outbox, broker, checks_of):
    assert checks_of(outbox, broker) == {}


@pytest.mark.parametrize(
    ("outbox", "broker"),
    [
        (RABBITMQ, "amqp://user:secret@other.example//"),
        (RABBITMQ, "amqp://user:secret@rabbit.example/shop"),
        (RABBITMQ, "amqp://user:secret@rabbit.example:5673//"),
        (RABBITMQ, "redis://rabbit.example"),
        ("redis://localhost/0", "redis://localhost/1"),
        ("local://", RABBITMQ),
    ],
)
def test_different_brokers_raise_w004_without_their_passwords(outbox, broker, checks_of):
    [(check, words)] = checks_of(outbox, broker).items()

    assert check == "outbox.W004"
    assert "secret" not in words
    assert outbox.partition("://")[0] in words


@pytest.mark.parametrize(
    ("broker", "option"),
    [("redis://localhost", "global_keyprefix"), ("sentinel://localhost", "master_name"), ("filesystem://", "region")],
)
def test_transport_option_of_a_place_that_the_relay_does_not_use_raises_w005(checks_of, broker, option):
    found = checks_of(broker, broker, **{option: "shop", "visibility_timeout": 60})

    assert list(found) == ["outbox.W005"]
    assert f"has {option}, which" in found["outbox.W005"]


def test_transport_options_of_rabbitmq_raise_no_w005(checks_of):
    assert checks_of(RABBITMQ, RABBITMQ, global_keyprefix="shop:") == {}
