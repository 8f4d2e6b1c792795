"""A timing wheel: many timers without a sorted list.

It is a ring of slots, each a set, and a hand that advances by one slot at every tick (Varghese and Lauck, "Hashed and
Hierarchical Timing Wheels", 1987, scheme 6). An entry that is due in d ticks is in the slot (hand + d) mod N, and the hand
passes it (d - 1) // N times before it fires. With the common d // N, an entry that is due after an exact multiple of N would be
one turn late.

The module has no clock and does not interpret its entries.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

Entry = TypeVar("Entry", bound=Hashable)


class TimingWheel(Generic[Entry]):
    """Entries that become due after a number of ticks.

    Args:
        slots: number of slots in the ring, at least 1. A turn takes this many ticks; later entries need several turns.
    """

    def __init__(self, slots: int) -> None:
        self._slots: list[dict[Entry, int]] = [{} for _ in range(slots)]
        self._slot_of: dict[Entry, int] = {}
        self._hand = 0

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._slot_of

    def put(self, entry: Entry, ticks: int) -> None:
        """Make `entry` due in `ticks` from now; this replaces an earlier time of the entry.

        Raises:
            ValueError: `ticks` is less than 1.
        """
        if ticks < 1:
            raise ValueError(f"ticks is {ticks}: it must be at least 1, the next tick.")
        self.discard(entry)
        slot = (self._hand + ticks) % len(self._slots)
        self._slots[slot][entry] = (ticks - 1) // len(self._slots)
        self._slot_of[entry] = slot

    def discard(self, entry: Entry) -> None:
        """Remove `entry` if it is in the wheel."""
        slot = self._slot_of.pop(entry, None)
        if slot is not None:
            del self._slots[slot][entry]

    def tick(self) -> list[Entry]:
        """Advance the hand by one slot; remove and return its due entries. The others there have one turn less left."""
        self._hand = (self._hand + 1) % len(self._slots)
        slot = self._slots[self._hand]
        due = [entry for entry, rounds in slot.items() if not rounds]
        for entry in due:
            self.discard(entry)
        for entry in slot:
            slot[entry] -= 1
        return due

    def ticks_to_next(self) -> int | None:
        """The number of ticks until the hand reaches a slot with entries; None if the wheel is empty."""
        if not self._slot_of:
            return None
        size = len(self._slots)
        return next(ticks for ticks in range(1, size + 1) if self._slots[(self._hand + ticks) % size])
