"""Statements as they are, on the connection of the test or in a session of its own."""

from contextlib import contextmanager

import psycopg
from django.db import connection, connections


def executed(sql, parameters=None, *, using="default"):
    """The rows of the statement, if it has any."""
    with connections[using].cursor() as cursor:
        cursor.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else []


def fetched(sql, parameters=None, *, using="default"):
    """The first column of the first row."""
    return executed(sql, parameters, using=using)[0][0]


def database_clock():
    """Seconds, by the one clock that all processes share."""
    if connection.vendor == "postgresql":
        return fetched("SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8")
    return fetched("SELECT (JULIANDAY('now') - 2440587.5) * 86400.0")


def another_session(alias="default", **options):
    """A session of psycopg on the database of an alias; as a block, it commits and is closed at its end."""
    known = connections[alias].get_connection_params()
    address = {name: known[name] for name in ("dbname", "user", "password", "host", "port") if name in known}
    return psycopg.connect(**address, **options)


@contextmanager
def as_another_user(*, without=""):
    """As a user who owns nothing and has all rights on tables and sequences, but that to read one of them."""
    executed(
        "CREATE ROLE another_user; GRANT ALL ON ALL TABLES IN SCHEMA public TO another_user; "
        "GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO another_user; "
        f"{f'REVOKE SELECT ON {without} FROM another_user; ' if without else ''}SET ROLE another_user"
    )
    try:
        yield
    finally:
        executed("RESET ROLE; DROP OWNED BY another_user; DROP ROLE another_user")
