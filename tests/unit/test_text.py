"""Text from outside fits every column and the wire format, or is refused with the reason."""

import struct

import pytest
from amqp.serialization import dumps, loads
from hypothesis import assume, example, given
from hypothesis import strategies as st

from exactly_once.wire.text import NAME_LENGTH, fit, printable, why_no_topic, why_unfit

ANY_TEXT = st.text(st.characters(), max_size=400) | st.text(st.characters(categories=["Cs"]), max_size=3)


@pytest.mark.parametrize("name", ["", "order-17", "x" * 255, "ä" * 127, "with space", "🍰"])
def test_a_short_printable_name_fits(name):
    assert why_unfit(name) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x" * 256, "256 bytes"),
        ("ä" * 128, "256 bytes"),
        ("a\x00b", r"'\x00'"),
        ("a\nb", r"'\n'"),
        ("a\x7f", r"'\x7f'"),
        ("a\ud800", r"'\ud800'"),
    ],
)
def test_a_long_or_unprintable_name_is_refused_with_the_reason(name, reason):
    assert reason in why_unfit(name)


@pytest.mark.parametrize("topic", ["shop.order.placed", "a", "a..b", "c#", "5*", "a.b*.c"])
def test_a_topic_without_wildcard_words_is_accepted(topic):
    assert why_no_topic(topic) is None


@pytest.mark.parametrize("topic", ["", "#", "*", "shop.#", "*.placed", "shop.*.placed", "x" * 256, "a\tb"])
def test_an_empty_wildcard_long_or_unprintable_topic_is_refused(topic):
    assert why_no_topic(topic)


@given(ANY_TEXT)
def test_any_text_is_fitted_to_a_valid_name_and_always_to_the_same_one(text):
    name = fit(text)

    assert why_unfit(name) is None
    assert fit(text) == name
    if why_unfit(text) is None:
        assert name == text


@given(ANY_TEXT, ANY_TEXT)
@example("x" * 300 + "a", "x" * 300 + "b")
@example("a\nb", "a\tb")
def test_different_texts_are_never_fitted_to_the_same_name(one, other):
    assume(one != other)

    assert fit(one) != fit(other)


@given(ANY_TEXT, st.integers(50, 300))
def test_printable_text_can_be_stored(text, limit):
    shown = printable(text, limit)

    assert "\x00" not in shown
    assert shown.encode().decode() == shown


def test_a_long_text_is_shortened_in_the_middle():
    shown = printable("begin" + "x" * 5_000 + "end", 100)

    assert shown.startswith("begin")
    assert shown.endswith("end")
    assert "4908 characters left out" in shown
    assert len(shown) < 150


def test_the_longest_name_fits_an_amqp_short_string_and_a_longer_one_does_not():
    longest = "x" * (NAME_LENGTH - 2) + "ä"

    assert why_unfit(longest) is None
    assert loads("s", dumps("s", [longest]), 0)[0] == [longest]
    assert why_unfit(longest + "x") == "it is 256 bytes long in UTF-8 and the limit is 255"
    with pytest.raises(struct.error, match="<= 255"):
        dumps("s", [longest + "x"])
