"""Whether a statement of a connection reaches the driver by Django's and psycopg's own code alone.

A project may put code of its own in between: a backend that sets `search_path` with each cursor (tenants by schema), a debug
toolbar or a tracer that patches a connection or Django's cursors, a pool that wraps the driver's connections. Then every
statement must go through `connection.cursor()`. A connection can be patched at any time, so this is asked before each
statement.
"""

from __future__ import annotations

from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any

from django.db.backends import utils

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

# A function that is not a method was set on the instance, and has no __func__.
_of_connection = attrgetter(
    "cursor.__func__", "_cursor.__func__", "_prepare_cursor.__func__", "make_cursor.__func__", "create_cursor.__func__"
)
_of_cursors = attrgetter(
    "CursorWrapper", "CursorWrapper.execute", "CursorWrapper._execute_with_wrappers", "CursorWrapper._execute"
)
_of_driver = attrgetter("cursor.__func__", "cursor_factory", "cursor_factory.execute")
_OWN = {"django", "psycopg"}
_seen: set[tuple[Any, ...]] = set()
"""The ways that lead through Django and psycopg only. The others may refer to a request, and are not kept."""


def is_direct(connection: BaseDatabaseWrapper) -> bool:
    """May a statement of PostgreSQL bypass Django's cursor? It connects if necessary.

    Not if the statement would be logged or wrapped, or if the project replaces any function on its way to the driver.
    """
    if connection.queries_logged or connection.execute_wrappers:
        return False
    connection.ensure_connection()
    raw: Any = connection.connection
    try:
        way = (*_of_connection(connection), *_of_cursors(utils), *_of_driver(raw))
        if raw.pgconn.pipeline_status:  # libpq's plain functions fail in the project's pipeline
            return False
    except AttributeError:  # also psycopg 2
        return False
    if way not in _seen:
        if not all(map(_is_own, way)):
            return False
        _seen.add(way)
    return True


def _is_own(way: Any) -> bool:
    """Is the function or the class, with all that a decorator of it calls, defined in Django or psycopg?

    The name of a function's module does not say so, because decorators copy it; its globals do.
    """
    if isinstance(way, type):
        return _package(way.__module__) in _OWN
    if not isinstance(way, FunctionType) or _package(way.__globals__["__name__"]) not in _OWN:
        return False
    return not hasattr(way, "__wrapped__") or _is_own(way.__wrapped__)


def _package(module: str) -> str:
    return module.partition(".")[0]
