"""Prepared messages: for an effect outside the outbox's database, which cannot be in the outbox's transaction.

The message is committed first, undecided, so that no crash can lose it. The effect follows, then the decision. Without a
decision in time, the relay asks the topic's checker (`outbox.callbacks`). Apache RocketMQ calls this a transactional message,
or half message.

An effect in the outbox's own database does not need this: `publish` in the transaction of the effect is simpler and is never
undecided.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, Unpack

from django.db import DatabaseError, InterfaceError, connections, transaction

from exactly_once.process.logs import escaping_logger
from exactly_once.sql.connections import is_inside_a_transaction
from exactly_once.states import Transition
from exactly_once.wire.identity import new_message_id
from outbox.api import PrepareOptions, draft_of, new_row, takes
from outbox.callbacks import checkers
from outbox.conf import outbox_options
from outbox.decisions import Decision, Outcome, decide, said
from outbox.errors import AlreadyDecided, NoChecker, PreparedInsideTransaction
from outbox.states import COMMIT, ROLL_BACK, UNDECIDED, State
from outbox.store import prepared_rows, writing
from outbox.store.dialect import database_of

logger = escaping_logger(__name__)


@takes(PrepareOptions)
def prepare(topic: str, payload: Any, *, using: str | None = None, **options: Unpack[PrepareOptions]) -> PreparedMessage:
    """Commit a message on `using` that is published only after a decision. Call it outside any transaction.

        with prepare("bank.transfer", {"amount": "10.00"}, biz_id=transfer_id):
            debit(account, transfer_id)     # in another database

    Args: as for `publish`. `delay` and `expires_in` are counted from now, not from the commit.

    Raises:
        PreparedInsideTransaction: a transaction is open on `using`.
        NoChecker: no checker is registered for `topic`.
        InvalidMessage, PayloadTooLarge: as `publish`; nothing was written.
    """
    alias = database_of(using)
    connection = connections[alias]
    if is_inside_a_transaction(alias) or not (connection.in_atomic_block or connection.get_autocommit()):
        raise PreparedInsideTransaction(alias)
    row = new_row(draft_of("prepare", topic, payload, options), new_message_id())
    if checkers.of(topic) is None:
        raise NoChecker(topic, checkers.topics())
    with transaction.atomic(using=alias):
        [position] = writing.insert_many(alias, [row._replace(check_after=outbox_options().CHECKS.AFTER)])
    return PreparedMessage(row.message_id, row.topic, row.biz_id, position, alias)


class PreparedMessage:
    """A prepared message, for the code that prepared it.

    As a context manager it is committed at the end of the block. If an exception leaves the block, it is unknown whether the
    effect has happened: the answer to a COMMIT may have been lost. So the message stays prepared, a relay asks its checker as
    soon as it can, and the exception propagates. Call `rollback()` inside the block if it is certain that nothing happened.

    Attributes:
        id: the message id.
        topic: as given.
        biz_id: as given, or the message id.
    """

    def __init__(self, message_id: uuid.UUID, topic: str, biz_id: str, position: int, using: str) -> None:
        self.id = message_id
        self.topic = topic
        self.biz_id = biz_id
        self._position = position
        self._using = using
        self._decided = False

    def __repr__(self) -> str:
        return f"<PreparedMessage {self.id} of {self.topic}>"

    def commit(self, *, by: str = "") -> Decision:
        """The effect happened: publish the message, at `deliver_at` if that is in the future. A second call changes nothing.

        It runs in the transaction that is open on `using`, or in its own. Until that transaction has committed, the message is
        undecided, and its checker may be asked.

        Args:
            by: who decides, for the trail; default: this process.

        Raises:
            AlreadyDecided: it was rolled back before, by its checker, an operator or your code.
        """
        return self._decide(COMMIT, Outcome.COMMITTED, said("commit", by), lambda state: state in {State.ROLLED_BACK, ""})

    def rollback(self, *, by: str = "") -> Decision:
        """The effect did not happen, and never will: drop the message. Otherwise as `commit`.

        Raises:
            AlreadyDecided: it was committed before; it may have been published.
        """
        same = {State.ROLLED_BACK, *UNDECIDED}
        return self._decide(ROLL_BACK, Outcome.ROLLED_BACK, said("rollback", by), lambda state: state not in same)

    def _decide(self, transition: Transition, done: Outcome, reason: str, is_opposite: Callable[[str], bool]) -> Decision:
        # At the end of the block, a rollback that has failed must not become a commit.
        self._decided = transition is ROLL_BACK
        decision = decide(transition, done, {"message_id": self.id}, self._using, reason)
        self._decided = True
        if not decision and is_opposite(state := decision.state or prepared_rows.state_of(self._using, self.id)):
            raise AlreadyDecided(self.id, done.replace("_", " "), state)
        return decision

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._decided:
            return
        if kind is None:
            self.commit()
            return
        try:
            prepared_rows.make_check_due(self._using, self._position)
        except (DatabaseError, InterfaceError) as unavailable:
            # The caller must get the exception of the block. The check then happens at its regular time.
            logger.info(
                "The checker of prepared message %s is asked later, because its row could not be updated: %s",
                self.id,
                unavailable,
            )
