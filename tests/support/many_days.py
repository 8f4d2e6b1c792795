"""Partitions of many days of history, and how many of them a transaction locks."""

from exactly_once.sql.days import day_of
from tests.support.sql import fetched

DAYS = 60
FEW_PARTITIONS = 8


def made(history, db_blocker):
    """The partitions, while a fixture of a module waits."""
    with db_blocker.unblock():
        today, days = day_of("default"), history.days
        before = days.existing("default")
        made = [day for day in range(today - DAYS, today + 2) if day not in before]
        for day in made:
            days.make("default", day)
        yield
        for day in made:
            days.drop("default", day)


def partitions_locked(history):
    """Of this history, by this transaction."""
    return fetched(
        "SELECT count(*) FROM pg_locks l JOIN pg_inherits i ON i.inhrelid = l.relation "
        f"WHERE l.pid = pg_backend_pid() AND i.inhparent = '{history.days.history}'::regclass"
    )
