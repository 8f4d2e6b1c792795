"""Handlers that change the same row at the same time: locks, versions, and what the inbox makes of a conflict."""

import threading
from datetime import timedelta
from functools import partial

import pytest

from inbox import RetryLater
from inbox.states import Outcome, State
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import A_WHILE, an_envelope, at_once, deliver, drain, make_due, the_row

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

MANY = 8


@pytest.fixture
def counter():
    return Effect.objects.create(name="counter", detail="0")


def count(counter):
    counter.refresh_from_db()
    return int(counter.detail)


def test_concurrent_handlers_that_lock_a_row_lose_no_update(handles, counter):
    def increase(message):
        row = Effect.objects.select_for_update().get(pk=counter.pk)
        row.detail = str(int(row.detail) + 1)
        row.save()

    handler = handles(increase)
    received = at_once([lambda: deliver(handler)] * MANY)

    assert received == [Outcome.HANDLED] * MANY
    assert count(counter) == MANY


def test_handler_with_a_stale_version_is_deferred_without_counting_an_attempt(handles, counter):
    has_read = threading.Event()

    def increase(message):
        before = Effect.objects.get(pk=counter.pk).detail
        if not has_read.is_set():
            has_read.set()
            at_once([change_it])
        if not Effect.objects.filter(pk=counter.pk, detail=before).update(detail=str(int(before) + 1)):
            raise RetryLater(timedelta(seconds=1), "another transaction was faster")

    def change_it():
        Effect.objects.filter(pk=counter.pk).update(detail="41")

    assert deliver(handles(increase), an_envelope(biz_id="late")) is Outcome.STORED
    row = the_row(biz_id="late")
    assert (row.state, row.attempts) == (State.RETRYING, 0)
    assert "another transaction was faster" in row.last_error

    make_due()
    drain()

    assert the_row(biz_id="late").state == State.DONE
    assert count(counter) == 42


@pytest.mark.long
def test_deadlocked_handler_is_run_again_at_once_without_counting_an_attempt(handles):
    rows = [Effect.objects.create(name=name, detail="0") for name in ("first", "second")]
    both_have_one = threading.Barrier(2)
    waited = set()

    def lock(message):
        order = rows if message.biz_id == "forwards" else rows[::-1]
        for number, row in enumerate(order):
            locked = Effect.objects.select_for_update().get(pk=row.pk)
            if number == 0 and message.biz_id not in waited:
                waited.add(message.biz_id)
                both_have_one.wait(A_WHILE)
            locked.detail = str(int(locked.detail) + 1)
            locked.save()

    handler = handles(lock)
    received = at_once([partial(deliver, handler, an_envelope(biz_id=way)) for way in ("forwards", "backwards")])

    assert received == [Outcome.HANDLED] * 2
    assert [count(row) for row in rows] == [2, 2]
    assert {the_row(biz_id=way).attempts for way in ("forwards", "backwards")} == {1}
