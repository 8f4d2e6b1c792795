"""The example of the page on prepared messages: its processes are killed at every step, and the money is counted.

Money leaves one database and arrives in another: neither lost nor doubled, and no transfer stays undecided.
"""

from functools import partial

import pytest

from outbox.models import OutboxMessage
from outbox.states import State
from tests.support.apps.bank import SAVINGS
from tests.support.apps.effects.models import Account, Booking
from tests.support.crash.points import COMMIT, FINISH, SEND, SETTLE
from tests.support.sql import fetched

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", SAVINGS])

ADA, AMOUNT, AT_FIRST = "Ada", 10, 1000
DEBIT = "tests.support.apps.bank.transfers.debit"
DECIDE = "outbox.store.decision_rows.decide"
ASK = "outbox.callbacks.Checkers.ask"
TOMBSTONE = "django.db.models.query.QuerySet.get_or_create"

ARRIVES, NEVER_BEGAN, IS_ROLLED_BACK = State.PUBLISHED, None, State.ROLLED_BACK
TELLER_POINTS = {
    f"before {COMMIT} 1": NEVER_BEGAN,  # the prepared message is not committed
    f"after {COMMIT} 1": IS_ROLLED_BACK,
    f"after {DEBIT}": IS_ROLLED_BACK,  # as the database rolls back the debit
    f"after {COMMIT} 2": ARRIVES,
    f"after {DECIDE}": ARRIVES,
    f"after {COMMIT} 3": ARRIVES,
}
"""Where the process that transfers is killed, and the final state of its message."""

RELAY_POINTS = [
    f"before {ASK}",
    f"after {TOMBSTONE} in checks-0",  # the checker has its proof, and has not returned
    f"after {DECIDE}",
    f"before {SETTLE} once {SEND}",
]
"""Where relays are killed, in an order that leaves each point reachable for the next one."""

OFTEN = {"AFTER": 0.1, "EVERY": 0.5}


@pytest.fixture
def bank(world):
    world.environment["DJANGO_SETTINGS_MODULE"] = "tests.support.apps.bank.settings"
    Account.objects.using(SAVINGS).create(owner=ADA, balance=AT_FIRST)
    Account.objects.create(owner=ADA, balance=0)
    return world


def balances():
    return Account.objects.using(SAVINGS).get().balance, Account.objects.get().balance


def became(transfer_id):
    return OutboxMessage.objects.filter(biz_id=transfer_id).values_list("state", flat=True).first()


def transferring(world, transfer_id, **how):
    code = f"from tests.support.apps.bank.transfers import transfer; transfer({transfer_id!r}, {ADA!r}, {AMOUNT})"
    return world.command("shell", "--command", code, outbox={"CHECKS": OFTEN, "CONCURRENCY": 1}, **how)


def test_a_transfer_is_neither_lost_nor_doubled_whichever_process_is_killed(bank):
    tellers = {point: transferring(bank, point, failpoint=f"kill {point}") for point in TELLER_POINTS}
    for point, teller in tellers.items():
        bank.dead(teller, point)
    assert Booking.objects.using(SAVINGS).count() == 3, "the processes were not killed where this test assumes"

    dying = bank.listening(failpoint=f"kill after {FINISH}")
    for point in RELAY_POINTS:
        bank.dies_at(point, partial(bank.relay, outbox={"CHECKS": OFTEN, "CONCURRENCY": 1}))
    bank.dead(dying, FINISH)
    bank.relay(outbox={"CHECKS": OFTEN, "CONCURRENCY": 1})
    bank.drain()

    assert {point: became(point) for point in TELLER_POINTS} == TELLER_POINTS
    arrived = list(TELLER_POINTS.values()).count(ARRIVES) * AMOUNT
    assert balances() == (AT_FIRST - arrived, arrived)


def test_a_checker_that_asks_too_early_gets_the_right_answer(bank):
    """One teller stops before its debit, one before the commit of its debit. The first one then finds a tombstone; the checker
    of the second waits for that transaction to end."""
    too_late = transferring(bank, "too late", failpoint=f"stop before {DEBIT}")
    in_time = transferring(bank, "in time", failpoint=f"stop after {DEBIT}")
    for teller in (too_late, in_time):
        bank.wait_until(lambda teller=teller: teller.is_stopped, "the teller stands still")

    bank.listening()
    bank.relay(outbox={"CHECKS": OFTEN, "CONCURRENCY": 3})
    bank.wait_until(lambda: became("too late") == State.ROLLED_BACK, "the checker has written its tombstone")
    bank.wait_until(a_transaction_waits_for_another, "the checker waits for the debit")
    assert became("in time") == State.PREPARED
    for teller in (too_late, in_time):
        teller.thaw()
    ends = (too_late.ends(), in_time.ends())
    bank.drain()

    assert ends == (1, 0)
    assert "IntegrityError" in too_late.tail()
    assert (became("too late"), became("in time")) == (State.ROLLED_BACK, State.PUBLISHED)
    assert balances() == (AT_FIRST - AMOUNT, AMOUNT)


def a_transaction_waits_for_another():
    return fetched("SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'", using=SAVINGS)
