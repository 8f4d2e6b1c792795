"""A stored message whose row the database refuses to change: the others are run, and it is reported with its remedy."""

from __future__ import annotations

from functools import partial

import pytest
from django.db import transaction

from exactly_once.process.loop import StopRequest
from inbox.models import InboxMessage, State
from inbox.receiving.admit import hand_over
from inbox.receiving.reading import read
from inbox.runner import Runner
from inbox.store import arrivals
from tests.support.deliveries import OPTIONS, an_envelope, drain, effects, the_effect, the_row
from tests.support.refused_rows import POISON, cleared, refused
from tests.support.relaying import in_threads
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

TABLE = "inbox_inboxmessage"
REFUSED = "refuses to change the rows of"
CLAIMED = "NEW.biz_id LIKE 'poison%'"
BEGUN = "NEW.biz_id LIKE 'poison%' AND NEW.next_attempt_at IS NULL"
MANY = 20

cursed = partial(refused, table=TABLE)


def stored(handler, **attributes):
    """Store a message of `handler` that is due, as local:// and the careful path do."""
    arrival = read(handler, an_envelope(**attributes), OPTIONS)
    assert arrivals.store_due(handler.using, arrival.row, OPTIONS.DUPLICATE_TIMEOUT)


def among_others(handler, bad=1):
    for number in range(MANY // 2):
        stored(handler, biz_id=f"before-{number}")
    for number in range(bad):
        stored(handler, biz_id=f"{POISON}-{number}")
    for number in range(MANY // 2):
        stored(handler, biz_id=f"after-{number}")


def done():
    return InboxMessage.objects.filter(state=State.DONE).count()


def reports(caplog):
    return [record.getMessage() for record in caplog.records if REFUSED in record.getMessage()]


def errors(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname in {"WARNING", "ERROR"}]


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(CLAIMED, id="claimed", marks=pytest.mark.every_database),
        # What SQLite says is about the values of the row, and so a failed attempt.
        pytest.param(BEGUN, id="begun"),
    ],
)
class TestOneRow:
    def test_all_others_are_run_without_a_pause_and_it_is_reported_once(self, handles, caplog, where):
        among_others(handles(the_effect))
        with cursed(where=where):
            assert drain() == MANY

        row = the_row(biz_id=f"{POISON}-0")
        assert (done(), effects(row.biz_id)) == (MANY, 0)
        assert row.attempts == 0
        [report] = errors(caplog)
        assert f"of 1 stored messages, so they cannot be run; the first is row {row.pk}: this row is cursed" in report
        assert "Look for a trigger" in report

    def test_it_is_run_once_its_row_can_be_changed(self, handles, caplog, where):
        handler = handles(the_effect)
        among_others(handler)
        stop = StopRequest()
        with cursed(where=where), in_threads(partial(Runner(OPTIONS).run, stop), stop=stop):
            wait_until(lambda: done() == MANY)
            stored(handler, biz_id="later")
            wait_until(lambda: done() == MANY + 1)
            assert the_row(biz_id=f"{POISON}-0").state == State.RECEIVED
            cleared()
            wait_until(lambda: done() == MANY + 2)

        assert effects(f"{POISON}-0") == 1
        assert len(reports(caplog)) == 1

    def test_later_messages_of_its_key_do_not_overtake_it(self, handles, where):
        seen = []
        handler = handles(lambda message: seen.append(message.biz_id), ordered=True)
        for name, key in ((POISON, "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")):
            with transaction.atomic():
                hand_over(handler, read(handler, an_envelope(biz_id=name, key=key), OPTIONS))
        with cursed(where=where):
            drain()

        assert seen == ["b1", "b2"]
        drain()
        assert seen == ["b1", "b2", POISON, "a2"]


@pytest.mark.every_database
def test_others_behind_forty_such_rows_are_run(handles, caplog):
    among_others(handles(the_effect), bad=40)
    stop = StopRequest()
    with cursed(where=CLAIMED), in_threads(partial(Runner(OPTIONS).run, stop), stop=stop):
        wait_until(lambda: done() == MANY)
        assert len(reports(caplog)) == 1
        cleared()
        wait_until(lambda: done() == MANY + 40)


class TestOnPostgreSQL:
    @pytest.mark.parametrize("sqlstate", ["P0001", "23514", "XX001", "42501"])
    def test_other_messages_run_whatever_error_the_database_has_for_one_row(self, handles, sqlstate):
        among_others(handles(the_effect))
        with cursed(sqlstate, where=CLAIMED):
            assert drain() == MANY

        assert done() == MANY

    def test_row_that_a_deferred_constraint_refuses_at_the_commit_stops_no_other(self, handles):
        among_others(handles(the_effect))
        with cursed(deferred=True, where=CLAIMED):
            assert drain() == MANY

        assert done() == MANY
