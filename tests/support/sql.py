"""Statements as they are, on the connection of the test or in a session of its own."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
from django.db import connection, connections

from tests.support.waiting import A_WHILE, wait_until


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


def while_another_session(changes, act):
    """What `act` returns if another session has changed its rows by this statement, and commits when `act` waits for them."""

    def acting():
        try:
            return act()
        finally:
            connections.close_all()

    with another_session() as other, ThreadPoolExecutor(1) as thread:
        other.execute(changes)
        answer = thread.submit(acting)
        wait_until(lambda: executed("SELECT 1 FROM pg_locks WHERE NOT granted"))
        other.commit()
        return answer.result(A_WHILE)


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
