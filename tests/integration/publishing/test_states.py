"""Every state against every transition: a message moves if and only if its state is a source, and to a declared target."""

from datetime import timedelta

import pytest
from django.test import override_settings

from exactly_once.process.clock import utcnow
from outbox.models import OutboxMessage, TrailEntry
from outbox.states import TRANSITIONS, State
from outbox.store.transitions import Found, count_moved, move
from tests.support.relaying import in_state, row_of, state_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.every_database]

HOUR = timedelta(hours=1)
GIVEN = {"error": "nacked", "error_class": "nacked", "delay": HOUR, "due": HOUR}
SCHEDULING = ("attempts", "deliver_at", "available_at", "expires_at", "settled_at", "day", "last_error", "headers")
FAILURE = ("error_class", "failing_since", "failed_at")
NAMES = {transition.name: transition for transition in TRANSITIONS}
NOT_STARTED = "scheduled ready retrying waiting paused"
MOVES = {
    "confirm": ("ready", "published"),
    "retry": ("ready", "retrying"),
    "pause": ("ready", "paused"),
    "die": ("ready", "dead"),
    "expire": ("ready", "expired"),
    "hold": ("ready", "waiting"),
    "fire": ("scheduled", "ready"),
    "try again": ("retrying", "ready"),
    "resume": ("paused", "ready"),
    "release": ("waiting", "ready"),
    "cancel": (f"{NOT_STARTED} dead", "cancelled"),
    "reschedule": (NOT_STARTED, "scheduled"),
    "publish now": (NOT_STARTED, "ready"),
    "restore": ("cancelled expired dead retrying", "ready"),
    "commit": ("prepared stuck", "ready"),
    "roll back": ("prepared stuck", "rolled_back"),
    "give up": ("prepared", "stuck"),
    "resume checks": ("stuck", "prepared"),
}
"""Of a message that is due: the states that a transition leads from, and the state that it leads to."""


def given_for(transition):
    return {name: value for name, value in GIVEN.items() if f"{name}}}" in "".join(transition.sets.values())}


def trail_of(message):
    return list(TrailEntry.objects.filter(message_id=message.id).values_list("was", "became", "reason"))


def test_every_transition_is_tested():
    assert MOVES.keys() == NAMES.keys()


@pytest.mark.parametrize("name", MOVES)
def test_transition_moves_messages_in_its_sources_and_no_others(name):
    sources, target = MOVES[name]
    messages = {state: in_state(state, expires_in=HOUR) for state in State}
    before = {state: row_of(message) for state, message in messages.items()}
    positions = [row.pk for row in before.values()]

    moved = move("default", NAMES[name], positions, reason="for a test", recorded=True, **given_for(NAMES[name]))

    assert sorted(one[:4] for one in moved) == sorted(
        (before[state].pk, messages[state].id, state, target) for state in sources.split()
    )
    for state, message in messages.items():
        after = row_of(message)
        if state in sources.split():
            assert (after.state, trail_of(message)) == (target, [(state, target, "for a test")])
        else:
            for column in ("state", *SCHEDULING):
                assert getattr(after, column) == getattr(before[state], column)
            assert trail_of(message) == []


@pytest.mark.parametrize("name", NAMES)
def test_transition_writes_the_columns_it_declares_and_no_other(name):
    transition = NAMES[name]
    message = in_state(transition.sources[0], expires_in=HOUR)
    failure = {"last_error": "before", "error_class": "before", "failing_since": utcnow()}
    OutboxMessage.objects.update(attempts=3, settled_at=utcnow(), headers={"tenant": "acme"}, **failure)
    before = row_of(message)

    move("default", transition, [before.pk], **given_for(transition))

    after = row_of(message)
    changed = {column for column in (*SCHEDULING, *FAILURE) if getattr(after, column) != getattr(before, column)}
    declared = set(transition.sets) - {"state"}
    assert changed <= declared
    # Where the new value is the old one by nature: an expiry that is ahead of the next attempt, for example.
    assert declared - changed <= {"expires_at", "attempts"}


@pytest.mark.parametrize(("ahead", "state"), [(True, State.SCHEDULED), (False, State.READY)])
@pytest.mark.parametrize("name", [name for name, transition in NAMES.items() if len(transition.targets) == 2])
def test_transition_with_two_targets_schedules_what_is_to_be_delivered_later(name, ahead, state):
    transition = NAMES[name]
    message = in_state(transition.sources[0])
    OutboxMessage.objects.update(deliver_at=utcnow() + (HOUR if ahead else -HOUR))

    move("default", transition, [row_of(message).pk])

    assert state_of(message) == state


@pytest.mark.parametrize("name", [name for name, transition in NAMES.items() if len(transition.sources) == 1])
@pytest.mark.parametrize("trail", ["decisions", "all"])
def test_counted_transition_is_recorded_as_it_declares(name, trail):
    transition = NAMES[name]
    messages = [in_state(transition.sources[0]) for _ in range(3)]
    other = in_state(next(state for state in State if state not in transition.sources))
    TrailEntry.objects.all().delete()

    with override_settings(OUTBOX={"TRAIL": trail}):
        positions = [row_of(message).pk for message in (*messages, other)]
        assert count_moved("default", transition, positions, **given_for(transition)) == 3

    recorded = transition.recorded or trail == "all"
    assert [len(trail_of(message)) for message in (*messages, other)] == [*[int(recorded)] * 3, 0]


def test_only_narrows_the_sources_of_a_transition_and_one_with_several_takes_no_query():
    """With several sources it could not report the previous state of each message."""
    dead, scheduled = in_state(State.DEAD), in_state(State.SCHEDULED)
    with pytest.raises(TypeError, match="one source"):
        move("default", NAMES["cancel"], Found("SELECT 1", []))

    move("default", NAMES["cancel"], [row_of(dead).pk, row_of(scheduled).pk], only=[State.DEAD])

    assert (state_of(dead), state_of(scheduled)) == (State.CANCELLED, State.SCHEDULED)
