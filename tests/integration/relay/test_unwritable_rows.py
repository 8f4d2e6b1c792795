"""The database refuses to change a row, or to make it ready: the others are sent once each, and it is reported once."""

from collections import Counter
from datetime import timedelta

import pytest
from django.db import Error, connection
from django.test.utils import CaptureQueriesContext

from exactly_once.process.clock import monotonic
from exactly_once.sql.now import DatabaseTime
from outbox import pause, resume
from outbox.models import OutboxMessage
from outbox.relay.passes import Pass
from outbox.states import State
from outbox.store import looking, settling, unwritable_rows
from outbox.store.set_aside import LONGEST_SKIP_SECONDS
from outbox.store.unwritable_rows import UnwritableRows
from tests.support.refused_rows import POISON, cleared, refused, reports
from tests.support.relaying import (
    TOPIC,
    Queue,
    all_published,
    connected,
    drained,
    ids,
    one_pass,
    published,
    published_many,
    quick,
    relaying,
    row_of,
    set_columns,
    state_of,
    states,
)
from tests.support.waiting import pass_by, wait_until, wait_until_reached

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.long,
    pytest.mark.usefixtures("reported_once", "unhurried_search"),
]

MANY = 60


def among_others(**options):
    """A message whose row cannot be changed, in the middle of others."""
    before = [published() for _ in range(MANY // 2)]
    bad = published(biz_id=POISON, **options)
    return bad, [*before, *(published() for _ in range(MANY // 2))]


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("outbox")]


class TestOneRow:
    @pytest.mark.parametrize(
        ("sqlstate", "remedy"),
        [
            pytest.param("P0001", "Look for a trigger", marks=pytest.mark.every_database),
            ("23514", "Look for a trigger"),
            ("53100", "Free disk space"),
            ("42501", "Grant"),
            ("XX001", "damaged index"),
        ],
    )
    def test_others_are_sent_once_and_the_refused_row_is_reported_once_with_its_remedy(
        self, rabbitmq_url, caplog, sqlstate, remedy
    ):
        bad, others = among_others()
        with Queue(rabbitmq_url) as queue:
            with refused(sqlstate), relaying(rabbitmq_url):
                wait_until(lambda: all_published(others))
                others += [published() for _ in range(5)]
                wait_until(lambda: all_published(others[-5:]))
                arrived = ids(queue.take_all())
                assert state_of(bad) == State.READY
                [report] = reports(caplog)
                logged = lines(caplog)
                cleared()
                wait_until(lambda: state_of(bad) == State.PUBLISHED)
            arrived += ids(queue.take_all())

        assert sorted(one for one in arrived if one != str(bad.id)) == sorted(ids(others)), "each of them once"
        assert arrived.count(str(bad.id)) == 2, "once before it could not be settled, and once when it could"
        assert f"the first is message {bad.id} (" in report
        assert f"biz-id {POISON})" in report
        assert "this row is cursed" in report
        if connection.vendor == "postgresql":
            assert remedy in report
        assert len(logged) < 5, logged

    @pytest.mark.every_database
    @pytest.mark.parametrize("index", [0, 1, 2], ids=["head", "middle", "last"])
    def test_later_messages_of_its_key_do_not_overtake_a_message_that_cannot_be_settled(self, rabbitmq_url, index):
        messages = [published(key="a", biz_id=POISON if number == index else None) for number in range(3)]
        other = published(key="b")
        with Queue(rabbitmq_url) as queue:
            with refused(), relaying(rabbitmq_url):
                wait_until(lambda: all_published([other, *messages[:index]]))
                messages.append(published(key="a"))
                later = published(key="b")
                wait_until(lambda: all_published([later]))
                assert {state_of(one) for one in messages[index:]} == {State.READY}
                first = [one for one in ids(queue.take_all()) if one not in ids([other, later])]
                cleared()
                wait_until(lambda: all_published(messages))
            again = [one for one in ids(queue.take_all()) if one not in ids([other, later])]

        assert first == ids(messages[:3])
        assert again == ids(messages[index:]), "what was sent after it is sent after it again"

    @pytest.mark.every_database
    def test_other_messages_are_handed_over_by_the_local_transport(self, handles, caplog):
        handles(lambda message: None, topic=TOPIC, name="tests.local")
        bad, others = among_others()
        with refused(), relaying("local://"):
            wait_until(lambda: all_published(others))
            assert state_of(bad) == State.READY
            wait_until(lambda: reports(caplog))
            cleared()
            wait_until(lambda: state_of(bad) == State.PUBLISHED)

    @pytest.mark.every_database
    def test_drain_ends_and_publishes_all_others_when_one_cannot_be_settled(self, rabbitmq_url):
        bad, others = among_others()
        with Queue(rabbitmq_url) as queue, refused():
            drained(rabbitmq_url)
            assert sorted(ids(queue.take_all())) == sorted(ids([bad, *others]))

        assert all_published(others)
        assert state_of(bad) == State.READY

    def test_message_refused_by_the_broker_stays_ready_when_its_row_cannot_be_settled(self, rabbitmq_url, caplog):
        bad, others = published("nobody.listens", biz_id=POISON), [published() for _ in range(10)]
        with Queue(rabbitmq_url), refused(), relaying(rabbitmq_url):
            wait_until(lambda: all_published(others))
            wait_until(lambda: reports(caplog))

        assert (state_of(bad), OutboxMessage.objects.get(biz_id=POISON).attempts) == (State.READY, 0)


@pytest.mark.every_database
class TestManyRows:
    def test_messages_after_200_unsettled_ones_are_published_and_none_of_the_200_is_sent_again(self, rabbitmq_url, caplog):
        bad = [published(biz_id=f"{POISON}-{number}") for number in range(200)]
        others = [published() for _ in range(20)]
        with Queue(rabbitmq_url) as queue, refused(), relaying(rabbitmq_url):
            wait_until(lambda: all_published(others))
            arrived = Counter(ids(queue.take_all()))
            cleared()
            wait_until_reached(len(bad) + len(others), lambda: states().count(State.PUBLISHED))

        assert {arrived[one] for one in ids(bad)} == {1}
        assert max(arrived[one] for one in ids(others)) <= 2, "they may have been in the same batch"
        assert len(reports(caplog)) == 1

    def test_search_for_one_row_among_500_takes_few_statements(self, peer):
        published_many(500, biz_id=lambda number: POISON if number == 300 else None)
        OutboxMessage.objects.update(shard=7)  # a pass reads an equal share of each shard that has messages
        with refused(), connected(peer.url) as transport, CaptureQueriesContext(connection) as statements:
            report = one_pass(transport)

        assert (report.claimed, report.settled) == (500, 499)
        assert len(statements) < 300

    def test_new_message_is_published_beside_hundreds_that_cannot_be_settled_and_only_a_batch_of_them_was_sent(
        self, peer, monkeypatch
    ):
        leapt = [0.0]
        monkeypatch.setattr("outbox.store.set_aside.monotonic", lambda: monotonic() + leapt[0])
        published_many(900, biz_id=lambda number: f"{POISON}-{number}")
        with refused(), connected(peer.url) as transport:
            single = Pass("default", transport, quick())
            for _ in range(12):
                single.run(looking.look("default").shards, 500)
                leapt[0] += 0.1
            sent = len(peer.published)
            new = published()
            leapt[0] += LONGEST_SKIP_SECONDS - 0.1  # all others are due again
            with CaptureQueriesContext(connection) as statements:
                single.run(looking.look("default").shards, 500)

        assert state_of(new) == State.PUBLISHED
        assert len(peer.published) == sent + 1
        assert sent <= 500
        assert len(statements) < 400

    def test_messages_are_sent_once_while_the_database_settles_nothing_and_it_is_reported_once(self, rabbitmq_url, caplog):
        messages = [published() for _ in range(30)]
        with Queue(rabbitmq_url) as queue, refused(where="NEW.state = 'published'"), relaying(rabbitmq_url):
            pass_by(2.5)
            copies = ids(queue.take_all())
            logged = lines(caplog)
            cleared()
            wait_until(lambda: all_published(messages))

        assert sorted(copies) == sorted(ids(messages))
        assert len(logged) < 5, logged
        assert "this row is cursed" in "".join(logged)


class TestOnPostgreSQL:
    def test_row_refused_by_a_deferred_constraint_does_not_stop_others_from_being_settled(self, rabbitmq_url, caplog):
        bad, others = among_others()
        with Queue(rabbitmq_url) as queue, refused(deferred=True), relaying(rabbitmq_url):
            wait_until(lambda: all_published(others))
            assert sorted(ids(queue.take_all())) == sorted(ids([bad, *others]))
            assert len(reports(caplog)) == 1

    def test_each_relay_sends_at_most_one_copy_of_a_message_that_cannot_be_settled(self, rabbitmq_url):
        bad, others = among_others()
        with Queue(rabbitmq_url) as queue, refused(), relaying(rabbitmq_url, relays=3):
            wait_until(lambda: all_published(others))
            pass_by(3.0)
            arrived = ids(queue.take_all())

        assert set(arrived) == set(ids([bad, *others]))
        assert 1 <= arrived.count(str(bad.id)) <= 3


HOUR = timedelta(hours=1)
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


def waiting_among_others(wait, bad=1):
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
class TestOneRowToMakeReady:
    @pytest.mark.parametrize("timed", [False, True], ids=["without a timer", "with a timer"])
    @pytest.mark.parametrize("wait", WAITING_AS)
    def test_other_messages_are_published_and_a_refused_one_once_its_row_can_be_changed(self, peer, caplog, wait, timed):
        [bad], others = waiting_among_others(wait)
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


@pytest.mark.every_database
class TestManyRowsToMakeReady:
    @pytest.mark.parametrize("wait", WAITING_AS)
    def test_messages_among_200_that_cannot_be_made_ready_are_published_with_one_report(self, peer, caplog, wait):
        bad, others = waiting_among_others(wait, bad=200)
        with refused(where=NOT_READY), relaying(peer.url, timed=True):
            wait_until(lambda: all_published(others))
            assert not all_published(bad)
            cleared()
            wait_until_reached(len(bad) + len(others), lambda: states().count(State.PUBLISHED))

        assert len(reports(caplog)) == 1

    def test_search_that_takes_too_long_continues_in_later_passes(self, peer, monkeypatch):
        monkeypatch.setattr(unwritable_rows, "_LONGEST_SEARCH_SECONDS", 0)
        bad, others = waiting_among_others(backed_off, bad=3)
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
        [bad], others = waiting_among_others(backed_off)
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
    [bad], others = waiting_among_others(wait)
    with refused(deferred=True, where=NOT_READY), relaying(peer.url, timed=True):
        wait_until(lambda: all_published(others))
        assert OutboxMessage.objects.exclude(state=State.READY).filter(message_id=bad.id).exists()
    assert str(bad.id) not in ids(peer.published)
