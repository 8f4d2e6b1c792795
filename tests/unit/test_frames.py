"""Our encoder writes the same bytes as py-amqp, and refuses a message that does not fit instead of sending it malformed."""

import struct
from types import SimpleNamespace

import amqp
import pytest
from amqp.method_framing import frame_writer
from amqp.serialization import dumps
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exactly_once.transport.interface import OutgoingMessage, PublishOutcome
from exactly_once.wire.envelope import Envelope
from outbox.transports.frames import FrameWriter
from tests.support.deliveries import at_once
from tests.support.fakes import amqp_wire as wire
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.relaying import connected, soon

CHANNEL, EXCHANGE = 7, "outbox"
FRAME_MAX = 4096
LARGEST = FRAME_MAX - wire.FRAME_OVERHEAD


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=60).filter(
    lambda name: name not in {"CC", "BCC"}
)
values = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=300),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, -1, 2**31 - 1, 2**31, -(2**31) + 1, -(2**31), 2**63 - 1, -(2**63)]),
    st.floats(allow_nan=False, allow_infinity=False),
)


def a_message(body=b"{}", priority=0, expires_in_seconds=None, **attributes):
    envelope = Envelope(**{"id": "0198-id", "topic": "shop.order.placed", "source": "/shop", "body": body, **attributes})
    return OutgoingMessage(position=1, envelope=envelope, priority=priority, expires_in_seconds=expires_in_seconds)


def encoded(message, frame_max=FRAME_MAX, exchange=EXCHANGE):
    return FrameWriter(channel=CHANNEL, frame_max=frame_max).publish(message, exchange, message.envelope.topic)


def by_py_amqp(outgoing, frame_max=FRAME_MAX, expiration=None):
    """What py-amqp writes to its socket for `basic_publish`, mandatory, on the same channel."""
    envelope, written = outgoing.envelope, bytearray()
    transport = SimpleNamespace(write=lambda data: written.extend(bytes(data)))
    write = frame_writer(SimpleNamespace(frame_max=frame_max, bytes_sent=0), transport)
    message = amqp.Message(
        envelope.body,
        content_type=envelope.content_type,
        content_encoding="utf-8",
        application_headers=envelope.to_headers(),
        delivery_mode=2,
        priority=outgoing.priority,
        message_id=envelope.id,
        type=envelope.topic,
        **({} if expiration is None else {"expiration": expiration}),
    )
    arguments = dumps("Bssbb", (0, EXCHANGE, envelope.topic, True, False))
    write(wire.METHOD_FRAME, CHANNEL, wire.PUBLISH, arguments, message)
    return bytes(written)


def frames(data):
    """Kind and payload of every frame."""
    split, at = [], 0
    while at < len(data):
        kind, channel, size = struct.unpack_from(">BHI", data, at)
        assert (channel, data[at + 7 + size]) == (CHANNEL, 0xCE)
        split.append((kind, data[at + 7 : at + 7 + size]))
        at += wire.FRAME_OVERHEAD + size
    return split


class TestHeadersOfRabbitMQ:
    @pytest.mark.parametrize("name", ["CC", "BCC"])
    @pytest.mark.parametrize("value", ["copy", 1, True])
    def test_cc_or_bcc_header_that_is_not_a_list_is_refused(self, name, value):
        """RabbitMQ would close the channel because of it."""
        with pytest.raises(ValueError, match=name):
            encoded(a_message(headers={name: value}))

    def test_header_named_cc_in_lower_case_is_sent_as_given(self):
        assert b"cc" in encoded(a_message(headers={"cc": "copy"}))


class TestSameBytesAsPyAmqp:
    @pytest.mark.long
    @given(headers=st.dictionaries(names, values, max_size=8), body=st.binary(max_size=200), priority=st.integers(0, 9))
    @example(headers={"x": True, "y": 1, "z": 1.0, "ä": "ü€😀", "": ""}, body=b"", priority=9)
    @settings(max_examples=300, deadline=None)
    def test_headers_are_encoded_as_py_amqp_encodes_them(self, headers, body, priority):
        message = a_message(body, priority, headers=headers)

        assert encoded(message, 131_072) == by_py_amqp(message, 131_072)

    @given(topic=names, key=names, biz_id=names, name=names)
    @settings(max_examples=100, deadline=None)
    def test_topics_keys_and_ids_are_encoded_as_py_amqp_encodes_them(self, topic, key, biz_id, name):
        message = a_message(topic=topic, key=key, biz_id=biz_id, id=name, correlation_id=name, causation_id=name)

        assert encoded(message, 131_072) == by_py_amqp(message, 131_072)

    @pytest.mark.parametrize(
        "length", [0, 1, LARGEST - 1, LARGEST, LARGEST + 1, 2 * LARGEST - 1, 2 * LARGEST, 2 * LARGEST + 1, 5 * LARGEST, 100_000]
    )
    def test_a_body_of_any_length_is_split_as_py_amqp_splits_it(self, length):
        message = a_message(bytes(range(256)) * (length // 256) + b"x" * (length % 256))

        assert encoded(message) == by_py_amqp(message)

    @given(length=st.integers(0, 3000), frame_max=st.integers(600, 800))
    @settings(max_examples=100, deadline=None)
    def test_any_negotiated_frame_size_is_used_as_py_amqp_uses_it(self, length, frame_max):
        message = a_message(b"y" * length)

        assert encoded(message, frame_max) == by_py_amqp(message, frame_max)


class TestExpiration:
    @pytest.mark.parametrize(
        ("seconds", "milliseconds"),
        [(3600.0, "3600000"), (1.0019, "1001"), (0.001, "1"), (0.0004, "1"), (4_294_967.295, "4294967295")],
    )
    def test_the_expiration_is_the_remaining_time_in_whole_milliseconds(self, seconds, milliseconds):
        message = a_message(expires_in_seconds=seconds)

        assert encoded(message) == by_py_amqp(message, expiration=milliseconds)
        _, (_, header), _ = frames(encoded(message))
        assert wire.Reader(header, at=12).properties()["expiration"] == milliseconds

    @pytest.mark.parametrize("seconds", [None, 4_294_967.296, 1e12])
    def test_no_expiration_is_sent_without_one_or_beyond_what_the_broker_can_represent(self, seconds):
        assert encoded(a_message(expires_in_seconds=seconds)) == by_py_amqp(a_message())


class TestRefusedMessages:
    @pytest.mark.parametrize("attribute", ["topic", "id", "content_type", "headers", "exchange"])
    def test_a_name_of_more_than_255_bytes_is_refused(self, attribute):
        def named(name):
            return a_message(**{} if attribute == "exchange" else {attribute: {name: ""} if attribute == "headers" else name})

        longest = named("ä" * 127 + "b")
        assert encoded(longest) == by_py_amqp(longest)
        exchange = "ä" * 128 if attribute == "exchange" else EXCHANGE
        with pytest.raises(ValueError, match="255"):
            encoded(named("ä" * 128), exchange=exchange)

    def test_a_header_frame_larger_than_negotiated_is_refused(self):
        """A broker closes the connection when it gets one."""
        empty = len(frames(encoded(a_message(headers={"h": ""})))[1][1])
        largest = a_message(headers={"h": "v" * (LARGEST - empty)})

        assert len(frames(encoded(largest))[1][1]) == LARGEST
        with pytest.raises(ValueError, match=f"{LARGEST + 1} bytes"):
            encoded(a_message(headers={"h": "v" * (LARGEST - empty + 1)}))
        larger = a_message(headers={"h": "v" * LARGEST})
        assert encoded(larger, 2 * FRAME_MAX) == by_py_amqp(larger, 2 * FRAME_MAX), "another broker may allow larger frames"

    @pytest.mark.parametrize("value", ["\ud800", 2**63, -(2**63) - 1, object(), 1j])
    def test_a_header_value_that_amqp_cannot_encode_is_refused(self, value):
        with pytest.raises((ValueError, struct.error, amqp.FrameSyntaxError), match=r"."):
            encoded(a_message(headers={"h": value}))


def test_cached_encodings_of_one_message_are_not_used_for_another():
    writer = FrameWriter(channel=CHANNEL, frame_max=FRAME_MAX)
    messages = [a_message(topic=f"t{n % 3}", id=f"m{n}", headers={f"h{n % 5}": f"v{n}"}, key=f"k{n % 2}") for n in range(60)]

    assert [writer.publish(message, EXCHANGE, message.envelope.topic) for message in messages] == [
        by_py_amqp(message) for message in messages
    ]


def test_concurrent_writers_share_a_cache_without_mixing_up_messages():
    """All writers share the cache of encoded names."""
    messages = [a_message(topic=f"t{n}", id=f"m{n}", headers={f"h{n}": n}) for n in range(300)]
    expected = [by_py_amqp(message) for message in messages]

    def lane():
        writer = FrameWriter(channel=CHANNEL, frame_max=FRAME_MAX)
        return [writer.publish(message, EXCHANGE, message.envelope.topic) for message in messages]

    assert [written == expected for written in at_once([lane] * 4)] == [True] * 4


def test_headers_too_large_for_the_smallest_frame_refuse_their_message_and_not_the_others():
    """A broker may agree to no more than 4096 bytes, the least that AMQP allows."""
    one, too_large, other = [
        OutgoingMessage(position=n, envelope=a_message(body, id=f"m{n}").envelope) for n, body in enumerate([b"1", b"2", b"3"])
    ]
    too_large = too_large._replace(envelope=too_large.envelope._replace(headers={"h": "v" * FRAME_MAX}))
    with FakeAmqpPeer(frame_max=FRAME_MAX) as peer, connected(peer.url) as transport:
        sent = transport.send([one, too_large, other], soon())

        assert [sent.verdicts[n].outcome for n in range(3)] == [
            PublishOutcome.CONFIRMED,
            PublishOutcome.REFUSED,
            PublishOutcome.CONFIRMED,
        ]
        assert f"limit is {LARGEST} per frame" in sent.verdicts[1].reason
        assert [message.body for message in peer.published] == [b"1", b"3"]
        assert sent.broken is None
