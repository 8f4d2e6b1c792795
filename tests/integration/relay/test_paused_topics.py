"""Topics paused by an operator or by the circuit breaker: the effect on their messages and on others, and the cost."""

from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
from django.db import connection, transaction

from exactly_once.process.loop import StopRequest
from exactly_once.sql.days import day_of
from exactly_once.sql.now import DatabaseTime
from exactly_once.transport.interface import PublishOutcome, Verdict
from outbox import TopicState, pause, publish_now, reschedule, resume
from outbox.errors import InvalidMessage
from outbox.models import OutboxMessage, PausedTopic, TrailEntry
from outbox.states import State
from outbox.store import looking, paused_topics, settling
from outbox.store.dialect import LIVE_PART
from tests.support.deliveries import at_once
from tests.support.relaying import (
    all_published,
    connected,
    drained,
    ids,
    in_hand,
    in_threads,
    one_pass,
    open_transaction,
    published,
    published_many,
    relay_for,
    relaying,
    row_of,
    set_columns,
    state_of,
    states,
)
from tests.support.waiting import pass_by, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

BAD, GOOD = "shop.stock.full", "shop.order.placed"
HOUR = timedelta(hours=1)
many = partial(published_many, topic=BAD)


@pytest.fixture
def room(peer):
    """The broker refuses messages of BAD as long as this is empty."""
    room = []
    peer.script = lambda m: [lambda: (peer.nack if m.routing_key == BAD and not room else peer.ack)(m)]
    return room


def of(topic, state=None):
    rows = OutboxMessage.objects.filter(topic=topic)
    return rows if state is None else rows.filter(state=state)


def count(topic, state):
    return of(topic, state).count()


def the_pause(topic=BAD):
    return PausedTopic.objects.get(topic=topic)


FULL = Verdict(PublishOutcome.NACKED, "full")


def refused_by_breaker(topic=BAD, **columns):
    """The row of a topic that the circuit breaker has paused."""
    given = {"mode": TopicState.REFUSED, "probe_at": DatabaseTime(HOUR), "pause_seconds": 1.0, "reason": "nacked", **columns}
    return PausedTopic.objects.create(topic=topic, paused_at=DatabaseTime(), **given)


@pytest.mark.every_database
class TestPausedByAnOperator:
    def test_nothing_of_the_topic_is_sent_until_it_is_resumed_and_then_everything_in_order(self, peer):
        before = many(30, key="k")
        assert pause(BAD, reason="consumer defect", by="ada") is TopicState.ACTIVE
        with relaying(peer.url, relays=2):
            wait_until(lambda: count(BAD, State.PAUSED) == 30)
            during = [*many(5, key="k"), published(BAD)]
            other = published(GOOD)
            wait_until(lambda: state_of(other) == State.PUBLISHED)
            wait_until(lambda: count(BAD, State.PAUSED) == 36)
            assert ids(peer.published) == ids([other])
            row = the_pause()
            assert (row.paused_by, row.reason, row.probe_at) == ("ada", "consumer defect", None)

            assert resume(BAD, by="ada") is TopicState.PAUSED
            wait_until(lambda: set(states()) == {State.PUBLISHED})
            wait_until(lambda: not PausedTopic.objects.exists())

        sent = [name for name in ids(peer.published) if name not in ids([other, during[-1]])]
        assert sent == ids([*before, *during[:-1]])
        assert set(of(BAD).values_list("attempts", flat=True)) == {1}

    @pytest.mark.long
    def test_operator_takes_over_what_the_circuit_breaker_has_paused(self, peer, room, short_pauses):
        many(60)
        with relaying(peer.url, MAX_ATTEMPTS=1000):
            wait_until(PausedTopic.objects.filter(topic=BAD, pause_seconds__gt=0.1).exists)
            assert pause(BAD, by="ada") is TopicState.REFUSED
            wait_until(lambda: count(BAD, State.PAUSED) == 60)
            sent = len(peer.published)
            room.append(True)
            pass_by(1.0)
            assert len(peer.published) == sent

            assert resume(BAD) is TopicState.PAUSED
            wait_until(lambda: set(states()) == {State.PUBLISHED})

    def test_pause_and_resume_belong_to_the_callers_transaction(self, peer):
        message = published(BAD)
        with transaction.atomic():
            pause(BAD)
            transaction.set_rollback(True)
        drained(peer.url)
        assert state_of(message) == State.PUBLISHED

        pause(BAD)
        with transaction.atomic():
            assert resume(BAD) is TopicState.PAUSED
            transaction.set_rollback(True)
        assert the_pause().mode == TopicState.PAUSED

    def test_pause_and_resume_say_how_they_found_the_topic(self):
        assert resume(BAD) is TopicState.ACTIVE
        assert pause(BAD) is TopicState.ACTIVE
        assert pause(BAD, reason="again") is TopicState.PAUSED
        assert the_pause().reason == "again"
        assert resume(BAD) is TopicState.PAUSED
        assert resume(BAD) is TopicState.RESUMING
        assert pause(BAD) is TopicState.RESUMING
        assert the_pause().mode == TopicState.PAUSED
        refused_by_breaker(GOOD)
        assert resume(GOOD) is TopicState.REFUSED

    @pytest.mark.parametrize("topic", ["shop.*", "#", "", " ", None, "x" * 300, "a\x00b"])
    def test_pause_and_resume_refuse_an_invalid_topic(self, topic):
        for change in (pause, resume):
            with pytest.raises(InvalidMessage):
                change(topic)

    def test_who_paused_and_resumed_is_logged_after_the_commit(self, caplog):
        with transaction.atomic():
            pause(BAD, reason="consumer defect", by="ada")
            assert not caplog.records
        resume(BAD, by="grace")

        assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
            f"outbox: topic '{BAD}' paused by ada: consumer defect",
            f"outbox: topic '{BAD}' resumed by grace",
        ]


class TestPausedMessage:
    @pytest.fixture
    def message(self, peer):
        message = published(BAD, expires_in=2 * HOUR)
        pause(BAD)
        drained(peer.url)
        assert state_of(message) == State.PAUSED
        return message

    def test_paused_message_can_be_rescheduled_or_wanted_now_and_is_paused_again_when_it_is_due(self, peer, message):
        assert reschedule(message.id, delay=HOUR)
        assert state_of(message) == State.SCHEDULED
        set_columns(message, available_at=DatabaseTime())
        drained(peer.url)
        assert (state_of(message), peer.published) == (State.PAUSED, [])
        assert publish_now(message.id)
        drained(peer.url)
        assert (state_of(message), peer.published) == (State.PAUSED, [])
        resume(BAD)
        drained(peer.url)
        assert state_of(message) == State.PUBLISHED

    def test_drain_sends_all_messages_of_a_topic_that_is_resumed_and_only_trail_all_records_the_pause(self, peer, settings):
        for trail, recorded in (("decisions", 0), ("all", 2)):
            settings.OUTBOX = {**settings.OUTBOX, "TRAIL": trail}
            message, *others = many(300)
            pause(BAD)
            drained(peer.url)
            assert count(BAD, State.PAUSED) == 300
            resume(BAD)
            drained(peer.url)
            assert all_published([message, *others])
            assert not PausedTopic.objects.exists()
            entries = TrailEntry.objects.filter(message_id=message.id).values_list("was", "became")
            assert sum(State.PAUSED in entry for entry in entries) == recorded


@pytest.mark.every_database
class TestProbes:
    def test_relays_learn_of_a_pause_from_each_other(self, peer, room):
        """Each of them would otherwise need 20 refusals of its own."""
        many(30)
        drained(peer.url, BACKOFF=(HOUR, HOUR))
        assert the_pause().mode == TopicState.REFUSED
        sent = len(peer.published)
        many(200)
        drained(peer.url, BACKOFF=(HOUR, HOUR))

        assert len(peer.published) <= sent + 5
        assert count(BAD, State.PAUSED) >= 195

    @pytest.mark.long
    def test_probe_that_becomes_due_ends_the_wait_of_an_idle_relay_that_did_not_pause_the_topic(self, peer):
        many(8)
        of(BAD).update(state=State.PAUSED)
        refused_by_breaker(probe_at=DatabaseTime(timedelta(seconds=1)))
        with relaying(peer.url, POLL_INTERVAL=timedelta(seconds=90), WATCHDOG=timedelta(seconds=200)):
            wait_until(lambda: count(BAD, State.PUBLISHED) == 8)
            wait_until(lambda: not PausedTopic.objects.exists())

    def test_refused_probes_double_the_pause_once_for_all_relays(self):
        refused_by_breaker(in_trial=[1, 2, 3])

        assert paused_topics.prolong("default", BAD, FULL, 30.0, 1.0) == "nacked"
        assert paused_topics.prolong("default", BAD, FULL, 30.0, 1.0) is None
        row = the_pause()
        assert (row.pause_seconds, row.reason, row.error_class, row.in_trial) == (2.0, "full", "nacked", [])

        for _ in range(6):
            PausedTopic.objects.update(in_trial=[1])
            paused_topics.prolong("default", BAD, FULL, 30.0, 1.0)
        assert the_pause().pause_seconds == 30.0

    def test_trial_is_claimed_once_and_no_earlier_than_it_is_due(self):
        messages = many(8)
        of(BAD).update(state=State.PAUSED)
        refused_by_breaker()
        assert paused_topics.begin_trial("default", BAD, 5, 1.0) == 0

        PausedTopic.objects.update(probe_at=DatabaseTime(-HOUR))
        assert [paused_topics.begin_trial("default", BAD, 5, 1.0) for _ in range(2)] == [5, 0]
        positions = [row_of(one).pk for one in messages[:5]]
        assert sorted(the_pause().in_trial) == positions == sorted(of(BAD, State.READY).values_list("pk", flat=True))

    def test_pause_of_a_refused_topic_ends_when_it_has_no_messages_left(self):
        message, other = published(BAD), published(GOOD)
        set_columns(message, state=State.RETRYING)
        refused_by_breaker(probe_at=DatabaseTime(-HOUR))
        paused_topics.begin_trial("default", BAD, 5, 1.0)
        assert the_pause(), "one is to be tried again"

        set_columns(message, state=State.CANCELLED)
        PausedTopic.objects.update(probe_at=DatabaseTime(-HOUR))
        paused_topics.begin_trial("default", BAD, 5, 1.0)
        assert not PausedTopic.objects.exists()
        assert state_of(other) == State.READY

    @pytest.mark.parametrize("paused_by", ["", "ada"])
    @pytest.mark.parametrize("mode", ["resuming", "limited"])
    def test_topic_that_is_refused_while_its_messages_are_sent_is_paused_again(self, paused_by, mode):
        refused_by_breaker(paused_by=paused_by, mode=mode, probe_at=None)

        assert paused_topics.pause_refused("default", BAD, FULL, 1.0, timedelta(seconds=1))
        row = the_pause()
        assert (row.mode, row.paused_by, row.pause_seconds) == (TopicState.REFUSED, "", 1.0)
        assert (row.reason, row.error_class) == ("full", "nacked")
        assert not paused_topics.pause_refused("default", BAD, FULL, 1.0, timedelta(seconds=1)), "another relay has done it"

    @pytest.mark.long
    def test_queue_that_accepts_a_few_messages_and_is_full_again_costs_few_others_an_attempt(self, peer):
        room = []
        peer.script = lambda m: [lambda: (peer.ack if room and room.pop() else peer.nack)(m)]
        many(1000)
        with relaying(peer.url, BACKOFF=(HOUR, HOUR)):
            wait_until(lambda: not count(BAD, State.READY))
            attempts = sum(of(BAD).values_list("attempts", flat=True))
            room += [True] * 5
            wait_until(lambda: count(BAD, State.PUBLISHED) == 5)
            wait_until(lambda: the_pause().mode == TopicState.REFUSED and not count(BAD, State.READY))

        assert sum(of(BAD).values_list("attempts", flat=True)) <= attempts + 5 + 10 + 20 + 40


@pytest.mark.every_database
class TestResuming:
    def resuming(self, count):
        """A topic with this many messages of which none has been made ready."""
        many(count)
        of(BAD).update(state=State.PAUSED)
        pause(BAD)
        resume(BAD)

    def test_messages_are_made_ready_in_growing_batches_of_at_most_500_the_oldest_first(self):
        self.resuming(1300)
        batches = []
        while PausedTopic.objects.exists():
            if moved := paused_topics.resume_some("default", BAD, 500):
                ready = list(of(BAD, State.READY).order_by("pk").values_list("pk", flat=True))
                assert len(ready) == moved
                batches.append(moved)
                of(BAD, State.READY).update(state=State.PUBLISHED, day=day_of("default"))
                assert count(BAD, State.PUBLISHED) == of(BAD).filter(pk__lte=ready[-1]).count(), "no older one was left"

        assert batches == [10, 20, 40, 80, 160, 320, 500, 170]

    def test_next_batch_waits_until_half_of_the_last_one_has_left_or_for_some_seconds(self):
        self.resuming(100)
        assert [paused_topics.resume_some("default", BAD, 500) for _ in range(2)] == [10, 0]

        left = of(BAD, State.READY).values_list("pk", flat=True)
        of(BAD).filter(pk__in=list(left[:5])).update(state=State.PUBLISHED, day=day_of("default"))
        assert paused_topics.resume_some("default", BAD, 500) == 20
        PausedTopic.objects.update(probe_at=DatabaseTime(-HOUR))
        assert paused_topics.resume_some("default", BAD, 500) == 40

    def test_messages_whose_row_was_deleted_by_hand_are_resumed(self, peer, caplog):
        many(10)
        of(BAD).update(state=State.PAUSED)
        pause(GOOD)
        published(GOOD)
        with relaying(peer.url):
            wait_until(lambda: count(BAD, State.PUBLISHED) == 10)
            wait_until(lambda: not PausedTopic.objects.filter(topic=BAD).exists())

        assert "which may have been deleted by hand" in caplog.text
        assert count(GOOD, State.PAUSED) == 1


class TestCost:
    @pytest.mark.long
    def test_message_is_written_once_when_it_is_paused_once_when_it_is_resumed_and_never_in_between(
        self, peer, room, short_pauses
    ):
        many(3000)
        with recorded_updates() as updates:
            with relaying(peer.url, relays=2, MAX_ATTEMPTS=1000, BACKOFF=(HOUR, HOUR)):
                wait_until(lambda: not count(BAD, State.READY) and count(BAD, State.PAUSED))
                probes = []
                wait_until(lambda: len(probes.append(the_pause().probe_at) or set(probes)) > 5)
                room.append(True)
                probed = {row for row, changes in updates().items() if "paused > ready" in changes}
                wait_until(lambda: not of(BAD).filter(state__in=[State.READY, State.PAUSED]).exists())
            of_each = updates()
        assert count(BAD, State.PUBLISHED) > 1000
        assert len(probed) < 500
        # A probe may be paused again: the next ones have replaced it before a relay came to it.
        for row, state in of(BAD).exclude(pk__in=probed).values_list("pk", "state"):
            refused = ["ready > retrying"]
            assert of_each.get(row, []) in (
                [refused] if state == State.RETRYING else [[], ["ready > paused", "paused > ready"]]
            )

    def test_reading_the_paused_topics_costs_a_pass_no_statement(self, peer, django_assert_num_queries):
        pause(GOOD)
        with connected(peer.url) as transport:
            published(BAD)
            with django_assert_num_queries(1):
                found = looking.look("default")
            assert [one.topic for one in found.paused] == [GOOD]
            assert one_pass(transport).published == 1


class TestConcurrency:
    @pytest.mark.parametrize("change", [pause, resume], ids=["pausing", "resuming"])
    def test_open_transaction_of_an_operator_holds_up_no_relay(self, peer, change):
        pause(BAD)
        many(50)
        with open_transaction(lambda: change(BAD)), relaying(peer.url):
            wait_until(lambda: count(BAD, State.PAUSED) == 50)
            others = many(50, topic=GOOD)
            wait_until(lambda: {state_of(one) for one in others[::10]} == {State.PUBLISHED})

    def test_row_is_not_deleted_while_a_pass_makes_messages_paused(self):
        """The pass has read the paused topics before the topic was resumed."""
        message = published(BAD)
        pause(BAD)
        position = row_of(message).pk

        with transaction.atomic():
            assert in_hand()
            at_once([lambda: [resume(BAD), paused_topics.resume_some("default", BAD, 500)]])
            assert settling.settle("default", settling.Settlement(paused={BAD: [position]})) == 0
        assert state_of(message) == State.READY, "it was not left behind"

    def test_topic_that_is_paused_in_an_open_transaction_for_the_first_time_holds_up_no_relay(self, peer, room):
        many(50)
        with open_transaction(lambda: pause(BAD, by="ada")), relaying(peer.url, BACKOFF=(HOUR, HOUR)):
            wait_until(lambda: count(BAD, State.RETRYING) == 50)
            other = published(GOOD)
            wait_until(lambda: state_of(other) == State.PUBLISHED)
        assert the_pause().paused_by == "ada"

    def test_relay_that_deletes_the_row_sees_what_a_pass_has_just_paused(self):
        message = published(BAD)
        pause(BAD)

        def settle():
            assert in_hand()
            assert settling.settle("default", settling.Settlement(paused={BAD: [row_of(message).pk]})) == 1

        with open_transaction(settle):
            resume(BAD)
            assert paused_topics.resume_some("default", BAD, 500) == 0
            assert PausedTopic.objects.exists(), "the pass has locked it"
        assert paused_topics.resume_some("default", BAD, 500) == 1
        assert state_of(message) == State.READY

    def test_row_of_a_resuming_topic_stays_while_another_transaction_locks_a_message_of_it(self):
        first, second = many(2)
        of(BAD).update(state=State.PAUSED)
        pause(BAD)
        resume(BAD)
        with open_transaction(lambda: OutboxMessage.objects.select_for_update().get(pk=row_of(first).pk)):
            assert paused_topics.resume_some("default", BAD, 500) == 1
            set_columns(second, state=State.PUBLISHED, day=day_of("default"))
            assert paused_topics.resume_some("default", BAD, 500) == 0
            assert PausedTopic.objects.exists()
        assert paused_topics.resume_some("default", BAD, 500) == 1

    @pytest.mark.long
    def test_pausing_and_resuming_at_random_beside_relays_strands_and_loses_nothing(self, peer):
        stop = StopRequest()
        keys = 10

        def switch():
            for _ in range(60):
                pause(BAD)
                pass_by(0.03)
                resume(BAD)
                pass_by(0.02)

        relays = [relay_for(peer.url, stop) for _ in range(3)]
        names = []

        def write():
            for _ in range(100):
                names.extend(ids(published_many(20, BAD, key=lambda n: f"k{n % keys}", biz_id=lambda n: f"{n % keys}")))

        with in_threads(*(relay.run for relay in relays), stop=stop):
            at_once([switch, write])
            wait_until(lambda: set(states()) == {State.PUBLISHED})
            wait_until(lambda: not PausedTopic.objects.exists())

        sent = ids(peer.published)
        assert Counter(sent) == Counter(names), "each once"
        for key in range(keys):
            order = [str(one) for one in of(BAD).filter(biz_id=str(key)).order_by("pk").values_list("message_id", flat=True)]
            mine = set(order)
            assert [name for name in sent if name in mine] == order


@contextmanager
def recorded_updates():
    """Yields a function that gives each update of a message until now, by its position: its states before and after it."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE recorded_updates (id bigserial, message bigint, change text)")
        cursor.execute(
            "CREATE FUNCTION record_update() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO recorded_updates "
            "(message, change) VALUES (NEW.id, OLD.state || ' > ' || NEW.state); RETURN NULL; END $$"
        )
        cursor.execute(
            f"CREATE TRIGGER record_update AFTER UPDATE ON {LIVE_PART} FOR EACH ROW EXECUTE FUNCTION record_update()"
        )

        def updates():
            cursor.execute("SELECT message, array_agg(change ORDER BY id) FROM recorded_updates GROUP BY message")
            return dict(cursor.fetchall())

        try:
            yield updates
        finally:
            cursor.execute("DROP FUNCTION record_update CASCADE")
            cursor.execute("DROP TABLE recorded_updates")
