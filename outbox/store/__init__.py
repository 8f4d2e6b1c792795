"""All SQL of the outbox. Every function is named for its transition and carries its guard.

Two databases are spoken to, PostgreSQL and SQLite, and they differ in one thing that matters: who may relay.

- On PostgreSQL relays are equals. A pass takes transaction-scoped advisory locks on some *shards*; the server frees them the
  moment the transaction or the connection ends, so a killed relay holds nothing and a relay that overslept finds its
  transaction gone. Nothing here outlives a transaction, so a transaction-pooling proxy may stand in between.
- SQLite has one writer. There one relay holds a *lease* with a token, and works in short transactions so that the write lock
  is never held while a broker is waited for.
"""

from outbox.store.calling import (
    CallLost,
    DueCall,
    PendingCalls,
    begin_call,
    call_now,
    claim_calls,
    discard_call,
    finish_call,
    pending_calls,
    put_off_call,
)
from outbox.store.claiming import (
    Busy,
    Claim,
    RelayedMessage,
    Sight,
    bound_transaction,
    claim_ready,
    claims_by_locks,
    look,
    writers,
)
from outbox.store.heartbeats import SILENT_AFTER, Beat, beat, forget_silent, relays, retire
from outbox.store.lease import Lease, LeaseLost
from outbox.store.operating import (
    CANCELLABLE,
    REQUEUEABLE,
    RESCHEDULABLE,
    cancel,
    identified,
    named,
    oldest_waiting,
    purge_settled,
    purgeable,
    requeue,
    reschedule,
    states,
    states_of,
)
from outbox.store.preparing import (
    UNDECIDED,
    ask_at_once,
    claim_checks,
    commit_prepared,
    count_unknown,
    note_no_answer,
    note_unchecked,
    resume,
    roll_back_prepared,
    topics_unchecked,
)
from outbox.store.settling import PUT_OFF, Failure, Settlement, promote_due, recall, release_waiting, settle, topics_put_off
from outbox.store.writing import NewRow, find_unique, hold_order, insert, insert_formed, insert_many, insert_prepared, shard_of

__all__ = [
    "CANCELLABLE",
    "PUT_OFF",
    "REQUEUEABLE",
    "RESCHEDULABLE",
    "SILENT_AFTER",
    "UNDECIDED",
    "Beat",
    "Busy",
    "CallLost",
    "Claim",
    "DueCall",
    "Failure",
    "Lease",
    "LeaseLost",
    "NewRow",
    "PendingCalls",
    "RelayedMessage",
    "Settlement",
    "Sight",
    "ask_at_once",
    "beat",
    "begin_call",
    "bound_transaction",
    "call_now",
    "cancel",
    "claim_calls",
    "claim_checks",
    "claim_ready",
    "claims_by_locks",
    "commit_prepared",
    "count_unknown",
    "discard_call",
    "find_unique",
    "finish_call",
    "forget_silent",
    "hold_order",
    "identified",
    "insert",
    "insert_formed",
    "insert_many",
    "insert_prepared",
    "look",
    "named",
    "note_no_answer",
    "note_unchecked",
    "oldest_waiting",
    "pending_calls",
    "promote_due",
    "purge_settled",
    "purgeable",
    "put_off_call",
    "recall",
    "relays",
    "release_waiting",
    "requeue",
    "reschedule",
    "resume",
    "retire",
    "roll_back_prepared",
    "settle",
    "shard_of",
    "states",
    "states_of",
    "topics_put_off",
    "topics_unchecked",
    "writers",
]
