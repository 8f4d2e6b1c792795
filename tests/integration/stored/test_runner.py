"""The runner: a stored message is run once, when it is due, by a process that has its handler."""

from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import OperationalError, connections

from exactly_once.process.clock import monotonic, utcnow
from exactly_once.process.loop import StopRequest
from inbox import housekeeping
from inbox.consumer import runner as runner_module
from inbox.consumer.runner import Runner
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.states import SETTLED, Outcome, State
from inbox.store import claims, due
from tests.support import decisions
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import (
    A_WHILE,
    OPTIONS,
    InAThread,
    Slow,
    an_envelope,
    at_once,
    deliver,
    drain,
    effects,
    fails,
    handed_over,
    make_due,
    run_to_the_end,
    running,
    stored_due,
    the_effect,
    the_row,
)
from tests.support.inbox_rows import settle
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.every_database]

A_LONG_TIME = 10 * A_WHILE


def test_due_messages_are_run_oldest_first(handles):
    seen = []
    handler = handles(lambda message: seen.append(message.biz_id))
    for name in "abc":
        stored_due(handler, an_envelope(biz_id=name))

    assert drain() == 3

    assert seen == ["a", "b", "c"]
    assert drain() == 0


def test_message_of_an_unregistered_handler_stays_unchanged(handles):
    """It belongs to a worker of another deployment, and must not lose attempts meanwhile."""
    stored_due(handles(the_effect, name="tests.elsewhere"))
    registry.remove("tests.elsewhere")
    handles(the_effect, name="tests.known")

    assert drain() == 0

    assert (the_row().state, the_row().attempts, effects()) == (State.RECEIVED, 0, 0)
    handles(the_effect, name="tests.elsewhere")
    assert drain() == 1
    assert effects() == 1


@pytest.mark.parametrize("number", [1, 5], ids=["of one handler", "of many handlers"])
def test_six_concurrent_runners_run_every_message_exactly_once(handles, number):
    handlers = [handles(the_effect, topic=f"topic.{one}") for one in range(number)]
    names = {stored_due(handler).biz_id for handler in handlers for _ in range(40 // number)}

    ran = at_once([drain] * 6)
    # On SQLite a runner that meets a lock may end before the others.
    while make_due():
        ran.append(drain())

    assert sum(ran) == 40
    assert sorted(Effect.objects.values_list("name", flat=True)) == sorted(names)
    assert set(InboxMessage.objects.values_list("state", "attempts")) == {(State.DONE, 1)}


def test_runner_asked_to_stop_finishes_the_running_handler(handles):
    slow, stop = Slow(), StopRequest()
    stored_due(handles(slow))
    with slow.inside(lambda: Runner(OPTIONS).run(stop)):
        stop.set()

    assert (the_row().state, effects()) == (State.DONE, 1)


@contextmanager
def default_database_unavailable(monkeypatch):
    with monkeypatch.context() as away:
        if connections["default"].vendor == "sqlite":
            away.setitem(connections["default"].settings_dict, "NAME", "/nowhere/at/all.sqlite3")
        else:
            away.setitem(connections["default"].settings_dict, "PORT", "1")
        connections["default"].close()
        yield


def test_unavailable_database_does_not_starve_the_other(handles, monkeypatch):
    stored_due(handles(lambda message: Effect.objects.using("other").create(name="there"), using="other"))
    handles(the_effect, topic="here")
    with default_database_unavailable(monkeypatch), running():
        wait_until(lambda: Effect.objects.using("other").count() == 1)


def test_runner_turn_does_not_wait_for_an_unavailable_database(handles, monkeypatch):
    """The threads that take turns also handle the deliveries from the broker."""
    handles(the_effect)
    runner, began_at = Runner(OPTIONS), monotonic()
    asked, orphans = [], due.orphans

    def count(alias, handlers):
        asked.append(alias)
        return orphans(alias, handlers)

    monkeypatch.setattr(due, "orphans", count)
    with default_database_unavailable(monkeypatch):
        for _ in range(30):
            assert runner.turn() == 0

    # Between two questions it leaves the database alone, and goes on.
    assert 1 <= len(asked) < 30
    assert monotonic() - began_at < A_WHILE


def test_purge_deletes_only_old_settled_messages(handles):
    handler = handles(the_effect)
    old = OPTIONS.KEEP_HISTORY + timedelta(days=1)
    for state in State:
        stored_due(handler, an_envelope(biz_id=f"old {state}"))
        stored_due(handler, an_envelope(biz_id=f"new {state}"))
    for row in InboxMessage.objects.all():
        age, state = row.biz_id.split()
        rows = InboxMessage.objects.filter(pk=row.pk)
        if state in SETTLED:
            settle(rows, State(state), ago=old if age == "old" else timedelta())
        else:
            rows.update(state=state)
        rows.update(received_at=utcnow() - old)

    assert housekeeping.HISTORY.purgeable("default", OPTIONS.KEEP_HISTORY) == 3
    assert list(housekeeping.HISTORY.purge("default", OPTIONS.KEEP_HISTORY, chunk=2)) == [2, 1]

    left = set(InboxMessage.objects.values_list("biz_id", flat=True))
    assert {f"old {state}" for state in State} - left == {f"old {state}" for state in ("done", "skipped", "shed")}
    assert {f"new {state}" for state in State} <= left


def test_an_operators_retry_gives_a_full_set_of_attempts(handles):
    deliver(handles(fails))
    run_to_the_end()
    assert the_row().state == State.DEAD

    assert decisions.retry("default", the_row().pk)

    assert (the_row().state, the_row().attempts) == (State.RETRYING, 0)
    drain()
    assert (the_row().state, the_row().attempts) == (State.RETRYING, 1)


def test_skipped_message_is_never_run(handles):
    handler, envelope = handles(fails), an_envelope()
    deliver(handler, envelope)

    assert decisions.skip("default", the_row().pk, "the customer called")
    assert not decisions.retry("default", the_row().pk)
    make_due()
    drain()

    assert (the_row().state, effects()) == (State.SKIPPED, 0)
    assert "the customer called" in the_row().last_error
    assert deliver(handler, envelope, redelivered=True) is Outcome.DUPLICATE


def test_runner_asked_to_stop_gives_back_the_next_message_of_its_key(handles):
    stop = StopRequest()

    def handle(message):
        the_effect(message)
        stop.set()

    handler = handles(handle, ordered=True)
    for name in "ab":
        handed_over(handler, an_envelope(biz_id=name, key="key"))

    assert Runner(OPTIONS).drain(stop) == 1

    row = the_row(biz_id="b")
    assert (row.state, row.attempts, effects("b")) == (State.RECEIVED, 0, 0)
    assert drain() == 1
    assert (the_row(biz_id="b").attempts, effects("b")) == (1, 1)


def test_unexpected_error_ends_a_drain_and_is_not_taken_for_nothing_due(handles, monkeypatch):
    stored_due(handles(the_effect))

    def fail(*arguments, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(claims, "claim_due", fail)

    with pytest.raises(ZeroDivisionError):
        Runner(OPTIONS).drain(StopRequest())


def test_messages_of_an_unknown_handler_are_logged_once_the_database_is_available(handles, caplog, monkeypatch):
    stored_due(handles(the_effect, name="tests.old_name"))
    registry.remove("tests.old_name")
    handles(the_effect, name="tests.new_name")
    ask, failures = due.orphans, [OperationalError("connection refused")]

    def fail_once(*arguments):
        if failures:
            raise failures.pop()
        return ask(*arguments)

    monkeypatch.setattr(due, "orphans", fail_once)

    assert Runner(OPTIONS).drain(StopRequest()) == 0

    assert not failures
    assert "1 stored message waits for the handler 'tests.old_name'" in caplog.text


def test_ring_ends_the_wait_of_a_runner_for_its_next_poll(handles, monkeypatch):
    for every_other_wait in ("_SHORTEST_POLL_SECONDS", "_LONGEST_WAIT_SECONDS"):
        monkeypatch.setattr(runner_module, every_other_wait, A_LONG_TIME)
    handler, stop = handles(the_effect), StopRequest()
    runner = Runner(replace(OPTIONS, POLL_INTERVAL=timedelta(seconds=A_LONG_TIME)))
    with InAThread(lambda: runner.run(stop)):
        wait_until(lambda: runner.seconds_left(monotonic()) > A_WHILE)
        stored_due(handler, an_envelope())
        runner.ring()
        wait_until(lambda: effects() == 1)
        stop.set()
