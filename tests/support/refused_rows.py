"""Rows that the database refuses to change, as with a trigger of another application or a damaged index."""

from contextlib import contextmanager

from django.db import connection

from outbox.store.dialect import HISTORY, LIVE_PART, TABLE
from tests.support.sql import executed

POISON = "poison"
"""The beginning of the biz-id of such a row."""


def reports(caplog):
    """What was logged about such rows."""
    logged = [record.getMessage() for record in caplog.records]
    return [line for line in logged if "the database refuses to change the rows of" in line]


@contextmanager
def refused(sqlstate="P0001", *, deferred=False, where="NEW.biz_id LIKE 'poison%'", table=TABLE):
    """Within the block no row that matches `where` can be changed; PostgreSQL's error has this SQLSTATE."""
    if connection.vendor == "postgresql":
        kind, timing = ("CONSTRAINT TRIGGER", "AFTER") if deferred else ("TRIGGER", "BEFORE")
        deferrable = "DEFERRABLE INITIALLY DEFERRED" if deferred else ""
        # A row of the outbox that is settled is inserted into history.
        changes = (f"UPDATE ON {LIVE_PART}", f"INSERT ON {HISTORY}") if table == TABLE else (f"UPDATE ON {table}",)
        _execute(
            _function(f"RAISE EXCEPTION 'this row is cursed' USING ERRCODE = '{sqlstate}'"),
            *(
                f"CREATE {kind} refuse {timing} {change} {deferrable} FOR EACH ROW WHEN ({where}) EXECUTE FUNCTION refuse()"
                for change in changes
            ),
        )
    else:
        _execute(
            f"CREATE TRIGGER refuse BEFORE UPDATE ON {table} WHEN {where} BEGIN SELECT RAISE(ABORT, 'this row is cursed'); END"
        )
    try:
        yield
    finally:
        _execute("DROP FUNCTION refuse CASCADE" if connection.vendor == "postgresql" else "DROP TRIGGER IF EXISTS refuse")


def cleared():
    """From now on the rows can be changed.

    On PostgreSQL the triggers stay until the block ends: dropping them locks two tables, and deadlocks with a running relay.
    """
    _execute(_function("RETURN NEW") if connection.vendor == "postgresql" else "DROP TRIGGER refuse")


def _function(body):
    return f"CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body}; END $$"


def _execute(*statements):
    for statement in statements:
        executed(statement)
