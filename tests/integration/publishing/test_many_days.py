"""Many days of history: a statement about one message of the outbox does not lock the partitions of all days."""

from datetime import timedelta

import pytest
from django.db import transaction
from django.test import override_settings

from exactly_once.models import AuditEntry, Operation
from exactly_once.process.loop import StopRequest
from exactly_once.sql.days import day_of
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.executing import Operations
from outbox import cancel, publish, restore
from outbox.models import OutboxMessage, PendingCallback
from outbox.operators.changes import RESTORE_THEM, operations
from outbox.states import State
from outbox.store.history import HISTORY
from outbox.store.pending_callbacks import begin_call, claim_calls
from outbox.store.settling import Settlement, settle
from tests.support import many_days
from tests.support.http_api import HTTP, Api
from tests.support.many_days import FEW_PARTITIONS, partitions_locked
from tests.support.relaying import published, set_columns

pytestmark = [pytest.mark.django_db(transaction=True)]


@pytest.fixture(autouse=True, scope="module")
def _made(django_db_setup, django_db_blocker):
    yield from many_days.made(HISTORY, django_db_blocker)


def locked_by(action):
    """How many partitions of history `action` has locked, and what it returned."""
    with transaction.atomic():
        found = action()
        return partitions_locked(HISTORY), found


@pytest.fixture
def cancelled():
    """A message that was cancelled 40 days ago."""
    with transaction.atomic():
        message = publish("shop.order.placed", {"order_id": 1})
        cancel(message.id)
    ago = timedelta(days=40)
    OutboxMessage.objects.update(settled_at=DatabaseTime(-ago), day=day_of("default", ago))
    return message


def test_restoring_a_message_by_its_id_or_by_a_canary_locks_a_few_partitions(cancelled):
    locked, _ = locked_by(lambda: restore(cancelled.id))
    assert (OutboxMessage.objects.get().state, locked <= FEW_PARTITIONS) == (State.READY, True)

    cancel(cancelled.id)
    set_columns(cancelled, day=day_of("default", timedelta(days=40)))
    row = OutboxMessage.objects.get()
    plan = Operation(action="restore", selection="one", sources=["cancelled"], requested_by="ann", is_canary=True)
    operation = operations.plan("default", plan, [row.pk])

    locked, _ = locked_by(lambda: Operations("outbox", ["default"]).drain(StopRequest()))

    operation.refresh_from_db()
    assert (operation.done, operation.wave_rows) == (1, [[row.pk, "shop.order.placed"]])
    assert locked <= FEW_PARTITIONS


def test_unique_message_locks_no_day_if_it_is_new_and_a_few_if_the_first_was_published_on_any_day():
    def publish_it():
        return publish("shop.order.placed", {"order_id": 1}, biz_id="order-1", unique=True)

    locked, first = locked_by(publish_it)
    assert (locked, first.created) == (0, True)
    ago = timedelta(days=40)
    set_columns(first, state=State.PUBLISHED, settled_at=DatabaseTime(-ago), day=day_of("default", ago))

    locked, again = locked_by(publish_it)
    assert (again.id, again.created, again.state) == (first.id, False, State.PUBLISHED)
    assert locked <= FEW_PARTITIONS


@pytest.fixture
def api():
    with override_settings(ROOT_URLCONF="tests.support.http_urls", OUTBOX={"HTTP": HTTP}):
        yield Api()


@pytest.mark.parametrize(
    "request_of",
    [
        lambda api, message: api.get(f"outbox/messages/{message.id}"),
        lambda api, message: api.get("outbox/messages", topic=message.topic, biz_id=message.biz_id),
        lambda api, message: api.post("outbox/messages/restore", {"id": str(message.id)}),
        lambda api, message: api.post("outbox/messages/restore", {"topic": message.topic, "biz_id": message.biz_id}),
    ],
    ids=["state by id", "states by name", "restore by id", "restore by name"],
)
def test_http_request_about_an_old_message_locks_a_few_partitions(api, cancelled, request_of):
    locked, response = locked_by(lambda: request_of(api, cancelled))

    assert response.status_code == 200
    assert locked <= FEW_PARTITIONS


@pytest.mark.parametrize("which", ["id", "name"])
def test_http_decision_about_a_recent_message_locks_a_few_partitions(api, which):
    with transaction.atomic():
        message = publish("shop.order.placed", {"order_id": 1})
    named = {"id": str(message.id)} if which == "id" else {"topic": message.topic, "biz_id": message.biz_id}

    locked, response = locked_by(lambda: api.post("outbox/messages/cancel", named))

    assert response.json() == {"outcome": "cancelled", "state": "cancelled"}
    assert AuditEntry.objects.get().object_id == str(message.id)
    assert locked <= FEW_PARTITIONS


@pytest.mark.parametrize(("most", "shown"), [(1, 1), (2, 2), (10, 3)])
def test_http_lists_the_newest_messages_of_a_name_first_whatever_their_days(most, shown, monkeypatch):
    with transaction.atomic():
        ids = [str(publish("shop.order.placed", {}, biz_id="order-17").id) for _ in range(3)]
        cancel(ids[2])
        cancel(ids[0])
    ago = timedelta(days=40)
    OutboxMessage.objects.filter(message_id=ids[2]).update(settled_at=DatabaseTime(-ago), day=day_of("default", ago))

    monkeypatch.setattr("outbox.contrib.http.urls.MAX_MESSAGES", most)
    with override_settings(ROOT_URLCONF="tests.support.http_urls", OUTBOX={"HTTP": HTTP}):
        answer = Api().get("outbox/messages", topic="shop.order.placed", biz_id="order-17").json()

    assert [message["id"] for message in answer["messages"]] == ids[::-1][:shown]


@pytest.mark.parametrize("is_sent", [True, False])
def test_canary_is_judged_without_locking_all_days(cancelled, is_sent):
    restore(cancelled.id)
    row = OutboxMessage.objects.get()
    if is_sent:
        set_columns(cancelled, state=State.PUBLISHED)

    locked, judged = locked_by(lambda: RESTORE_THEM.canary.judge("default", [row.pk], row.created_at))

    assert (judged.succeeded, judged.pending) == (([row.pk], []) if is_sent else ([], [row.pk]))
    assert locked <= FEW_PARTITIONS


@pytest.mark.parametrize("ago", [timedelta(), timedelta(days=40)])
def test_settling_a_message_with_a_callback_and_calling_it_lock_a_few_partitions(add_callback, ago):
    add_callback()
    message = published()

    locked, _ = locked_by(lambda: settle("default", Settlement(published=[message.position])))
    assert locked <= FEW_PARTITIONS

    settled = {"settled_at": DatabaseTime(-ago), "day": day_of("default", ago)}
    set_columns(message, **settled)
    PendingCallback.objects.update(settled_at=settled["settled_at"])
    [call] = claim_calls("default", 1, timedelta(minutes=1))
    locked, found = locked_by(lambda: begin_call(call))
    assert (found.id, found.state) == (message.id, State.PUBLISHED)
    assert locked <= FEW_PARTITIONS
