"""Text that comes from elsewhere fits every column and every wire, or is refused with the reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.kernel.text import NAME_LENGTH, fit, printable, why_no_topic, why_unfit

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
def test_any_other_name_is_refused_with_what_is_wrong(name, reason):
    assert reason in why_unfit(name)


@pytest.mark.parametrize("topic", ["shop.order.placed", "a", "a..b", "c#", "5*", "a.b*.c"])
def test_a_topic_is_taken_literally(topic):
    assert why_no_topic(topic) is None


@pytest.mark.parametrize("topic", ["", "#", "*", "shop.#", "*.placed", "shop.*.placed", "x" * 256, "a\tb"])
def test_what_a_topic_exchange_would_not_take_literally_is_no_topic(topic):
    assert why_no_topic(topic)


@given(ANY_TEXT)
def test_whatever_the_text_its_name_fits_and_is_always_the_same(text):
    name = fit(text)

    assert why_unfit(name) is None
    assert fit(text) == name
    if why_unfit(text) is None:
        assert name == text


@given(ANY_TEXT, ANY_TEXT)
def test_two_texts_never_share_a_name(one, other):
    if one != other:
        assert fit(one) != fit(other)


@given(ANY_TEXT, st.integers(50, 300))
def test_what_is_printable_can_be_stored(text, limit):
    shown = printable(text, limit)

    assert "\x00" not in shown
    shown.encode()


def test_a_long_text_keeps_both_ends():
    shown = printable("begin" + "x" * 5_000 + "end", 100)

    assert shown.startswith("begin")
    assert shown.endswith("end")
    assert "characters left out" in shown


def test_names_are_limited_by_what_amqp_calls_a_short_string():
    assert NAME_LENGTH == 255
