"""The policy of every loop: what it does after an error of its turn."""

import logging

import pytest
from django.db import OperationalError, ProgrammingError, connection

from exactly_once.process.loop import StopRequest
from exactly_once.process.outage import Outage
from exactly_once.sql.turns import Fault, Turns

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def stop():
    """A stop request that is set, so that no test waits."""
    request = StopRequest()
    request.set()
    return request


def error_of(sqlstate, kind=OperationalError):
    error = kind(f"SQLSTATE {sqlstate}")
    error.__cause__ = Exception()
    error.__cause__.sqlstate = error.sqlstate = sqlstate
    return error


OUTAGE, COLLISION, CANCELED = error_of("57P01"), error_of("40P01"), error_of("57014")
MISSING, UNEXPECTED = error_of("42P01", ProgrammingError), ValueError("no such luck")


def failing(error):
    def turn():
        raise error

    return turn


def lines(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def test_result_of_a_turn_is_returned_and_ends_an_outage(stop):
    turns = Turns("loop", "unexpected on %r", database=(outage := Outage("the database")))
    assert turns.take("default", failing(OUTAGE), stop) is None
    assert outage.ongoing

    assert turns.take("default", lambda: 7, stop) == 7

    assert not outage.ongoing


@pytest.mark.parametrize("error", [OUTAGE, COLLISION, CANCELED, MISSING, UNEXPECTED], ids=str)
def test_no_error_ends_the_loop_and_its_connection_is_closed(stop, error):
    connection.ensure_connection()
    before = connection.connection

    assert Turns("loop", "unexpected on %r").take("default", failing(error), stop) is None

    assert before.closed


@pytest.mark.parametrize("error", [CANCELED, MISSING, UNEXPECTED], ids=str)
def test_error_that_waiting_may_not_remove_is_raised_to_a_caller_that_drains(stop, error):
    with pytest.raises(type(error)):
        Turns("loop", "unexpected on %r").take("default", failing(error), stop, raising=True)


@pytest.mark.parametrize("error", [OUTAGE, COLLISION], ids=str)
def test_drain_waits_for_an_unavailable_database(stop, error):
    assert Turns("loop", "unexpected on %r").take("default", failing(error), stop, raising=True) is None


@pytest.mark.parametrize("error", [OUTAGE, COLLISION], ids=str)
def test_loop_without_an_outage_log_leaves_the_report_to_the_others_of_its_process(stop, caplog, error):
    Turns("loop", "unexpected on %r").take("default", failing(error), stop)

    assert lines(caplog, logging.INFO) == []


def test_loop_that_only_collides_reports_once_a_minute_that_it_makes_no_progress(stop, caplog):
    turns = Turns("loop", "unexpected on %r")
    for _ in range(99):
        turns.take("default", failing(COLLISION), stop)
    turns.take("default", lambda: 7, stop)
    assert lines(caplog, logging.INFO) == []

    for _ in range(300):
        turns.take("default", failing(COLLISION), stop, raising=True)

    (line,) = lines(caplog, logging.INFO)
    assert line.startswith("loop: makes no progress on database 'default': 100 tries in a row collided")
    assert "SQLSTATE 40P01" in line


def test_unexpected_error_is_reported_also_within_a_minute_of_collisions_without_progress(stop, caplog):
    turns = Turns("loop", "unexpected error in the loop of %r")
    for error in (*100 * [COLLISION], UNEXPECTED):
        turns.take("default", failing(error), stop)

    collided, unexpected = lines(caplog, logging.WARNING)
    assert collided.startswith("loop: makes no progress")
    assert unexpected == "unexpected error in the loop of 'default'"


def test_unexpected_error_and_missing_table_are_reported_once_a_minute(stop, caplog):
    for error in (UNEXPECTED, MISSING):
        turns = Turns("loop", "unexpected error in the loop of %r")
        for _ in range(3):
            turns.take("default", failing(error), stop)

    unexpected, missing = lines(caplog, logging.ERROR)
    assert unexpected == "unexpected error in the loop of 'default'"
    assert missing.startswith("loop: ")
    assert missing.endswith("It is tried again.")


def test_fault_that_the_loop_handles_itself_is_neither_reported_nor_waited_for(caplog):
    faults = []

    def on_fault(fault, error):
        faults.append((fault, error))
        return True

    turns = Turns("loop", "unexpected on %r", database=Outage("the database"), on_fault=on_fault)
    for error in (OUTAGE, COLLISION, CANCELED, MISSING, UNEXPECTED):
        turns.take("default", failing(error), StopRequest(), raising=True)

    assert faults == list(zip(Fault, (OUTAGE, COLLISION, CANCELED, MISSING, UNEXPECTED), strict=True))
    assert caplog.records == []


def test_outage_says_what_an_operator_can_do(stop, caplog):
    turns = Turns("loop", "unexpected on %r", database=Outage("the database"))

    turns.take("default", failing(error_of("53100")), stop)

    (line,) = lines(caplog, logging.WARNING)
    assert "(SQLSTATE 53100)" in line
    assert "Free disk space on its server." in line
