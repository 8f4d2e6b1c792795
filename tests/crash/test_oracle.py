"""Proof that the oracle notices: it is given what producers and handlers would have written, once right and once wrong."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.support.apps.effects.models import Effect, Unique
from tests.support.crash.oracle import CHAINED, EXPIRES, Fact, punctual, rows_due, verdict

pytestmark = pytest.mark.django_db

DUE_AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
MOMENT = timedelta(milliseconds=1)


def committed(*names):
    for name in names:
        Unique.objects.create(name=name)


def effect(name, at=DUE_AT):
    Effect.objects.filter(pk=Effect.objects.create(name=name).pk).update(at=at)


def everything_as_it_must_be():
    """One operation of every kind, each with the effects that it must have."""
    committed("plain", "chain-1", EXPIRES + "1", "delayed", "rescheduled", "cancelled", "cancelled late", "restored")
    committed(Fact.NOT_BEFORE.of("delayed", DUE_AT))
    committed(Fact.NOT_BEFORE.of("rescheduled", DUE_AT + MOMENT))
    committed(Fact.NOT_BEFORE.of("cancelled", DUE_AT), Fact.CANCELLED.of("cancelled"))
    committed(Fact.CANCELLED_LATE.of("cancelled late"))
    committed(Fact.PREPARED.of("confirmed"), Fact.DECIDED.of("confirmed"), "confirmed")
    committed(Fact.PREPARED.of("forgotten"), Fact.DECIDED.of("forgotten"))
    committed(Fact.PREPARED.of("withdrawn"))
    for name in ("plain", "chain-1", CHAINED + "chain-1", "delayed", "restored", "confirmed"):
        effect(name)
    effect("rescheduled", DUE_AT + MOMENT)


def test_oracle_reports_no_fault_in_a_correct_run():
    everything_as_it_must_be()

    found = verdict()

    assert found.is_clean, str(found)
    assert found.committed == 9
    assert not found.overtaken


def test_oracle_counts_the_expected_rows_of_each_final_state():
    everything_as_it_must_be()

    due = rows_due()

    assert due == {"published": 7, "cancelled": 2, "expired": 1, "rolled_back": 2}
    assert due.total() == 12


@pytest.mark.parametrize(
    "name", ["cancelled", EXPIRES + "1", "withdrawn", "forgotten", "never committed", CHAINED + "plain", CHAINED + "chain-2"]
)
def test_effect_without_a_committed_operation_is_reported_as_ghost(name):
    everything_as_it_must_be()
    effect(name)

    found = verdict()

    assert not found.is_clean
    assert found.ghosts == {name}


@pytest.mark.parametrize("name", ["plain", "delayed", "rescheduled", "restored", "confirmed", CHAINED + "chain-1"])
def test_a_missing_effect_is_a_loss(name):
    everything_as_it_must_be()
    Effect.objects.filter(name=name).delete()

    found = verdict()

    assert not found.is_clean
    assert found.lost == {name}


@pytest.mark.parametrize("name", ["delayed", "rescheduled", "restored", "confirmed"])
def test_a_second_effect_is_a_double(name):
    everything_as_it_must_be()
    effect(name, DUE_AT + timedelta(hours=1))

    found = verdict()

    assert not found.is_clean
    assert found.doubled == {name}


@pytest.mark.parametrize(("name", "at"), [("delayed", DUE_AT - MOMENT), ("rescheduled", DUE_AT)])
def test_effect_before_its_due_time_is_reported_as_early(name, at):
    """A rescheduled message is early before its second instant, though the first has come."""
    everything_as_it_must_be()
    Effect.objects.filter(name=name).update(at=at)

    found = verdict()

    assert not found.is_clean
    assert found.early == {name}


def test_effect_within_the_tolerance_counts_as_punctual():
    committed(*(Fact.NOT_BEFORE.of(name, DUE_AT) for name in ("early", "on time", "late")), "early", "on time", "late")
    effect("early", DUE_AT - MOMENT)
    effect("on time", DUE_AT + MOMENT)
    effect("late", DUE_AT + 2 * MOMENT)

    assert punctual(within=MOMENT) == 2


def test_message_cancelled_after_its_due_time_may_have_at_most_one_effect():
    everything_as_it_must_be()

    effect("cancelled late")
    once = verdict()
    effect("cancelled late")
    twice = verdict()

    assert once.is_clean
    assert once.overtaken == {"cancelled late"}
    assert twice.doubled == {"cancelled late"}
