"""Time that passes for messages without anybody waiting."""

from datetime import timedelta

import pytest
from django.db import models, transaction

from inbox import RetryLater
from inbox.models import InboxMessage
from outbox import Answer, checker, prepare, publish
from outbox.callbacks import checkers
from outbox.models import OutboxMessage
from outbox.testing import assert_published, run_relay, travel
from tests.support.apps.effects.models import Effect

TOPIC = "tests.travel"

pytestmark = [pytest.mark.every_database, pytest.mark.django_db]


def say(**options):
    with transaction.atomic():
        return publish(TOPIC, {}, **options)


def state():
    return OutboxMessage.objects.get().state


@pytest.mark.usefixtures("transaction_of_the_test")
def test_delayed_message_goes_out_when_its_time_has_come_and_not_before(amqp):
    say(delay=timedelta(hours=48))

    travel(timedelta(hours=47))
    assert run_relay() == []

    travel(timedelta(hours=1))
    assert len(run_relay()) == 1


def test_unroutable_message_is_tried_again(handles):
    say()
    run_relay()
    assert assert_published(TOPIC).attempts == 1

    handles(lambda message: None, topic=TOPIC)
    travel(timedelta(minutes=2))
    run_relay()

    assert state() == "published"


@pytest.mark.long
@pytest.mark.usefixtures("transaction_of_the_test")
def test_handler_that_asks_for_later_is_called_again_then(handles):
    calls = []

    def out_of_stock(message):
        calls.append(message.attempt)
        if len(calls) == 1:
            raise RetryLater(timedelta(minutes=5))

    handles(out_of_stock, topic=TOPIC)
    say()
    run_relay()
    travel(timedelta(minutes=4))
    run_relay()
    assert len(calls) == 1

    travel(timedelta(minutes=1))
    run_relay()

    assert len(calls) == 2
    assert InboxMessage.objects.get().state == "done"


def test_checker_of_a_prepared_message_is_asked_when_it_is_due(amqp):
    asked = []

    def paid(message):
        asked.append(message.payload)
        return Answer.UNKNOWN if len(asked) == 1 else Answer.COMMIT

    checker(TOPIC)(paid)
    try:
        prepare(TOPIC, {"order": "1"})
        run_relay()
        assert asked == []

        travel(timedelta(seconds=10))
        run_relay()
        assert (len(asked), state()) == (1, "prepared")

        travel(timedelta(seconds=30))
        run_relay()
    finally:
        checkers.remove(TOPIC)

    assert asked == [{"order": "1"}] * 2
    assert state() == "published"


def test_every_instant_of_a_message_moves_by_the_same_time():
    say(delay=timedelta(hours=1), expires_in=timedelta(hours=1))
    before = OutboxMessage.objects.values(*instants(OutboxMessage)).get()

    travel(timedelta(days=1, microseconds=1))

    after = OutboxMessage.objects.values(*instants(OutboxMessage)).get()
    for name, instant in before.items():
        assert after[name] == (instant and instant - timedelta(days=1, microseconds=1)), name


def test_rows_of_other_apps_stay_as_they_are_and_a_way_back_is_refused():
    Effect.objects.create(name="a")
    before = list(Effect.objects.values())

    travel(timedelta(days=1))

    assert list(Effect.objects.values()) == before
    for time in (timedelta(), timedelta(seconds=-1)):
        with pytest.raises(ValueError, match="more than zero"):
            travel(time)


def instants(model):
    return [field.name for field in model._meta.fields if isinstance(field, models.DateTimeField)]
