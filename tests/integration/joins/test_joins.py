"""Joins: once per run id, when all messages have come, in any order and however often; and what happens at the deadline."""

import itertools
import random
import threading
from datetime import timedelta
from functools import partial

import psycopg
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connection, transaction
from django.utils.module_loading import import_string

from exactly_once.console.operators.dead_letters import Refused
from exactly_once.console.operators.dead_letters import read as read_dead_letter
from exactly_once.models import AuditEntry
from inbox.contrib.joins import runs, store
from inbox.contrib.joins.models import Part, Run
from inbox.contrib.joins.store import TOPIC
from inbox.errors import NotCallable, NotEditable
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.operators.dead_letters import letters
from inbox.operators.editing import editable
from inbox.operators.handler_pauses import pause
from inbox.states import Outcome
from inbox.testing import deliver as deliver_and_drain
from inbox.testing import drain as drain_all
from inbox.testing import make_message, run_handler, travel
from outbox import publish
from outbox.testing import run_relay
from tests.support.aliases import the_default_at
from tests.support.decisions import retry, skip
from tests.support.deliveries import InAThread, an_envelope, at_once, deliver, drain, options, run_to_the_end
from tests.support.inbox_rows import delete_messages
from tests.support.joins import NAME, TOPICS, comes, effects, part, report
from tests.support.sql import fetched
from tests.support.waiting import A_WHILE


def the_run(run_id="monday"):
    return Run.objects.select_related("row").get(run_id=run_id)


class ReadsElsewhere:
    def db_for_read(self, model, **hints):
        return "other" if model._meta.app_label == "inbox_joins" else None


ALL = ",".join(TOPICS)
SERIALIZABLE_ROUNDS = 5


@pytest.mark.django_db(transaction=True)
class TestAllCome:
    @pytest.mark.every_database
    @pytest.mark.parametrize("order", list(itertools.permutations(TOPICS)))
    def test_join_runs_once_when_the_last_message_has_arrived_in_any_order(self, joins, order):
        joins(report)
        for topic in order:
            assert not drain()
            assert comes(topic) is Outcome.HANDLED
        drain()

        assert effects() == [("monday", ALL)]
        assert the_run().row.state == "done"

    @pytest.mark.skipif("connection.vendor != 'postgresql'")
    def test_first_parts_of_many_runs_share_a_session(self, joins):
        joins(report)
        sessions = set()
        for number in range(5):
            assert comes(TOPICS[0], f"run-{number}") is Outcome.HANDLED
            sessions.add(fetched("SELECT pg_backend_pid()"))

        assert len(sessions) == 1

    def test_join_gets_each_message_with_its_payload_and_the_run_id(self, joins):
        given = []
        joins(given.append)
        for number, topic in enumerate(TOPICS):
            comes(topic, number=number)
        drain()

        (join,) = given
        assert join.run_id == "monday"
        assert join.missing == ()
        assert [join[topic].payload["number"] for topic in TOPICS] == [0, 1, 2]
        assert [message.topic for message in join.messages.values()] == TOPICS
        assert join.id == the_run().row.message_id
        with pytest.raises(KeyError):
            join["other"]

    @pytest.mark.long
    @pytest.mark.every_database
    def test_duplicates_in_random_order_do_not_start_a_run_again(self, joins):
        joins(report)
        runs = [f"run-{number}" for number in range(10)]
        load = [(topic, run) for topic in TOPICS for run in runs for _ in range(random.randint(1, 3))]
        random.shuffle(load)
        for topic, run in load:
            comes(topic, run, redelivered=random.random() < 0.3)
            drain()

        assert sorted(effects()) == sorted((run, ALL) for run in runs)

    @pytest.mark.every_database
    def test_message_with_other_content_for_a_topic_that_has_arrived_is_a_conflicting_duplicate(self, joins):
        given = []
        joins(given.append)
        comes(TOPICS[0], rows=1)
        assert comes(TOPICS[0], rows=2) is Outcome.DUPLICATE
        comes(TOPICS[1])
        comes(TOPICS[2])
        drain()

        assert [join[TOPICS[0]].payload["rows"] for join in given] == [1]
        assert InboxMessage.objects.get(topic=TOPICS[0]).conflicts == 1

    def test_reused_run_id_of_a_finished_run_starts_nothing(self, joins):
        joins(report)
        for day in range(2):
            for topic in TOPICS:
                comes(topic, "nightly", day=day)
            drain()

        assert effects() == [("nightly", ALL)]
        assert set(InboxMessage.objects.exclude(topic=TOPIC).values_list("conflicts", flat=True)) == {1}

    def test_message_without_run_id_is_a_dead_letter_and_no_part(self, joins):
        joins(report)
        assert deliver(registry.get(f"{NAME}/{TOPICS[0]}"), an_envelope({"day": 1}, topic=TOPICS[0])) is Outcome.DEAD
        assert "run_id" in InboxMessage.objects.get().last_error
        assert not Part.objects.exists()

    @pytest.mark.django_db(transaction=True, databases=["default", "other"])
    def test_messages_of_a_run_are_not_read_from_a_replica(self, joins, settings):
        settings.DATABASE_ROUTERS = [ReadsElsewhere()]
        joins(report)
        for topic in TOPICS:
            comes(topic)
        drain()
        assert effects() == [("monday", ALL)]

    def test_join_of_one_topic_runs_at_once(self, joins):
        joins(report, topics=TOPICS[:1])
        comes(TOPICS[0])
        drain()
        assert effects() == [("monday", TOPICS[0])]

    def test_two_joins_of_one_topic_each_get_its_message(self, joins):
        joins(report, topics=TOPICS[:2])
        joins(report, topics=TOPICS[1:], name="tests.other")
        comes(TOPICS[0])
        for name in (NAME, "tests.other"):
            comes(TOPICS[1], name=name)
        comes(TOPICS[2], name="tests.other")
        drain()
        assert sorted(effects()) == [("monday", ",".join(TOPICS[:2])), ("monday", ",".join(TOPICS[1:]))]

    @pytest.mark.every_database
    def test_join_that_fails_is_retried_with_all_messages_and_its_effect_happens_once(self, joins):
        attempts = []

        def fails_first(join):
            report(join)
            attempts.append(join.attempt)
            if len(attempts) == 1:
                raise RuntimeError("not yet")

        joins(fails_first)
        for topic in TOPICS:
            comes(topic)
        drain()
        assert effects() == []
        run_to_the_end()

        assert attempts == [1, 2]
        assert effects() == [("monday", ALL)]

    def test_payloads_are_removed_when_the_run_is_done_if_bodies_are_not_kept(self, joins, settings):
        settings.INBOX = {"KEEP_HISTORY": None}
        joins(report)
        for topic in TOPICS:
            comes(topic)
        drain(options(KEEP_HISTORY=None))
        assert effects() == [("monday", ALL)]
        assert {bytes(body) for body in Part.objects.values_list("body", flat=True)} == {b""}

    @pytest.mark.every_database
    def test_purge_deletes_a_finished_run_with_its_row(self, joins):
        joins(report)
        for run in ("monday", "tuesday"):
            comes(TOPICS[0], run)
        for topic in TOPICS[1:]:
            comes(topic)
        drain()
        travel(timedelta(days=31))
        call_command("exactly_once_purge", app="inbox")

        assert list(Run.objects.values_list("run_id", flat=True)) == ["tuesday"]
        assert Part.objects.count() == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.every_database
class TestAtTheSameMoment:
    def test_twenty_threads_with_all_messages_of_one_run_start_it_once(self, joins):
        topics = [f"part.{number}" for number in range(20)]
        joins(report, topics=topics)
        at_once([lambda topic=topic: comes(topic) for topic in topics])
        run_to_the_end()
        assert effects() == [("monday", ",".join(topics))]
        assert the_run().row.attempts == 1

    def test_twenty_threads_with_copies_of_the_last_message_start_the_run_once(self, joins):
        joins(report)
        comes(TOPICS[0])
        comes(TOPICS[1])
        last = part(TOPICS[2])
        at_once([lambda: deliver(registry.get(f"{NAME}/{TOPICS[2]}"), last) for _ in range(20)])
        run_to_the_end()
        assert effects() == [("monday", ALL)]

    def test_last_message_while_the_row_of_the_run_is_locked_is_deferred_and_not_lost(self, joins):
        joins(report)
        comes(TOPICS[0])
        comes(TOPICS[1])
        held, release = threading.Event(), threading.Event()

        def hold():
            with transaction.atomic():
                InboxMessage.objects.select_for_update().get(topic=TOPIC)
                held.set()
                release.wait(A_WHILE)

        with InAThread(hold):
            assert held.wait(A_WHILE)
            if connection.vendor == "postgresql":
                assert comes(TOPICS[2]) is Outcome.STORED
            release.set()
        comes(TOPICS[2])
        run_to_the_end()
        assert effects() == [("monday", ALL)]


@pytest.mark.django_db(transaction=True)
class TestUnderStricterIsolation:
    """SQLite runs one writing transaction at a time."""

    @pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
    def test_last_two_messages_start_the_run_under_stricter_isolation(self, joins, level, monkeypatch):
        joins(report)
        comes(TOPICS[0])
        first_has_locked, second_has_begun = threading.Event(), threading.Event()
        locks, lock = [], store.lock

        def in_turn(*given):
            locks.append(given)
            if len(locks) == 1:
                locked = lock(*given)
                first_has_locked.set()
                assert second_has_begun.wait(A_WHILE)
                return locked
            if len(locks) == 2:
                # Its snapshot is older than the commit of the first.
                assert InboxMessage.objects.exists()
                second_has_begun.set()
            return lock(*given)

        with the_default_at(OPTIONS={"isolation_level": psycopg.IsolationLevel[level]}):
            monkeypatch.setattr(store, "lock", in_turn)
            with InAThread(lambda: comes(TOPICS[1])):
                assert first_has_locked.wait(A_WHILE)
                comes(TOPICS[2])
            drain()
            assert effects() == [("monday", ALL)]

    @pytest.mark.long
    def test_messages_of_many_runs_that_arrive_together_do_not_collide_under_serializable_isolation(self, joins):
        joins(report)
        with the_default_at(OPTIONS={"isolation_level": psycopg.IsolationLevel.SERIALIZABLE}):
            for number in range(SERIALIZABLE_ROUNDS):
                arrive = [partial(comes, topic, f"run-{number}-{run}") for topic in TOPICS for run in range(4)]
                assert at_once(arrive) == [Outcome.HANDLED] * len(arrive)
            drain()
        assert len(effects()) == 4 * SERIALIZABLE_ROUNDS


@pytest.mark.django_db(transaction=True)
@pytest.mark.every_database
class TestAtTheDeadline:
    def test_run_past_its_deadline_is_a_dead_letter_that_names_the_missing_messages(self, joins):
        """The deadline counts from the first message."""
        joins(report, topics=[*TOPICS, "another"])
        comes(TOPICS[1])
        travel(timedelta(hours=1))
        comes("another")
        travel(timedelta(minutes=59))
        assert not drain()
        travel(timedelta(minutes=2))
        drain()

        row = the_run().row
        assert row.state == "dead"
        assert f"{TOPICS[0]}, {TOPICS[2]}" in row.last_error
        assert effects() == []

    def test_join_is_called_at_the_deadline_with_the_missing_topics_if_it_says_so(self, joins):
        joins(report, on_missing="call")
        comes(TOPICS[1])
        travel(timedelta(hours=3))
        drain()
        assert effects() == [("monday", f"{TOPICS[1]},-{TOPICS[0]},-{TOPICS[2]}")]

    def test_message_after_the_deadline_is_stored_and_starts_nothing_until_its_run_is_retried(self, joins, caplog):
        joins(report)
        for topic in TOPICS[:2]:
            comes(topic)
        travel(timedelta(hours=3))
        drain()
        assert comes(TOPICS[2]) is Outcome.HANDLED
        run_to_the_end()

        assert effects() == []
        assert the_run().row.state == "dead"
        assert runs.missing(the_run()) == ()
        assert "came too late for the run monday" in caplog.text
        assert retry("default", the_run().row_id)
        drain()
        assert effects() == [("monday", ALL)]

    def test_run_waits_an_hour_at_most_for_a_stored_message_and_then_names_it(self, joins):
        joins(report)
        comes(TOPICS[0])
        pause(f"{NAME}/{TOPICS[1]}")
        comes(TOPICS[1], "tuesday", redelivered=True)  # it may be of any run, because it is not read
        stored = InboxMessage.objects.get(topic=TOPICS[1]).pk
        travel(timedelta(hours=2, minutes=1))
        drain()
        assert the_run().row.state == "retrying"
        travel(timedelta(hours=1))
        drain()
        assert the_run().row.state == "dead"
        assert f"row {stored} ({TOPICS[1]})" in the_run().row.last_error

    def test_message_that_comes_while_its_run_is_called_without_it_is_reported(self, joins, caplog):
        def waits(join):
            report(join)
            began.set()
            if connection.vendor == "postgresql":
                assert go.wait(A_WHILE)

        began, go = threading.Event(), threading.Event()
        joins(waits, on_missing="call", topics=TOPICS[:2])
        comes(TOPICS[0])
        travel(timedelta(hours=3))
        with InAThread(drain):
            assert began.wait(A_WHILE)
            assert comes(TOPICS[1]) is Outcome.HANDLED
            go.set()
        run_to_the_end()

        assert effects() == [("monday", f"{TOPICS[0]},-{TOPICS[1]}")]
        assert f"of topic {TOPICS[1]} came too late for the run monday" in caplog.text

    def test_retry_before_the_deadline_starts_nothing_and_the_last_message_does(self, joins):
        joins(report)
        comes(TOPICS[0])
        retry("default", the_run().row_id)
        drain()
        assert the_run().row.state == "retrying"
        assert effects() == []
        for topic in TOPICS[1:]:
            comes(topic)
        drain()
        assert effects() == [("monday", ALL)]

    def test_skipped_run_ignores_its_later_messages(self, joins):
        joins(report)
        comes(TOPICS[0])
        skip("default", the_run().row_id, "not needed")
        for topic in TOPICS[1:]:
            comes(topic)
        run_to_the_end()
        assert effects() == []
        assert the_run().row.state == "skipped"


@pytest.mark.django_db(transaction=True)
class TestDecisions:
    @pytest.fixture
    def dead(self, joins):
        joins(report)
        comes(TOPICS[0])
        travel(timedelta(hours=3))
        drain()
        assert the_run().row.state == "dead"
        return the_run()

    def test_row_of_a_run_is_neither_corrected_nor_imported(self, dead):
        with pytest.raises(NotEditable, match="the row of a join's run"):
            editable(dead.row)
        (line,) = letters.lines(InboxMessage.objects.filter(pk=dead.row_id))
        _letters, values = read_dead_letter(line.encode(), [letters])
        delete_messages()
        with pytest.raises(Refused, match="the row of a join's run"):
            letters.store("default", values, "imported")

    def test_partly_completed_run_stays_dead_and_takes_no_message_that_it_does_not_wait_for(self, dead):
        with pytest.raises(runs.NotDecidable, match=r"does not wait for orders.exported"):
            runs.complete("default", dead.pk, {TOPICS[0]: {}, TOPICS[1]: {}}, by="by anna")
        assert Part.objects.count() == 1
        assert runs.complete("default", dead.pk, {TOPICS[1]: {}}, by="by anna")
        drain()
        assert runs.missing(the_run()) == (TOPICS[2],)
        assert the_run().row.state == "dead"
        retry("default", dead.row_id)
        drain()
        assert (the_run().row.state, effects()) == ("dead", [])

    def test_extended_run_waits_until_the_new_deadline_and_is_dead_again_then(self, dead):
        runs.extend("default", dead.pk, timedelta(hours=1), by="by anna")
        travel(timedelta(hours=1, seconds=1))
        drain()
        assert the_run().row.state == "dead"
        assert runs.extend("default", dead.pk, timedelta(hours=1), by="by anna")
        assert not drain()
        for topic in TOPICS[1:]:
            comes(topic)
        drain()
        assert effects() == [("monday", ALL)]

    def test_run_that_is_complete_starts_when_its_deadline_is_extended(self, dead):
        for topic in TOPICS[1:]:
            comes(topic)
        runs.extend("default", dead.pk, timedelta(hours=1), by="by anna")
        drain()
        assert effects() == [("monday", ALL)]

    def test_started_run_is_called_without_the_missing_messages_once_and_allows_no_decision_then(self, dead):
        assert runs.start("default", dead.pk, by="by anna")
        assert runs.start("default", dead.pk, by="by bert")
        drain()
        assert not runs.start("default", dead.pk, by="by anna")
        assert not runs.extend("default", dead.pk, timedelta(hours=1), by="by anna")
        assert not runs.complete("default", dead.pk, {TOPICS[1]: {}}, by="by anna")
        assert Part.objects.count() == 1
        assert not AuditEntry.objects.exists()
        for topic in TOPICS[1:]:
            comes(topic)
        run_to_the_end()
        assert effects() == [("monday", f"{TOPICS[0]},-{TOPICS[1]},-{TOPICS[2]}")]


@pytest.mark.django_db(transaction=True)
class TestWithTheHelpersForTests:
    def test_published_messages_reach_the_join_through_the_local_transport(self, joins):
        joins(report)
        with transaction.atomic():
            for topic in TOPICS:
                publish(topic, {"run_id": "monday"})
        run_relay()
        assert effects() == [("monday", ALL)]
        assert registry.for_topic(TOPIC) == [], "nothing can be published to the topic of the runs"

    def test_delivered_messages_reach_the_join(self, joins):
        joins(report)
        deliver_and_drain(*(make_message(topic, {"run_id": "monday"}) for topic in TOPICS), times=2)
        assert effects() == [("monday", ALL)]
        assert drain_all() == 0

    @pytest.mark.parametrize("count", [3, 2])
    def test_run_handler_calls_the_join_with_the_given_messages(self, joins, count):
        function = joins(report)
        run_handler(function, *(make_message(topic, {"run_id": "monday"}) for topic in TOPICS[:count]))
        assert effects() == [("monday", ",".join([*TOPICS[:count], *(f"-{topic}" for topic in TOPICS[count:])]))]
        assert not InboxMessage.objects.exists()

    def test_run_handler_refuses_a_payload_for_a_join(self, joins):
        with pytest.raises(ValueError, match="needs messages from make_message"):
            run_handler(joins(report), {"run_id": "monday"})


class TestDeclaring:
    @pytest.mark.parametrize(
        ("arguments", "error", "words"),
        [
            ({"deadline": timedelta()}, ValueError, "longer than zero"),
            ({"deadline": 7200}, TypeError, "timedelta"),
            ({"topics": [TOPICS[0], TOPICS[0]]}, ValueError, "each may be listed once"),
            ({"topics": ["orders.*"]}, ValueError, "wildcard"),
            ({"topics": [TOPIC]}, ValueError, "topic of the runs"),
            ({"topics": "orders.exported"}, TypeError, "must be a list of topics"),
            ({"topics": []}, ValueError, "has one message of each topic"),
            ({"on_missing": "ignore"}, ValueError, "must be 'dead' or 'call'"),
            ({"correlate": None}, TypeError, "correlate is None"),
        ],
    )
    def test_invalid_options_are_refused(self, joins, arguments, error, words):
        with pytest.raises(error, match=words):
            joins(report, **arguments)
        assert registry.get(NAME) is None

    @pytest.mark.parametrize("option", [{"ordered": True}, {"group_commit": 5}, {"biz_id": "id"}, {"start_from": "first"}])
    def test_join_does_not_take_options_of_other_handlers(self, joins, option):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            joins(report, **option)

    def test_generator_function_is_refused(self, joins):
        def generates(join):
            yield join

        with pytest.raises(NotCallable):
            joins(generates)

    @pytest.mark.parametrize("name", ["joined_handler", "correlated"])
    def test_use_without_the_app_is_refused(self, settings, name):
        settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app != "inbox.contrib.joins"]
        with pytest.raises(ImproperlyConfigured, match=r"add 'inbox.contrib.joins' to INSTALLED_APPS"):
            import_string(f"inbox.contrib.joins.{name}")
