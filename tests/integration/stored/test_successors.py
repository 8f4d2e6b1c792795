"""The stored message that is claimed in the transaction that settles another one."""

from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from exactly_once.sql.now import DatabaseTime
from inbox import Retry, pause, resume, signals
from inbox.consumer import runner
from inbox.models import InboxMessage
from inbox.receiving.receive import claim_next, run_stored
from inbox.states import Outcome, State
from inbox.store.message_rows import Successor
from inbox.store.ordering import RUN_LOCK
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import (
    OPTIONS,
    admitted,
    an_envelope,
    drain,
    effects,
    in_the_order_of_their_effects,
    run_to_the_end,
    the_effect,
    the_row,
)
from tests.support.lost_answers import losing_the_answer
from tests.support.signals import listening
from tests.support.sql import another_session, executed, fetched
from tests.support.waiting import A_WHILE, wait_until

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]


def store(handler, *names, key=""):
    load = [an_envelope(biz_id=name, key=key) for name in names]
    assert admitted(handler, *load) == [Outcome.STORED] * len(names)
    for seconds, name in enumerate(reversed(names)):
        due = InboxMessage.objects.filter(biz_id=name, next_attempt_at__isnull=False)
        due.update(next_attempt_at=DatabaseTime(timedelta(seconds=-seconds)))


def run_first(handler):
    """Run the message of the handler that is due longest; the message that follows, or None."""
    successor = Successor(timedelta(minutes=1), lambda: [handler.name])
    assert run_stored(*claim_next([handler], "default", OPTIONS), OPTIONS, successor) is Outcome.HANDLED
    return successor.message


@pytest.mark.parametrize("ordered", [True, False])
def test_successor_equals_its_row(handles, ordered):
    handler = handles(the_effect, ordered=ordered)
    store(handler, "a", "b", key="k")

    successor = run_first(handler)

    assert (successor.biz_id, successor.attempts) == ("b", 1)
    row = InboxMessage.objects.get(biz_id="b")
    for field in InboxMessage._meta.concrete_fields:
        assert getattr(successor, field.attname) == getattr(row, field.attname), field.name


SETTINGS = ["DateStyle = German", "DateStyle = 'SQL, DMY'", "client_encoding = LATIN1", "TIME ZONE 'Asia/Tokyo'"]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("ordered", [True, False])
def test_successor_is_read_whatever_the_handler_has_set(handles, setting, ordered):
    hooks = []

    def setting_it(message):
        the_effect(message)
        transaction.on_commit(lambda: hooks.append(message.biz_id))
        executed(f"SET LOCAL {setting}")

    handler = handles(setting_it, ordered=ordered)
    store(handler, "a", "b", key="k")
    InboxMessage.objects.filter(biz_id="b").update(source="ü", last_error="ü")
    received_at = InboxMessage.objects.get(biz_id="b").received_at

    successor = run_first(handler)

    assert hooks == ["a"]
    assert (successor.biz_id, successor.source, successor.received_at) == ("b", "ü", received_at)


def test_none_follows_when_the_predecessor_has_used_up_the_time(handles):
    handler = handles(the_effect, ordered=True)
    store(handler, "a", "b", key="k")
    successor = Successor(timedelta(minutes=1), lambda: None)

    assert run_stored(*claim_next([handler], "default", OPTIONS), OPTIONS, successor) is Outcome.HANDLED

    assert successor.message is None
    assert InboxMessage.objects.get(biz_id="b").attempts == 0
    drain()
    assert effects() == 2


def test_message_of_another_key_follows_the_last_one_of_a_key(handles):
    handler = handles(the_effect, ordered=True)
    store(handler, "a", key="a")
    store(handler, "b", key="b")

    successor = run_first(handler)

    assert {successor.biz_id, *Effect.objects.values_list("name", flat=True)} == {"a", "b"}


@pytest.mark.parametrize("ordered", [True, False])
def test_nothing_follows_once_the_handler_is_paused(handles, ordered):
    handler = handles(lambda message: pause(message.headers["handler"]), ordered=ordered)
    admitted(handler, *(an_envelope(biz_id=name, key="k", headers={"handler": handler.name}) for name in "ab"))

    assert run_first(handler) is None

    assert [*InboxMessage.objects.values_list("state", "attempts").order_by("id")] == [(State.DONE, 1), (State.RECEIVED, 0)]
    assert not drain()
    resume(handler.name)
    assert drain() == 1
    assert set(InboxMessage.objects.values_list("state", flat=True)) == {State.DONE}


@pytest.mark.parametrize(
    "columns",
    [{"attempts": 1, "state": State.RECEIVED}, {"attempts": 1, "state": State.RUNNING}, {"attempts": 1, "stopping": True}],
    ids=["never ended", "its lease has ended", "was to stop"],
)
def test_message_whose_last_attempt_never_ended_does_not_follow(handles, columns):
    handler = handles(the_effect)
    store(handler, "a", "b")
    InboxMessage.objects.filter(biz_id="b").update(**columns)

    assert run_first(handler) is None


def test_failed_message_follows_when_it_is_due(handles):
    handler = handles(the_effect)
    store(handler, "a", "b")
    InboxMessage.objects.filter(biz_id="b").update(attempts=1, state=State.RETRYING)

    assert run_first(handler).attempts == 2


@contextmanager
def isolation(level):
    executed(f"SET default_transaction_isolation = '{level}'")
    try:
        yield
    finally:
        executed("RESET default_transaction_isolation")


@pytest.mark.parametrize(
    "inside",
    [lambda: CaptureQueriesContext(connection), lambda: isolation("repeatable read"), lambda: isolation("serializable")],
    ids=["where statements may not be prepared", "repeatable read", "serializable"],
)
@pytest.mark.parametrize("ordered", [True, False])
def test_transaction_that_prepares_nothing_or_does_not_see_every_commit_claims_none(handles, inside, ordered):
    handler = handles(the_effect, ordered=ordered)
    store(handler, "a", "b", key="k")
    with inside():
        assert run_first(handler) is None

    assert InboxMessage.objects.get(biz_id="b").state == State.RECEIVED
    drain()
    assert effects() == 2


def test_successor_is_due_again_if_the_commit_fails(handles):
    def impossible(message):
        the_effect(message)
        executed("INSERT INTO child VALUES (1)")

    executed("CREATE TABLE parent (id int PRIMARY KEY)")
    executed("CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
    try:
        handler = handles(impossible)
        store(handler, "a", "b")
        successor = Successor(timedelta(minutes=1), lambda: [handler.name])

        assert run_stored(*claim_next([handler], "default", OPTIONS), OPTIONS, successor) is Outcome.STORED
    finally:
        executed("DROP TABLE child, parent")

    assert successor.message is None
    assert [*InboxMessage.objects.order_by("biz_id").values_list("biz_id", "state", "attempts")] == [
        ("a", State.RETRYING, 1),
        ("b", State.RECEIVED, 0),
    ]


class TestBegunWithTheCommitOfTheOneBefore:
    """Of `a`, `b`, `c` and `d`, `c` and `d` begin in the round trip that commits `b` and `c`."""

    @pytest.fixture(autouse=True)
    def without_end(self, monkeypatch):
        monkeypatch.setattr(runner, "_SUCCESSORS_SECONDS", A_WHILE)

    def test_each_has_its_own_transaction_and_the_limits_of_its_handler(self, handles):
        limits = []

        def handler(message):
            the_effect(message)
            limits.append(fetched("SELECT current_setting('statement_timeout')"))

        store(handles(handler, ordered=True, timeout=timedelta(seconds=7)), *"abcd", key="k")

        assert drain() == 4
        assert limits == ["7s"] * 4
        assert fetched(f"SELECT count(DISTINCT xmin::text) FROM {Effect._meta.db_table}") == 4
        assert in_the_order_of_their_effects() == [*"abcd"]

    def test_one_that_fails_leaves_the_effect_of_the_one_before(self, handles):
        def handler(message):
            the_effect(message)
            if message.biz_id == "c":
                raise ValueError("no stock")

        store(handles(handler, ordered=True), *"abcd", key="k")
        drain()

        assert in_the_order_of_their_effects() == ["a", "b"]
        assert (the_row(biz_id="b").state, the_row(biz_id="c").state, the_row(biz_id="c").attempts) == ("done", "retrying", 1)

    def test_one_that_cannot_be_read_is_a_dead_letter(self, handles):
        store(handles(the_effect, ordered=True), *"abcd", key="k")
        InboxMessage.objects.filter(biz_id="c").update(body=b"not JSON")
        drain()

        assert (the_row(biz_id="b").state, the_row(biz_id="c").state) == (State.DONE, State.DEAD)

    @pytest.mark.parametrize(
        "decision", ["UPDATE inbox_inboxmessage SET fence = fence + 1", "DELETE FROM inbox_inboxmessage"], ids=["fence", "row"]
    )
    def test_one_that_an_operator_has_decided_about_meanwhile_is_not_run(self, handles, decision):
        store(handles(the_effect, ordered=True), *"abcd", key="k")
        executed(
            f"CREATE FUNCTION decide() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {decision} WHERE biz_id = 'c'; "
            f"RETURN NULL; END $$; CREATE CONSTRAINT TRIGGER decides AFTER INSERT ON {Effect._meta.db_table} "
            "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.name = 'b') EXECUTE FUNCTION decide()"
        )
        try:
            drain()
        finally:
            executed("DROP FUNCTION decide CASCADE")

        assert in_the_order_of_their_effects() == ["a", "b"]
        assert the_row(biz_id="b").state == State.DONE

    def test_one_whose_key_is_busy_is_given_back(self, handles):
        handler = handles(the_effect, ordered=True)
        for name in "abcd":
            store(handler, name, key=name)
        with another_session() as session:
            session.execute(f"SELECT {RUN_LOCK} FROM (SELECT 'c' AS key, %s AS handler) AS other", [handler.name])
            wait_until(lambda: drain() == 0 and effects() == 3)
            assert (the_row(biz_id="c").attempts, the_row(biz_id="c").state) == (0, State.RECEIVED)
        run_to_the_end()

        assert sorted(in_the_order_of_their_effects()) == [*"abcd"]

    def test_one_whose_row_stays_locked_is_deferred(self, handles, caplog):
        """The other session's lock permits the claim, which changes no key, and not the lock of the row."""
        store(handles(the_effect, ordered=True), *"abcd", key="k")
        with another_session() as session:
            session.execute("SELECT 1 FROM inbox_inboxmessage WHERE biz_id = 'c' FOR KEY SHARE")
            assert drain() == 3
            assert in_the_order_of_their_effects() == ["a", "b"]
            assert (the_row(biz_id="b").state, the_row(biz_id="c").attempts) == (State.DONE, 1)
            assert "is deferred: another session has locked row" in caplog.text
        run_to_the_end()

        assert in_the_order_of_their_effects() == [*"abcd"]

    def test_commit_whose_answer_is_lost_has_one_effect_and_counts_no_attempt(self, handles, process_environment):
        point = SimpleNamespace(reached=lambda: None)

        def handle(message):
            the_effect(message)
            if message.biz_id == "b":
                point.reached()

        handler = handles(handle, ordered=True, retry=Retry(max_attempts=1))

        def prepare():
            store(handler, "0", key="k")
            drain()
            store(handler, *"abcd", key="k")

        losing_the_answer(
            process_environment,
            before=prepare,
            call=drain,
            written="SELECT 1 FROM inbox_inboxmessage WHERE biz_id = 'c' AND attempts = 1",
            after=(point, "reached"),
        )

        assert [*InboxMessage.objects.values_list("state", "attempts").order_by("id")] == [(State.DONE, 1)] * 5
        assert in_the_order_of_their_effects() == [*"0abcd"]

    @pytest.mark.parametrize("after", ["hook", "receiver"])
    def test_what_happens_after_a_commit_is_not_part_of_the_next_transaction(self, handles, after):
        def later(biz_id, **arguments):
            Effect.objects.create(name=f"after {biz_id}")

        def handler(message):
            if after == "hook":
                transaction.on_commit(lambda: later(message.biz_id))
            if message.biz_id == "c":
                raise ValueError("no stock")

        store(handles(handler, ordered=True), *"abcd", key="k")
        with listening(signals.message_handled, later) if after == "receiver" else nullcontext():
            drain()

        assert sorted(Effect.objects.values_list("name", flat=True)) == ["after a", "after b"]
