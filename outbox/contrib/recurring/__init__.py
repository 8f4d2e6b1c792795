"""Recurring messages: a function that the relay calls at fixed times, in the transaction that publishes its message.

    # recurring.py of an app
    from outbox import Draft
    from outbox.contrib.recurring import Tick, recurring

    @recurring("0 3 * * *", tz="Europe/Berlin")
    def nightly_report(tick: Tick) -> Draft:
        return Draft("reports.nightly", {"day": f"{tick.at:%Y-%m-%d}"})

Each schedule has a row with the instant up to which its ticks are decided (`models`). A relay locks the row of a schedule that
is due, calls the function for a tick (`declarations`), and moves the instant, in one transaction (`ticking`). So a tick is
published once, however many relays there are, and whatever dies.

An optional app: add "outbox.contrib.recurring" to INSTALLED_APPS.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from exactly_once.packages import looked_up

if TYPE_CHECKING:
    from outbox.contrib.recurring.declarations import Tick, recurring

__all__ = ["Tick", "recurring"]

__getattr__ = partial(looked_up, __name__, dict.fromkeys(__all__, "declarations"))
