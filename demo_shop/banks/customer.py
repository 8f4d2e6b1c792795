"""A customer of both banks, in a process of its own, so that it can be killed in the middle of a transfer.

It pauses at the critical points: after the message is prepared and before the withdrawal, and between the withdrawal and the
decision. It writes the result of each transfer to its standard output.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial

from demo_shop.banks import services
from demo_shop.banks.models import Withdrawal

SENT, REFUSED = "sent", "refused"
SAVED_AT_FIRST = 100_000
LARGEST_AMOUNT = 50
LONGEST_HESITATION_SECONDS = 0.25
_GIVEN_UP_AMONG = 8
"""One transfer in this number waits until the checker has ruled it out, and is too late."""


def run(name: str, stop: Callable[[], bool], report: Callable[[str], None]) -> None:
    """Transfer until `stop()`.

    Args:
        name: of the run, whose accounts are used.
        report: called with a line for each transfer that has ended, the word SENT or REFUSED and its name.
    """
    rng = random.Random(os.getpid())
    count = 0
    while not stop():
        transfer = f"{name}-{os.getpid()}-{count}"
        pause = partial(_hesitate, rng, stop, until_decided=transfer if count % _GIVEN_UP_AMONG == 0 else "")
        count += 1
        try:
            services.transfer(transfer, name, rng.randint(1, LARGEST_AMOUNT), pause=pause)
        except services.Refused:
            report(f"{REFUSED} {transfer}")
        else:
            report(f"{SENT} {transfer}")


def _hesitate(rng: random.Random, stop: Callable[[], bool], *, until_decided: str) -> None:
    time.sleep(rng.uniform(0, LONGEST_HESITATION_SECONDS))
    while until_decided and not Withdrawal.objects.filter(transfer=until_decided).exists():
        if stop():
            return
        time.sleep(0.1)
