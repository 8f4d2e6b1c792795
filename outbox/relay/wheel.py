"""A timing wheel: many timers, one hand, and no list to keep in order.

A ring of slots, each a set, and a hand that moves on by one slot at every tick (Varghese and Lauck, "Hashed and Hierarchical
Timing Wheels", 1987, scheme 6). What is due in d ticks lies in the slot (hand + d) mod N and is passed over (d - 1) // N times
before it fires: with d // N, as it is often written, what is due after an exact multiple of N would be late by a whole turn.

Pure: it knows neither the time nor what it holds.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Entry = TypeVar("Entry", bound=Hashable)


class TimingWheel(Generic[Entry]):
    """Entries that fall due after so many ticks.

    Args:
        slots: of the ring, at least 1. A turn takes as many ticks; entries further away go round.
    """

    def __init__(self, slots: int) -> None:
        self._slots: list[dict[Entry, int]] = [{} for _ in range(slots)]
        self._place: dict[Entry, int] = {}
        self._hand = 0

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._place

    def put(self, entry: Entry, ticks: int) -> None:
        """Let `entry` be due in so many ticks, from now; it may have been put for another time before.

        Raises:
            ValueError: less than one tick is no time to come.
        """
        if ticks < 1:
            raise ValueError(f"ticks is {ticks}: the earliest that can come is the next tick, 1.")
        self.discard(entry)
        place = (self._hand + ticks) % len(self._slots)
        self._slots[place][entry] = (ticks - 1) // len(self._slots)
        self._place[entry] = place

    def discard(self, entry: Entry) -> None:
        """Forget `entry`, if it is here."""
        place = self._place.pop(entry, None)
        if place is not None:
            del self._slots[place][entry]

    def tick(self) -> list[Entry]:
        """The hand moves on by one slot: what is due there, which leaves the wheel. The rest has one round less to go."""
        self._hand = (self._hand + 1) % len(self._slots)
        slot = self._slots[self._hand]
        due = [entry for entry, rounds in slot.items() if not rounds]
        for entry in due:
            self.discard(entry)
        for entry in slot:
            slot[entry] -= 1
        return due

    def ticks_to_next(self) -> int | None:
        """After how many ticks the hand comes to a slot with something in it; None when there is none."""
        if not self._place:
            return None
        size = len(self._slots)
        return next(ticks for ticks in range(1, size + 1) if self._slots[(self._hand + ticks) % size])

    def clear(self) -> None:
        for slot in self._slots:
            slot.clear()
        self._place.clear()
