"""What an operator decides about a running message: nothing before its run has ended, by the word of the store of its lease."""

from __future__ import annotations

from collections.abc import Callable

from inbox.conf import inbox_options
from inbox.leases.opening import lease_store
from inbox.leases.stores import stored_row
from inbox.models import InboxMessage, State

Transition = Callable[[str, int], bool]


def once_ended(transition: Transition) -> Transition:
    """`transition`, and False for a message whose lease is still extended in a store that its row knows nothing of.

    Raises, when called, LeaseStoreAway: that cannot be asked, and nothing was decided.
    """

    def decide(alias: str, row: int) -> bool:
        running = InboxMessage.objects.using(alias).filter(pk=row, state=State.RUNNING).first()
        # Whoever begins a run from here on moves the time that the row tells, and the transition looks at that.
        if running is not None and lease_store(inbox_options()).is_held(alias, stored_row(running)):
            return False
        return transition(alias, row)

    return decide
