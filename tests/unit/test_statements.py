"""Which statements of a handler end the transaction of the inbox, however they are written."""

from types import SimpleNamespace

import pytest
from psycopg import sql

from inbox.transactions.sessions import controls_transaction

POSTGRESQL = SimpleNamespace(vendor="postgresql", connection=None)
SQLITE = SimpleNamespace(vendor="sqlite", connection=None)


@pytest.mark.parametrize(
    "statement",
    [
        "COMMIT",
        "  commit work",
        "/* x */ COMMIT",
        "/* /* x */ */ COMMIT",
        "-- c\nCOMMIT",
        ";COMMIT",
        "; /* x */ ; -- c\n end",
        "SELECT 1; COMMIT",
        "SELECT ';'; ROLLBACK",
        "SELECT 'it''s'; COMMIT",
        r"SELECT E'it\'s'; COMMIT",
        "SELECT $$ ; $$; COMMIT",
        "SELECT $a$ ; $b$ $a$; COMMIT",
        'SELECT 1 AS "a;b"; COMMIT',
        "START  TRANSACTION",
        "PREPARE TRANSACTION 'x'",
        "COMMIT PREPARED 'x'",
        "ROLLBACK",
        "ROLLBACK AND CHAIN",
        "ABORT",
        b"/* x */ COMMIT",
        sql.SQL("COMMIT"),
        sql.SQL("{} {}").format(sql.SQL("COMMIT"), sql.SQL("WORK")),
    ],
    ids=repr,
)
def test_statement_that_ends_or_begins_a_transaction_is_recognised(statement):
    assert controls_transaction(statement, POSTGRESQL)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 1",
        "",
        "SAVEPOINT a",
        "ROLLBACK TO a",
        "ROLLBACK WORK TO SAVEPOINT a",
        "RELEASE SAVEPOINT a",
        "SELECT 'COMMIT'",
        "SELECT '; COMMIT'",
        "SELECT 1 -- ; COMMIT",
        "SELECT 1 /* ; COMMIT */",
        "/* /* */ ; COMMIT */ SELECT 1",
        "SELECT $$; COMMIT $$",
        'SELECT 1 AS "; COMMIT"',
        "SELECT CASE WHEN true THEN 1 END",
        "INSERT INTO commits VALUES (%s)",
        "UPDATE t SET begin = %s",
        "DO $$ BEGIN PERFORM 1; END $$",
        "CREATE TRIGGER t AFTER INSERT ON a BEGIN SELECT 1; END",
        "PREPARE q AS SELECT 1",
        b"SELECT 'COMMIT'",
        sql.SQL("SELECT {}").format(sql.Literal("; COMMIT")),
    ],
    ids=repr,
)
def test_statement_that_leaves_the_transaction_open_is_not_refused(statement):
    assert not controls_transaction(statement, POSTGRESQL)


def test_comments_of_sqlite_do_not_nest():
    assert controls_transaction("/* /* */ COMMIT", SQLITE)
    assert not controls_transaction("/* /* */ COMMIT", POSTGRESQL)
