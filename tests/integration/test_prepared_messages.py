"""Prepared messages: committed first, decided about once, and never forgotten."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction

from outbox import (
    AlreadyDecided,
    Answer,
    InvalidMessage,
    NoChecker,
    PreparedInsideTransaction,
    prepare,
    store,
)
from outbox.checkers import checker, checkers
from outbox.kernel.clock import DatabaseTime
from outbox.models import OutboxMessage, State, TrailEntry
from tests.deliveries import at_once
from tests.fakes.amqp_peer import FakeAmqpPeer
from tests.relaying import drained, ids, in_hand, published, row_of, set_columns, state_of, states

pytestmark = [pytest.mark.every_database, pytest.mark.django_db(databases=["default", "other"])]
by_several = pytest.mark.django_db(transaction=True)

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
    set_columns(half, state=State.STUCK, attempts=15, last_error="nobody knows")
    return half


class TestPreparing:
    def test_commits_a_row_that_no_relay_takes(self):
        half = prepare(TOPIC, {"amount": 10}, biz_id="transfer-1", headers={"tenant": "acme"})

        row = row_of(half)
        assert (row.state, row.biz_id, bytes(row.body), row.attempts) == (State.PREPARED, "transfer-1", b'{"amount":10}', 0)
        assert row.available_at - row.created_at == timedelta(seconds=6)
        assert row.deliver_at is row.expires_at is None
        with transaction.atomic():
            assert not in_hand()

    def test_fixes_its_instants_at_once(self):
        half = prepare(TOPIC, {}, delay=HOUR, expires_in=HOUR)

        row = row_of(half)
        assert abs(row.deliver_at - row.created_at - HOUR) < timedelta(seconds=30)
        assert abs(row.expires_at - row.deliver_at - HOUR) < timedelta(milliseconds=1)
        assert row.available_at < row.deliver_at - HOUR / 2

    def test_is_refused_inside_a_transaction_of_its_database_and_no_other(self):
        with transaction.atomic(using="other"):
            prepare(TOPIC, {})
        with transaction.atomic(), pytest.raises(PreparedInsideTransaction, match="'default'"):
            prepare(TOPIC, {})

        assert states() == [State.PREPARED]

    @by_several
    def test_is_refused_where_a_connection_commits_nothing_by_itself(self):
        connection.set_autocommit(False)
        try:
            with pytest.raises(PreparedInsideTransaction):
                prepare(TOPIC, {})
        finally:
            connection.rollback()
            connection.set_autocommit(True)

    def test_is_refused_for_a_topic_without_a_checker(self):
        with pytest.raises(NoChecker, match=r"'shop\.gone'.*bank\.transfer"):
            prepare("shop.gone", {})

    def test_is_refused_for_what_cannot_be_published(self):
        with pytest.raises(InvalidMessage, match="priority"):
            prepare(TOPIC, {}, priority=10)

        assert states() == []


class TestDeciding:
    def test_a_committed_message_is_published(self):
        half = prepare(TOPIC, {"amount": 10})
        half.commit()

        assert trail_of(half) == [(State.PREPARED, State.READY)]
        with transaction.atomic():
            assert [row.aside for row in in_hand()] == [True]  # where no reader has passed its place
        with FakeAmqpPeer() as peer:
            drained(peer.url)
            assert ids(peer.published) == [str(half.id)]
        assert state_of(half) == State.PUBLISHED

    def test_a_message_rolled_back_is_never_published(self):
        half = prepare(TOPIC, {})
        half.rollback()

        assert trail_of(half) == [(State.PREPARED, State.ROLLED_BACK)]
        assert row_of(half).settled_at is not None
        with FakeAmqpPeer() as peer:
            drained(peer.url)
            assert peer.published == []

    def test_a_delay_that_is_ahead_is_waited_for(self):
        later, passed = prepare(TOPIC, {}, delay=HOUR), prepare(TOPIC, {}, delay=HOUR)
        set_columns(passed, deliver_at=DatabaseTime(-HOUR))
        later.commit()
        passed.commit()

        assert (state_of(later), state_of(passed)) == (State.SCHEDULED, State.READY)
        assert row_of(later).available_at == row_of(later).deliver_at

    def test_every_scheduling_column_is_set(self):
        half = stuck()
        before = row_of(half).available_at
        half.commit()

        row = row_of(half)
        assert (row.state, row.attempts, row.last_error, row.settled_at) == (State.READY, 0, "", None)
        assert row.available_at != before

    def test_deciding_the_same_again_changes_nothing(self):
        committed, dropped = prepare(TOPIC, {}), prepare(TOPIC, {})
        for _ in range(2):
            committed.commit()
            dropped.rollback()
        set_columns(committed, state=State.PUBLISHED)
        committed.commit()

        assert states() == [State.PUBLISHED, State.ROLLED_BACK]

    def test_deciding_otherwise_is_an_error_that_names_the_state(self):
        committed, dropped = prepare(TOPIC, {}), prepare(TOPIC, {})
        store.commit_prepared("default", row_of(committed).pk)
        store.roll_back_prepared("default", row_of(dropped).pk)

        with pytest.raises(AlreadyDecided) as of_committed:
            committed.rollback()
        with pytest.raises(AlreadyDecided) as of_dropped:
            dropped.commit()

        assert (of_committed.value.message_id, of_committed.value.state) == (committed.id, State.READY)
        assert (of_dropped.value.message_id, of_dropped.value.state) == (dropped.id, State.ROLLED_BACK)

    def test_a_row_that_is_gone_is_an_error(self):
        half = prepare(TOPIC, {})
        OutboxMessage.objects.all().delete()

        with pytest.raises(AlreadyDecided, match="not here any more"):
            half.commit()

    def test_joins_the_transaction_that_is_open(self):
        half = prepare(TOPIC, {})
        with transaction.atomic():
            half.commit()
            transaction.set_rollback(True)

        assert state_of(half) == State.PREPARED
        assert trail_of(half) == []

    def test_an_error_leaves_the_transaction_that_is_open_usable(self):
        half = prepare(TOPIC, {})
        half.rollback()
        with transaction.atomic():
            with pytest.raises(AlreadyDecided):
                half.commit()
            published()

        assert states() == [State.ROLLED_BACK, State.READY]

    def test_on_another_database(self):
        half = prepare(TOPIC, {}, using="other")
        half.commit()

        assert state_of(half, "other") == State.READY

    def test_a_committed_message_takes_its_place_in_its_key(self):
        first, half, last = published(key="k"), prepare(TOPIC, {}, key="k"), published(key="k")
        half.commit()

        with FakeAmqpPeer() as peer:
            drained(peer.url)
            assert ids(peer.published) == ids([first, half, last])

    def test_an_undecided_message_holds_up_nobody_of_its_key(self):
        half, last = prepare(TOPIC, {}, key="k"), published(key="k")
        with FakeAmqpPeer() as peer:
            drained(peer.url)
            half.commit()
            drained(peer.url)
            assert ids(peer.published) == ids([last, half])

    @by_several
    def test_of_all_who_decide_at_the_same_time_exactly_one_does(self):
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
                tried(lambda half: store.commit_prepared("default", positions[half]), halves),
                tried(lambda half: store.roll_back_prepared("default", positions[half]), halves[::-1]),
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


class TestTheBlock:
    def test_is_committed_at_its_end(self):
        with prepare(TOPIC, {}) as half:
            assert state_of(half) == State.PREPARED

        assert state_of(half) == State.READY

    def test_left_by_an_exception_stays_undecided_and_is_asked_about_at_once(self):
        with pytest.raises(ConnectionError), prepare(TOPIC, {}) as half:
            raise ConnectionError

        assert state_of(half) == State.PREPARED
        assert OutboxMessage.objects.filter(message_id=half.id, available_at__lte=DatabaseTime()).exists()

    def test_may_decide_itself(self):
        with prepare(TOPIC, {}) as dropped:
            dropped.rollback()
        with prepare(TOPIC, {}) as half:
            half.commit()

        assert [state_of(one) for one in (dropped, half)] == [State.ROLLED_BACK, State.READY]

    def test_ends_well_when_the_checker_has_decided_the_same_and_tells_when_not(self):
        with prepare(TOPIC, {}) as half:
            store.commit_prepared("default", row_of(half).pk)
        with pytest.raises(AlreadyDecided), prepare(TOPIC, {}) as half:
            store.roll_back_prepared("default", row_of(half).pk)

    def test_lets_its_exception_go_on_when_the_database_is_of_no_help(self):
        half = prepare(TOPIC, {})
        with pytest.raises(IntegrityError), transaction.atomic(), half:
            OutboxMessage.objects.create(message_id=half.id)

        assert state_of(half) == State.PREPARED


class TestResuming:
    def test_asks_a_stuck_message_anew_and_at_once(self):
        half = stuck()
        position = row_of(half).pk

        assert [store.resume("default", position, reason="looked into it") for _ in range(2)] == [True, False]
        assert (state_of(half), row_of(half).attempts) == (State.PREPARED, 0)
        assert OutboxMessage.objects.filter(pk=position, available_at__lte=DatabaseTime()).exists()
        assert trail_of(half) == [(State.STUCK, State.PREPARED)]

    def test_a_stuck_message_can_be_decided(self):
        committed, dropped = stuck(), stuck()
        committed.commit()
        dropped.rollback()

        assert states() == [State.READY, State.ROLLED_BACK]
        assert trail_of(committed) == [(State.STUCK, State.READY)]
