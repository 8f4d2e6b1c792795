"""Payloads as instances of a class: how one becomes JSON when it is published, and is read from JSON for a handler.

Pydantic reads and writes its models, and msgspec its Structs and plain dataclasses, see decision 58. Each is imported when a
payload has such a class, and not before.
"""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import is_dataclass
from datetime import date, time
from functools import cache, partial
from importlib import import_module
from typing import Any

from exactly_once.wire.text import describe, one_line
from exactly_once.wire.unreadable import JSON_TYPES, Unreadable, check_fields, check_schema

_SHOWN = 80
_STEP = re.compile(r"\.?([^.\[\]]+)\]?")


class Misfit(ValueError):
    """A payload does not fit its class; the text names the field, what is expected and what was found."""

    def __init__(self, kind: type, at: str, expected: str, found: object) -> None:
        shown = f"found {one_line(repr(found), _SHOWN)}"
        super().__init__(
            f"The payload does not fit {kind.__qualname__}: {one_line(at) or 'it'}: {one_line(expected)}, {shown}."
        )


def plain(payload: Any, encoder: json.JSONEncoder) -> Any:
    """What this encoder turns into JSON: of an instance of a payload class its fields; anything else unchanged.

    Raises:
        Unreadable: its fields would not be read back, or the library of its class is not installed.
        TypeError, ValueError: neither the library nor the encoder writes a value.
    """
    kind: Any = type(payload)
    if kind in JSON_TYPES:
        return payload
    if _is_of_pydantic(kind):
        return _adapter(kind).dump_python(payload, mode="json", by_alias=True, round_trip=True)
    if _is_of_msgspec(kind):
        return _msgspec().to_builtins(payload, enc_hook=partial(_written, encoder))
    return payload


@cache
def reader(kind: Any) -> Callable[[Any], Any]:
    """A function that returns decoded JSON as an instance of this class, and raises `Misfit`.

    Raises:
        Unreadable: it is not a payload class, or its library is not installed.
        TypeError: it has a field that its library cannot read.
    """
    if _is_of_pydantic(kind):
        return partial(_by_pydantic, kind, _adapter(kind), import_module("pydantic").ValidationError)
    if not _is_of_msgspec(kind):
        raise Unreadable("it is neither a dataclass, nor a model of Pydantic 2, nor a msgspec Struct")
    _msgspec().json.Decoder(kind)  # refuses fields that it cannot read
    check_fields(kind)
    return partial(_by_msgspec, kind, _msgspec())


def why_unreadable(kind: Any) -> str:
    """Why no payload can be read as this class; "" if one can."""
    try:
        reader(kind)
    except Exception as error:  # noqa: BLE001 - annotations of a project, and its libraries
        return describe(error)
    return ""


def _is_of_pydantic(kind: type) -> bool:
    return hasattr(kind, "__pydantic_validator__")


def _is_of_msgspec(kind: type) -> bool:
    return hasattr(kind, "__struct_fields__") or is_dataclass(kind)


@cache
def _adapter(kind: Any) -> Any:
    adapter = import_module("pydantic").TypeAdapter(kind)
    with suppress(LookupError, AttributeError, ValueError):  # another version may have a schema of another form
        check_schema(kind, adapter.core_schema)
    return adapter


def _msgspec() -> Any:
    try:
        return import_module("msgspec")
    except ImportError as error:
        raise Unreadable(f"dataclasses are read and written by msgspec ({error}): run `pip install msgspec`") from error


def _written(encoder: json.JSONEncoder, value: Any) -> Any:
    """A value that msgspec does not write: of a subclass of a type that it does, or one for the encoder."""
    match value:
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case date() | time():  # also datetime; with the microseconds that Django's encoder cuts off
            return value.isoformat().replace("+00:00", "Z")
    return encoder.default(value)


def _by_pydantic(kind: type, adapter: Any, invalid: type[Any], payload: Any) -> Any:
    try:
        # From JSON, where text may be a date or a Decimal even if the model is strict.
        return adapter.validate_json(json.dumps(payload))
    except invalid as error:
        first = error.errors(include_url=False, include_context=False)[0]
        at = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        raise Misfit(kind, at.removeprefix("."), first["msg"], first["input"]) from error


def _by_msgspec(kind: type, msgspec: Any, payload: Any) -> Any:
    try:
        return msgspec.convert(payload, kind, str_keys=True)
    except msgspec.ValidationError as error:
        expected, _, path = str(error).partition(" - at `$")
        at = path.rstrip("`").removeprefix(".")
        raise Misfit(kind, at, expected, _value_at(at, payload)) from error


def _value_at(path: str, payload: Any) -> Any:
    for step in _STEP.findall(path):
        payload = payload[int(step)] if isinstance(payload, list) else payload.get(step) if isinstance(payload, dict) else "?"
    return payload
