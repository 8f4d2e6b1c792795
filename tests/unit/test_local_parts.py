"""local:// hands over many messages with one statement, which does not grow without a limit."""

import pytest

from exactly_once.transport.interface import OutgoingMessage
from exactly_once.wire.envelope import Envelope
from inbox import local
from inbox.consumer import lanes


@pytest.mark.parametrize(
    ("sizes", "parts"), [([], []), ([4, 4], [[0, 1]]), ([4, 4, 4], [[0, 1], [2]]), ([20, 1, 20], [[0], [1], [2]])]
)
def test_parts_keep_the_order_and_are_bounded_by_bytes(sizes, parts, monkeypatch):
    monkeypatch.setattr(lanes, "LOAD_BYTES", 10)
    messages = [
        OutgoingMessage(position=position, envelope=Envelope(id=str(position), topic="t", body=b"x" * size))
        for position, size in enumerate(sizes)
    ]

    assert [[message.position for message in part] for part in local._in_parts(messages)] == parts
