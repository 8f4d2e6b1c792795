"""The statistics of each minute; see `exactly_once.upkeep.minutes`.

Everything that handles messages counts here, in memory. The processes that send heartbeats, and Celery's workers, write what
was counted; in any other process it is never written.
"""

from collections import defaultdict
from collections.abc import Collection
from datetime import datetime

from exactly_once.telemetry.statistics import Tally
from exactly_once.upkeep.minutes import MinuteWriter
from inbox.store.duplicates import COUNTED_AS
from inbox.store.message_rows import DuplicateCause, Failure

tallies: defaultdict[str, Tally] = defaultdict(Tally)
"""What this process has counted, by database."""


def writer(alias: str) -> MinuteWriter:
    """Writes what has been counted, and what is counted from now on."""
    return MinuteWriter("inbox", alias, tallies[alias])


def count_failure(alias: str, handler: str, failure: Failure) -> None:
    """Count an attempt that failed or was deferred, and a dead letter. A delivery that was refused has had no attempt."""
    tally = tallies[alias]
    if failure.deferred:
        tally.count(handler, "deferred")
    elif failure.attempts:
        tally.count(handler, "failed")
    if failure.retry_after is None:
        tally.count(handler, "dead")


def count_duplicate(alias: str, handler: str, cause: DuplicateCause) -> None:
    tallies[alias].count(handler, COUNTED_AS.get(cause, "repeats"))


def time_received(alias: str, handler: str, received: Collection[tuple[datetime | None, float, bool]]) -> None:
    """Count how long after their due times messages were received, and how long after that their effects were committed.

    Args:
        received: for each its due time, or None if that is unknown; how many seconds ago it was received; and whether its
            effect was committed just now.
    """
    tally = tallies[alias]
    if effects := [ago for _, ago, has_effect in received if has_effect]:
        tally.time(handler, "to_effect", effects)
    if (now := tally.now()) is not None:
        tally.time(handler, "to_inbox", [(now - due).total_seconds() - ago for due, ago, _ in received if due is not None])


def time_stored_effect(alias: str, handler: str, received_at: datetime) -> None:
    """Count how long after it was received the effect of a stored message was committed."""
    tally = tallies[alias]
    if (now := tally.now()) is not None:
        tally.time(handler, "to_effect", [(now - received_at).total_seconds()])
