"""Whole frames are taken out of py-amqp's buffer: all of them, in order, wherever the network has cut the stream."""

from itertools import starmap
from types import SimpleNamespace

import pytest
from amqp.exceptions import UnexpectedFrame
from hypothesis import given
from hypothesis import strategies as st

from exactly_once.transport.broker import dispatch_what_is_read
from tests.support.fakes import amqp_wire as wire

FRAMES = st.lists(st.tuples(st.sampled_from([1, 2, 3, 8]), st.integers(0, 2**16 - 1), st.binary(max_size=40)), max_size=8)


class Connection:
    """The part of py-amqp's connection that is used."""

    def __init__(self, refused=()):
        self.transport = SimpleNamespace(_read_buffer=b"")
        self.dispatched = []
        self.refused = refused

    def on_inbound_frame(self, frame):
        self.dispatched.append(frame)
        if frame in self.refused:
            raise UnexpectedFrame

    def read(self, data):
        self.transport._read_buffer += data
        dispatch_what_is_read(self)


@given(frames=FRAMES, cuts=st.lists(st.integers(1, 60)))
def test_whole_frames_are_dispatched_in_order_however_the_stream_is_cut(frames, cuts):
    connection, stream = Connection(), b"".join(starmap(wire.frame, frames))
    for cut in [*cuts, len(stream)]:
        connection.read(stream[:cut])
        stream = stream[cut:]

    assert connection.dispatched == frames
    assert connection.transport._read_buffer == b""


@given(frames=FRAMES, cut=st.integers(1, 7))
def test_an_incomplete_frame_stays_in_the_buffer(frames, cut):
    connection, last = Connection(), wire.frame(1, 1)
    connection.read(b"".join(starmap(wire.frame, frames)) + last[:cut])

    assert connection.dispatched == frames
    assert connection.transport._read_buffer == last[:cut]


def test_a_frame_without_its_end_marker_is_left_for_py_amqp_to_refuse():
    connection, malformed = Connection(), wire.frame(1, 1, b"abc")[:-1] + b"\x00"
    connection.read(wire.frame(8, 0) + malformed)

    assert connection.dispatched == [(8, 0, b"")]
    assert connection.transport._read_buffer == malformed


def test_a_refused_frame_is_not_dispatched_twice():
    frames = [(1, 1, b"a"), (1, 1, b"b"), (1, 1, b"c")]
    connection = Connection(refused=frames[1:2])

    with pytest.raises(UnexpectedFrame):
        connection.read(b"".join(starmap(wire.frame, frames)))
    connection.read(b"")

    assert connection.dispatched == frames
