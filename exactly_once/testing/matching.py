"""Messages that a test expects, by the values of their attributes or of paths into these.

A message is a frozen dataclass with a `topic` and a `payload`. A path is written with `__`: `payload__items__0__sku="pen"`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from django.core.serializers.json import DjangoJSONEncoder

_Message = TypeVar("_Message")

_SHOWN_MESSAGES = 20
_SHOWN_LENGTH = 300


def decoded(body: bytes) -> Any:
    """The payload in `body`; the bytes if they are not JSON, as in another protocol."""
    try:
        return json.loads(body)
    except ValueError:
        return body


def matching(messages: Sequence[_Message], expected: Mapping[str, Any]) -> list[_Message]:
    """Those with all expected values. A value is compared with `==`; in a payload also in its JSON form."""
    return [message for message in messages if not _differences(message, expected)]


def require_known(kind: type[Any], expected: Mapping[str, Any]) -> None:
    """Refuse an expectation that no message can fulfil.

    Raises:
        TypeError: a name is not an attribute of `kind`.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    for name in expected:
        attribute = name.split("__")[0]
        if attribute not in known:
            close = difflib.get_close_matches(attribute, known, n=1)
            remedy = f"Did you mean {close[0]!r}?" if close else f"A message has: {', '.join(known)}."
            raise TypeError(f"{name}: a message has no {attribute!r}. {remedy}")


def with_values(expected: Mapping[str, Any]) -> str:
    """The expectation, as the end of a sentence about messages."""
    return f" with {', '.join(f'{name}={value!r}' for name, value in expected.items())}" if expected else ""


def listed(
    messages: Sequence[_Message],
    line: Callable[[_Message], str],
    expected: Mapping[str, Any],
    *,
    place: str,
    is_meant: Callable[[_Message], bool],
) -> str:
    """All messages in `place`, one per line; first those that are meant, each with its differences from the expectation."""
    if not messages:
        return f"The {place} is empty."
    ordered = sorted(messages, key=lambda message: not is_meant(message))
    lines = []
    for message in ordered[:_SHOWN_MESSAGES]:
        differences = _differences(message, expected) if is_meant(message) else []
        lines.append(f"  {line(message)}" + "".join(f"\n      {difference}" for difference in differences))
    if len(ordered) > _SHOWN_MESSAGES:
        lines.append(f"  … and {len(ordered) - _SHOWN_MESSAGES} more")
    return "\n".join([f"In the {place}:", *lines])


def line_of(words: Sequence[str], values: Mapping[str, Any]) -> str:
    """The words, then each value that is not empty by its name."""
    return " ".join([*words, *(f"{name}={short(value)}" for name, value in values.items() if value)])


def short(value: object) -> str:
    """Its `repr()`, not longer than can be read."""
    text = repr(value)
    return text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "…"


def _differences(message: object, expected: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in expected.items():
        attribute, *path = name.split("__")
        try:
            actual = _follow(getattr(message, attribute), path)
        except LookupError:
            found.append(f"{name}: missing, expected {short(value)}")
        else:
            if actual != value and not (attribute == "payload" and actual == _as_json(value)):
                found.append(f"{name}: {short(actual)}, expected {short(value)}")
    return found


def _follow(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        if isinstance(value, Mapping):
            value = value[name]
        elif isinstance(value, list) and name.isdecimal():
            value = value[int(name)]
        else:
            raise LookupError(name)
    return value


def _as_json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, cls=DjangoJSONEncoder))
    except (TypeError, ValueError):
        return value  # such as unittest.mock.ANY
