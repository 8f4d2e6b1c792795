"""What a user's own tests do: publish and drain inside the transaction of a TestCase, which pytest-django's `db` is."""

import pytest
from django.core.management import call_command
from django.db import connection

from inbox.models import InboxMessage
from inbox.states import State as InboxState
from outbox import PublishedOutsideTransaction, publish
from outbox.models import OutboxMessage
from outbox.states import State
from tests.support.deliveries import TOPIC, effects, the_effect
from tests.support.relaying import published, state_of
from tests.support.sql import fetched

pytestmark = [pytest.mark.every_database, pytest.mark.django_db(databases=["default", "other"])]


@pytest.mark.parametrize("alias", ["default", "other"])
def test_publish_without_atomic_is_refused_inside_a_testcase(alias):
    with pytest.raises(PublishedOutsideTransaction):
        publish(TOPIC, {}, using=alias)
    assert not OutboxMessage.objects.using(alias).exists()


def test_drain_runs_the_handlers_inside_a_testcase_and_leaves_its_timeouts_unchanged(handles):
    handles(the_effect)
    message = published(biz_id="seen")

    call_command("outbox_relay", "--drain", verbosity=0)

    assert effects("seen") == 1
    assert (InboxMessage.objects.get().state, state_of(message)) == (InboxState.DONE, State.PUBLISHED)
    if connection.vendor == "postgresql":
        for name in ("idle_in_transaction_session_timeout", "lock_timeout"):
            assert fetched(f"SHOW {name}") == "0"
