"""Dead letters as JSON lines: a line has all that is needed to store a message again, in this database or in another one.

A line is a JSON object: `dead_letter`, the name of its app; the columns of the message by name; and its body, as text in `body`
if it is UTF-8, otherwise as base64 in `body_base64`. Instants are in ISO 8601. Content is neither masked nor shortened.
"""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import MAXYEAR, MINYEAR, UTC, datetime
from typing import Any, BinaryIO

from django.core.exceptions import ValidationError
from django.db import IntegrityError, models, transaction
from django.db.models import QuerySet
from django.utils.timezone import is_aware
from django.utils.translation import gettext as _

from exactly_once.console.operators.audit import Subject
from exactly_once.sql.fields import bounds_instants
from exactly_once.wire.text import why_unfit

_LONGEST_LINE = 64 * 1024 * 1024
"""In bytes. A longer line is refused, so that a file without line ends does not fill the memory."""
_AT_ONCE = 50
_KIND = "dead_letter"
_BODY, _BODY_BASE64 = "body", "body_base64"
_NAMES = ("topic", "biz_id", "key", "message_id")
_MOST_SHOWN = 80


class Refused(Exception):
    """This line is not imported; the message says why."""


class Letters:
    """The dead letters of one app.

    Args:
        app: its package.
        columns: the columns of a message in a line, besides the body. Those without a default are required.
        identity: those that are unique together; they are required, too.
    """

    def __init__(self, app: str, model: type[models.Model], columns: Sequence[str], identity: Sequence[str]) -> None:
        self.app = app
        self._model, self._identity = model, identity
        self._fields: Mapping[str, models.Field[Any, Any]] = {name: model._meta.get_field(name) for name in columns}  # type: ignore[misc]

    def rows(self, alias: str) -> QuerySet[Any]:
        """All dead letters."""
        return QuerySet(self._model, using=alias).filter(state="dead")

    def ids(self, message_ids: Iterable[str]) -> list[Any]:
        """The message ids as their column has them."""
        return list(message_ids)

    def store(self, alias: str, values: Mapping[str, Any], reason: str) -> str:
        """Store a message as a dead letter, in the open transaction.

        Returns:
            "", or the label of its state if it is here already.

        Raises:
            Refused: it cannot be stored.
        """
        if known := self._state_of(alias, values):
            return known
        try:
            with transaction.atomic(using=alias):
                self.insert(alias, values, reason)
        except IntegrityError:
            if known := self._state_of(alias, values):
                return known  # it was received or imported at the same time
            raise
        return ""

    def insert(self, alias: str, values: Mapping[str, Any], reason: str) -> None:
        """∅ → dead. Raises as `store`, or IntegrityError if the message is here already."""
        raise NotImplementedError

    def _state_of(self, alias: str, values: Mapping[str, Any]) -> str:
        named = {name: values[name] for name in self._identity}
        row: Any = QuerySet(self._model, using=alias).filter(**named).only("state").first()
        return str(row.get_state_display()) if row else ""

    def subject(self, values: Mapping[str, Any]) -> Subject:
        """The message, for the audit log."""
        raise NotImplementedError

    def lines(self, rows: QuerySet[Any]) -> Iterator[str]:
        """A line for each row, in the order of the primary key. It reads a few rows at a time, in a query of their own."""
        # Neither a server-side cursor, which a transaction pooler does not support, nor all rows at once.
        rows, last = rows.defer(None).order_by("pk"), 0
        while some := list(rows.filter(pk__gt=last)[:_AT_ONCE]):
            last = some[-1].pk
            for row in some:
                yield json.dumps(self.values(row), ensure_ascii=False, default=_plain) + "\n"

    def values(self, row: Any) -> dict[str, Any]:
        """The content of the line of a row."""
        # SQLite stores a body that was written by hand as text.
        body = row.body.encode() if isinstance(row.body, str) else bytes(row.body)
        given = {_KIND: self.app, **{name: getattr(row, name) for name in self._fields}}
        try:
            return {**given, _BODY: body.decode()}
        except UnicodeDecodeError:
            return {**given, _BODY_BASE64: base64.b64encode(body).decode()}

    def taken(self, given: dict[str, Any]) -> dict[str, Any]:
        """The values of a message, from the content of its line."""
        values: dict[str, Any] = {"body": _body(given)}
        if unknown := sorted(set(given) - set(self._fields)):
            raise Refused(_("it has unknown columns: %(columns)s") % {"columns": ", ".join(unknown)[:_MOST_SHOWN]})
        for name, field in self._fields.items():
            if name in given:
                values[name] = value_of(field, given[name])
            elif name in self._identity or not (field.has_default() or field.null):
                raise Refused(_("it has no %(column)s") % {"column": name})
        for name in _NAMES:
            if reason := why_unfit(str(values.get(name, ""))):
                raise Refused(f"{name}: {reason}")
        return values


def read(line: bytes | None, known: Sequence[Letters]) -> tuple[Letters, dict[str, Any]]:
    """The app of a line, and the values of its message by column.

    Raises:
        Refused: the line is not a dead letter of a known app, a value does not fit its column, or the line is too long (None).
    """
    if line is None:
        raise Refused(_("it is longer than %(limit)s bytes") % {"limit": f"{_LONGEST_LINE:,}"})
    given = _object(line)
    kind = given.pop(_KIND, None)
    for letters in known:
        if letters.app == kind:
            return letters, letters.taken(given)
    words = _("it is not a dead letter of the %(app)s: “dead_letter” is %(kind)s")
    raise Refused(words % {"app": _(" or ").join(letters.app for letters in known), "kind": _shown(kind)})


def numbered(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """The lines of a file that are not blank, with their numbers; None for a line that is too long."""
    number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            while (rest := file.readline(_LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif line.strip():
            yield number, line


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refused(_("it is not JSON: %(why)s") % {"why": str(error)[:_MOST_SHOWN]}) from error
    if not isinstance(found, dict):
        raise Refused(_("it is not a JSON object"))
    return found


def _body(given: dict[str, Any]) -> bytes:
    text, encoded = given.pop(_BODY, None), given.pop(_BODY_BASE64, None)
    try:
        if isinstance(text, str) and encoded is None:
            return text.encode()
        if isinstance(encoded, str) and text is None:
            return base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise Refused(_("its body cannot be decoded: %(why)s") % {"why": str(error)[:_MOST_SHOWN]}) from error
    raise Refused(_("it needs either “body”, a text, or “body_base64”"))


def value_of(field: Any, given: Any) -> Any:
    """The value of a column, as its field expects it."""
    if given is None and field.null:
        return None
    with suppress(ValidationError, ValueError, TypeError, OverflowError):
        json.dumps(given, ensure_ascii=False, allow_nan=False).encode()  # fails for NaN and for a surrogate
        value = field.to_python(given)
        field.run_validators(value)
        if isinstance(value, datetime):
            fits = is_aware(value) and (MINYEAR < value.year < MAXYEAR or not bounds_instants(field.model))
            value = value.astimezone(UTC) if fits else None
        if _fits(field, given, value):
            return value
    raise Refused(_("%(column)s is %(value)s, which does not fit") % {"column": field.name, "value": _shown(given)})


def _fits(field: Any, given: Any, value: Any) -> bool:
    """Is it what an export writes for such a column? A field also takes "16" or 16.7 for a number, and any JSON."""
    if isinstance(field, models.JSONField):
        return isinstance(given, dict) or field.default is not dict
    written = value if isinstance(value, int) else _plain(value)
    return value is not None and type(written) is type(given) and "\x00" not in str(given)


def _plain(value: Any) -> str:
    """An instant or a UUID, as JSON can hold it."""
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
