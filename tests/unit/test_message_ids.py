"""Message ids are unique, of version 7, and grow with time; those made in one call are in order."""

import time
import uuid

import pytest

from exactly_once.wire.identity import new_message_id, new_message_ids


def test_ids_made_in_one_call_are_unique_ascending_and_of_version_7():
    ids = new_message_ids(10_000)

    assert {(made.version, made.variant) for made in ids} == {(7, uuid.RFC_4122)}
    assert len(set(ids)) == 10_000
    assert ids == sorted(ids)


def test_ids_made_one_by_one_are_unique():
    assert len({new_message_id() for _ in range(10_000)}) == 10_000


@pytest.mark.parametrize("make", [lambda: [new_message_id()], lambda: new_message_ids(100)], ids=["one", "many"])
def test_ids_carry_the_time_of_the_call(make):
    before = time.time_ns() // 1_000_000
    [made] = {message_id.int >> 80 for message_id in make()}

    assert before <= made <= time.time_ns() // 1_000_000


def test_a_call_for_zero_ids_returns_an_empty_list():
    assert new_message_ids(0) == []


def test_every_bit_outside_the_format_is_random():
    every_id = [new_message_id() for _ in range(200)] + new_message_ids(200)
    bits = (1 << 80) - 1
    ever, always = 0, bits
    for message_id in every_id:
        ever |= message_id.int & bits
        always &= message_id.int

    assert ever == bits & ~(0x8 << 76) & ~(0x1 << 62)
    assert always == 0x7 << 76 | 0x2 << 62
