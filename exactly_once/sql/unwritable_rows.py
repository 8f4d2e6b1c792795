"""Rows that the database refuses to change, for example because of another application's trigger. They are skipped for a time,
longer each time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from exactly_once.process.clock import monotonic
from exactly_once.sql.faults import is_canceled, may_be_of_a_row, remedy
from exactly_once.sql.schema import is_missing
from exactly_once.wire.retry import Pause
from exactly_once.wire.text import describe

LONGEST_SKIP_SECONDS = 30.0
NO_KEYS: Mapping[int, str] = MappingProxyType({})
_FIRST_SKIP_SECONDS = 1.0


def may_be_of_one_row(error: BaseException) -> bool:
    """May one row be the cause of the error? Then it is worth searching for it."""
    return may_be_of_a_row(error) and not (is_canceled(error) or is_missing(error))


def why_unwritable(error: BaseException, alias: str, table: str) -> str:
    """Why the database refuses to change a row of this table, and what to do, in sentences."""
    unknown = f"Look for a trigger, a constraint or a damaged index of {table} that refuses it, and remove the cause."
    return f"{describe(error)}. {remedy(error, alias) or unknown}"


@dataclass
class _Skipped:
    """An unwritable row, and the instant of its next try (monotonic)."""

    key: str
    pause: Pause = field(default_factory=lambda: Pause(_FIRST_SKIP_SECONDS, LONGEST_SKIP_SECONDS))
    again_at: float = 0.0


class UnwritableRows:
    """The rows that the database has recently refused to change, in the memory of one loop or process.

    Args:
        at_once: maximum number of due rows to try together; None tries all. A row that is refused again must be identified
            again.
    """

    def __init__(self, at_once: int | None = None) -> None:
        self._at_once = at_once
        self._rows: dict[int, _Skipped] = {}
        self._due: list[int] = []

    @property
    def count(self) -> int:
        return len(self._rows)

    def __contains__(self, position: int) -> bool:
        return position in self._rows

    def skipped(self) -> Mapping[int, str]:
        """The positions of the rows that are not tried now, with the keys of their messages."""
        now = monotonic()
        # A row that was not tried since it was due has changed, or belongs to another process.
        self._rows = {at: row for at, row in [*self._rows.items()] if now < row.again_at + LONGEST_SKIP_SECONDS}
        due = sorted((row.again_at, position) for position, row in self._rows.items() if row.again_at <= now)
        self._due = [position for _, position in due[: self._at_once]]
        return {position: row.key for position, row in self._rows.items() if position not in self._due}

    def record(self, refused: Mapping[int, BaseException], keys: Mapping[int, str] = NO_KEYS) -> None:
        """Skip the refused rows until their backoff ends."""
        now = monotonic()
        for position in refused:
            row = self._rows.setdefault(position, _Skipped(keys.get(position, "")))
            row.again_at = now + row.pause.next_seconds()

    def forget_due(self, tried: Collection[int] | None = None) -> None:
        """Forget the rows that were due and could be changed: all that were tried again, or those among these positions."""
        for position in self._due:
            if tried is None or position in tried:
                self.forget(position)

    def forget(self, position: int) -> None:
        """Forget a row that could be changed."""
        self._rows.pop(position, None)
