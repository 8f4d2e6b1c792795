"""Messages of several topics of one handler with one biz-id, in one load: they are different messages."""

import pytest
from django.db import transaction

from inbox.models import InboxMessage
from inbox.receiving.admit import admit, hand_over
from inbox.receiving.reading import read
from inbox.receiving.receive import receive
from inbox.states import Outcome
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import OPTIONS, an_envelope, drain

pytestmark = [pytest.mark.every_database, pytest.mark.django_db(transaction=True, databases=["default", "other"])]

TOPICS = ["shop.order.paid", "shop.order.placed"]


def of_each_topic(handler):
    return [read(handler, an_envelope(topic=topic, biz_id="order-1", key="order-1"), OPTIONS) for topic in TOPICS]


def take(message):
    Effect.objects.create(name=message.topic)


def take_all(messages):
    for message in messages:
        take(message)


def effects_of_topics():
    return [*Effect.objects.order_by("id").values_list("name", flat=True)]


@pytest.mark.parametrize("options", [{"size": 2}, {"group_commit": 2}], ids=["batch", "group commit"])
def test_each_message_of_a_load_is_handled(handles, options):
    handler = handles(take_all if "size" in options else take, topic=TOPICS, **options)

    assert receive(handler, of_each_topic(handler), OPTIONS) == [Outcome.HANDLED] * 2

    assert effects_of_topics() == TOPICS


def test_copy_in_a_load_is_a_duplicate_of_the_message_of_its_own_topic(handles):
    handler = handles(take_all, topic=TOPICS, size=3)
    paid, placed = of_each_topic(handler)

    assert receive(handler, [placed, paid, placed], OPTIONS) == [Outcome.HANDLED, Outcome.HANDLED, Outcome.DUPLICATE]

    assert effects_of_topics() == TOPICS[::-1]
    assert [*InboxMessage.objects.order_by("topic").values_list("duplicates", flat=True)] == [0, 1]


@pytest.mark.parametrize("ordered", [True, False])
def test_each_message_of_a_load_is_stored_and_not_a_duplicate(handles, ordered):
    handler = handles(take, topic=TOPICS, ordered=ordered)

    assert admit(handler, of_each_topic(handler), OPTIONS) == [Outcome.STORED] * 2

    assert [*InboxMessage.objects.values_list("duplicates", flat=True)] == [0, 0]
    drain()
    assert effects_of_topics() == TOPICS


def test_each_message_that_is_handed_over_is_stored_and_not_a_duplicate(handles):
    handler = handles(take, topic=TOPICS, ordered=True)

    with transaction.atomic():
        hand_over(handler, *of_each_topic(handler))

    assert [*InboxMessage.objects.values_list("duplicates", flat=True)] == [0, 0]
