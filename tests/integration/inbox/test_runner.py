"""The runner: what is stored is run when it is due, by whoever knows its handler, once."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import OperationalError, connections, transaction

from inbox import store
from inbox.handlers import registry
from inbox.models import InboxMessage, State
from inbox.reading import read
from inbox.receiving import Received, hand_over
from inbox.runner import Runner
from outbox.kernel.clock import monotonic, utcnow
from outbox.kernel.loop import StopRequest
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import (
    A_WHILE,
    OPTIONS,
    InAThread,
    an_envelope,
    at_once,
    deliver,
    drain,
    effects,
    make_due,
    options,
    run_to_the_end,
    the_effect,
    the_row,
    wait_until,
)

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.every_database]


def stored(handler, **attributes):
    """A message of `handler` that is due, as local:// and the careful path leave it."""
    arrival = read(handler, an_envelope(**attributes), OPTIONS)
    assert store.store_due(handler.using, arrival.row, OPTIONS.TWIN_TIMEOUT)
    return arrival.row


def fails(message):
    the_effect(message)
    raise ValueError("no stock")


def test_what_is_due_is_run_oldest_first(handles):
    seen = []
    handler = handles(lambda message: seen.append(message.biz_id))
    for name in "abc":
        stored(handler, biz_id=name)

    assert drain() == 3

    assert seen == ["a", "b", "c"]
    assert drain() == 0


def test_a_message_of_a_handler_nobody_knows_here_stays_as_it_is(handles):
    """It is for a worker of another deploy; it must not lose attempts meanwhile."""
    gone = handles(the_effect, name="tests.gone")
    stored(gone)
    registry.remove("tests.gone")
    handles(the_effect, name="tests.known")

    assert drain() == 0

    assert (the_row().state, the_row().attempts, effects()) == (State.RECEIVED, 0, 0)
    handles(the_effect, name="tests.gone")
    assert drain() == 1
    assert effects() == 1


def test_one_that_fails_does_not_hold_up_the_others(handles):
    bad, good = handles(fails, name="tests.bad"), handles(the_effect, name="tests.good", topic="other")
    stored(bad)
    stored(good, topic="other")

    assert drain() == 2

    states = dict(InboxMessage.objects.values_list("handler", "state"))
    assert states == {"tests.bad": State.RETRYING, "tests.good": State.DONE}


def test_many_runners_share_the_work_and_run_nothing_twice(handles):
    handler = handles(the_effect)
    names = {stored(handler).biz_id for _ in range(40)}

    ran = at_once([drain] * 6)

    run_to_the_end()
    assert sum(ran) >= 1
    assert sorted(Effect.objects.values_list("name", flat=True)) == sorted(names)
    assert set(InboxMessage.objects.values_list("state", "attempts")) == {(State.DONE, 1)}


def test_it_works_until_asked_to_stop_and_finishes_what_is_in_hand(handles):
    begun, go_on, stop = threading.Event(), threading.Event(), StopRequest()

    def handle(message):
        begun.set()
        assert go_on.wait(A_WHILE)
        the_effect(message)

    stored(handles(handle))
    with InAThread(lambda: Runner(OPTIONS).run(stop)):
        assert begun.wait(A_WHILE)
        stop.set()
        go_on.set()

    assert (the_row().state, effects()) == (State.DONE, 1)


def test_a_running_one_picks_up_what_becomes_due(handles):
    stop, handler = StopRequest(), handles(the_effect)
    with InAThread(lambda: Runner(options(POLL_INTERVAL=timedelta(milliseconds=20))).run(stop)):
        try:
            for name in ("first", "second"):
                stored(handler, biz_id=name)
                wait_until(lambda name=name: effects(name) == 1)
        finally:
            stop.set()


def test_handlers_of_two_databases_are_run_on_theirs(handles):
    def handle(message):
        Effect.objects.using("other").create(name=message.biz_id)

    stored(handles(the_effect, name="tests.here"), biz_id="here")
    stored(handles(handle, name="tests.there", using="other", topic="there"), biz_id="there", topic="there")

    assert drain() == 2

    assert (effects("here"), Effect.objects.using("other").get().name) == (1, "there")


@pytest.mark.parametrize("alias", ["default", "other"])
def test_what_a_handler_committed_by_itself_is_buried_on_every_database(handles, alias):
    """Such a row has no due time: without the sweep nobody would ever see it again."""
    for using in ("default", "other"):
        handler = handles(the_effect, using=using, name=f"tests.{using}")
        stored(handler)
    InboxMessage.objects.using(alias).update(next_attempt_at=None)
    InboxMessage.objects.using("other" if alias == "default" else "default").all().delete()

    drain()

    row = InboxMessage.objects.using(alias).get()
    assert (row.state, row.last_error) == (State.DEAD, store.ABANDONED)


@contextmanager
def the_default_away(monkeypatch):
    with monkeypatch.context() as away:
        if connections["default"].vendor == "sqlite":
            away.setitem(connections["default"].settings_dict, "NAME", "/nowhere/at/all.sqlite3")
        else:
            away.setitem(connections["default"].settings_dict, "PORT", "1")
        connections["default"].close()
        yield


def test_a_database_that_is_away_does_not_starve_the_other(handles, monkeypatch):
    handler = handles(lambda message: Effect.objects.using("other").create(name="there"), using="other")
    stored(handler)
    handles(the_effect, topic="here")
    stop = StopRequest()
    with the_default_away(monkeypatch), InAThread(lambda: Runner(OPTIONS).run(stop)):
        try:
            wait_until(lambda: Effect.objects.using("other").count() == 1)
        finally:
            stop.set()


def test_nobody_waits_for_a_database_that_is_away(handles, monkeypatch):
    """The threads that take turns are those that handle what comes from the broker."""
    handles(the_effect)
    runner, began_at = Runner(OPTIONS), monotonic()
    with the_default_away(monkeypatch):
        for _ in range(30):
            assert runner.turn() == 0

    assert monotonic() - began_at < A_WHILE


def test_a_purge_takes_what_is_settled_and_old_and_nothing_else(handles):
    handler = handles(the_effect)
    old = OPTIONS.RETENTION + timedelta(days=1)
    for state in State:
        stored(handler, biz_id=f"old {state}")
        stored(handler, biz_id=f"new {state}")
    for row in InboxMessage.objects.all():
        age, state = row.biz_id.split()
        InboxMessage.objects.filter(pk=row.pk).update(
            state=state, settled_at=utcnow() - (old if age == "old" else timedelta()), received_at=utcnow() - old
        )

    assert store.purgeable("default", OPTIONS.RETENTION) == 3
    assert list(store.purge_settled("default", OPTIONS.RETENTION, chunk=2)) == [2, 1]

    left = set(InboxMessage.objects.values_list("biz_id", flat=True))
    assert {f"old {state}" for state in State} - left == {f"old {state}" for state in ("done", "skipped", "shed")}
    assert {f"new {state}" for state in State} <= left


def test_an_operators_retry_gives_a_full_set_of_attempts(handles):
    handler = handles(fails)
    deliver(handler)
    run_to_the_end()
    assert the_row().state == State.DEAD

    assert store.retry("default", the_row().pk)

    assert (the_row().state, the_row().attempts) == (State.RETRYING, 0)
    drain()
    assert (the_row().state, the_row().attempts) == (State.RETRYING, 1)


def test_a_skipped_message_has_no_effect_any_more(handles):
    handler, envelope = handles(fails), an_envelope()
    deliver(handler, envelope)

    assert store.skip("default", the_row().pk, "the customer called")
    assert not store.retry("default", the_row().pk)
    make_due()
    drain()

    assert (the_row().state, effects()) == (State.SKIPPED, 0)
    assert "the customer called" in the_row().last_error
    assert deliver(handler, envelope, redelivered=True) is Received.DUPLICATE


def test_what_is_done_can_neither_be_retried_nor_skipped(handles):
    deliver(handles(the_effect))

    assert not store.retry("default", the_row().pk)
    assert not store.skip("default", the_row().pk, "no")
    run_to_the_end()

    assert (the_row().state, effects()) == (State.DONE, 1)


def test_messages_of_a_handler_that_was_renamed_are_told_about(handles, caplog):
    old = handles(the_effect, name="tests.old_name")
    stored(old)
    stored(old)
    registry.remove("tests.old_name")
    handles(the_effect, name="tests.new_name")

    assert Runner(OPTIONS).drain(StopRequest()) == 0

    assert "2 stored messages wait for a handler called 'tests.old_name'" in caplog.text


def test_asked_to_stop_it_gives_back_the_one_that_would_have_followed_in_its_order(handles):
    stop = StopRequest()

    def handle(message):
        the_effect(message)
        stop.set()

    handler = handles(handle, ordered=True)
    for name in "ab":
        with transaction.atomic():
            hand_over(handler, read(handler, an_envelope(biz_id=name, key="key"), OPTIONS))

    assert Runner(OPTIONS).drain(stop) == 1

    row = the_row(biz_id="b")
    assert (row.state, row.attempts, effects("b")) == (State.RECEIVED, 0, 0)
    assert drain() == 1
    assert (the_row(biz_id="b").attempts, effects("b")) == (1, 1)


def test_an_error_nobody_foresaw_ends_a_drain_and_is_not_taken_for_nothing_due(handles, monkeypatch):
    stored(handles(the_effect))

    def fail(*arguments, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(store, "claim_due", fail)

    with pytest.raises(ZeroDivisionError):
        Runner(OPTIONS).drain(StopRequest())


def test_they_are_told_about_also_when_the_database_was_away_at_first(handles, caplog, monkeypatch):
    stored(handles(the_effect, name="tests.old_name"))
    registry.remove("tests.old_name")
    handles(the_effect, name="tests.new_name")
    ask, failures = store.orphans, [OperationalError("connection refused")]

    def fail_once(*arguments):
        if failures:
            raise failures.pop()
        return ask(*arguments)

    monkeypatch.setattr(store, "orphans", fail_once)

    assert Runner(OPTIONS).drain(StopRequest()) == 0

    assert not failures
    assert "1 stored messages wait for a handler called 'tests.old_name'" in caplog.text
