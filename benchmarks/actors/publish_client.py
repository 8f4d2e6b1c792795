"""One client of the `publish` benchmark: runs business transactions of one kind for the requested time.

It prints "ready" when it has read the row that is in the outbox as a specimen. Then it reads lines of JSON, and answers

    {"kind": "publish", "seconds": 2.0}            with {"transactions": …, "seconds": …}
    {"kinds": ["raw", "publish"], "rounds": 300}   with {"raw": [seconds, …], "publish": [seconds, …]}

where a round is one transaction of each kind, in random order.

Every kind changes one account; `raw` also inserts, with one statement written by hand, the row that `publish` writes; the
others are `bare`, `publish`, `publish without doorbell`, and `publish through the project`: the project has replaced
`connection.cursor`, as a debug toolbar does, so no statement bypasses it.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from random import randrange, sample
from typing import Any

import django
from django.conf import settings
from django.db import connection, connections, transaction
from django.db.models import F

from benchmarks.lab.workload import ACCOUNTS, TOPIC, biz_id, many_customers, payload
from exactly_once.wire.identity import new_message_id


class Client:
    def __init__(self, specimen: dict[str, object]) -> None:
        from benchmarks.shop.models import Account  # noqa: PLC0415 - needs Django
        from outbox import publish  # noqa: PLC0415
        from outbox.models import SHARDS  # noqa: PLC0415

        self._accounts = Account.objects
        self._publish = publish
        self._payload = payload(0)
        self._specimen = specimen
        self._shards = SHARDS
        # The same two all the time, because options are read again whenever the setting is another object.
        self._ringing, self._silent = ({**settings.OUTBOX, "LISTEN_ALIAS": alias} for alias in ("", None))
        columns = ", ".join(specimen)
        self._insert = f"INSERT INTO outbox_outboxmessage_live ({columns}) VALUES ({', '.join(['%s'] * len(specimen))})"

    def run(self, kind: str, seconds: float) -> dict[str, float]:
        write = self._writing(kind)
        transactions = 0
        began = time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            self._transact(write)
            transactions += 1
        return {"transactions": transactions, "seconds": passed}

    def alternate(self, kinds: Sequence[str], rounds: int) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind in sample(kinds, len(kinds)):
                write = self._writing(kind)
                began = time.perf_counter()
                self._transact(write)
                seconds[kind].append(time.perf_counter() - began)
        return seconds

    def _writing(self, kind: str) -> Callable[[int], object]:
        from outbox.conf import outbox_options  # noqa: PLC0415 - needs Django

        settings.OUTBOX = self._silent if kind == "publish without doorbell" else self._ringing
        outbox_options()  # reads them, so that publish() need not
        own: dict[str, object] = vars(connections["default"])
        own.pop("cursor", None)
        if kind == "publish through the project":
            own["cursor"] = partial(connection.cursor)
        writes: dict[str, Callable[[int], object]] = {"bare": lambda _: None, "raw": self._raw}
        return writes.get(kind, self._by_publish)

    def _transact(self, write: Callable[[int], object]) -> None:
        number = randrange(ACCOUNTS)
        with transaction.atomic():
            self._accounts.filter(pk=number + 1).update(balance=F("balance") + 1)
            write(number)

    def _by_publish(self, number: int) -> None:
        self._publish(TOPIC, self._payload, biz_id=biz_id(number), key=many_customers(number))

    def _raw(self, number: int) -> None:
        message_id, key = new_message_id(), many_customers(number)
        changes = {
            "message_id": message_id,
            "correlation_id": str(message_id),
            "biz_id": biz_id(number),
            "key": key,
            "shard": zlib.crc32(key.encode()) % self._shards,
        }
        with connection.cursor() as cursor:
            cursor.execute(self._insert, list({**self._specimen, **changes}.values()))


def main() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM outbox_outboxmessage LIMIT 1")
        row = dict(zip([column.name for column in cursor.description], cursor.fetchone(), strict=True))
    del row["id"]
    client = Client(row)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        print(json.dumps(client.alternate(**order) if "rounds" in order else client.run(**order)), flush=True)


if __name__ == "__main__":
    django.setup()
    main()
