"""Operators' decisions about a run: enter the missing messages, extend its deadline, start it without them.

Each locks the run, so that no message is added meanwhile.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import Prefetch, prefetch_related_objects

from exactly_once.sql.connections import decision_transaction
from exactly_once.wire.identity import new_message_id
from exactly_once.wire.text import NAME_LENGTH
from inbox.contrib.joins import store
from inbox.contrib.joins.models import Run
from inbox.errors import InboxError
from inbox.handlers.registry import registry
from inbox.operators import decisions
from inbox.states import RETRY


class NotDecidable(InboxError):
    """A decision about a run is refused, for this reason; the run is unchanged."""


def complete(alias: str, pk: int, payloads: Mapping[str, Any], *, by: str) -> bool:
    """Add messages with these payloads by topic, and start the run if none is missing then. False: its state does not allow it.

    Raises:
        NotDecidable: the join does not wait for such a message.
    """

    def decide(run: Run) -> bool:
        waits_for = missing(run)
        if unknown := sorted({*payloads} - {*waits_for}):
            raise NotDecidable(f"It does not wait for {', '.join(unknown)}. It waits for: {', '.join(waits_for) or 'nothing'}.")
        for topic, payload in payloads.items():
            store.add_part(alias, run, topic, payload, message_id=str(new_message_id()), entered_by=by[:NAME_LENGTH])
        return bool({*waits_for} - {*payloads}) or _run_now(alias, run, by)

    return _decide(alias, pk, decide)


def extend(alias: str, pk: int, duration: timedelta, *, by: str) -> bool:
    """Wait for the missing messages until `duration` from now; a dead run is open again. False: its state does not allow it."""

    def decide(run: Run) -> bool:
        if not _retry(alias, run, f"deadline extended {by}", after=duration):
            return False
        _, deadline_at = store.times_of(alias, run.row_id)
        Run.objects.using(alias).filter(pk=run.pk).update(deadline_at=deadline_at)
        return bool(missing(run)) or _run_now(alias, run, by)

    return _decide(alias, pk, decide)


def start(alias: str, pk: int, *, by: str) -> bool:
    """Call the function with what has come, without the missing messages. False: its state does not allow it."""

    def decide(run: Run) -> bool:
        Run.objects.using(alias).filter(pk=run.pk).update(started_by=by[:NAME_LENGTH])
        return _retry(alias, run, f"started without the missing messages {by[:NAME_LENGTH]}")

    return _decide(alias, pk, decide)


def _run_now(alias: str, run: Run, by: str) -> bool:
    return _retry(alias, run, f"the missing messages were entered {by}")


def _retry(alias: str, run: Run, reason: str, *, after: timedelta = timedelta()) -> bool:
    return not decisions.decide(alias, run.row_id, decisions.retrying(reason, after=after)).unchanged


def missing(run: Any) -> tuple[str, ...]:
    """The topics that a `Run` waits for; () also if this process has no such join."""
    join = registry.get(run.handler)
    come = {part.topic for part in run.parts.all()}
    return tuple(topic for topic in join.all_of if topic not in come) if join else ()


def _decide(alias: str, pk: int, decide: Callable[[Run], bool]) -> bool:
    with decision_transaction(alias):
        run = Run.objects.using(alias).filter(pk=pk).first()
        decided = False
        if run and store.lock(alias, run.handler, run.run_id) and store.state_of(alias, run)[0] in RETRY.sources:
            prefetch_related_objects([run], Prefetch("parts", store.parts(alias, run)))
            decided = decide(run)
        if not decided:
            transaction.set_rollback(True, using=alias)
        return decided
