"""A worker begins each delivery with the commit of the one before it, and each still ends by itself."""

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from django.db import DataError, connection, transaction

from exactly_once.process.clock import monotonic
from inbox import Lease, signals
from inbox.consumer.answers import Acks
from inbox.consumer.lanes import Delivery
from inbox.consumer.reception import Reception
from inbox.consumer.runner import Runner
from inbox.models import InboxMessage
from inbox.states import Outcome, State
from inbox.store import sentinel
from inbox.testing.messages import as_delivered, make_message
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import OPTIONS, TOPIC, InAThread, effects, effects_by_name, the_effect, the_row
from tests.support.lost_answers import losing_the_answer
from tests.support.signals import listening
from tests.support.sql import executed, fetched

pytestmark = [pytest.mark.django_db(transaction=True)]


def in_turn(handler, *names):
    """The answers to deliveries of these biz-ids, which one worker takes one by one; in the order in which it gives them."""
    messages = [as_delivered(make_message(TOPIC, {}, biz_id=name), redelivered=False) for name in names]
    deliveries = [Delivery(Acks(None, multiple=False), handler, message, monotonic()) for message in messages]
    named, waiting, answers = dict(zip(deliveries, names, strict=True)), iter(deliveries), []
    reception = Reception(OPTIONS, Runner(OPTIONS), answers.extend)
    while first := next(waiting, None):
        reception.receive([first], more=lambda: next(waiting, None))
    return [(named[delivery], outcome) for delivery, outcome in answers]


def transactions():
    return fetched(f"SELECT count(DISTINCT xmin::text) FROM {Effect._meta.db_table}")


@pytest.fixture
def in_one_go(monkeypatch):
    """Counts the deliveries that began with the commit of another one."""
    begun = []
    original = sentinel.finish

    def finish(*args, following=None, **kwargs):
        begun.extend([1] if following is not None else [])
        return original(*args, following=following, **kwargs)

    monkeypatch.setattr(sentinel, "finish", finish)
    return lambda: len(begun)


def test_each_has_its_own_transaction(handles, in_one_go):
    answers = in_turn(handles(the_effect), "a", "b", "c")

    assert answers == [(name, Outcome.HANDLED) for name in "abc"]
    assert (effects_by_name(), transactions()) == ({"a": 1, "b": 1, "c": 1}, 3)
    assert in_one_go() == 2


def test_failure_of_the_next_leaves_the_effect_of_the_one_before(handles):
    def handler(message):
        the_effect(message)
        if message.biz_id == "b":
            raise ValueError("no stock")

    answers = in_turn(handles(handler), "a", "b", "c")

    assert answers == [("a", Outcome.HANDLED), ("b", Outcome.STORED), ("c", Outcome.HANDLED)]
    assert (effects_by_name(), the_row(biz_id="b").state) == ({"a": 1, "c": 1}, State.RETRYING)


def test_commit_that_fails_fails_its_own_message_only(handles):
    executed(
        "CREATE TABLE parent (id int PRIMARY KEY);"
        "CREATE TABLE child (parent int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)"
    )
    try:

        def handler(message):
            the_effect(message)
            if message.biz_id == "a":
                executed("INSERT INTO child VALUES (1)")

        answers = in_turn(handles(handler), "a", "b")
    finally:
        executed("DROP TABLE child; DROP TABLE parent")

    assert answers == [("a", Outcome.STORED), ("b", Outcome.HANDLED)]
    assert (effects_by_name(), the_row(biz_id="a").error_class) == ({"b": 1}, "django.db.utils.IntegrityError")


def test_error_that_a_handler_swallows_fails_its_own_message_only(handles):
    def handler(message):
        the_effect(message)
        if message.biz_id == "a":
            with suppress(DataError):
                executed("SELECT 1 / 0")

    assert in_turn(handles(handler), "a", "b") == [("a", Outcome.STORED), ("b", Outcome.HANDLED)]
    assert effects_by_name() == {"b": 1}


def test_transaction_that_a_handler_ended_fails_its_own_message_only(handles):
    def handler(message):
        the_effect(message)
        if message.biz_id == "a":
            connection.connection.commit()

    answers = in_turn(handles(handler), "a", "b")

    assert [outcome for _, outcome in answers] == [Outcome.DEAD, Outcome.HANDLED]
    assert effects("b") == 1


def test_copy_of_the_one_before_is_a_duplicate(handles):
    answers = in_turn(handles(the_effect), "a", "a", "b", "a")

    assert answers == [("a", Outcome.HANDLED), ("a", Outcome.DUPLICATE), ("b", Outcome.HANDLED), ("a", Outcome.DUPLICATE)]
    assert (effects_by_name(), the_row(biz_id="a").duplicates) == ({"a": 1, "b": 1}, 2)


def test_one_that_another_process_is_handling_does_not_delay_the_answer_to_the_one_before(handles):
    handler = handles(the_effect)
    with transaction.atomic():
        executed(
            "INSERT INTO inbox_receipt (id, handler, topic, biz_id, message_id, digest, received_at) "
            "VALUES (-1, %s, %s, 'b', '', '', now())",
            [handler.name, TOPIC],
        )
        with InAThread(lambda: in_turn(handler, "a", "b", "c")) as worker:
            pass
        transaction.set_rollback(True)

    assert worker.answer == [("a", Outcome.HANDLED), ("b", Outcome.STORED), ("c", Outcome.HANDLED)]


def test_hook_after_a_commit_is_not_part_of_the_next_transaction(handles, in_one_go):
    def handler(message):
        transaction.on_commit(lambda: the_effect(replace(message, biz_id=f"hook of {message.biz_id}")))
        if message.biz_id == "b":
            raise ValueError("no stock")

    in_turn(handles(handler), "a", "b")

    assert (effects("hook of a"), effects("hook of b"), in_one_go()) == (1, 0, 0)


def test_receiver_of_a_signal_is_not_part_of_the_next_transaction(handles, in_one_go):
    def receiver(biz_id, **arguments):
        the_effect(make_message(TOPIC, {}, biz_id=f"receiver of {biz_id}"))

    def handler(message):
        if message.biz_id == "b":
            raise ValueError("no stock")

    with listening(signals.message_handled, receiver):
        in_turn(handles(handler), "a", "b")

    assert (effects("receiver of a"), in_one_go()) == (1, 0)


def test_function_that_identifies_a_message_is_not_called_in_the_transaction_of_another(handles):
    within = []

    def biz_id(message):
        within.append(connection.in_atomic_block)
        return message.biz_id

    in_turn(handles(the_effect, biz_id=biz_id), "a", "b", "c")

    assert within == [False, False, False]


def test_setting_that_a_handler_changed_does_not_reach_the_next(handles):
    seen = []

    def handler(message):
        seen.append(fetched("SELECT current_setting('work_mem')"))
        executed("SET work_mem = '123MB'")

    in_turn(handles(handler), "a", "b")

    assert len(set(seen)) == 1
    assert seen[0] != "123MB"


@pytest.mark.parametrize("lost", ["second", "third"])
def test_commit_whose_answer_is_lost_has_one_effect_and_so_has_the_next(handles, process_environment, lost):
    point = SimpleNamespace(reached=lambda: None)

    def handle(message):
        the_effect(message)
        if message.biz_id == lost:
            point.reached()

    handler = handles(handle)
    answers = losing_the_answer(
        process_environment,
        before=lambda: in_turn(handler, "first"),
        call=lambda: in_turn(handler, "second", "third", "fourth"),
        written=f"SELECT 1 FROM inbox_inboxmessage WHERE biz_id = '{lost}'",
        after=(point, "reached"),
    )

    assert dict(answers) == {**dict.fromkeys(["second", "third", "fourth"], Outcome.HANDLED), lost: Outcome.DUPLICATE}
    assert effects_by_name() == dict.fromkeys(["first", "second", "third", "fourth"], 1)
    assert set(InboxMessage.objects.values_list("state", flat=True)) == {State.DONE}


class TestUnderALease:
    """The lease of each is granted in the commit that consumes the one before it."""

    @pytest.fixture
    def leased(self, handles):
        return lambda function, **arguments: handles(function, lease=Lease(), **arguments)

    @staticmethod
    def rows():
        return [*InboxMessage.objects.order_by("biz_id").values_list("biz_id", "state", "attempts")]

    def test_each_is_acknowledged_once_and_handled_once(self, leased):
        running = []

        def handler(message):
            the_effect(message)
            running.append(InboxMessage.objects.filter(state=State.RUNNING).get().biz_id)

        answers = in_turn(leased(handler), "a", "b", "a", "c")

        assert answers == [("a", Outcome.STORED), ("b", Outcome.STORED), ("a", Outcome.DUPLICATE), ("c", Outcome.STORED)]
        assert (running, effects_by_name()) == ([*"abc"], {"a": 1, "b": 1, "c": 1})
        assert self.rows() == [(name, State.DONE, 1) for name in "abc"]

    def test_failure_of_the_next_leaves_the_one_before_handled(self, leased):
        def handler(message):
            the_effect(message)
            if message.biz_id == "b":
                raise ValueError("no stock")

        in_turn(leased(handler), "a", "b", "c")

        assert self.rows() == [("a", State.DONE, 1), ("b", State.RETRYING, 1), ("c", State.DONE, 1)]

    def test_one_that_another_process_is_storing_does_not_keep_the_one_before_from_being_handled(self, leased):
        handler = leased(the_effect)
        with transaction.atomic():
            executed(
                "INSERT INTO inbox_receipt (id, handler, topic, biz_id, message_id, digest, received_at) "
                "VALUES (-1, %s, %s, 'b', '', '', now())",
                [handler.name, TOPIC],
            )
            with InAThread(lambda: in_turn(handler, "a", "b", "c")):
                pass
            transaction.set_rollback(True)

        assert effects_by_name() == {"a": 1, "c": 1}
        assert (the_row(biz_id="a").state, the_row(biz_id="c").state) == (State.DONE, State.DONE)

    def test_lease_whose_grant_was_not_confirmed_is_granted_again(self, leased, process_environment):
        point = SimpleNamespace(reached=lambda: None)

        def handle(message):
            the_effect(message)
            if message.biz_id == "b":
                point.reached()

        handler = leased(handle)
        losing_the_answer(
            process_environment,
            before=lambda: in_turn(handler, "0"),
            call=lambda: in_turn(handler, "a", "b", "c", "d"),
            written="SELECT 1 FROM inbox_inboxmessage WHERE biz_id = 'c'",
            after=(point, "reached"),
        )

        assert self.rows() == [(name, State.DONE, 1) for name in "0abcd"]
        assert effects_by_name() == dict.fromkeys("0abcd", 1)

    @pytest.mark.parametrize(("claims", "state"), [(0, State.DONE), (1, State.RUNNING)], ids=["free", "taken over"])
    def test_run_whose_lease_has_ended_counts_unless_it_was_taken_over_and_the_next_one_runs(self, leased, claims, state):
        def handler(message):
            the_effect(message)
            if message.biz_id == "a":
                executed(f"UPDATE inbox_inboxmessage SET next_attempt_at = now(), fence = fence + {claims} WHERE biz_id = 'a'")

        in_turn(leased(handler), "a", "b")

        assert self.rows() == [("a", state, 1), ("b", State.DONE, 1)]
