"""Messages that are due later: very many in the far future, and some that fall due during the measurement."""

from __future__ import annotations

import random

from benchmarks.lab.database import Database
from benchmarks.lab.processes import ProcessFailed
from benchmarks.lab.workload import many_topics, no_customer

FAR = 1_000_000
"""The number of the first of those in the far future; all others have lower ones."""
NOT_BEFORE_SECONDS, NOT_AFTER_SECONDS = 3600.0, 30 * 86_400.0
SEED = 5
ROWS_PER_SECOND = 3_000
"""Written by COPY at the least, on a machine that is fit to measure."""
SPARE_SECONDS = 5.0
HEAD_START_SECONDS = 1.0
"""Between the commit of scheduled messages and the first instant; less would measure how late they were written."""
EARLY = "SELECT count(*) FROM outbox_outboxmessage WHERE settled_at < deliver_at"


def schedule_far(database: Database, count: int) -> float:
    """Commit this number of messages of several topics, due in an hour to a month, and vacuum; rows per second."""
    now, chance = database.now(), random.Random(SEED)

    def due(number: int) -> float:
        return now + chance.uniform(NOT_BEFORE_SECONDS, NOT_AFTER_SECONDS)

    return database.preload(count, no_customer, first=FAR, topics=many_topics, due=due)


def schedule_soon(database: Database, count: int, seconds: float) -> float:
    """Commit messages 0 to `count` - 1 of several topics, due one by one over this time; return when the first is due."""
    begin = database.now() + SPARE_SECONDS + count / ROWS_PER_SECOND
    with database.connection.transaction():
        database.copy(count, no_customer, topics=many_topics, due=lambda number: begin + number * seconds / count)
    require_time(database, begin)
    return begin


def require_time(database: Database, begin: float) -> None:
    """Refuse to measure messages that were due before all were committed.

    Raises:
        ProcessFailed: less than `HEAD_START_SECONDS` are left until `begin`.
    """
    left = begin - database.now()
    if left < HEAD_START_SECONDS:
        raise ProcessFailed(f"everything was there {left:.1f} s before the first message was due: this machine is too slow")


def early(database: Database) -> int:
    """Messages that were settled before they were due, by the database's clock alone."""
    return int(database.value(EARLY))
