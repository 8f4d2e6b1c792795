"""Operators' actions on a running message: allowed only after its lease has ended, according to its lease store."""

from __future__ import annotations

from collections.abc import Callable

from inbox.conf import inbox_options
from inbox.leases.opening import lease_store
from inbox.leases.stores import stored_row
from inbox.models import InboxMessage, State

Transition = Callable[[str, int], bool]


def once_ended(transition: Transition) -> Transition:
    """`transition`, but False for a message whose lease still runs in a store other than its row.

    Raises, when called, LeaseStoreUnavailable: the store does not answer, and nothing was decided.
    """

    def decide(alias: str, row: int) -> bool:
        running = InboxMessage.objects.using(alias).filter(pk=row, state=State.RUNNING).first()
        # A run that begins after this changes the row's time, which the transition checks.
        if running is not None and lease_store(inbox_options()).is_held(alias, stored_row(running)):
            return False
        return transition(alias, row)

    return decide
