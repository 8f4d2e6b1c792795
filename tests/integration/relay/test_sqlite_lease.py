"""On SQLite, which has one writer, one relay works at a time, under a lease with a fencing token."""

import logging
from datetime import timedelta

import pytest
from django.db import connection

from exactly_once.models import Lease
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.loop_leases import TableLease
from outbox.relay.passes import Pass
from outbox.states import CANCEL, State
from outbox.store import claiming, decision_rows, settling
from outbox.store.lease import RELAYING, LeaseLost, RelayLease, in_hand
from outbox.store.settling import Settlement
from tests.support.deliveries import at_once
from tests.support.relaying import connected, drained, ids, published, quick, relaying, state_of, states, waiting
from tests.support.waiting import wait_until

# The lease itself is plain SQL and is tested on every database. Relays use it on SQLite only.
pytestmark = [pytest.mark.every_database, pytest.mark.django_db(transaction=True)]

DURATION = timedelta(minutes=2)


@pytest.fixture
def ours():
    return RelayLease("default", DURATION)


@pytest.fixture
def theirs():
    return RelayLease("default", DURATION)


def expire_the_lease():
    assert Lease.objects.filter(name=RELAYING).update(expires_at=DatabaseTime()) == 1


def positions(rows):
    return [row.position for row in rows]


def take(lease):
    return lease.claim(claiming.look("default").shards, 10, {})


def settle(lease, settlement):
    with lease.fenced():
        return settling.settle("default", settlement)


class TestLease:
    def test_lease_is_held_by_one_relay_at_a_time(self, ours, theirs):
        message = published()

        assert positions(take(ours)) == [message.position]
        assert take(theirs) is take(RelayLease("default", DURATION / 10)) is None
        assert theirs.holder() == ours.holder() != "another relay"
        theirs.release()
        assert take(theirs) is None, "it cannot release the lease of another"
        ours.release()
        assert theirs.holder() == "another relay"
        assert positions(take(theirs)) == [message.position]

    def test_relay_without_the_lease_settles_nothing(self, ours, theirs):
        message = published()
        with pytest.raises(LeaseLost):  # it never had it
            settle(theirs, Settlement(published=[message.position]))
        take(ours)
        expire_the_lease()
        with pytest.raises(LeaseLost):
            settle(ours, Settlement(published=[message.position]))
        take(ours)
        expire_the_lease()
        take(theirs)
        with pytest.raises(LeaseLost):  # it was taken over
            settle(ours, Settlement(published=[message.position]))

        assert state_of(message) == State.READY
        assert Lease.objects.get(name=RELAYING).in_hand == [message.position], "the rows claimed by the new holder stay claimed"
        assert settle(theirs, Settlement(published=[message.position])) == 1

    def test_one_of_four_concurrent_claims_gets_the_lease(self):
        published()

        answers = at_once([lambda: take(RelayLease("default", DURATION))] * 4)

        assert sum(answer is not None for answer in answers) == 1


@pytest.mark.only_sqlite
class TestCancel:
    def test_cancel_after_the_lease_expired_succeeds_and_its_holder_settles_nothing(self, ours):
        message = published()
        take(ours)
        expire_the_lease()

        assert decision_rows.decide("default", CANCEL, [message.position])
        with pytest.raises(LeaseLost):
            settle(ours, Settlement(published=[message.position]))
        assert state_of(message) == State.CANCELLED


@pytest.mark.only_sqlite
class TestRelay:
    def test_second_relay_waits_and_logs_the_lease_holder_once(self, peer, theirs, caplog):
        published()
        take(theirs)

        with relaying(peer.url):
            wait_until(lambda: "SQLite takes one relay at a time" in caplog.text)
            assert not peer.published
            assert theirs.holder() in caplog.text
            theirs.release()
            wait_until(lambda: not waiting())

        assert caplog.text.count("SQLite takes one relay at a time") == 1

    def test_relay_takes_over_at_once_if_the_clock_was_set_back_after_the_holder_died(self, peer, theirs):
        message = published()
        take(theirs)
        Lease.objects.update(
            valid_from=DatabaseTime(timedelta(hours=1)), expires_at=DatabaseTime(DURATION + timedelta(hours=1))
        )

        with relaying(peer.url):
            wait_until(lambda: state_of(message) == State.PUBLISHED)

        assert ids(peer.published) == [str(message.id)]

    def test_relay_whose_lease_expired_during_a_send_settles_nothing_and_logs_it(self, peer, caplog):
        caplog.set_level(logging.WARNING)
        message = published()

        def outlast_the_lease(arrived):
            at_once([expire_the_lease])
            return [lambda: peer.ack(arrived)]

        peer.script = outlast_the_lease
        with connected(peer.url) as transport:
            report = Pass("default", transport, quick()).run(claiming.look("default").shards, 10)

        assert (report.claimed, report.settled, report.published) == (1, 0, 0)
        assert state_of(message) == State.READY
        assert "lost its lease during a pass" in caplog.text

    def test_relay_does_not_hold_the_write_lock_while_it_sends(self, peer):
        published(biz_id="first")
        written = []

        def meanwhile(arrived):
            if not written:
                written.extend(at_once([lambda: published(biz_id="meanwhile")]))
            return [lambda: peer.ack(arrived)]

        peer.script = meanwhile
        drained(peer.url)

        assert len(written) == 1
        assert states() == [State.PUBLISHED] * 2

    def test_two_relays_publish_every_message_once_and_release_the_lease_when_they_end(self, peer):
        for _ in range(20):
            published()

        with relaying(peer.url, relays=2, BATCH_SIZE=5):
            wait_until(lambda: not waiting())

        assert len(peer.published) == len(set(ids(peer.published))) == 20
        assert not Lease.objects.filter(name=RELAYING, expires_at__gt=DatabaseTime()).exists()


def test_message_that_is_being_sent_is_not_cancelled_while_other_leases_are_held(ours):
    message = published()
    assert TableLease("default", "outbox: timer").take(DURATION)
    assert positions(take(ours)) == [message.position]

    assert in_hand("default") == {message.position}
    if connection.vendor == "sqlite":
        assert not decision_rows.decide("default", CANCEL, [message.position])
        assert state_of(message) == State.READY
