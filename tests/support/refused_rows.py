"""Rows that the database refuses to change, as by a trigger of somebody else's or a damaged index."""

from contextlib import contextmanager

from django.db import connection

POISON = "poison"
"""The beginning of the biz-id of such a row."""
OUTBOX = "outbox_outboxmessage"


@contextmanager
def refused(sqlstate="P0001", *, deferred=False, where="NEW.biz_id LIKE 'poison%'", table=OUTBOX):
    """No row for which this holds can be changed; what PostgreSQL says about it has this SQLSTATE."""
    if connection.vendor == "postgresql":
        timing = "CONSTRAINT TRIGGER refuse AFTER UPDATE" if deferred else "TRIGGER refuse BEFORE UPDATE"
        _execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION 'this row is cursed' USING ERRCODE = '{sqlstate}'; END $$",
            f"CREATE {timing} ON {table} {'DEFERRABLE INITIALLY DEFERRED' if deferred else ''} "
            f"FOR EACH ROW WHEN ({where}) EXECUTE FUNCTION refuse()",
        )
    else:
        _execute(
            f"CREATE TRIGGER refuse BEFORE UPDATE ON {table} WHEN {where} BEGIN SELECT RAISE(ABORT, 'this row is cursed'); END"
        )
    try:
        yield
    finally:
        cleared(table)


def cleared(table=OUTBOX):
    """From now on it can."""
    if connection.vendor == "postgresql":
        _execute(f"DROP TRIGGER IF EXISTS refuse ON {table}", "DROP FUNCTION IF EXISTS refuse")
    else:
        _execute("DROP TRIGGER IF EXISTS refuse")


def _execute(*statements):
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
