"""Messages that a test expects, by the values of their attributes or of paths into these.

A message is a frozen dataclass with a `topic` and a `payload`. A path is written with `__`: `payload__items__0__sku="pen"`.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import Model, QuerySet

from exactly_once.sql.rows import value_of
from exactly_once.wire.text import did_you_mean

_Message = TypeVar("_Message")
IsMeant = Callable[[Any], bool]

_SHOWN_MESSAGES = 20
_SHOWN_LENGTH = 300


def decoded(body: bytes) -> Any:
    """The payload in `body`; the bytes if they are not JSON, as in another protocol."""
    try:
        return json.loads(body)
    except ValueError:
        return body


class Messages(Generic[_Message]):
    """The messages of one app in the test's database.

    Args:
        place: where they are, "outbox".
        kind: their dataclass. `payload`, `state`, `id` and `due_at` are made from other columns.
        due: the column of `due_at`.
        words: attributes that begin its line in a report; `values` are shown with their names if they are not empty.
    """

    def __init__(
        self, place: str, kind: type[_Message], model: type[Model], *, due: str, words: Sequence[str], values: Sequence[str]
    ) -> None:
        self._place, self._kind, self._model, self._due = place, kind, model, due
        self._words, self._values = words, ("key", "headers", *values)

    def all(self, using: str) -> list[_Message]:
        """All of them, in the order of writing."""
        rows: Any = QuerySet(self._model, using=using).order_by("pk")
        return [
            value_of(
                self._kind,
                row,
                id=str(row.message_id),
                payload=decoded(bytes(row.body)),
                state=str(row.state),
                due_at=getattr(row, self._due),
            )
            for row in rows
        ]

    def found(self, messages: Sequence[_Message], is_meant: IsMeant, expected: Mapping[str, Any]) -> list[_Message]:
        """Those that are meant and have all expected values. A value is compared with `==`; in a payload also in its JSON form.

        Raises:
            TypeError: a name is not an attribute of the messages.
        """
        require_known(self._kind, expected)
        return [message for message in messages if is_meant(message) and not _differences(message, expected)]

    def listed(self, messages: Sequence[_Message], is_meant: IsMeant, expected: Mapping[str, Any]) -> str:
        """All messages, one per line; first those that are meant, each with its differences from the expectation."""
        if not messages:
            return f"The {self._place} is empty."
        ordered = sorted(messages, key=lambda message: not is_meant(message))
        lines = []
        for message in ordered[:_SHOWN_MESSAGES]:
            differences = _differences(message, expected) if is_meant(message) else []
            lines.append(f"  {self._line(message)}" + "".join(f"\n      {difference}" for difference in differences))
        if len(ordered) > _SHOWN_MESSAGES:
            lines.append(f"  … and {len(ordered) - _SHOWN_MESSAGES} more")
        return "\n".join([f"In the {self._place}:", *lines])

    def _line(self, message: Any) -> str:
        named = {"biz_id": "" if message.biz_id == message.id else message.biz_id}
        named |= {name: getattr(message, name) for name in self._values}
        words = [getattr(message, name) for name in self._words]
        words += [f"{name}={_short(value)}" for name, value in named.items() if value]
        return f"{' '.join(words)} payload={_short(message.payload)}"


def require_known(kind: type[Any], expected: Mapping[str, Any]) -> None:
    """Refuse an expectation that no message can fulfil.

    Raises:
        TypeError: a name is not an attribute of `kind`.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    for name in expected:
        attribute = name.split("__")[0]
        if attribute not in known:
            remedy = did_you_mean(attribute, known) or f"A message has: {', '.join(known)}."
            raise TypeError(f"{name}: a message has no {attribute!r}. {remedy}")


def with_values(expected: Mapping[str, Any]) -> str:
    """The expectation, as the end of a sentence about messages."""
    return f" with {', '.join(f'{name}={value!r}' for name, value in expected.items())}" if expected else ""


def _short(value: object) -> str:
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
            found.append(f"{name}: missing, expected {_short(value)}")
        else:
            if actual != value and not (attribute == "payload" and actual == _as_json(value)):
                found.append(f"{name}: {_short(actual)}, expected {_short(value)}")
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
