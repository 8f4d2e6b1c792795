"""The database refuses to make a row ready: the others become ready, and the row is reported with its remedy."""

from datetime import timedelta

import pytest
from django.db import Error

from exactly_once.sql.now import DatabaseTime
from outbox import pause, resume
from outbox.models import OutboxMessage
from outbox.states import State
from outbox.store import settling, unwritable_rows
from outbox.store.unwritable_rows import UnwritableRows
from tests.support.refused_rows import POISON, cleared, refused, reports
from tests.support.relaying import (
    TOPIC,
    all_published,
    drained,
    ids,
    published,
    relaying,
    row_of,
    set_columns,
    state_of,
    states,
)
from tests.support.waiting import wait_until, wait_until_reached

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.long,
    pytest.mark.usefixtures("reported_once", "unhurried_search"),
]

HOUR = timedelta(hours=1)
MANY = 60
NOT_READY = "NEW.biz_id LIKE 'poison%' AND NEW.state = 'ready'"


def backed_off(message):
    set_columns(message, state=State.RETRYING, available_at=DatabaseTime(-HOUR))


def scheduled(message):
    set_columns(message, state=State.SCHEDULED, available_at=DatabaseTime(-HOUR))


def released(message):
    set_columns(message, state=State.WAITING, key=f"key of {message.id}")


def resumed(message):
    set_columns(message, state=State.PAUSED)
    pause(TOPIC)
    resume(TOPIC)


WAITING_AS = [backed_off, scheduled, released, resumed]


def among_others(wait, bad=1):
    """Messages whose rows cannot be made ready, in the middle of others."""
    before = [published() for _ in range(MANY // 2)]
    poisoned = [published(biz_id=f"{POISON}-{number}") for number in range(bad)]
    others = [*before, *(published() for _ in range(MANY // 2))]
    for message in [*others, *poisoned]:
        wait(message)
    return poisoned, others


def unexpected(caplog):
    return [record.getMessage() for record in caplog.records if "nexpected" in record.getMessage()]


@pytest.mark.every_database
class TestOneRow:
    @pytest.mark.parametrize("timed", [False, True], ids=["without a timer", "with a timer"])
    @pytest.mark.parametrize("wait", WAITING_AS)
    def test_other_messages_are_published_and_a_refused_one_once_its_row_can_be_changed(self, peer, caplog, wait, timed):
        [bad], others = among_others(wait)
        was = state_of(bad)
        with refused(where=NOT_READY), relaying(peer.url, timed=timed):
            wait_until(lambda: all_published(others))
            wait_until(lambda: reports(caplog))
            assert state_of(bad) == was
            cleared()
            wait_until(lambda: state_of(bad) == State.PUBLISHED)

        [report] = reports(caplog)
        assert f"of 1 messages, so they cannot be made ready; the first is message {bad.id} (" in report
        assert f"biz-id {bad.biz_id}): this row is cursed" in report
        assert "Look for a trigger" in report
        assert not unexpected(caplog)
        assert sorted(ids(peer.published)) == sorted(ids([bad, *others])), "each of them once"

    def test_later_messages_of_its_key_do_not_overtake_a_message_that_cannot_be_made_ready(self, peer):
        head, second, third = published(key="k", biz_id=POISON), published(key="k"), published(key="k")
        other = published(key="free")
        for message in (head, second, third, other):
            set_columns(message, state=State.WAITING)
        with refused(where=NOT_READY), relaying(peer.url):
            wait_until(lambda: state_of(other) == State.PUBLISHED)
            later = published()
            wait_until(lambda: state_of(later) == State.PUBLISHED)
            assert [state_of(one) for one in (head, second, third)] == [State.WAITING] * 3
            cleared()
            wait_until(lambda: all_published([head, second, third]))

        assert [one for one in ids(peer.published) if one not in ids([other, later])] == ids([head, second, third])

    def test_message_that_cannot_be_paused_does_not_stop_other_messages(self, peer):
        bad, *others = published("shop.paused", biz_id=POISON), *(published("shop.paused") for _ in range(20))
        pause("shop.paused")
        with refused(where="NEW.biz_id LIKE 'poison%' AND NEW.state = 'paused'"), relaying(peer.url):
            wait_until(lambda: all(state_of(one) == State.PAUSED for one in others))
            free = [published() for _ in range(20)]
            wait_until(lambda: all_published(free))
            assert state_of(bad) == State.READY
        assert str(bad.id) not in ids(peer.published)

    @pytest.mark.parametrize("wait", WAITING_AS)
    def test_drain_ends_and_publishes_all_others_when_one_cannot_be_made_ready(self, peer, wait):
        [bad], others = among_others(wait)
        with refused(where=NOT_READY):
            drained(peer.url)

        assert all_published(others)
        assert str(bad.id) not in ids(peer.published)


@pytest.mark.every_database
class TestManyRows:
    @pytest.mark.parametrize("wait", WAITING_AS)
    def test_messages_among_200_that_cannot_be_made_ready_are_published_with_one_report(self, peer, caplog, wait):
        bad, others = among_others(wait, bad=200)
        with refused(where=NOT_READY), relaying(peer.url, timed=True):
            wait_until(lambda: all_published(others))
            assert not all_published(bad)
            cleared()
            wait_until_reached(len(bad) + len(others), lambda: states().count(State.PUBLISHED))

        assert len(reports(caplog)) == 1

    def test_search_that_takes_too_long_continues_in_later_passes(self, peer, monkeypatch):
        monkeypatch.setattr(unwritable_rows, "_LONGEST_SEARCH_SECONDS", 0)
        bad, others = among_others(backed_off, bad=3)
        with refused(where=NOT_READY), relaying(peer.url, timed=True):
            wait_until(lambda: all_published(others))
            assert not any(state_of(one) == State.PUBLISHED for one in bad)

    def test_error_that_affects_every_row_is_raised(self):
        for _ in range(120):
            backed_off(published())
        with refused(where="NEW.state = 'ready'"), pytest.raises(Error, match="cursed"):
            settling.make_retrying_ready("default", 1000, UnwritableRows("default"))

    def test_one_refused_row_among_many_that_were_not_tried_is_not_raised(self, monkeypatch):
        monkeypatch.setattr(unwritable_rows, "_LONGEST_SEARCH_SECONDS", 0)
        for number in range(120):
            backed_off(published(biz_id=f"{POISON}-{number}"))
        rows = UnwritableRows("default")

        with refused(where=NOT_READY):
            assert settling.make_retrying_ready("default", 1000, rows) == 0

        assert rows.count == 1

    def test_refused_row_is_skipped_until_its_backoff_ends(self):
        [bad], others = among_others(backed_off)
        rows = UnwritableRows("default")
        with refused(where=NOT_READY):
            assert settling.make_retrying_ready("default", 1000, rows) == len(others)
            assert [*rows.skipped()] == [row_of(bad).pk]
            others[0:1] = [published()]
            backed_off(others[0])
            assert settling.make_retrying_ready("default", 1000, rows) == 1
        assert settling.make_retrying_ready("default", 1000, rows) == 0, "it is not due again"
        assert settling.make_retrying_ready("default", 1000) == 1


@pytest.mark.parametrize("wait", WAITING_AS)
def test_row_refused_by_a_deferred_constraint_does_not_stop_others_from_becoming_ready(peer, wait):
    [bad], others = among_others(wait)
    with refused(deferred=True, where=NOT_READY), relaying(peer.url, timed=True):
        wait_until(lambda: all_published(others))
        assert OutboxMessage.objects.exclude(state=State.READY).filter(message_id=bad.id).exists()
    assert str(bad.id) not in ids(peer.published)
