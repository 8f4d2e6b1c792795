"""Parse settings dictionaries into frozen dataclasses, and load the functions of the project that they name.

Each field of the dataclass is one option with its type and its default; a field that is a dataclass itself takes a dictionary.
A duration is a `timedelta`, or text such as "90s". Numbers and durations must be greater than zero. For a misspelt name the
error suggests the nearest one. One error reports every problem of the dictionary. A value of the wrong type is not quoted,
because it may contain a password.
"""

import dataclasses
import difflib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from inspect import iscoroutinefunction
from types import GenericAlias, NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from exactly_once.conf.masking import kind, quoted
from exactly_once.wire.durations import parse_duration
from exactly_once.wire.text import describe, did_you_mean

logger = logging.getLogger(__name__)  # noqa: TID251 - it logs names in the settings only

Options = TypeVar("Options")

_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*/\s*(s|m|h)\s*")
_NUMBER_FIRST = re.compile(r"\d[\w ./]{,20}")
"""What looks like a rate, which may be shown."""
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_AMOUNTS = {timedelta, int, float}
_LONGEST = timedelta(days=36_500)
"""Databases calculate with the instant so long ago, which they cannot for `timedelta.max`."""
_EXAMPLES = {bool: True, int: 10, float: 0.5, str: "…", timedelta: timedelta(seconds=30), dict: {}}


class InvalidOptions(ImproperlyConfigured, ValueError):
    """A settings dictionary that cannot be read; `problems` has one sentence for each mistake."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(" ".join(problems))
        self.problems = problems


def parse(options: type[Options], setting: str, given: object) -> Options:
    """Parse `given`, the value of the Django setting `setting`, into the dataclass `options`.

    Raises:
        InvalidOptions: it has unknown names, wrong types or invalid values; the error lists all of them.
    """
    if not isinstance(given, Mapping):
        raise InvalidOptions([f"{setting} must be a dict, not {kind(given)}."])
    types = get_type_hints(options)
    defaults = {field.name: field.default for field in dataclasses.fields(options)}  # type: ignore[arg-type] # a dataclass
    problems = [_unknown(setting, name, types) for name in given if name not in types]
    values = dict(given)
    for name, expected in types.items():
        if name not in given:
            continue
        if isinstance(expected, type) and dataclasses.is_dataclass(expected):
            try:
                values[name] = parse(expected, f"{setting}[{name!r}]", given[name]) if given[name] != {} else defaults[name]
            except InvalidOptions as error:
                problems += error.problems
            continue
        values[name] = _with_durations(given[name], expected)
        if reason := _why_refused(values[name], expected, defaults[name]):
            problems.append(f"{setting}[{name!r}] is {reason}.")
    if problems:
        raise InvalidOptions(problems)
    try:
        return options(**values)
    except ValueError as error:
        raise InvalidOptions([f"{setting}: {error}"]) from error


def reader(options: type[Options], setting: str) -> Callable[[], Options]:
    """A function that returns the options in force now; it parses each value of the setting once.

    It raises `InvalidOptions`, which `manage.py check` reports, too.
    """
    latest: tuple[object, Options] | None = None

    def read() -> Options:
        nonlocal latest
        given = getattr(settings, setting, None)
        if latest is None or latest[0] is not given:
            latest = given, parse(options, setting, {} if given is None else given)
        return latest[1]

    return read


def require_backoff(backoff: Sequence[timedelta]) -> None:
    """For `__post_init__`: refuse anything but the first and the longest delay."""
    if len(backoff) != len(("first", "longest")) or not timedelta() < backoff[0] <= backoff[1] <= _LONGEST:
        raise ValueError(
            "BACKOFF must be two durations greater than zero and of at most a century, the first and the longest backoff, as "
            "in (timedelta(seconds=1), timedelta(minutes=5))."
        )


def per_second(option: str, rate: object) -> float:
    """`rate`, the value of `option`, as messages a second.

    Raises:
        ValueError: it is not a positive number per s, m or h, like "2000/s".
    """
    parts = _RATE.fullmatch(str(rate))
    if parts is None or not float(parts[1]):
        shown = repr(rate) if _NUMBER_FIRST.fullmatch(str(rate)) else quoted(rate)
        raise ValueError(f'{option} is {shown}: it must be a positive number per s, m or h, like "2000/s", "90/m" or "5/h".')
    return float(parts[1]) / _SECONDS[parts[2]]


def load(path: str) -> Callable[..., Any]:
    """The function with this dotted path.

    Raises:
        ImportError: there is none; the text names a similar one.
        Exception: whatever its module raises when it is imported.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ImportError("it is not a dotted path like 'myproject.module.function'")
    module = import_module(module_name)
    function: Any = getattr(module, name, None)
    if callable(function):
        redactor: Callable[..., Any] = function
        return redactor
    close = difflib.get_close_matches(name, [known for known, value in vars(module).items() if callable(value)], n=1)
    remedy = f"; did you mean '{module_name}.{close[0]}'?" if close else ""
    raise ImportError(f"the module {module_name} has no function {name!r}{remedy}")


def why_not_loaded(path: str) -> str | None:
    """Why no function can be loaded by this dotted path, or None if one can."""
    try:
        load(path)
    except Exception as error:  # noqa: BLE001 - an import runs code of the project
        return describe(error)
    return None


def why_not_called(path: str) -> str | None:
    """Why there is no synchronous function with this dotted path, or None if there is one."""
    return why_not_loaded(path) or ("it is async, and must be synchronous" if iscoroutinefunction(load(path)) else None)


def redacted_error(path: str, text: str) -> str:
    """An error or a traceback as it may be stored.

    Args:
        path: of a function that takes and returns text; "" changes nothing. If it fails, nothing of the text is stored.
    """
    if not path or not text:
        return text
    try:
        redacted = load(path)(text)
        if not isinstance(redacted, str):
            raise TypeError(f"it returned {type(redacted).__name__}, not str")  # noqa: TRY301 - logged as any other failure
    except Exception as error:  # noqa: BLE001 - code of the project
        # Without a traceback and without the function's own message: both may contain the text.
        logger.error("The function %s failed to redact an error (%s); the error is not stored.", path, type(error).__name__)  # noqa: TRY400
        return f"The function {path} failed to redact this error ({type(error).__name__}). It is not stored."
    return redacted


def _unknown(setting: str, name: object, types: Mapping[str, Any]) -> str:
    remedy = did_you_mean(str(name), types) or f"Known options: {', '.join(sorted(types))}."
    return f"{setting} has no option {quoted(name)}. {remedy}"


def _with_durations(value: Any, expected: Any) -> Any:
    """`value` with the durations that it has as text. Text that is none is left: it is refused without being quoted."""
    if timedelta not in (expected, *get_args(expected)):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_with_durations(item, timedelta) for item in value)
    with suppress(TypeError, ValueError):
        return parse_duration("", value)
    return value


def _why_refused(value: Any, expected: Any, default: object) -> str:
    """What a value is, and what it must be; "" if it is that."""
    if not _fits(value, expected):
        return f"{_kind(value)}: it must be {_describe(expected)}, such as {_example(expected, default)}"
    if type(value) in _AMOUNTS and value <= type(value)():
        return f"{value!r}: it must be greater than zero"
    if type(value) is timedelta and value > _LONGEST:
        return f"{value!r}: it must be at most a century, timedelta(days={_LONGEST.days})"
    return ""


def _fits(value: object, expected: Any) -> bool:
    if isinstance(expected, GenericAlias) and get_origin(expected) is tuple:
        return isinstance(value, list | tuple) and all(isinstance(item, get_args(expected)[0]) for item in value)
    if isinstance(expected, UnionType):
        return any(_fits(value, kind) for kind in get_args(expected))
    if isinstance(value, bool):
        return expected is bool
    return isinstance(value, int | float if expected is float else expected)


def _kind(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"{kind(value)} of {', '.join(sorted({type(item).__name__ for item in value})) or 'nothing'}"
    return kind(value)


def _example(expected: Any, default: object) -> str:
    """A value of the expected type: the default, if that is an instance which is not empty."""
    if get_origin(expected) is tuple:
        kind = get_args(expected)[0]
        given = list(default)[:2] if isinstance(default, tuple) and default else [_EXAMPLES[kind]]
        return f"[{', '.join(_example(kind, one) for one in given)}]"
    if isinstance(expected, UnionType):
        return _example(get_args(expected)[0], default)
    value = default if default and isinstance(default, expected) else _EXAMPLES[expected]
    if not isinstance(value, timedelta):
        return repr(value)
    days = value // timedelta(days=1)
    return f"timedelta(days={days})" if value == timedelta(days=days) else f"timedelta(seconds={value.total_seconds():g})"


def _describe(expected: Any) -> str:
    if get_origin(expected) is tuple:
        return f"a list or tuple of {get_args(expected)[0].__name__}"
    if isinstance(expected, UnionType):
        return " or ".join(_describe(kind) if kind is not NoneType else "None" for kind in get_args(expected))
    name = getattr(expected, "__name__", str(expected))
    if expected is timedelta:
        return 'a timedelta, or text such as "90s"'
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
