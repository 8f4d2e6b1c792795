"""The database refuses to change a row: the others are sent once each, and the row is reported with its remedy."""

from collections import Counter

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from exactly_once.process.clock import monotonic
from exactly_once.sql import unwritable_rows
from exactly_once.sql.unwritable_rows import LONGEST_SKIP_SECONDS
from outbox.models import OutboxMessage
from outbox.relay.passes import Pass
from outbox.states import State
from outbox.store import claiming
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
        monkeypatch.setattr(unwritable_rows, "monotonic", lambda: monotonic() + leapt[0])
        published_many(900, biz_id=lambda number: f"{POISON}-{number}")
        with refused(), connected(peer.url) as transport:
            single = Pass("default", transport, quick())
            for _ in range(12):
                single.run(claiming.look("default").shards, 500)
                leapt[0] += 0.1
            sent = len(peer.published)
            new = published()
            leapt[0] += LONGEST_SKIP_SECONDS - 0.1  # all others are due again
            with CaptureQueriesContext(connection) as statements:
                single.run(claiming.look("default").shards, 500)
            single.close()

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
