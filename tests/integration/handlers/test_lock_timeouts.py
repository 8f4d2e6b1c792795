"""A caller's transaction keeps the `lock_timeout` it had, whatever the inbox did in it."""

from contextlib import suppress
from datetime import timedelta

import pytest
from django.db import transaction

from exactly_once.sql.connections import lock_timeout
from inbox.receiving.admit import hand_over
from inbox.receiving.reading import read
from tests.support.deliveries import OPTIONS, an_envelope, the_effect
from tests.support.sql import executed, fetched

pytestmark = [pytest.mark.django_db(transaction=True)]

OF_THE_CALLER = "1234ms"


@pytest.fixture
def callers_transaction(transactional_db):
    with transaction.atomic():
        executed("SELECT set_config('lock_timeout', %s, true)", [OF_THE_CALLER])
        yield


def shown():
    return fetched("SHOW lock_timeout")


def test_bound_of_a_block_that_fails_ends_with_the_block(callers_transaction):
    with suppress(ValueError), lock_timeout("default", timedelta(seconds=7)):
        assert shown() == "7s"
        raise ValueError

    assert shown() == OF_THE_CALLER


@pytest.mark.parametrize("copies", [1, 2])
def test_message_and_its_duplicate_are_stored_under_their_own_bound(handles, callers_transaction, copies):
    handler, envelope = handles(the_effect), an_envelope()
    for _ in range(copies):
        hand_over(handler, read(handler, envelope, OPTIONS))

    assert shown() == OF_THE_CALLER
