"""The tests of a project; pytest reads its configuration here, and none of this repository's."""

from datetime import timedelta

import pytest
from django.db import transaction
from django.test import TestCase, TransactionTestCase

from inbox.models import InboxMessage
from inbox.testing import assert_duplicate, assert_handled, deliver, make_message, redeliver
from outbox import publish
from outbox.models import OutboxMessage
from outbox.testing import assert_published, published, run_relay, travel
from tests.projects.cycle import TOPIC
from tests.projects.shop.models import Effect


def whole_way():
    """Nothing is left of another test; a message fails once, is retried later, and comes twice."""
    assert not published()
    assert not InboxMessage.objects.exists()
    with transaction.atomic():
        publish(TOPIC, "fails once", biz_id="order-1")
        publish(TOPIC, "", biz_id="order-2", unique=True)
        publish(TOPIC, "", biz_id="order-2", unique=True)
    assert_published(TOPIC, biz_id="order-1")
    run_relay()
    travel(timedelta(minutes=1))
    run_relay()
    assert_handled(TOPIC, biz_id="order-1")
    assert sorted(Effect.objects.values_list("name", flat=True)) == ["order-1", "order-2"]
    message = make_message(TOPIC, "", biz_id="order-3")
    deliver(message)
    redeliver(message)
    assert_duplicate(TOPIC, biz_id="order-3")
    assert OutboxMessage.objects.exclude(settled_at=None).count() == 2


class InATransaction(TestCase):
    def test_first(self):
        whole_way()

    def test_second(self):
        whole_way()


class Committed(TransactionTestCase):
    serialized_rollback = True

    def test_first(self):
        whole_way()

    def test_second(self):
        whole_way()


@pytest.mark.django_db
@pytest.mark.parametrize("number", range(2))
def test_in_a_transaction(number):
    whole_way()


@pytest.mark.django_db(transaction=True, serialized_rollback=True)
@pytest.mark.parametrize("number", range(2))
def test_committed(number):
    whole_way()
