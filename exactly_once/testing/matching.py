"""Messages that a test expects, by the values of their attributes or of paths into these.

A message is a frozen dataclass with a `topic` and a `payload`. A path is written with `__`: `payload__items__0__sku="pen"`.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from django.core.serializers.json import DjangoJSONEncoder
from django.db import router
from django.db.models import Model, QuerySet

from exactly_once.sql.fields import value_of
from exactly_once.wire.text import did_you_mean

_Message = TypeVar("_Message")

_SHOWN_MESSAGES = 20
_SHOWN_LENGTH = 300


class Meant(NamedTuple):
    """Which messages are meant: as a function, and as a part of a sentence."""

    includes: Callable[[Any], bool]
    where: str


def on_topic(topic: str | None) -> Meant:
    """The messages of a topic; None means all."""
    return Meant(lambda message: topic in {None, message.topic}, "" if topic is None else f" on the topic {topic!r}")


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
        self._kind: type[Any] = kind
        self._place, self._model, self._due = place, model, due
        self._words, self._values = words, ("key", "headers", *values)

    def found(self, meant: Meant, using: str | None, expected: Mapping[str, Any]) -> list[_Message]:
        """Those that are meant and have all expected values. A value is compared with `==`; in a payload also in its JSON form.

        Raises:
            TypeError: a name is not an attribute of the messages.
        """
        known = [field.name for field in dataclasses.fields(self._kind)]
        for name in expected:
            attribute = name.split("__")[0]
            if attribute not in known:
                remedy = did_you_mean(attribute, known) or f"A message has: {', '.join(known)}."
                raise TypeError(f"{name}: a message has no {attribute!r}. {remedy}")
        return [message for message in self._all(using) if meant.includes(message) and not _differences(message, expected)]

    def counted(
        self, count: int, done: str, meant: Meant, using: str | None, expected: Mapping[str, Any], *, state: str = ""
    ) -> list[_Message]:
        """Those that are `found`, which must be `count`.

        Args:
            done: what was done to them, "published".
            state: their state, unless another one is expected. An error does not repeat it.

        Raises:
            AssertionError: they are another number.
        """
        __tracebackhide__ = True
        hidden = {"state": expected.get("state", state)} if state else {}
        found = self.found(meant, using, {**expected, **hidden})
        if len(found) != count:
            raise self.unexpected(len(found), f"message {done}", count, meant, using, expected, **hidden)
        return found

    def unexpected(
        self, number: int, what: str, count: int, meant: Meant, using: str | None, expected: Mapping[str, Any], **hidden: Any
    ) -> AssertionError:
        """The error of an assertion about a number of something, "message published"; it lists the messages."""
        noun, done = what.split()
        were = f"{number or 'No'} {noun} was" if number in {0, 1} else f"{number} {noun}s were"
        values = ", ".join(f"{name}={value!r}" for name, value in expected.items() if name not in hidden)
        where = f"{meant.where} with {values}" if values else meant.where
        alias, listed = using or router.db_for_write(self._model), self._listed(meant, using, {**expected, **hidden})
        return AssertionError(f"{were} {done}{where} on {alias!r}, {count or 'none'} expected.\n{listed}")

    def _listed(self, meant: Meant, using: str | None, wanted: Mapping[str, Any]) -> str:
        """All messages, one per line; first those that are meant, each with its differences from the expectation."""
        ordered = sorted(self._all(using), key=lambda message: not meant.includes(message))
        if not ordered:
            return f"The {self._place} is empty."
        lines = []
        for message in ordered[:_SHOWN_MESSAGES]:
            differences = _differences(message, wanted) if meant.includes(message) else []
            lines.append(f"  {self._line(message)}" + "".join(f"\n      {difference}" for difference in differences))
        if len(ordered) > _SHOWN_MESSAGES:
            lines.append(f"  … and {len(ordered) - _SHOWN_MESSAGES} more")
        return "\n".join([f"In the {self._place}:", *lines])

    def _all(self, using: str | None) -> list[_Message]:
        rows: Any = QuerySet(self._model, using=using or router.db_for_write(self._model)).order_by("pk")
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

    def _line(self, message: Any) -> str:
        named = {"biz_id": "" if message.biz_id == message.id else message.biz_id}
        named |= {name: getattr(message, name) for name in self._values}
        words = [getattr(message, name) for name in self._words]
        words += [f"{name}={_short(value)}" for name, value in named.items() if value]
        return f"{' '.join(words)} payload={_short(message.payload)}"


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
