"""Rows that the database refuses to change, as by a trigger of somebody else's: skipped for a while, longer each time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from outbox.kernel.clock import monotonic
from outbox.kernel.retry import Pause

LONGEST_SKIP_SECONDS = 30.0
NO_KEYS: Mapping[int, str] = MappingProxyType({})
_FIRST_SKIP_SECONDS = 1.0


@dataclass
class _Refused:
    """A row that was refused, and when to try it again (monotonic)."""

    key: str
    pause: Pause = field(default_factory=lambda: Pause(_FIRST_SKIP_SECONDS, LONGEST_SKIP_SECONDS))
    again_at: float = 0.0


class RefusedRows:
    """The rows that the database has refused to change lately, in the memory of one loop or process.

    Args:
        at_once: so many of those that are due are tried again together, or all of them. Each that is refused again is searched
            for again.
    """

    def __init__(self, at_once: int | None = None) -> None:
        self._at_once = at_once
        self._refused: dict[int, _Refused] = {}
        self._due: list[int] = []

    def __len__(self) -> int:
        return len(self._refused)

    def __contains__(self, position: int) -> bool:
        return position in self._refused

    def skipped(self) -> Mapping[int, str]:
        """The positions of the rows that are not tried now, with the keys of their messages."""
        now = monotonic()
        # One that has not been tried since it was due has changed, or is another process's.
        self._refused = {at: one for at, one in [*self._refused.items()] if now < one.again_at + LONGEST_SKIP_SECONDS}
        due = sorted((one.again_at, position) for position, one in self._refused.items() if one.again_at <= now)
        self._due = [position for _, position in due[: self._at_once]]
        return {position: one.key for position, one in self._refused.items() if position not in self._due}

    def note(self, refused: Mapping[int, BaseException], keys: Mapping[int, str] = NO_KEYS) -> None:
        """Skip what was refused for a while."""
        now = monotonic()
        for position in refused:
            one = self._refused.setdefault(position, _Refused(keys.get(position, "")))
            one.again_at = now + one.pause.next_seconds()

    def retried(self, refused: Collection[int] = (), among: Collection[int] | None = None) -> None:
        """What was due has been tried again, `among` others if not all of it; forget it, but for what is `refused` again."""
        for position in self._due:
            if position not in refused and (among is None or position in among):
                self.forget(position)

    def forget(self, position: int) -> None:
        """It could be changed."""
        self._refused.pop(position, None)
