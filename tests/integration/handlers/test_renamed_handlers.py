"""Renamed handlers: with `renamed_from` they continue where they were; without it, the old name is reported."""

from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.core.checks import run_checks

from inbox import batch_handler, idempotent_handler, leased_handler
from inbox.handlers.registry import registry
from inbox.store.handler_rows import consumers
from tests.support.deliveries import TOPIC, deliver, effects, the_effect
from tests.support.heartbeats import a_consumer
from tests.support.waiting import wait_until
from tests.support.workers import broker_options, consuming, declare, length_of, send

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.long]

OLD, NEW = "tests.remind", "tests.send_reminder"


@pytest.fixture(autouse=True)
def forgotten():
    yield
    registry.remove(OLD)


def send_reminder(message):
    the_effect(message)


def new_names():
    return [str(each.msg) for each in run_checks(databases=["default"]) if each.id == "inbox.W007"]


@pytest.mark.timeout(300)
def test_old_and_new_processes_of_a_renamed_handler_have_one_effect_per_message(old, rabbitmq_server, rabbitmq_url):
    options = broker_options(rabbitmq_url)
    with consuming([old], options):
        for number in range(2):
            send(rabbitmq_url, TOPIC, {}, message_id=f"m-{number}")
        wait_until(lambda: effects() == 2)

        registry.remove(OLD)
        idempotent_handler(TOPIC, renamed_from=OLD)(send_reminder)
        new = registry.get(OLD)
        with consuming([new], options):
            for number in range(8):  # the first two once more
                send(rabbitmq_url, TOPIC, {}, message_id=f"m-{number}")
            wait_until(lambda: effects() >= 8 and length_of(rabbitmq_server, old, options) == 0)

    assert effects() == 8
    assert new_names() == []


@pytest.mark.parametrize("decorator", [idempotent_handler, batch_handler, leased_handler])
def test_name_and_renamed_from_contradict_each_other(decorator):
    with pytest.raises(ValueError, match="remove name='a', or renamed_from='b'"):
        decorator(TOPIC, name="a", renamed_from="b")


def test_check_of_the_database_names_a_new_handler_and_the_name_that_it_may_have_had(handles):
    deliver(handles(the_effect, name=OLD))
    assert new_names() == []

    registry.remove(OLD)
    new = handles(send_reminder, name=NEW)
    [warning] = new_names()
    assert NEW in warning
    assert f"renamed_from={OLD!r}" in warning

    deliver(new)  # too late
    assert new_names() == []


@pytest.fixture
def old(handles, rabbitmq_url):
    """The handler under its old name, whose queue exists."""
    handler = handles(the_effect, name=OLD)
    declare(handler, broker_options(rabbitmq_url))
    return handler


def handles_one(rabbitmq_url):
    send(rabbitmq_url, TOPIC, {}, message_id="m-1")
    wait_until(lambda: effects() == 1)


@contextmanager
def consuming_new(handles, options, caplog):
    with consuming([handles(send_reminder, name=NEW)], options) as consumer:
        wait_until(lambda: f"The handler {NEW} is new" in caplog.text)
        checked(consumer)
        yield consumer


def checked(consumer):
    """Let the consumer check its queues, as if half a minute had passed."""
    for _ in range(2):  # when the second check begins, the first has ended
        consumer._subscriptions._checked_at = float("-inf")
        wait_until(lambda: consumer._subscriptions._checked_at > 0)


@pytest.fixture
def is_reported(caplog):
    return lambda: f"collects a copy of every message of {TOPIC} for the handler {OLD}" in caplog.text


def test_consumer_names_a_new_handler_at_its_start_and_the_old_queue_as_long_as_it_exists(
    handles, old, rabbitmq_url, caplog, is_reported
):
    options = broker_options(rabbitmq_url)
    with consuming([old], options):
        handles_one(rabbitmq_url)
    registry.remove(OLD)

    with consuming_new(handles, options, caplog):
        wait_until(is_reported)


def test_queue_of_an_older_version_that_still_runs_is_not_reported(handles, old, rabbitmq_url, caplog, is_reported):
    options = broker_options(rabbitmq_url)
    with consuming([old], options):
        handles_one(rabbitmq_url)
        registry.remove(OLD)
        with consuming_new(handles, options, caplog):
            assert not is_reported()


def test_queue_of_a_handler_that_a_running_process_has_paused_is_not_reported(handles, old, rabbitmq_url, caplog, is_reported):
    deliver(old)
    registry.remove(OLD)
    other = a_consumer(handlers=[OLD], silent_for=timedelta(seconds=-14))
    with consuming_new(handles, broker_options(rabbitmq_url), caplog) as consumer:
        assert not is_reported()

        consumers.mark_stopped("default", other.id)
        wait_until(lambda: checked(consumer) or is_reported())


def test_queue_of_topics_that_a_handler_no_longer_has_is_named(handles, rabbitmq_url, caplog):
    options = broker_options(rabbitmq_url)
    both = handles(the_effect, name=OLD, topic=[TOPIC, "shop.order.cancelled"])
    declare(both, options)
    with consuming([both], options):
        for topic in both.topics:
            send(rabbitmq_url, topic, {}, message_id=topic)
        wait_until(lambda: effects() == 2)
    registry.remove(OLD)

    with consuming([handles(the_effect, name=OLD)], options) as consumer:
        checked(consumer)
        wait_until(lambda: checked(consumer) or f"{OLD}, which does not handle that topic any more" in caplog.text)

    assert f"The queue 'tests.{OLD}@shop.order.cancelled+{TOPIC}' collects a copy of every message" in caplog.text
