"""Message ids are unique, are of version 7, and grow with time; those made together are in order."""

import time
import uuid

from outbox.kernel.identity import new_message_id, new_message_ids


def test_those_made_together_are_of_version_7_and_ascend():
    ids = new_message_ids(10_000)

    assert {(made.version, made.variant) for made in ids} == {(7, uuid.RFC_4122)}
    assert len(set(ids)) == 10_000
    assert ids == sorted(ids)


def test_those_made_together_carry_the_time_they_were_made():
    before = time.time_ns() // 1_000_000
    [made] = {message_id.int >> 80 for message_id in new_message_ids(100)}

    assert before <= made <= time.time_ns() // 1_000_000


def test_none_are_made_when_none_are_wanted():
    assert new_message_ids(0) == []


def test_every_bit_but_those_of_the_format_is_random():
    every_id = [new_message_id() for _ in range(200)] + new_message_ids(200)
    bits = (1 << 80) - 1
    ever, always = 0, bits
    for message_id in every_id:
        ever |= message_id.int & bits
        always &= message_id.int

    assert ever == bits & ~(0x8 << 76) & ~(0x1 << 62)
    assert always == 0x7 << 76 | 0x2 << 62
