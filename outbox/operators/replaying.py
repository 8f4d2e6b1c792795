"""Replay: send published messages again, as an operation.

A replayed message is the same message: its message id, biz-id, body and headers do not change, and neither does its row. So the
inbox suppresses a message that has had its effect, and handles one that was lost. Messages of one key are sent in their order,
each after the broker has confirmed the one before.

A batch is sent inside the transaction that takes its rows out of the operation. If the process is killed, the batch is sent
again as a whole. Messages that the broker has not confirmed before the deadline of their batch are sent again by the next one,
which is as large as the part that was confirmed.
"""

import uuid
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

from django.db import transaction

from exactly_once.console.operators.audit import Actor, Subject, record
from exactly_once.console.operators.changes import Change
from exactly_once.models import Lease, Operation
from exactly_once.process.clock import monotonic
from exactly_once.sql.now import DatabaseTime
from exactly_once.transport.broker import queue_name
from exactly_once.transport.interface import BrokerUnavailable, OutgoingMessage, PublishOutcome, Transport, Verdict
from exactly_once.upkeep.operation_rows import Given, RowOutcome
from exactly_once.wire.identity import process_name
from exactly_once.wire.text import NAME_LENGTH
from outbox.conf import OutboxOptions, outbox_options
from outbox.models import PausedTopic
from outbox.operators.changes import names_of, operations
from outbox.states import State, TopicState
from outbox.store import transitions
from outbox.store.messages import DamagedRow, RelayedMessage, outgoing, parts_of_published, read_published, waves
from outbox.store.selecting import Selection
from outbox.transports import open_transport

_PLANNING = "outbox: planning a replay"
_TRY_AGAIN = (PublishOutcome.UNKNOWN, PublishOutcome.NACKED)
_LONGEST_BATCH = timedelta(seconds=20)
"""Less than the time after which PostgreSQL ends the idle transaction of a batch."""


class Planned(NamedTuple):
    """A planned replay; `is_new` is False if the same one was planned or running already."""

    operation: Operation
    is_new: bool


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What to send again, and to whom.

    Attributes:
        to_group: group and name of the only handler that gets it, or the name of its queue; "" for all queues of the topic.
    """

    selection: Selection
    to_group: str = ""

    @property
    def given(self) -> dict[str, str]:
        """Its parameters, for people, and to recognise the same replay."""
        chosen = self.selection
        named = {"topic": chosen.topic, "biz_id": chosen.biz_id, "to_group": self.to_group}
        instants = {"since": chosen.since, "until": chosen.until}
        return {name: value for name, value in named.items() if value} | {
            name: instant.isoformat() for name, instant in instants.items() if instant
        }


def plan(alias: str, replay: Replay, *, rate: int, reason: str, actor: Actor) -> Planned:
    """Plan a replay. The running relays execute it.

    The same replay is not planned twice: one that is planned or running is returned.

    Args:
        rate: the maximum number of messages per second.
    """
    given = replay.given
    with transaction.atomic(using=alias):
        plan_alone(alias)
        if found := _open_replay(alias, REPLAY.name, given):
            return Planned(found, is_new=False)
        planned = Operation(
            action=REPLAY.name,
            selection=", ".join(f"{name} {value}" for name, value in given.items()) or "all published messages",
            sources=[*REPLAY.sources],
            requested_by=actor.name,
            reason=reason,
            given=given,
            rate=rate,
        )
        operation = operations.plan(alias, planned, replace(replay.selection, states=[State.PUBLISHED]).positions(alias))
        subject = Subject(kind="operation", id=str(operation.pk), name=operation.selection)
        parameters = {**given, "rate": rate, "reason": reason, "messages": operation.total}
        record("outbox", alias, actor, REPLAY.name, [subject], parameters)
    return Planned(operation, is_new=True)


def plan_alone(alias: str) -> None:
    """Wait until no other transaction plans a replay; none does until the open transaction ends."""
    lease = Lease.objects.using(alias).filter(name=_PLANNING)
    holder = process_name()[:NAME_LENGTH]
    # The first statement writes, because SQLite refuses to upgrade a transaction that has read an older snapshot.
    if not lease.update(holder=holder):
        now = DatabaseTime()
        row = Lease(name=_PLANNING, token=uuid.UUID(int=0), holder=holder, valid_from=now, expires_at=now)
        Lease.objects.using(alias).bulk_create([row], ignore_conflicts=True)
        lease.update(holder=holder)


def _open_replay(alias: str, action: str, given: dict[str, str]) -> Operation | None:
    """The replay of the same selection that is planned or running, if there is one."""
    rows = Operation.objects.using(alias).filter(action=action, state__in=["planned", "running"]).order_by("pk")
    return next((operation for operation in rows if operation.given == given), None)


def _paused_topics(alias: str) -> frozenset[str]:
    """The topics that an operator has paused. Those of the circuit breaker may have a queue again."""
    rows = PausedTopic.objects.using(alias).filter(mode=TopicState.PAUSED)
    return frozenset(rows.values_list("topic", flat=True))


def send_again(alias: str, rows: Sequence[int], given: Given) -> Sequence[RowOutcome]:
    """Send published messages again. Messages without an outcome have to be sent again.

    Raises:
        BrokerUnavailable: the broker has confirmed none of them.
    """
    outcomes: list[RowOutcome] = []
    for part in parts_of_published(alias, rows):
        try:
            sent = _send_again(alias, part, given)
        except BrokerUnavailable:
            if not outcomes:
                raise
            break
        outcomes += sent
        if len(sent) < len(part):
            break  # the next part may have later messages of the same keys
    return outcomes


def _send_again(alias: str, rows: Sequence[int], given: Given) -> Sequence[RowOutcome]:
    options = outbox_options()
    paused, to_group = _paused_topics(alias), str(given.values.get("to_group", ""))
    unchanged = dict.fromkeys(rows, "it is no longer in the history")
    sendable: list[RelayedMessage] = []
    messages: dict[int, OutgoingMessage] = {}
    found = {row.position: row for row in read_published(alias, rows)}
    for position, row in found.items():
        if why := _why_not(row, paused, to_group):
            unchanged[position] = why
            continue
        try:
            queue = to_group if "@" in to_group else queue_name(to_group, row.topic) if to_group else ""
            messages[position] = outgoing(row, options, replayed=True, queue=queue)
            sendable.append(row)
        except DamagedRow as damage:
            unchanged[position] = f"its row is damaged: {damage}"
    verdicts: dict[int, Verdict] = {}
    unconfirmed = _send(alias, options, [[messages[row.position] for row in wave] for wave in waves(sendable)], verdicts)
    if unconfirmed and not verdicts:
        raise BrokerUnavailable(unconfirmed)
    unfinished = messages.keys() - verdicts.keys()
    failed = {position: verdict for position, verdict in verdicts.items() if verdict.outcome is not PublishOutcome.CONFIRMED}
    unchanged |= {position: verdict.reason for position, verdict in failed.items()}
    sent = [position for position in verdicts if position not in failed]
    to = f" to {to_group}" if to_group else ""
    said = f"sent again{to}: {given.text}"
    published = State.PUBLISHED.value
    transitions.record(alias, [found[position].message_id for position in sent], was=published, became=published, reason=said)
    names = names_of(alias, [row for row in rows if row not in sent]) if len(sent) < len(rows) else {}
    return [
        RowOutcome(row)
        if row in verdicts and row not in failed
        else RowOutcome(row, names.get(row, f"number {row}"), unchanged[row], is_error=row in failed)
        for row in rows
        if row not in unfinished
    ]


def _why_not(row: RelayedMessage, paused: Collection[str], to_group: str) -> str:
    if row.expired:
        return "it has expired"
    if row.topic in paused:
        return "its topic is paused"
    if row.wire is not None and to_group:
        return "it is in the format of another protocol, which has no groups"
    return ""


def _send(alias: str, options: OutboxOptions, split: Sequence[Sequence[OutgoingMessage]], verdicts: dict[int, Verdict]) -> str:
    """Send waves one after the other, and add the broker's final answers to `verdicts`.

    Returns:
        Why not all of them have one; "" if all have.
    """
    if not split:
        return ""
    with closing(open_transport(options.BROKER_URL, alias=alias, exchange=options.EXCHANGE)) as transport:
        try:
            transport.connect()
            # Not counted before: over a slow link, connecting may take as long.
            deadline = monotonic() + min(options.BATCH_DEADLINE, _LONGEST_BATCH).total_seconds()
            for wave in split:
                _send_wave(transport, wave, deadline, verdicts)
        except BrokerUnavailable as error:
            return str(error)
    return ""


def _send_wave(
    transport: Transport, messages: Sequence[OutgoingMessage], deadline: float, verdicts: dict[int, Verdict]
) -> None:
    """Send messages that may be in flight together.

    Raises:
        BrokerUnavailable: it has not answered for all of them.
    """
    parts = deque([messages])
    while parts:
        part = parts.popleft()
        transport.connect()
        sent = transport.send(part, deadline)
        verdicts |= {position: verdict for position, verdict in sent.verdicts.items() if verdict.outcome not in _TRY_AGAIN}
        missing = [message for message in part if message.position not in verdicts]
        if sent.suspected:
            # One of them made the broker close the connection: sent alone, it gets its answer.
            parts.extend([message] for message in missing)
        elif missing:
            nacked = (verdict.reason for verdict in sent.verdicts.values() if verdict.outcome in _TRY_AGAIN)
            raise BrokerUnavailable(sent.broken or next(nacked, "it did not confirm everything within the deadline"))


REPLAY = Change(name="replay", sources=[State.PUBLISHED], is_operation=True, perform=send_again)
