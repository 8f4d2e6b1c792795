"""Which messages may be in flight at the same time, and which may not."""

import uuid

from hypothesis import given
from hypothesis import strategies as st

from outbox.store.claiming import RelayedMessage
from outbox.store.waves import waves


def a_message(position, key=""):
    return RelayedMessage(
        position=position,
        shard=0,
        id=str(uuid.uuid4()),
        topic="t",
        biz_id="b",
        key=key,
        priority=0,
        body=b"{}",
        headers_json="{}",
        correlation_id="",
        causation_id="",
        traceparent="",
        attempts=0,
        created="2026-03-01 00:00:00+00",
        deliver=None,
        expires_in_seconds=None,
        is_blocked=False,
        ready_position=0,
    )


def positions(split):
    return [[message.position for message in wave] for wave in split]


def test_an_empty_batch_makes_no_wave():
    assert waves([]) == []


def test_the_kth_message_of_every_key_is_in_the_kth_wave():
    batch = [a_message(1, "a"), a_message(2, "a"), a_message(3, "b"), a_message(4), a_message(5, "a"), a_message(6, "b")]

    assert positions(waves(batch)) == [[1, 3, 4], [2, 6], [5]]


@given(st.lists(st.sampled_from(["", "a", "b", "c"]), max_size=30))
def test_no_wave_has_a_key_twice_and_keys_keep_their_order(keys):
    batch = [a_message(position, key) for position, key in enumerate(keys)]

    split = waves(batch)

    assert sorted(m.position for wave in split for m in wave) == list(range(len(batch)))
    for wave in split:
        keyed = [message.key for message in wave if message.key]
        assert len(keyed) == len(set(keyed))
        assert [m.position for m in wave] == sorted(m.position for m in wave)
    for key in "abc":
        sent = [message.position for wave in split for message in wave if message.key == key]
        assert sent == sorted(sent)
    assert all(message.key != "" for wave in split[1:] for message in wave)
