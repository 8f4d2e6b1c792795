"""Durations as text: a number and s, m, h or d, as in "90s", "30m", "2h" and "7d".

Each name that RocketMQ's delay levels have by default is such a text. A list of levels in the settings would restrict delays
without a use.
"""

import re
from collections.abc import Callable
from datetime import timedelta

_DURATION = re.compile(r"(0|[1-9][0-9]{0,4})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_SHOWN = {"d": timedelta(days=1), "h": timedelta(hours=1), "min": timedelta(minutes=1), "s": timedelta(seconds=1)}


def parse_duration(option: str, given: object) -> timedelta:
    """The duration that was given for `option`, which the errors name.

    Raises:
        TypeError: it is neither a timedelta nor text.
        ValueError: it is text in another format.
    """
    if isinstance(given, timedelta):
        return given
    if isinstance(given, str) and (parts := _DURATION.fullmatch(given)):
        return timedelta(**{_UNITS[parts[2]]: int(parts[1])})
    kind = ValueError if isinstance(given, str) else TypeError
    seconds = given if type(given) in {int, float} else 30
    example = f"timedelta(seconds={seconds})"
    raise kind(f'{option} is {given!r:.80}: it must be a number and s, m, h or d, as "90s", or a timedelta, such as {example}.')


def in_words(duration: timedelta, number: Callable[[int], str] = str) -> str:
    """A duration in the largest unit of which it has at least two, so that rounding loses little: "90 s", "36 h"."""
    symbol = next((symbol for symbol, unit in _SHOWN.items() if duration >= 2 * unit), "s")
    return f"{number(duration // _SHOWN[symbol])} {symbol}"
