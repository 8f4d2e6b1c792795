"""Prepared messages: committed at once, decided once, checked until they are decided or stuck."""

import sys
from collections import Counter
from datetime import timedelta
from functools import partial

import pytest
from django.db import IntegrityError, connection, transaction
from django.test import override_settings

from exactly_once.process.loop import StopRequest
from exactly_once.sql.now import DatabaseTime
from outbox import (
    AlreadyDecided,
    Answer,
    Decision,
    NoChecker,
    Outcome,
    PreparedInsideTransaction,
    UndecidedMessage,
    checker,
    prepare,
    signals,
)
from outbox.callbacks import checkers
from outbox.conf import CheckOptions, OutboxOptions
from outbox.models import OutboxMessage, TrailEntry
from outbox.relay.callback_worker import askers
from outbox.relay.service import serve
from outbox.states import COMMIT, RESUME_CHECKS, ROLL_BACK, State
from outbox.store import decision_rows, prepared_rows
from tests.support.deliveries import at_once
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.relaying import drained, ids, in_hand, in_threads, published, row_of, set_columns, state_of, states
from tests.support.signals import listening
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.every_database, pytest.mark.django_db(databases=["default", "other"])]
several_connections = pytest.mark.django_db(transaction=True)

TOPIC = "bank.transfer"
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def answers():
    """The checker of the topic: the test puts its answers here; the last one is given again and again."""
    given = [Answer.UNKNOWN]

    @checker(TOPIC)
    def ask(message):
        answer = given.pop(0) if len(given) > 1 else given[0]
        return answer(message) if callable(answer) else answer

    yield given
    checkers.remove(TOPIC)


def trail_of(half):
    return list(TrailEntry.objects.filter(message_id=half.id).order_by("pk").values_list("was", "became"))


def stuck(**options):
    half = prepare(TOPIC, {}, **options)
    set_columns(half, state=State.STUCK, attempts=15, last_error="unknown")
    return half


class TestPrepare:
    def test_prepare_commits_a_row_that_no_relay_claims(self):
        half = prepare(TOPIC, {"amount": 10}, biz_id="transfer-1", headers={"tenant": "acme"})
        later = row_of(prepare(TOPIC, {}, delay=HOUR, expires_in=HOUR))

        row = row_of(half)
        assert (row.state, row.biz_id, bytes(row.body), row.attempts) == (State.PREPARED, "transfer-1", b'{"amount":10}', 0)
        assert row.available_at - row.created_at == timedelta(seconds=6)
        assert row.deliver_at is row.expires_at is None
        assert abs(later.deliver_at - later.created_at - HOUR) < timedelta(seconds=30)
        assert abs(later.expires_at - later.deliver_at - HOUR) < timedelta(milliseconds=1)
        assert later.available_at < later.deliver_at - HOUR / 2
        with transaction.atomic():
            assert not in_hand()

    @pytest.mark.django_db(transaction=True, databases=["default", "other"])
    def test_prepare_is_refused_inside_a_transaction_of_its_own_database_only(self):
        with transaction.atomic(using="other"):
            prepare(TOPIC, {})
        with transaction.atomic(), pytest.raises(PreparedInsideTransaction, match="'default'"):
            prepare(TOPIC, {})
        connection.set_autocommit(False)
        try:
            with pytest.raises(PreparedInsideTransaction):
                prepare(TOPIC, {})
        finally:
            connection.rollback()
            connection.set_autocommit(True)
        with pytest.raises(NoChecker, match=r"'shop\.gone'.*bank\.transfer"):
            prepare("shop.gone", {})

        assert states() == [State.PREPARED]


class TestDecision:
    def test_committed_message_is_published_and_a_rolled_back_one_never_and_an_undecided_one_does_not_block_its_key(self, peer):
        half, dropped, last = prepare(TOPIC, {"amount": 10}, key="k"), prepare(TOPIC, {}, key="k"), published(key="k")
        dropped.rollback()
        drained(peer.url)
        half.commit()

        assert (trail_of(half), trail_of(dropped)) == ([(State.PREPARED, State.READY)], [(State.PREPARED, State.ROLLED_BACK)])
        assert row_of(dropped).settled_at is not None
        with transaction.atomic():
            assert [row.ready_position > 0 for row in in_hand()] == [True]  # where no reader has passed its place
        drained(peer.url)
        assert ids(peer.published) == ids([last, half])
        assert (state_of(half), state_of(dropped)) == (State.PUBLISHED, State.ROLLED_BACK)

    def test_repeated_decision_changes_nothing_and_the_opposite_is_an_error_that_names_the_state(self):
        committed, dropped = prepare(TOPIC, {}), prepare(TOPIC, {})
        assert committed.commit() == Decision(Outcome.COMMITTED, State.READY)
        assert dropped.rollback() == Decision(Outcome.ROLLED_BACK, State.ROLLED_BACK)
        assert dropped.rollback() == Decision(Outcome.TOO_LATE, State.ROLLED_BACK)
        for decide, half, state in ((committed.rollback, committed, State.READY), (dropped.commit, dropped, State.ROLLED_BACK)):
            with transaction.atomic():
                with pytest.raises(AlreadyDecided) as refused:
                    decide()
                published()  # the transaction is usable
            assert (refused.value.message_id, refused.value.state) == (half.id, state)
        set_columns(committed, state=State.PUBLISHED)
        assert committed.commit() == Decision(Outcome.TOO_LATE, State.PUBLISHED)

        assert states() == [State.PUBLISHED, State.ROLLED_BACK, State.READY, State.READY]

    def test_decision_is_rolled_back_with_the_open_transaction_and_about_a_deleted_row_it_is_an_error(self):
        half = prepare(TOPIC, {})
        with transaction.atomic():
            half.commit()
            transaction.set_rollback(True)
        assert (state_of(half), trail_of(half)) == (State.PREPARED, [])

        OutboxMessage.objects.all().delete()
        with pytest.raises(AlreadyDecided, match="its row no longer exists"):
            half.commit()

    def test_prepare_and_commit_with_using_affect_that_database_only(self):
        here, there = prepare(TOPIC, {}), prepare(TOPIC, {}, using="other")
        there.commit()

        assert state_of(there, "other") == State.READY
        assert state_of(here) == State.PREPARED
        assert not OutboxMessage.objects.filter(message_id=there.id).exists()

    @several_connections
    def test_exactly_one_of_several_concurrent_decisions_takes_effect(self):
        """Each of many messages at the same moment by its code, by its code's opposite, and by a checker or operator."""
        halves = [prepare(TOPIC, {}) for _ in range(10)]
        positions = {half: row_of(half).pk for half in halves}

        def tried(decide, order):
            def run():
                won, lost = set(), {}
                for half in order:
                    try:
                        decide(half)
                        won.add(half)
                    except AlreadyDecided as error:
                        lost[half] = error.state
                return won, lost

            return run

        (committed, not_committed), (dropped, not_dropped), _, _ = at_once(
            [
                tried(lambda half: half.commit(), halves),
                tried(lambda half: half.rollback(), halves[::-1]),
                tried(lambda half: decision_rows.decide("default", COMMIT, [positions[half]]), halves),
                tried(lambda half: decision_rows.decide("default", ROLL_BACK, [positions[half]]), halves[::-1]),
            ]
        )

        assert committed | dropped == set(halves)
        assert committed & dropped == set()
        assert set(not_committed) == dropped
        assert set(not_dropped) == committed
        for half in halves:
            state = State.READY if half in committed else State.ROLLED_BACK
            assert (state_of(half), trail_of(half)) == (state, [(State.PREPARED, state)])
        assert set(not_committed.values()) <= {State.ROLLED_BACK}
        assert set(not_dropped.values()) <= {State.READY}


class TestPrepareBlock:
    def test_prepare_block_commits_at_its_end(self):
        with prepare(TOPIC, {}) as half:
            assert state_of(half) == State.PREPARED

        assert state_of(half) == State.READY

    def test_prepare_block_may_decide_itself_and_accepts_the_same_decision_of_the_checker_and_refuses_the_opposite(self):
        with prepare(TOPIC, {}) as dropped:
            dropped.rollback()
        with prepare(TOPIC, {}) as half:
            half.commit()
        with prepare(TOPIC, {}) as checked:
            decision_rows.decide("default", COMMIT, [row_of(checked).pk])
        with pytest.raises(AlreadyDecided), prepare(TOPIC, {}) as lost:
            decision_rows.decide("default", ROLL_BACK, [row_of(lost).pk])

        assert states() == [State.ROLLED_BACK, State.READY, State.READY, State.ROLLED_BACK]

    def test_prepare_block_left_by_an_exception_stays_undecided_and_its_check_is_due(self):
        with pytest.raises(ConnectionError), prepare(TOPIC, {}) as half:
            raise ConnectionError

        assert state_of(half) == State.PREPARED
        assert OutboxMessage.objects.filter(message_id=half.id, available_at__lte=DatabaseTime()).exists()

    def test_prepare_block_does_not_commit_a_message_that_was_locked_when_it_was_rolled_back(self, monkeypatch):
        with prepare(TOPIC, {}) as half, monkeypatch.context() as patch:
            patch.setattr(decision_rows, "_despite_locks", lambda change: ((), {}))
            assert half.rollback() == Decision(Outcome.TOO_LATE, State.PREPARED)

        assert state_of(half) == State.PREPARED

    @pytest.mark.parametrize("trail", ["decisions", "all"])
    def test_prepare_block_that_ends_after_its_message_was_published_and_deleted_raises_nothing(self, answers, trail):
        """Its checker said that the effect had happened, and without KEEP_HISTORY a published message has no row."""
        answers[:] = [Answer.COMMIT]
        with override_settings(OUTBOX={"KEEP_HISTORY": None, "TRAIL": trail}), FakeAmqpPeer() as peer:
            with prepare(TOPIC, {}) as half:
                overdue(half)
                asked()
                drained(peer.url)
                assert states() == []

            assert ids(peer.published) == [str(half.id)]
            with pytest.raises(AlreadyDecided, match="published"):
                half.rollback()

    def test_prepare_block_in_a_failed_transaction_raises_the_original_exception(self):
        half = prepare(TOPIC, {})
        with pytest.raises(IntegrityError), transaction.atomic(), half:
            OutboxMessage.objects.create(message_id=half.id)

        assert state_of(half) == State.PREPARED


def overdue(half, by=timedelta(seconds=1)):
    """Make the check of `half` due `by` before now."""
    set_columns(half, available_at=DatabaseTime(-by))
    return half


def asked(**options):
    """Run every check that is due, once; return how many ran."""
    (attendant,) = askers("default", OutboxOptions(CHECKS=CheckOptions(EVERY=HOUR, **options)))
    return attendant.drain(StopRequest())


class TestCheck:
    def test_check_waits_for_its_due_time_and_for_a_relay_with_a_checker(self):
        overdue(prepare(TOPIC, {}), -HOUR)
        assert asked() == 0

        checkers.remove(TOPIC)
        assert askers("default", OutboxOptions()) == ()

    def test_checker_receives_the_message_and_its_answer_decides_it(self, answers):
        received = []
        answers[:] = [lambda message: received.append(message) or Answer.COMMIT, Answer.ROLLBACK]
        halves = [
            overdue(prepare(TOPIC, {"amount": 10}, biz_id="transfer-1", key="k", headers={"tenant": "acme"}), HOUR),
            overdue(prepare(TOPIC, {})),
        ]

        assert asked() == 2
        assert received == [
            UndecidedMessage(
                id=halves[0].id,
                topic=TOPIC,
                biz_id="transfer-1",
                key="k",
                payload={"amount": 10},
                headers={"tenant": "acme"},
                created_at=row_of(halves[0]).created_at,
                checks=0,
            )
        ]
        assert [state_of(half) for half in halves] == [State.READY, State.ROLLED_BACK]
        assert TrailEntry.objects.filter(reason="its checker answered commit").count() == 1

    def test_message_without_a_decision_at_the_check_limit_is_stuck_and_sends_the_signal(self, caplog, answers):
        received = []
        half = prepare(TOPIC, {})
        with listening(signals.message_stuck, lambda message_id, error, **_: received.append((message_id, error))):
            for checks in range(3):
                assert (state_of(half), row_of(half).attempts) == (State.PREPARED, checks)
                overdue(half)
                asked(LIMIT=3)

        assert (state_of(half), row_of(half).attempts) == (State.STUCK, 3)
        assert received == [(str(half.id), row_of(half).last_error)]
        assert "its checker answered unknown, 3 of 3 times" in caplog.text
        assert trail_of(half) == [(State.PREPARED, State.STUCK)]
        overdue(half)
        assert asked() == 0

    @pytest.mark.parametrize("answer", [lambda _: 1 / 0, lambda _: sys.exit(1), "commit"])
    def test_invalid_checker_answer_is_not_counted(self, caplog, answers, answer):
        answers[:] = [answer]
        half = overdue(prepare(TOPIC, {}))

        assert asked(LIMIT=1) == 1
        row = row_of(half)
        assert (row.state, row.attempts) == (State.PREPARED, 0)
        assert row.last_error.startswith("no answer: ")
        assert not asked()
        assert str(half.id) in caplog.text

    def test_check_overtaken_by_another_decision_logs_an_error_only_when_they_differ(self, caplog, answers):
        def decided_meanwhile(message):
            transition = {"commit": COMMIT, "rollback": ROLL_BACK}[message.payload["decide"]]
            assert decision_rows.decide("default", transition, [OutboxMessage.objects.get(message_id=message.id).pk])
            return Answer.COMMIT

        answers[:] = [decided_meanwhile]
        same = overdue(prepare(TOPIC, {"decide": "commit"}))
        asked()
        assert "one of the two decisions is wrong" not in caplog.text

        other = overdue(prepare(TOPIC, {"decide": "rollback"}))
        asked()
        assert f"{other.id} ({TOPIC}, biz-id {other.id}), but it is already rolled_back" in caplog.text
        assert "one of the two decisions is wrong" in caplog.text
        assert (state_of(same), state_of(other)) == (State.READY, State.ROLLED_BACK)

    def test_answer_to_an_older_check_is_not_counted(self, answers):
        half = overdue(prepare(TOPIC, {}))
        position = row_of(half).pk
        answers[:] = [lambda _: prepared_rows.count_unknown("default", position, 0, 15, "another") and Answer.UNKNOWN]
        asked()

        assert (row_of(half).attempts, row_of(half).last_error) == (1, "another")

    def test_check_without_a_registered_checker_is_logged_and_left_to_other_relays(self, caplog):
        half = prepare(TOPIC, {})
        set_columns(half, topic="bank.unregistered")
        overdue(half)
        assert asked() == 0
        assert row_of(half).last_error == ""

        overdue(half, 2 * HOUR)
        assert asked() == 0
        assert "1 prepared messages of the topic 'bank.unregistered'" in caplog.text
        assert "has a checker" in row_of(half).last_error
        assert [row.pk for row in prepared_rows.claim_checks("default", ["bank.unregistered"], 10, HOUR)] == [row_of(half).pk]

    @several_connections
    def test_check_is_run_by_one_of_several_relays(self, answers):
        asked_about = []
        answers[:] = [lambda message: asked_about.append(message.id) or Answer.COMMIT]
        stop = StopRequest()
        checks = {"AFTER": timedelta(milliseconds=1), "EVERY": HOUR}
        with FakeAmqpPeer() as peer, override_settings(OUTBOX={"BROKER_URL": peer.url, "CHECKS": checks}):
            halves = [prepare(TOPIC, {}) for _ in range(12)]
            with in_threads(*(partial(serve, "default", stop=stop) for _ in range(2)), stop=stop):
                wait_until(lambda: states() == [State.PUBLISHED] * len(halves))

        assert Counter(asked_about) == Counter(half.id for half in halves)


class TestResume:
    def test_resume_makes_the_next_check_of_a_stuck_message_due_now(self):
        half = stuck()
        position = row_of(half).pk

        resumed = [decision_rows.decide("default", RESUME_CHECKS, [position], reason="looked into it") for _ in range(2)]
        assert [bool(one) for one in resumed] == [True, False]
        assert (state_of(half), row_of(half).attempts) == (State.PREPARED, 0)
        assert OutboxMessage.objects.filter(pk=position, available_at__lte=DatabaseTime()).exists()
        assert trail_of(half) == [(State.STUCK, State.PREPARED)]
