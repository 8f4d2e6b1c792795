"""The audit of the demo finds every kind of fault that it exists to find."""

from dataclasses import replace
from datetime import timedelta

import pytest

from demo_shop.simulation.audit import (
    DEPOSIT,
    EFFECTS,
    ORDER,
    PAYMENT,
    RATING,
    RECEIPT,
    REVIEW_REQUEST,
    SHIPMENT,
    SMS,
    WITHDRAWAL,
    Early,
    Facts,
    Finding,
    Traffic,
    Transfers,
    audit,
)

ORDERS = frozenset({"run-1", "run-2", "run-3"})
TAKEN_BACK = "run-0"
A_MOMENT = timedelta(milliseconds=1)
BOTH_BOOKS = Transfers(
    sent=frozenset({"out-1"}),  # out-2 has arrived, too, but its customer was killed before it got the answer
    refused=frozenset({"out-3"}),
    withdrawn={"out-1": 1, "out-2": 1},
    deposited={"out-1": 1, "out-2": 1},
    given_up=1,
)
TRAFFIC = Traffic(messages=dict.fromkeys(ORDERS, 12), suppressed=5)
FLAWLESS_RUN = Facts(
    wanted=4,
    committed=ORDERS | {TAKEN_BACK},
    rolled_back=frozenset({"run-4"}),
    taken_back=frozenset({TAKEN_BACK}),
    rated=frozenset({"run-1"}),
    rated_by_itself=frozenset({"run-2", "run-3"}),
    effects={effect: dict.fromkeys(ORDERS, 1) for effect in EFFECTS} | {ORDER: dict.fromkeys([*ORDERS, TAKEN_BACK], 1)},
    lateness={
        SMS: dict.fromkeys(ORDERS, A_MOMENT),
        REVIEW_REQUEST: dict.fromkeys(ORDERS, A_MOMENT),
        RECEIPT: {"run-3": A_MOMENT},
        RATING: dict.fromkeys(["run-2", "run-3"], timedelta()),
    },
    transfers=BOTH_BOOKS,
    traffic=TRAFFIC,
    injected=4,
    repeated_calls=1,
    forged_calls=1,
    contradicting_calls=1,
    refused_calls=2,
    kills_wanted=2,
    kills=2,
)


def with_count(effect, order, count):
    """The flawless run, except for one effect of one order."""
    return replace(FLAWLESS_RUN, effects={**FLAWLESS_RUN.effects, effect: {**FLAWLESS_RUN.effects[effect], order: count}})


def without_lateness_of(effect):
    return {"lateness": {**FLAWLESS_RUN.lateness, effect: {}}}


def test_a_flawless_run_passes():
    result = audit(FLAWLESS_RUN)

    assert result.passed
    assert (result.lost, result.doubled, result.ghosts, result.early, result.problems) == ((), (), (), (), ())
    assert result.total(PAYMENT) == 3


WRONG_COUNTS = [
    ("run-2", 0, "lost"),
    ("run-3", 2, "doubled"),
    ("run-4", 1, "ghosts"),  # rolled back
    ("run-unknown", 1, "ghosts"),
    (TAKEN_BACK, 1, "ghosts"),
]


@pytest.mark.parametrize(
    ("effect", "order", "count", "fault"),
    [(effect, *wrong) for effect in EFFECTS for wrong in WRONG_COUNTS if effect != ORDER or wrong[0] != TAKEN_BACK]
    + [(ORDER, TAKEN_BACK, 0, "lost")],
)
def test_an_effect_that_is_lost_or_doubled_or_without_an_order_is_found(effect, order, count, fault):
    result = audit(with_count(effect, order, count))

    expected = {"lost": (), "doubled": (), "ghosts": (), fault: (Finding(effect=effect, order=order, count=count),)}
    assert {name: getattr(result, name) for name in expected} == expected
    assert not result.passed


def test_an_effect_without_any_count_is_lost_for_every_order():
    effects = {effect: counts for effect, counts in FLAWLESS_RUN.effects.items() if effect != SHIPMENT}

    result = audit(replace(FLAWLESS_RUN, effects=effects))

    assert [finding.order for finding in result.lost] == ["run-1", "run-2", "run-3"]
    assert not result.passed


def test_a_lost_and_a_doubled_effect_do_not_cancel_each_other_out():
    """Their sum is right, which is why the audit looks at each order."""
    counts = {"run-1": 2, "run-2": 0, "run-3": 1}

    result = audit(replace(FLAWLESS_RUN, effects={**FLAWLESS_RUN.effects, PAYMENT: counts}))

    assert result.total(PAYMENT) == 3
    assert result.lost == (Finding(effect=PAYMENT, order="run-2", count=0),)
    assert result.doubled == (Finding(effect=PAYMENT, order="run-1", count=2),)
    assert not result.passed


@pytest.mark.parametrize("order", ["run-4", TAKEN_BACK])
def test_a_message_of_an_order_that_was_rolled_back_or_taken_back_is_a_ghost(order):
    result = audit(replace(FLAWLESS_RUN, traffic=replace(TRAFFIC, messages={**TRAFFIC.messages, order: 1})))

    assert result.ghosts == (Finding(effect="messages", order=order, count=1),)
    assert not result.passed


@pytest.mark.parametrize("effect", [SMS, REVIEW_REQUEST, RECEIPT, RATING])
def test_an_effect_that_happened_before_it_was_due_is_early(effect):
    lateness = {**FLAWLESS_RUN.lateness, effect: {**FLAWLESS_RUN.lateness[effect], "run-3": -A_MOMENT}}

    result = audit(replace(FLAWLESS_RUN, lateness=lateness))

    assert result.early == (Early(effect=effect, order="run-3", seconds=0.001),)
    assert not result.passed


@pytest.mark.parametrize(
    ("books", "lost", "doubled", "ghosts"),
    [
        ({"deposited": {"out-1": 1}}, [(DEPOSIT, "out-2", 0)], [], []),
        (
            {"deposited": {}, "withdrawn": {"out-2": 1}},
            [(WITHDRAWAL, "out-1", 0), (DEPOSIT, "out-1", 0), (DEPOSIT, "out-2", 0)],
            [],
            [],
        ),
        ({"withdrawn": {"out-1": 1}}, [], [], [(DEPOSIT, "out-2", 1)]),
        ({"deposited": {"out-1": 1, "out-2": 2}}, [], [(DEPOSIT, "out-2", 2)], []),
        ({"refused": frozenset({"out-2"})}, [], [], [(DEPOSIT, "out-2", 1), (WITHDRAWAL, "out-2", 1)]),
    ],
    ids=["not deposited", "sent and in no book", "deposited and not withdrawn", "deposited twice", "refused and in both books"],
)
def test_a_transfer_that_is_not_in_both_books_once_or_in_neither_is_found(books, lost, doubled, ghosts):
    result = audit(replace(FLAWLESS_RUN, transfers=replace(BOTH_BOOKS, **books)))

    found = [
        [(finding.effect, finding.order, finding.count) for finding in findings]
        for findings in (result.lost, result.doubled, result.ghosts)
    ]
    assert found == [lost, doubled, ghosts]
    assert not result.passed


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ({"stock_differences": {"mug": -2}}, "the stock of mug differs by -2 from the sum of its movements"),
        ({"rated_by_itself": ORDERS}, "the customer of run-1 rated it, and it has five stars by itself"),
        ({"transfers": replace(BOTH_BOOKS, money_missing=-7)}, "of the money at both banks -7 is missing"),
        ({"traffic": replace(TRAFFIC, outbox={"dead": 1}, inbox={"dead": 2})}, "3 dead letters"),
        ({"traffic": replace(TRAFFIC, contradictions=1)}, "1 messages contradicted an earlier one with their biz-id"),
        ({"bad_ends": ("outbox_relay 1 ended by itself with 1",)}, "outbox_relay 1 ended by itself with 1"),
        ({"unfinished": ("2 ratings",)}, "not finished in time: 2 ratings"),
        ({"refused_calls": 1}, "2 calls of the webhook were to be refused, and 1 were"),
        ({"traffic": replace(TRAFFIC, suppressed=3)}, "4 duplicates were injected and only 3 suppressed"),
        # A required event never occurred:
        ({"wanted": 5}, "4 of 5 orders were placed"),
        (without_lateness_of(SMS), "no SMS was due later, so an early one had no chance"),
        (without_lateness_of(REVIEW_REQUEST), "no review request was due later, so an early one had no chance"),
        (without_lateness_of(RECEIPT), "no receipt was refused and tried again later, so an early one had no chance"),
        ({"rolled_back": frozenset()}, "no order was rolled back, so ghosts had no chance"),
        (
            {"transfers": replace(BOTH_BOOKS, given_up=0)},
            "no transfer was given up by the checker, so a late withdrawal had no chance",
        ),
        ({"transfers": Transfers(given_up=1)}, "no money was transferred, so losing it had no chance"),
        ({"injected": 0}, "no duplicate was injected, so doubled effects had no chance"),
        ({"copied": 0}, "no message was copied on the broker, so redelivery had no chance"),
        ({"kills": 0}, "0 of 2 kills fired"),
        ({"kills": 1}, "1 of 2 kills fired"),
    ],
)
def test_audit_fails_on_each_other_fault_and_reports_it(fault, complaint):
    result = audit(replace(FLAWLESS_RUN, **fault))

    assert result.problems == (complaint,)
    assert not result.passed


def test_a_run_in_which_no_order_was_taken_back_proves_nothing():
    result = audit(
        replace(
            FLAWLESS_RUN,
            wanted=3,
            committed=ORDERS,
            taken_back=frozenset(),
            effects={effect: dict.fromkeys(ORDERS, 1) for effect in EFFECTS},
        )
    )

    assert result.problems == ("no order was taken back, so taking back had no chance",)


def test_a_run_without_orders_proves_nothing():
    result = audit(Facts(wanted=0, committed=frozenset(), rolled_back=frozenset(), effects={}))

    assert "0 of 0 orders were placed" in result.problems
    assert not result.passed


def test_a_run_without_kills_passes_when_none_were_wanted():
    assert audit(replace(FLAWLESS_RUN, kills_wanted=0, kills=0)).passed
