"""The tasks of every queue, after those of `tests/contracts/test_tasks.py`, and what is seen of them."""

from __future__ import annotations

from typing import Any
from uuid import uuid4


def ask_provider(name: str) -> None:
    """A system outside of the database, which takes a repeated call."""


def note(cursor: Any, name: str) -> None:
    cursor.execute("INSERT INTO effects VALUES (%s)", [name])


def charge(cursor: Any, name: str) -> None:
    ask_provider(name)
    cursor.execute("INSERT INTO effects SELECT %s WHERE NOT EXISTS (SELECT FROM effects WHERE name = %s)", [name, name])


def new_name(cursor: Any) -> str:
    cursor.execute("CREATE TABLE IF NOT EXISTS effects (name text)")
    return str(uuid4())


def count(cursor: Any, name: str) -> int:
    cursor.execute("SELECT count(*) FROM effects WHERE name = %s", [name])
    return cursor.fetchone()[0]
