"""The life of a run: its messages are collected and given to the join's function, and operators decide about it.

`collect` is the function of the handlers of the awaited topics. It runs in the transaction of its message's inbox row, so a
message is a part of its run if and only if it is handled. The run id is its biz-id, so the inbox suppresses copies.

Operators enter the missing messages, extend the deadline, or start the run without them. Each decision locks the run, so that
no message is added meanwhile.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from django.db import transaction
from django.db.models import Prefetch, prefetch_related_objects

from exactly_once.process.logs import escaping_logger
from exactly_once.sql.connections import decision_transaction
from exactly_once.wire.identity import new_message_id
from exactly_once.wire.payloads import Misfit
from exactly_once.wire.text import NAME_LENGTH
from inbox.conf import inbox_options
from inbox.contrib.joins import Join, store
from inbox.contrib.joins.models import Part, Run
from inbox.contrib.joins.store import TOPIC
from inbox.errors import InboxError, Reject, RetryLater
from inbox.handlers.message import Message
from inbox.handlers.registry import registry
from inbox.operators import decisions
from inbox.states import DUE, RETRY, State

logger = escaping_logger(__name__)

_RUNNING = timedelta(seconds=1)
_EARLY = timedelta(minutes=1)
"""A run that is retried before it is complete is run again after this, in case its last message came in between."""
_LONGEST_OVERTIME = timedelta(hours=1)
_SAME = ("key", "correlation_id", "causation_id", "created_at")
"""The columns of a part that are attributes of its message."""


@dataclass(frozen=True, kw_only=True)
class Definition:
    """What a join waits for.

    Attributes:
        name: of its handler.
        using: the database alias of its runs.
        topics: all of these.
        deadline: after the first arrival of a message of the run.
        on_missing: what happens then.
        refuses_late: a message that comes when the run is over is a dead letter. Otherwise it is stored with the run.

    Raises:
        ValueError: a value is out of range.
    """

    name: str
    using: str
    topics: tuple[str, ...]
    deadline: timedelta
    on_missing: Literal["dead", "call"]
    refuses_late: bool = False

    def __post_init__(self) -> None:
        if not self.topics or len({*self.topics}) < len(self.topics):
            raise ValueError(f"all_of is {[*self.topics]}: a run has one message of each topic, so each may be listed once.")
        if TOPIC in self.topics:
            raise ValueError(f"all_of contains {TOPIC!r}, which is the topic of the runs themselves.")
        if self.on_missing not in {"dead", "call"}:
            raise ValueError(f"on_missing is {self.on_missing!r}: it must be 'dead' or 'call'.")

    def missing(self, topics: Collection[str]) -> tuple[str, ...]:
        """Those of its topics that are not in `topics`."""
        return tuple(topic for topic in self.topics if topic not in topics)

    @property
    def collectors(self) -> dict[str, str]:
        """Its topics by the handlers that collect them."""
        return {f"{self.name}/{topic}": topic for topic in self.topics}


def collect(join: Definition, message: Message) -> None:
    """Store a message as a part of its run. The last one makes the run's inbox row due.

    Raises:
        RetryLater: the run is being changed by another transaction.
        Reject: the run is over, and the join refuses late messages.
    """
    alias, run_id = join.using, message.biz_id
    run = store.lock(alias, join.name, run_id)
    if run is None:
        left = join.deadline - store.age(alias, run_id, join.collectors)
        # Another transaction may have opened it in between.
        run = store.open_run(alias, join.name, run_id, left, message) or store.lock(alias, join.name, run_id)
    if run is None:
        _late(join, message, "its run is over and was purged")
        return
    columns = {"message_id": message.id, "headers": dict(message.headers), **{name: getattr(message, name) for name in _SAME}}
    store.add_part(alias, run, message.topic, message.raw, **columns)
    state, attempts = store.state_of(alias, run)
    if state not in DUE:
        # An operator can still start a dead run, with this message.
        report = _report_late if state == State.DEAD else _late
        report(join, message, f"its run is {State(state).label.lower()}" if state else "its run was purged")
    elif attempts > 0:
        if join.refuses_late:
            # The next attempt sees it, unless one is running now.
            if not store.hold_back(alias, run):
                raise RetryLater(_RUNNING, f"the run {run_id} of {join.name} is being handled without it")
        elif store.may_lack_messages(alias, run):
            _report_late(join, message, "an attempt of its run began without it")
    elif not join.missing({part.topic for part in store.parts(alias, run).only("topic")}) and not store.make_due(alias, run):
        raise RetryLater(_RUNNING, f"another transaction is changing the run {run_id} of {join.name}")


def gather(join: Definition, given: Sequence[Message]) -> Join:
    """The messages of a run, whose payloads go with its effect if the inbox keeps none of messages that are done.

    Args:
        given: the message of the run's inbox row; in a test, the messages of the run.

    Raises:
        Reject: the deadline has passed, and messages are missing.
        RetryLater: messages are missing, and the deadline has not passed, or one that is stored is not handled yet. For those
            it waits for as long as the deadline again, at least a minute and at most an hour.
    """
    if given[0].topic != TOPIC:
        return _joined(join, given[0], {message.topic: message for message in given})
    (of_the_run,) = given
    run = store.collected(join.using, join.name, of_the_run.biz_id)
    if run is None:
        raise Reject(f"The messages of the run {of_the_run.biz_id} are not stored: its row was not made by this join.")
    left = run.deadline_at - run.database_now
    # Before the parts are read: a message that is handled in between is one of them.
    stored = ", ".join(store.unhandled(join.using, run, join.collectors)) if left <= timedelta() else ""
    parts = store.parts(join.using, run)
    joined = _joined(join, of_the_run, {part.topic: _message_of(join, part, of_the_run) for part in parts})
    if joined.missing and not run.started_by:
        _require_deadline(join, joined, left, stored)
    if not inbox_options().keeps_successes:
        # Restored with the transaction if the function fails.
        parts.update(body=b"", headers={})
    return joined


def _require_deadline(join: Definition, joined: Join, left: timedelta, stored: str) -> None:
    """Raise RetryLater or Reject unless the run is to start without the messages that are missing."""
    names = ", ".join(joined.missing)
    if left > timedelta():
        raise RetryLater(min(left, _EARLY), f"waits for {names}")
    if stored and -left < max(_EARLY, min(join.deadline, _LONGEST_OVERTIME)):
        raise RetryLater(_EARLY, f"the deadline has passed, but what may be of {names} is stored and not handled yet: {stored}")
    unhandled = stored and f" These stored messages may be of it, and are still not handled: {stored}."
    if join.on_missing == "dead":
        raise Reject(
            f"The deadline has passed, and these messages have not come: {names}.{unhandled} Complete the run, extend its "
            "deadline, or start it without them."
        )
    logger.warning("%s: run %s starts at its deadline without: %s.%s", join.name, joined.run_id, names, unhandled)


def _joined(join: Definition, of_the_run: Message, by_topic: dict[str, Message]) -> Join:
    return Join(
        id=of_the_run.id,
        run_id=of_the_run.biz_id,
        messages={topic: by_topic[topic] for topic in join.topics if topic in by_topic},
        missing=join.missing(by_topic),
        attempt=of_the_run.attempt,
    )


def _message_of(join: Definition, part: Part, of_the_run: Message) -> Message:
    message = Message(
        id=part.message_id,
        biz_id=of_the_run.biz_id,
        payload=json.loads(bytes(part.body)),
        attempt=of_the_run.attempt,
        redelivered=of_the_run.redelivered,
        **{name: getattr(part, name) for name in ("topic", "headers", *_SAME)},
    )
    collector = registry.get(f"{join.name}/{part.topic}")
    try:
        return collector.typed(message) if collector else message
    except Misfit as error:  # the class has changed, or an operator has entered it
        raise Reject(f"The message of {part.topic}: {error}") from error


def _late(join: Definition, message: Message, why: str) -> None:
    if join.refuses_late:
        raise Reject(f"It came too late for the run {message.biz_id}: {why}. Check what has happened, then skip this message.")
    _report_late(join, message, why)


def _report_late(join: Definition, message: Message, why: str) -> None:
    logger.warning(
        "%s: message %s of topic %s came too late for the run %s: %s. The run does not start by it.",
        join.name,
        message.id,
        message.topic,
        message.biz_id,
        why,
    )


# ------------------------------------------------------------------------------------------------------ operators' decisions


class NotDecidable(InboxError):
    """A decision about a run is refused, for this reason; the run is unchanged."""


def complete(alias: str, pk: int, payloads: Mapping[str, Any], *, by: str) -> bool:
    """Add messages with these payloads by topic, and start the run if none is missing then. False: its state does not allow it.

    Raises:
        NotDecidable: the join does not wait for such a message, or a payload does not fit its class.
    """

    def decide(run: Run) -> bool:
        waits_for = missing(run)
        if unknown := sorted({*payloads} - {*waits_for}):
            raise NotDecidable(f"It does not wait for {', '.join(unknown)}. It waits for: {', '.join(waits_for) or 'nothing'}.")
        for topic, payload in payloads.items():
            _require_fit(run, topic, payload)
            store.add_part(alias, run, topic, payload, message_id=str(new_message_id()), entered_by=by[:NAME_LENGTH])
        return bool({*waits_for} - {*payloads}) or _run_now(alias, run, by)

    return _decide(alias, pk, decide)


def _require_fit(run: Run, topic: str, payload: Any) -> None:
    if collector := registry.get(f"{run.handler}/{topic}"):
        try:
            collector.read_payload(topic, payload)
        except Misfit as error:
            raise NotDecidable(f"{topic}: {error}") from error


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
    return tuple(topic for topic in join.kind.all_of if topic not in come) if join else ()


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
