"""The consuming side of a run: the queue at its beginning, and the effects at its end.

Messages are sent straight to the broker, as the outbox would send them. Only committed effects count. The
clock is that of PostgreSQL's commit timestamps, so it is the same for every side.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import amqp

from benchmarks.lab.broker import connected
from benchmarks.lab.confirms import Unconfirmed
from benchmarks.lab.project import Project
from benchmarks.lab.record import Verdict
from benchmarks.lab.waiting import Progress
from benchmarks.lab.workload import CUSTOMERS, EXCHANGE, HANDLER, PAST, TOPIC, Keys, biz_id, payload, serialised
from exactly_once.wire.envelope import Envelope
from exactly_once.wire.identity import new_message_id

PERSISTENT = 2
WINDOW = 1000
SILENCE_SECONDS = 30.0
UNTIMED = 500
"""Effects that are committed before the clock starts."""

REMEMBERED = 20_000
"""Messages that were handled over the last six days. Housekeeping would delete older ones while the clock runs."""

HISTORY = """
WITH past AS (
    SELECT nextval('inbox_receipt_id_seq') AS id, %(past)s || n AS biz_id, 'customer-' || n %% 1000 AS key,
        gen_random_uuid() AS message_id, encode(sha256(%(body)s), 'hex') AS digest,
        now() - (%(count)s - n) * interval '25 seconds' AS at
    FROM generate_series(1, %(count)s) n
), receipts AS (
    INSERT INTO inbox_receipt (id, handler, topic, biz_id, message_id, digest, received_at)
    SELECT id, %(handler)s, %(topic)s, biz_id, message_id, digest, at FROM past
)
INSERT INTO inbox_inboxmessage (
    id, handler, topic, biz_id, message_id, key, content_type, body, digest, headers, source,
    correlation_id, causation_id, traceparent, attempts, state, created_at, received_at, settled_at, day
)
SELECT
    id, %(handler)s, %(topic)s, biz_id, message_id, key, 'application/json', %(body)s, digest, '{}', '/benchmarks', '', '', '',
    1, 'done', at, at, at, floor(extract(epoch FROM at) / 86400) - 1
FROM past
"""
EFFECTS = "SELECT number, extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8 FROM shop_effect ORDER BY id"
DUPLICATES = (
    "SELECT id, extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8 FROM inbox_inboxmessage WHERE duplicates = 1 "
    "ORDER BY id"
)
DRAWN = "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM shop_effect_id_seq"
COUNT = "SELECT count(*) FROM shop_effect"
UNFINISHED = (
    "SELECT count(*) FROM outbox_outboxmessage WHERE settled_at IS NULL",
    "SELECT count(*) FROM inbox_inboxmessage WHERE settled_at IS NULL",
)
UNSETTLED = "SELECT state, count(*) FROM inbox_inboxmessage WHERE state <> 'done' GROUP BY state"


def handled_by(project: Project, kind: str, *, inbox: dict[str, Any] | None = None, **options: Any) -> Project:
    """The same project, whose handler is written like `kind` and has these options; durations in seconds."""
    variables = {"BENCH_HANDLER": json.dumps({"kind": kind, **options}), "BENCH_INBOX": json.dumps(inbox or {})}
    return replace(project, extra={**project.extra, **variables})


def remember(project: Project) -> None:
    """Fill the inbox with a history, as in production, and with statistics of it. The partition of today is made later."""
    connection = project.database.connection
    parameters = {"handler": HANDLER, "topic": TOPIC, "past": PAST, "body": serialised(payload(0)), "count": REMEMBERED}
    connection.execute(HISTORY, parameters)
    connection.execute("VACUUM (ANALYZE) inbox_inboxmessage, inbox_receipt")


def enqueue(project: Project, count: int, keys: Keys, *, first: int = 0) -> None:
    """Have so many messages confirmed by the broker, in every queue that is bound to the topic.

    Raises:
        AssertionError: there is no such queue, or the broker refused one.
    """
    unconfirmed = Unconfirmed()
    with connected(project.broker_url) as connection:
        channel = connection.channel()
        unconfirmed.listen(channel)

        def wait(most: int) -> None:
            while len(unconfirmed.tags) > most:
                connection.blocking_read(SILENCE_SECONDS)

        for tag, number in enumerate(range(first, first + count), start=1):
            channel.basic_publish(_message(envelope(number, keys(number))), EXCHANGE, TOPIC, mandatory=True)
            unconfirmed.tags[tag] = None
            wait(WINDOW)
        wait(0)
    if unconfirmed.refused:
        raise AssertionError(f"the broker refused {unconfirmed.refused} messages; is a queue bound to {TOPIC}?")


def envelope(number: int, key: str) -> Envelope:
    """Message number n, as the outbox would send it now."""
    message_id = str(new_message_id())
    return Envelope(
        id=message_id,
        topic=TOPIC,
        source="/benchmarks",
        created_at=datetime.now(tz=UTC),
        biz_id=biz_id(number),
        key=key,
        correlation_id=message_id,
        body=serialised(payload(number)),
    )


def _message(sent: Envelope) -> amqp.Message:
    return amqp.Message(
        sent.body,
        content_type=sent.content_type,
        content_encoding="utf-8",
        application_headers=sent.to_headers(),
        message_id=sent.id,
        type=sent.topic,
        delivery_mode=PERSISTENT,
        priority=0,
    )


def effects_of(project: Project, count: int, *, unread: Collection[str] = ()) -> Progress:
    """The progress of its handler towards this number of effects. The query costs almost nothing until then.

    Args:
        unread: queues that the handler does not read.
    """
    value = project.database.value

    def written() -> int:
        drawn = int(value(DRAWN))
        return drawn if drawn < count else int(value(COUNT))

    def work_left() -> int:
        """In the direction that a message takes, so that none is passed over that moves on meanwhile."""
        relayed, handled = UNFINISHED
        ready = int(value(relayed))
        queued = sum(length for queue, length in project.queue_lengths().items() if queue not in unread)
        return ready + queued + int(value(handled))

    return Progress(project=project, what="effects", goal=count, current=written, work_left=work_left)


def duplicates_of(project: Project, count: int) -> Progress:
    """The progress of its handler towards this number of messages that have had a duplicate."""
    counted, left = "SELECT count(*) FROM inbox_inboxmessage WHERE duplicates > 0", effects_of(project, count).work_left
    value = project.database.value
    return Progress(project=project, what="duplicates", goal=count, current=lambda: int(value(counted)), work_left=left)


def duplicates(project: Project) -> list[tuple[int, float]]:
    """The id of each message that has had one duplicate, and when that was committed."""
    return project.database.connection.execute(DUPLICATES).fetchall()


def effects(project: Project) -> list[tuple[int, float]]:
    """The number of each effect's message and when it was committed, in the order they were written."""
    return project.database.connection.execute(EFFECTS).fetchall()


def rate_of(found: Sequence[tuple[int, float]], untimed: int = UNTIMED) -> float:
    """Effects per second, from the commit that had the last untimed one to the last commit."""
    instants = sorted(at for _, at in found)
    began, ended = instants[untimed - 1], instants[-1]
    return sum(at > began for at in instants) / (ended - began)


def judged(project: Project, side: str, count: int, found: Sequence[tuple[int, float]], *, ordered: bool = False) -> Verdict:
    """Has each of `count` messages had its effect once, is its row settled, and is nothing left in the queues?"""
    numbers = [number for number, _ in found]
    faults = {
        "without an effect": count - len(set(numbers) & set(range(count))),
        "with a second effect": len(numbers) - len(set(numbers)),
        "never sent": len(set(numbers) - set(range(count))),
        "before an earlier one of their key": _disordered(numbers) if ordered else 0,
        "still in the queue": sum(project.queue_lengths().values()),
    }
    wrong = [f"{number:,} {what}" for what, number in faults.items() if number]
    wrong += [f"{number:,} rows {state}" for state, number in project.database.connection.execute(UNSETTLED)]
    return Verdict(side, correct=not wrong, detail="; ".join(wrong) or f"{count:,} messages, {len(numbers):,} effects")


def _disordered(numbers: Sequence[int]) -> int:
    """Effects that came after one of a later message of their key, with the keys of `many_customers`."""
    latest: dict[int, int] = {}
    late = 0
    for number in numbers:
        customer = number % CUSTOMERS
        late += number < latest.get(customer, -1)
        latest[customer] = max(number, latest.get(customer, -1))
    return late
