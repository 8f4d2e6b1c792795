"""Rows that the database refuses to change, for example because of another application's trigger. They are skipped for a time,
longer each time."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf
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
    """An unwritable row, and the instants (monotonic) of its next try, and of forgetting it if it is not tried until then."""

    key: str
    pause: Pause = field(default_factory=lambda: Pause(_FIRST_SKIP_SECONDS, LONGEST_SKIP_SECONDS))
    again_at: float = 0.0
    forgotten_at: float = inf


class UnwritableRows:
    """The rows that the database has recently refused to change, in the memory of one loop or process.

    Args:
        at_once: maximum number of due rows to try together. A row that is refused again must be identified again.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._rows: dict[int, _Skipped] = {}
        self._due: set[int] = set()

    @property
    def count(self) -> int:
        return len(self._rows)

    def __contains__(self, position: int) -> bool:
        return position in self._rows

    def skipped(self) -> Mapping[int, str]:
        """The positions of the rows that are not tried now, with the keys of their messages.

        The rows of a key are tried together: each one that is skipped would hold back the others.
        """
        now = monotonic()
        self._rows = {at: row for at, row in [*self._rows.items()] if now < row.forgotten_at}
        due = sorted((row.again_at, position) for position, row in self._rows.items() if row.again_at <= now)[: self._at_once]
        for row in (self._rows[position] for _, position in due):
            row.again_at = now + _FIRST_SKIP_SECONDS  # others are tried meanwhile, if this one is not
            # Then it has changed, or belongs to another process.
            row.forgotten_at = min(row.forgotten_at, now + LONGEST_SKIP_SECONDS)
        keys = {self._rows[position].key for _, position in due} - {""}
        self._due = {position for _, position in due} | {position for position, row in self._rows.items() if row.key in keys}
        return {position: row.key for position, row in self._rows.items() if position not in self._due}

    def record(self, refused: Mapping[int, BaseException], keys: Mapping[int, str] = NO_KEYS) -> None:
        """Skip the refused rows until their backoff ends."""
        now = monotonic()
        for position in refused:
            row = self._rows.setdefault(position, _Skipped(keys.get(position, "")))
            row.again_at, row.forgotten_at = now + row.pause.next_seconds(), inf

    def forget_due(self, tried: Collection[int] | None = None) -> None:
        """Forget the rows that were due and could be changed: all that were tried again, or those among these positions."""
        for position in self._due:
            if tried is None or position in tried:
                self.forget(position)

    def forget(self, position: int) -> None:
        """Forget a row that could be changed."""
        self._rows.pop(position, None)
