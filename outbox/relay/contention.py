"""Locks of other sessions on rows and shards. Locked rows are set aside, and locks reported once a minute.

A ready row that another session has locked cannot be settled, so it is not sent. It is set aside.

A locked shard belongs to another relay, and is free again in a moment. A shard that is locked for longer than any pass lasts is
held by a relay that does not read what the database sends it. The session of such a relay is ended.
"""

from collections.abc import Sequence
from datetime import timedelta

from django.db import Error

from exactly_once.process.clock import monotonic
from exactly_once.process.logs import Reminder, escaping_logger
from outbox.models import SHARDS
from outbox.store import lockers
from outbox.store.claiming import Claim
from outbox.store.messages import RelayedMessage
from outbox.store.set_aside import Reason, SetAside

logger = escaping_logger(__name__)


class Contention:
    """The locks that one relay has found.

    Args:
        longest_pass: maximum time that a relay holds a shard.
        aside: where locked rows are set aside.
    """

    def __init__(self, alias: str, longest_pass: timedelta, aside: SetAside) -> None:
        self._alias = alias
        self._longest_pass = longest_pass
        self._aside = aside
        self._rows, self._tables, self._shards = Reminder(), Reminder(), Reminder()
        self._look_for_holders_at = 0.0

    def record(self, claim: Claim) -> None:
        """Record the locks that a claim found, and report them if a report is due."""
        self._aside.hold({row.position: row.key for row in claim.locked_rows}, Reason.LOCKED)
        # A row that was found locked only once may have been locked for a moment.
        again = [row for row in claim.locked_rows if self._aside.was_held_before(row.position)]
        if again and self._rows.is_due():
            self._report_rows(again)
        now = monotonic()
        if claim.locked_shards and now >= self._look_for_holders_at:
            self._look_for_holders_at = now + self._longest_pass.total_seconds()
            self._report_shards()

    def timed_out(self) -> None:
        """A pass timed out waiting for a lock: report the session that has locked the tables, if there is one."""
        try:
            pids = lockers.table_lockers(self._alias)
        except Error as error:
            logger.debug("relay: the session that has locked the tables was not found: %s", error)
            return
        if not pids or not self._tables.is_due():
            return
        logger.warning(
            "relay: no message is sent, because another session (pid %s) has locked the outbox's tables against writing, as "
            "CREATE INDEX does without CONCURRENTLY. Sending continues when its transaction ends: commit it, or end it by "
            "pg_terminate_backend().",
            ", ".join(map(str, pids)),
        )

    def _report_rows(self, locked: Sequence[RelayedMessage]) -> None:
        pids = lockers.row_lockers(self._alias, [row.position for row in locked])
        logger.warning(
            "relay: %d ready messages are not sent, because another session has locked their rows (%s); the first is message "
            "%s (%s, biz-id %s). They and the later messages of their keys are sent when its transaction ends: commit it, or "
            "end it by pg_terminate_backend().",
            len(locked),
            f"pid {', '.join(map(str, pids))}" if pids else "pid unknown",
            locked[0].id,
            locked[0].topic,
            locked[0].biz_id,
        )

    def _report_shards(self) -> None:
        holders = lockers.shard_holders(self._alias, self._longest_pass)
        for holder in (one for one in holders if one.is_ended):
            logger.warning(
                "relay: ended the session of another relay (pid %d): for %d s it held %d of %d shards and did not read what "
                "the database sent it. Other relays send these messages now. Its process is frozen, or its network is cut or "
                "too slow for a batch: lower OUTBOX['BATCH_SIZE'].",
                holder.pid,
                holder.seconds,
                len(holder.shards),
                SHARDS,
            )
        held = [one for one in holders if not one.is_ended]
        for holder in held if held and self._shards.is_due() else ():
            logger.warning(
                "relay: the ready messages of %d of %d shards (%s) are not sent, because the transaction of another session "
                "(pid %d) has held them for %d s, which no pass of a relay takes. They are sent when it ends: commit it, or "
                "end it by pg_terminate_backend().",
                len(holder.shards),
                SHARDS,
                ", ".join(map(str, holder.shards)),
                holder.pid,
                holder.seconds,
            )
