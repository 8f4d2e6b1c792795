"""Functions of the project that redact: loaded by their dotted path when they are needed."""

import difflib
import logging
from collections.abc import Callable
from importlib import import_module
from inspect import iscoroutinefunction
from typing import Any

from exactly_once.wire.text import describe

logger = logging.getLogger(__name__)  # noqa: TID251 - it logs names in the settings only


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
