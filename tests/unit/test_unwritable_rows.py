"""Which of the rows that the database refuses to change are tried again, and when."""

import pytest

from outbox.store import unwritable_rows
from outbox.store.unwritable_rows import LONGEST_SKIP_SECONDS, UnwritableRows

REFUSED = ValueError("refused")


@pytest.fixture
def pass_by(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(unwritable_rows, "monotonic", lambda: now[0])

    def leap(seconds):
        now[0] += seconds

    return leap


def refused(*positions, at_once=2, keys=unwritable_rows.NO_KEYS):
    rows = UnwritableRows("default")
    rows.at_once = at_once
    rows.skip(dict.fromkeys(positions, REFUSED), keys)
    return rows


def test_due_rows_are_tried_in_turn_although_some_of_them_are_never_found(pass_by):
    rows = refused(*range(6))
    pass_by(2.0)

    tried = [set(range(6)) - set(rows.skipped()) for _ in range(3)]

    assert sorted(map(len, tried)) == [2, 2, 2]
    assert set.union(*tried) == set(range(6))


def test_due_row_that_has_not_had_its_turn_is_not_forgotten(pass_by):
    rows = refused(1, 2, 3, at_once=1)
    pass_by(10 * LONGEST_SKIP_SECONDS)

    assert len(rows.skipped()) == 2
    assert rows.count == 3


def test_row_is_forgotten_some_time_after_its_turn_unless_it_is_refused_again(pass_by):
    rows = refused(1, 2)
    pass_by(2.0)
    rows.skipped()
    rows.skip({2: REFUSED})
    pass_by(LONGEST_SKIP_SECONDS)
    rows.skipped()

    assert 1 not in rows
    assert 2 in rows


def test_rows_of_a_key_are_tried_together(pass_by):
    """Each one that is skipped would hold back the others."""
    rows = refused(1, at_once=1, keys={1: "a"})
    pass_by(2.0)
    rows.skip({2: REFUSED, 3: REFUSED}, {2: "a", 3: "b"})

    assert rows.skipped() == {3: "b"}
