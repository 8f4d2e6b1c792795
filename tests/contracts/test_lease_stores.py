"""The contract of a lease store, run on every store, each with its real server."""

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

import pytest
from django.test import override_settings

from exactly_once.process.clock import utcnow
from inbox import Lease as Terms
from inbox.leases.stores import DatabaseLeases, Lease, lease_store
from inbox.models import InboxMessage
from inbox.receiving.in_hand import is_quarantined
from inbox.receiving.reading import read
from inbox.states import Outcome, State
from inbox.store import claims
from inbox.store.message_rows import Failure
from tests.support import decisions
from tests.support.deliveries import OPTIONS, an_envelope, handed_over, make_due, options, the_row
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

LONG = timedelta(minutes=10)


@pytest.fixture(params=[pytest.param("database", marks=pytest.mark.every_database), "redis"])
def store_options(request):
    """The options that select the store."""
    return options(LEASE_STORE="database" if request.param == "database" else request.getfixturevalue("redis_url"))


@pytest.fixture
def leases(store_options):
    return lease_store(store_options)


@pytest.fixture
def lease_handler(handles):
    """Register a handler whose leases have the given duration."""

    def register(duration=LONG, **arguments):
        return handles(lambda message: None, lease=Terms(duration=duration), **arguments)

    return register


def a_delivery(handler, envelope=None):
    return read(handler, envelope or an_envelope(), OPTIONS)


def acquire(leases, request):
    return leases.acquire(request)


def acquired(leases, request):
    lease = acquire(leases, request)
    assert isinstance(lease, Lease), lease
    return lease


def claimed(request):
    """The stored row of that message, claimed the way a runner claims it."""
    make_due()
    return replace(request, stored=claim(request.handler))


def claim(handler):
    stored = claims.claim_due(handler.using, [handler.name], timedelta(hours=1))
    assert stored is not None
    return stored


def is_held(answer):
    """Has another owner the lease? The row of the message says so, or one is stored that does."""
    return answer is Outcome.STORED or (answer is None and InboxMessage.objects.filter(state=State.RUNNING).exists())


def is_consumed(answer):
    """Has the message been handled? Its row says so, or the store."""
    return answer is Outcome.DUPLICATE or (answer is None and the_row().state == State.DONE)


def remaining():
    """How long the lease of the message lasts, according to its row."""
    return the_row().next_attempt_at - utcnow()


def let_expire(leases, lease):
    """Wait until it has expired by the store's clock, which is that of this machine."""
    assert leases.extend(lease, timedelta(milliseconds=1))
    extended_at = utcnow()
    wait_until(lambda: utcnow() > extended_at + timedelta(milliseconds=2))


def taken_over(leases, lease):
    """The lease of the next owner, acquired once this one has expired."""
    let_expire(leases, lease)
    return acquired(leases, lease.arrival)


def failed(attempts=1, retry_after=timedelta(hours=1)):
    return Failure(error="ValueError: no", traceback="here", retry_after=retry_after, attempts=attempts)


def failed_once(leases, handler):
    """A delivery whose message is stored, with a failure."""
    request = a_delivery(handler)
    leases.free(acquired(leases, request), failed())
    return request


def settlements(leases, lease):
    """Which operations of an owner the store grants."""
    return {
        "extend": leases.extend(lease, LONG),
        "remember": leases.remember(lease, "a step", "1"),
        "consume": leases.consume(lease),
        "free": leases.free(lease, failed()),
    }


NONE_GRANTED = {"extend": False, "remember": False, "consume": False, "free": False}


class TestAcquiring:
    def test_second_acquire_returns_held_with_the_remaining_time(self, leases, lease_handler):
        request = a_delivery(lease_handler())
        acquired(leases, request)

        assert is_held(acquire(leases, request))
        assert timedelta(minutes=9) < remaining() < LONG + timedelta(seconds=1)
        assert not the_row().conflicts

    def test_leases_are_separate_by_handler_topic_and_biz_id(self, leases, lease_handler):
        one, another = lease_handler(), lease_handler()
        envelope = an_envelope(biz_id="same")
        assert isinstance(acquire(leases, a_delivery(one, envelope)), Lease)

        others = {
            "handler": a_delivery(another, envelope),
            "topic": a_delivery(lease_handler(topic="shop.order.paid"), an_envelope(topic="shop.order.paid", biz_id="same")),
            "biz_id": a_delivery(one, an_envelope(biz_id="another")),
        }
        assert {differs: type(acquire(leases, request)) for differs, request in others.items()} == dict.fromkeys(others, Lease)
        assert is_held(acquire(leases, a_delivery(one, envelope)))

    @pytest.mark.parametrize("biz_id", ["ä 🍰 'quoted' {braced}", "x" * 255], ids=["special characters", "255 characters"])
    def test_any_text_is_accepted_as_biz_id_and_step_name(self, leases, lease_handler, biz_id):
        request = a_delivery(lease_handler(), an_envelope(biz_id=biz_id))
        lease = acquired(leases, request)

        assert leases.remember(lease, "Schritt №1 🍰", '"ä"')
        assert leases.consume(lease)
        assert is_consumed(acquire(leases, request))


class TestConsumed:
    def test_consumed_message_stays_consumed_after_its_lease_has_ended(self, leases, lease_handler):
        handler = lease_handler(timedelta(seconds=1))

        def consumed_in_time():
            lease = acquired(leases, a_delivery(handler))
            return leases.consume(lease) and lease

        lease = wait_until(consumed_in_time)

        wait_until(lambda: lease.is_over)

        assert is_consumed(acquire(leases, lease.arrival))


class TestExpiredLease:
    def test_delivery_that_was_held_is_left_to_its_row_in_redis_and_takes_over_in_the_database(self, leases, lease_handler):
        """Redis marks the message as stored when a delivery is held; in the database the record is the row itself."""
        lease = acquired(leases, a_delivery(lease_handler()))
        assert is_held(acquire(leases, lease.arrival))
        let_expire(leases, lease)

        assert isinstance(acquire(leases, lease.arrival), Lease) is isinstance(leases, DatabaseLeases)

    @pytest.mark.parametrize("is_stored", [False, True], ids=["delivered", "stored"])
    def test_owner_of_an_expired_lease_can_settle_nothing_until_it_renews_it(self, leases, lease_handler, is_stored):
        """Which it can before it is taken over: otherwise what its run has done would be done again."""
        handler = lease_handler()
        request = claimed(failed_once(leases, handler)) if is_stored else a_delivery(handler)
        lease = acquired(leases, request)
        let_expire(leases, lease)

        assert [leases.remember(lease, "a step", "1"), leases.consume(lease), leases.free(lease, failed())] == [False] * 3
        assert leases.extend(lease, LONG)
        assert is_held(acquire(leases, a_delivery(handler, request.envelope)))
        assert leases.remember(lease, "a step", "1")
        assert leases.consume(lease)

    def test_expired_lease_of_a_message_that_an_operator_has_skipped_is_not_renewed(self, leases, store_options, lease_handler):
        lease = acquired(leases, claimed(failed_once(leases, lease_handler())))
        let_expire(leases, lease)
        InboxMessage.objects.update(next_attempt_at=utcnow())
        with override_settings(INBOX={"LEASE_STORE": store_options.LEASE_STORE}):
            assert decisions.skip("default", the_row().pk, "no longer wanted")

        assert settlements(leases, lease) == NONE_GRANTED

    def test_expired_lease_is_not_renewed_while_another_message_of_its_key_runs(self, leases, lease_handler):
        handler, requests = lease_handler(ordered=True), []
        for _ in range(2):
            InboxMessage.objects.update(ordered=False)  # as if the first one had left the order
            request = a_delivery(handler, handed_over(handler, an_envelope(key="customer-1")))
            requests.append(replace(request, stored=claim(handler)))
        lease = acquired(leases, requests[0])
        let_expire(leases, lease)
        InboxMessage.objects.filter(pk=lease.pk).update(next_attempt_at=utcnow())
        acquired(leases, requests[1])

        assert not leases.extend(lease, LONG)

    def test_previous_owner_can_settle_nothing_and_the_new_owner_everything(self, leases, lease_handler):
        request = a_delivery(lease_handler())
        stalled = acquired(leases, request)
        successor = taken_over(leases, stalled)
        assert leases.extend(successor, LONG)

        assert settlements(leases, stalled) == NONE_GRANTED
        assert leases.remember(successor, "a step", '"mine"')
        assert leases.consume(successor)
        assert settlements(leases, stalled) == NONE_GRANTED
        assert is_consumed(acquire(leases, request))

    def test_previous_owner_can_settle_nothing_once_the_row_is_claimed_again(self, leases, lease_handler):
        request = failed_once(leases, lease_handler())
        stalled = acquired(leases, claimed(request))
        let_expire(leases, stalled)
        again = claimed(request)

        assert settlements(leases, stalled) == NONE_GRANTED
        assert leases.consume(acquired(leases, again))

    def test_extending_a_lease_moves_its_end(self, leases, lease_handler):
        request = a_delivery(lease_handler())
        lease = acquired(leases, request)

        assert leases.extend(lease, 2 * LONG)

        assert is_held(acquire(leases, request))
        assert remaining() > timedelta(minutes=19)
        assert leases.consume(lease)

    def test_fences_grow_through_failures_and_takeovers(self, leases, lease_handler):
        request = a_delivery(lease_handler())
        given_out = [acquired(leases, request)]
        given_out.append(taken_over(leases, given_out[-1]))
        leases.free(given_out[-1], failed(attempts=2))
        given_out.append(acquired(leases, claimed(request)))
        leases.free(given_out[-1], failed(attempts=3))
        assert (the_row().state, the_row().attempts) == (State.RETRYING, 3), "of a message that is stored already"
        given_out.append(acquired(leases, claimed(request)))
        let_expire(leases, given_out[-1])
        given_out.append(acquired(leases, claimed(request)))

        assert [lease.attempt for lease in given_out] == [1, 2, 3, 4, 5]
        assert all(earlier.fence < later.fence for earlier, later in pairwise(given_out))


class TestFailure:
    @pytest.mark.parametrize("retry_after", [timedelta(hours=1), None], ids=["retrying", "dead"])
    def test_delivery_of_a_message_with_a_stored_failure_is_left_to_its_row(self, leases, lease_handler, retry_after):
        request = a_delivery(lease_handler())
        leases.free(acquired(leases, request), failed(retry_after=retry_after))

        assert acquire(leases, request) is None
        row = the_row()
        assert row.state == (State.RETRYING if retry_after else State.DEAD)
        assert (row.next_attempt_at is None) == (row.settled_at is not None) == (row.state == State.DEAD)

    @pytest.mark.parametrize("way", ["consume", "free"])
    def test_settled_lease_can_only_be_settled_in_the_same_way_again(self, leases, lease_handler, way):
        lease = acquired(leases, a_delivery(lease_handler()))
        assert leases.consume(lease) if way == "consume" else leases.free(lease, failed())

        assert settlements(leases, lease) == NONE_GRANTED | {way: True}

    def test_claim_overtaken_by_a_later_claim_gets_no_lease(self, leases, lease_handler):
        request = failed_once(leases, lease_handler())
        overtaken, latest = claimed(request), claimed(request)

        assert acquire(leases, overtaken) is None
        assert acquired(leases, latest).attempt == 3

    def test_failure_does_not_lower_the_fence_of_a_row_that_was_claimed_meanwhile(self, leases, lease_handler):
        request = failed_once(leases, lease_handler())
        lease = acquired(leases, claimed(request))
        latest = claimed(request).stored.fence
        leases.free(lease, failed(attempts=2))

        assert the_row().fence >= latest > lease.fence

    def test_message_of_a_process_that_was_asked_to_stop_is_exempt_from_the_crash_quarantine_once(self, leases, lease_handler):
        request = failed_once(leases, lease_handler())
        lease = acquired(leases, claimed(request))
        if not isinstance(leases, DatabaseLeases):
            make_due()  # the row does not follow the extensions of a lease in Redis
        assert leases.extend(lease, LONG, stopping=True)

        assert [is_quarantined(claimed(request).stored) for _ in range(3)] == [False, True, True]


class TestSteps:
    def test_steps_are_passed_to_the_next_owner(self, leases, lease_handler):
        lease = acquired(leases, a_delivery(lease_handler()))
        assert leases.remember(lease, "lock", '{"lock": 7}')
        assert leases.remember(lease, "nothing", "null")
        assert leases.remember(lease, "begun", None)
        assert leases.remember(lease, "charge", None)
        assert leases.remember(lease, "charge", '"paid"')

        passed_on = {"lock": '{"lock": 7}', "nothing": "null", "begun": None, "charge": '"paid"'}
        assert taken_over(leases, lease).steps == passed_on

    def test_forget_deletes_a_begun_step_and_keeps_a_finished_one(self, leases, lease_handler):
        request = a_delivery(lease_handler())
        lease = acquired(leases, request)
        leases.remember(lease, "charge", None)
        leases.remember(lease, "lock", "7")
        lease.steps = {"charge": None, "lock": "7"}
        leases.free(lease, failed())

        leases.forget(lease, "charge")
        leases.forget(lease, "lock")

        assert acquired(leases, claimed(request)).steps == {"lock": "7"}

    def test_forget_by_a_previous_owner_deletes_no_step(self, leases, lease_handler):
        stalled = acquired(leases, a_delivery(lease_handler()))
        successor = taken_over(leases, stalled)
        leases.remember(successor, "charge", None)

        leases.forget(stalled, "charge")

        assert taken_over(leases, successor).steps == {"charge": None}
