"""A program written by hand for an effect that happens exactly once, without the inbox: one process, kombu and psycopg.

    python -m benchmarks.actors.hand_written COUNT PREFETCH [lean | publish | bulk]

It takes COUNT messages off the queue of the benchmarks, one transaction each, and acknowledges each after its commit. In the
transaction is the same work for the database as in the inbox's: the receipt, unique on what names the message, and the row with
everything that the inbox keeps of it; the effect; the row settled. There is no ORM, and psycopg prepares statements as it does
by default, from the sixth time on.

`lean` inserts the row as settled, which saves its second version and is the least that can be done; a transaction that the
effect has broken or ended unnoticed is acknowledged all the same.

`publish` also inserts a message into the outbox, as `publish()` does, without what checks it and wakes a relay.

A message whose receipt exists is a duplicate, and is counted on its row.

`bulk` takes 100 messages at a time: one INSERT of their rows, as settled, one of the effects of the new ones, one commit and
one acknowledgement.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from datetime import UTC, datetime

import kombu
import psycopg

from benchmarks.lab.workload import HANDLER, NEXT_TOPIC, QUEUE
from exactly_once.wire.identity import new_message_id

COLUMNS = (
    "handler, topic, biz_id, message_id, key, content_type, body, digest, headers, source, correlation_id, causation_id, "
    "traceparent, created_at"
)
TODAY = "CAST(floor(EXTRACT(EPOCH FROM statement_timestamp()) / 86400) AS int)"
RECEIPT = """receipt AS (
    INSERT INTO inbox_receipt (handler, topic, biz_id, message_id, digest, received_at)
    SELECT handler, topic, biz_id, message_id, digest, statement_timestamp() FROM given
    ON CONFLICT (handler, topic, biz_id) DO NOTHING RETURNING id, biz_id
)"""
RECEIVE = f"""
WITH given ({COLUMNS}) AS (
    VALUES (%s, %s, %s, %s, %s, %s, %s::bytea, %s, %s::jsonb, %s, %s, %s, %s, %s::timestamptz)
), {RECEIPT}
INSERT INTO inbox_inboxmessage (id, {COLUMNS}, state, received_at)
SELECT receipt.id, given.*, 'received', statement_timestamp() FROM given, receipt RETURNING id
"""
RECEIVE_SETTLED = RECEIVE.replace("received_at)\nSELECT", "received_at, attempts, settled_at, day)\nSELECT").replace(
    "'received', statement_timestamp()", f"'done', statement_timestamp(), 1, statement_timestamp(), {TODAY}"
)
EFFECT = "INSERT INTO shop_effect (number) VALUES (%s)"
SETTLE = (
    f"UPDATE inbox_inboxmessage SET state = 'done', attempts = 1, settled_at = statement_timestamp(), day = {TODAY} "
    "WHERE id = %s AND day = 0"
)
PUBLISH = """
INSERT INTO outbox_outboxmessage_live (
    message_id, topic, biz_id, key, shard, priority, body, headers, correlation_id, causation_id, traceparent, is_unique,
    attempts, last_error, created_at, available_at, state, ready_position
) VALUES (
    %s, %s, %s, '', %s, 0, %s, '{}', %s, %s, '', false, 0, '', statement_timestamp(), statement_timestamp(), 'ready', 0
)"""
COUNT_DUPLICATE = f"""
UPDATE inbox_inboxmessage SET duplicates = duplicates + 1
WHERE day = {(datetime.now(tz=UTC) - datetime(1970, 1, 1, tzinfo=UTC)).days}
AND id = (SELECT id FROM inbox_receipt WHERE handler = %s AND topic = %s AND biz_id = %s)
"""
_TYPES = ["text"] * 6 + ["bytea", "text", "jsonb", *["text"] * 4, "timestamptz"]
RECEIVE_MANY = f"""
WITH given ({COLUMNS}) AS (SELECT * FROM unnest({", ".join(f"%s::{kind}[]" for kind in _TYPES)})), {RECEIPT}
INSERT INTO inbox_inboxmessage (id, {COLUMNS}, state, received_at, attempts, settled_at, day)
SELECT receipt.id, given.*, 'done', statement_timestamp(), 1, statement_timestamp(), {TODAY}
FROM given JOIN receipt USING (biz_id) RETURNING biz_id
"""
EFFECTS = "INSERT INTO shop_effect (number) SELECT unnest(%s::bigint[])"
BULK = 100
SILENCE_SECONDS = 60.0
SHARDS = 64
"""Of the outbox, whose models need Django."""


class Consumer:
    def __init__(self, database: psycopg.Connection, *, lean: bool, publishes: bool = False) -> None:
        self.handled = 0
        self._database = database
        self._lean = lean or publishes
        self._publishes = publishes

    def on_message(self, message: kombu.Message) -> None:
        given = _row(message)
        with self._database.transaction(), self._database.cursor() as cursor:
            row = cursor.execute(RECEIVE_SETTLED if self._lean else RECEIVE, given).fetchone()
            if row is not None:
                cursor.execute(EFFECT, [message.payload["order"]])
                if self._publishes:
                    cursor.execute(PUBLISH, _published(message))
                if not self._lean:
                    cursor.execute(SETTLE, row)
            else:
                cursor.execute(COUNT_DUPLICATE, given[:3])
        message.ack()
        self.handled += 1


class BulkConsumer:
    def __init__(self, database: psycopg.Connection, count: int) -> None:
        self.handled = 0
        self._database = database
        self._count = count
        self._messages: list[kombu.Message] = []

    def on_message(self, message: kombu.Message) -> None:
        self._messages.append(message)
        if len(self._messages) < min(BULK, self._count - self.handled):
            return
        orders = {message.headers["cloudEvents:bizid"]: message.payload["order"] for message in self._messages}
        with self._database.transaction(), self._database.cursor() as cursor:
            columns = [list(column) for column in zip(*map(_row, self._messages), strict=True)]
            new = cursor.execute(RECEIVE_MANY, columns).fetchall()
            cursor.execute(EFFECTS, [[orders[biz_id] for (biz_id,) in new]])
        self._messages[-1].ack(multiple=True)
        self.handled += len(self._messages)
        self._messages.clear()


def _row(message: kombu.Message) -> list[object]:
    headers = message.headers
    body = message.body.encode() if isinstance(message.body, str) else bytes(message.body)
    return [
        HANDLER,
        headers["cloudEvents:type"],
        headers["cloudEvents:bizid"],
        message.properties["message_id"],
        headers.get("cloudEvents:orderingkey", ""),
        message.content_type,
        body,
        hashlib.sha256(body).hexdigest(),
        "{}",
        headers["cloudEvents:source"],
        headers.get("cloudEvents:correlationid", ""),
        headers.get("cloudEvents:causationid", ""),
        headers.get("cloudEvents:traceparent", ""),
        datetime.fromisoformat(headers["cloudEvents:time"]),
    ]


def _published(message: kombu.Message) -> list[object]:
    message_id, cause = new_message_id(), message.properties["message_id"]
    correlation_id = message.headers.get("cloudEvents:correlationid") or cause
    body = json.dumps(message.payload, separators=(",", ":")).encode()
    shard = zlib.crc32(message_id.bytes) % SHARDS
    return [message_id, NEXT_TOPIC, message.headers["cloudEvents:bizid"], shard, body, correlation_id, cause]


def main() -> None:
    count, prefetch = int(sys.argv[1]), int(sys.argv[2])
    url, broker = os.environ["DATABASE_URL"], os.environ["BROKER_URL"]
    with psycopg.connect(url, autocommit=True) as database, kombu.Connection(broker) as connection:
        one_by_one = Consumer(database, lean="lean" in sys.argv, publishes="publish" in sys.argv)
        consumer = BulkConsumer(database, count) if "bulk" in sys.argv else one_by_one
        queue = kombu.Queue(QUEUE, no_declare=True)
        with kombu.Consumer(
            connection, [queue], on_message=consumer.on_message, accept=["json"], prefetch_count=prefetch, auto_declare=False
        ):
            while consumer.handled < count:
                connection.drain_events(timeout=SILENCE_SECONDS)


if __name__ == "__main__":
    main()
