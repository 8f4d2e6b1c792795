"""All SQL of the inbox. Every function is named for its transition and carries its guard.

The one statement everything rests on is the INSERT of `begin_fresh`: unique on (handler, topic, biz-id), first in the
handler's transaction. The other is the UPDATE of `finish`, the *commit sentinel*: last in the same transaction, it must hit
exactly the row that the transaction began with.
"""

from inbox.store.accounting import Balance, Duplicates, balance, conflicts
from inbox.store.dialect import TABLE, is_reachable
from inbox.store.due import MOST_COUNTED, due_handlers, orphans
from inbox.store.fresh import begin_fresh, count_duplicate, store_due, store_failed
from inbox.store.heartbeats import consumers
from inbox.store.intake import Incoming, Taken, take_in
from inbox.store.operating import (
    RETRYABLE,
    SKIPPABLE,
    oldest_waiting,
    override_maximum_age,
    purge_settled,
    purgeable,
    retry,
    skip,
)
from inbox.store.ordering import Released, deciding, hold_gates, promote_next, release_stuck
from inbox.store.rows import (
    UNIDENTIFIED,
    DuplicateCause,
    Earlier,
    Failure,
    Follower,
    Guard,
    KeyBusy,
    NewRow,
    OrderedKey,
    TwinBusy,
    undecoded,
)
from inbox.store.sentinel import ENDED, finish, refuse_if_ended
from inbox.store.stored import (
    ABANDONED,
    Buried,
    begin_stored,
    bury_abandoned,
    claim_due,
    claimed,
    fail_stored,
    give_back,
    note_error,
    refused_claim,
    rekey,
    who_locks,
)
from inbox.store.together import begin_together
from inbox.store.trial import try_to_store
from inbox.store.undecided import begin_reading, decide_now, end_reading, fold_undecided, name_undecided

__all__ = [
    "ABANDONED",
    "ENDED",
    "MOST_COUNTED",
    "RETRYABLE",
    "SKIPPABLE",
    "TABLE",
    "UNIDENTIFIED",
    "Balance",
    "Buried",
    "DuplicateCause",
    "Duplicates",
    "Earlier",
    "Failure",
    "Follower",
    "Guard",
    "Incoming",
    "KeyBusy",
    "NewRow",
    "OrderedKey",
    "Released",
    "Taken",
    "TwinBusy",
    "balance",
    "begin_fresh",
    "begin_reading",
    "begin_stored",
    "begin_together",
    "bury_abandoned",
    "claim_due",
    "claimed",
    "conflicts",
    "consumers",
    "count_duplicate",
    "decide_now",
    "deciding",
    "due_handlers",
    "end_reading",
    "fail_stored",
    "finish",
    "fold_undecided",
    "give_back",
    "hold_gates",
    "is_reachable",
    "name_undecided",
    "note_error",
    "oldest_waiting",
    "orphans",
    "override_maximum_age",
    "promote_next",
    "purge_settled",
    "purgeable",
    "refuse_if_ended",
    "refused_claim",
    "rekey",
    "release_stuck",
    "retry",
    "skip",
    "store_due",
    "store_failed",
    "take_in",
    "try_to_store",
    "undecoded",
    "who_locks",
]
