"""The rows of the test's database: whether they may be changed, and time travel.

The outbox and the inbox compare the instants in their rows with the database's clock. That clock cannot be set, so `travel`
moves the instants into the past instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.core import mail
from django.db import OperationalError, connections, models, router, transaction
from django.db.models import F, QuerySet

from exactly_once.models import Process
from exactly_once.sql.connections import execute, lock_timeout
from exactly_once.sql.faults import is_collision
from exactly_once.sql.schema import our_models

_TRIES = 20
_LONGEST_WAIT = timedelta(seconds=2)


def travel(time: timedelta, *, using: str | None = None) -> None:
    """Simulate that `time` has passed for the messages of the outbox and of the inbox, whichever is installed.

    All instants in their rows move back by `time`: due, expiry, next attempt, end of a lease, creation. This alone runs
    nothing; the next `run_relay()` of the outbox, or `drain()` of the inbox, processes the messages that are due then. For
    each retry of a message that fails several times, travel and then call one of these.

    The clocks of Python and of the database do not change, and neither do the rows of other apps.

    Args:
        time: the duration, more than zero.
        using: the database alias of the rows.

    Raises:
        RuntimeError: not in a test.
        ValueError: `time` is not positive.
    """
    require_tests("travel")
    if time <= timedelta():
        raise ValueError(f"travel() was given {time!r}: it must be more than zero.")
    alias = using or router.db_for_write(Process)
    for model in our_models(alias):
        instants = [field.name for field in model._meta.local_fields if isinstance(field, models.DateTimeField)]
        if instants:
            objects = model._base_manager.using(alias)  # noqa: SLF001 - documented, and never filtered
            update_beside(objects.all(), {name: F(name) - time for name in instants})


def update_beside(rows: QuerySet[Any], values: Mapping[str, Any]) -> int:
    """Update `rows` while processes run beside the test, and return their number.

    A process that settles a message moves its row to another partition, and a statement that meets this fails. Under much
    load each statement would: every second one keeps the others off the table, unless one of them is frozen and holds it.
    """
    connection = connections[rows.db]
    number = 0
    while True:
        try:
            with transaction.atomic(using=rows.db):
                if number % 2 and connection.vendor == "postgresql":
                    table = connection.ops.quote_name(rows.model._meta.db_table)
                    with lock_timeout(rows.db, _LONGEST_WAIT):
                        execute(connection, f"LOCK TABLE {table} IN EXCLUSIVE MODE")
                return rows.update(**values)
        except OperationalError as error:
            number += 1
            if number == _TRIES or not is_collision(error):
                raise


def require_tests(function: str) -> None:
    """Refuse to change rows outside of tests.

    Raises:
        RuntimeError: Django's test environment is not set up, so the databases may not be test databases.
    """
    # `setup_test_environment` sets it. Django has no public function to check it.
    if not hasattr(mail, "outbox"):
        raise RuntimeError(
            f"{function}() changes rows and is for tests only. Django's test environment is not set up here: run the "
            "tests with manage.py test or pytest-django. A test runner of your own calls "
            "django.test.utils.setup_test_environment()."
        )
