"""restore(): a cancelled, expired or dead message becomes scheduled or ready again, in place and once."""

import re
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random

import pytest
from django.core.management import CommandError
from django.db import connection, transaction
from django.utils import timezone

from exactly_once.models import AuditEntry
from exactly_once.sql.now import DatabaseTime
from outbox import Decision, InvalidMessage, Outcome, cancel, publish, publish_now, reschedule, restore
from outbox.models import OutboxMessage, TrailEntry, UniqueMessage
from outbox.states import PUBLISH_NOW, RESTORE, RESUME, State
from outbox.store import decision_rows, settling
from outbox.store.transitions import move
from tests.support.commands import output_of
from tests.support.deliveries import InAThread, at_once
from tests.support.many_rows import multiply
from tests.support.open_transactions import lock_waits
from tests.support.relaying import TOPIC, drained, ids, published, row_of, set_columns, state_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db
every_database = pytest.mark.every_database

HOUR = timedelta(hours=1)
A_MOMENT = timedelta(minutes=5)
RESTORABLE = [State.CANCELLED, State.EXPIRED, State.DEAD]


def ended(state=State.CANCELLED, **options):
    """A message that ended so an hour ago, after three attempts."""
    message = published(**options)
    set_columns(message, state=state, attempts=3, last_error="refused", settled_at=DatabaseTime(-HOUR))
    return message


def make_due(message, ago):
    """Set the due time to `ago` before now and keep the time from there to the expiry."""
    row = row_of(message)
    expires_at = row.expires_at and DatabaseTime(-ago + (row.expires_at - row.available_at))
    set_columns(message, deliver_at=DatabaseTime(-ago), available_at=DatabaseTime(-ago), expires_at=expires_at)


def is_about(instant, expected):
    return abs(instant - expected) < A_MOMENT


run = partial(output_of, "outbox_restore")


@every_database
class TestRestoredMessage:
    @pytest.mark.parametrize("state", RESTORABLE)
    @pytest.mark.parametrize("ago", [-2 * HOUR, None, 3 * HOUR], ids=["ahead", "not delayed", "due before"])
    def test_restored_message_is_scheduled_for_its_time_or_ready(self, state, ago):
        ahead = ago is not None and ago < timedelta()
        message = ended(state, delay=HOUR if ago else None, expires_in=HOUR if ahead else None)
        if ago:
            make_due(message, ago)
        before = row_of(message)
        became = State.SCHEDULED if ahead else State.READY

        assert restore(message.id) == Decision(Outcome.RESTORED, became)

        row = row_of(message)
        assert (row.pk, row.state, row.attempts, row.settled_at) == (before.pk, became, 0, None)
        assert (row.last_error, row.deliver_at, row.expires_at) == ("refused", before.deliver_at, before.expires_at)
        if ahead:
            assert row.available_at == row.deliver_at
        else:
            assert is_about(row.available_at, timezone.now())
            assert row.available_at != row.created_at, "a relay has read that index past its place"
        entry = TrailEntry.objects.get(message_id=message.id, became=became, reason="restore()")
        assert entry.was == state

    @pytest.mark.django_db(transaction=True)
    def test_restored_message_is_published_once_with_its_message_id_and_marked_as_a_replay_behind_its_head(self, peer):
        head, later = ended(State.DEAD, key="k"), ended(State.EXPIRED, key="k", expires_in=HOUR)
        make_due(later, 5 * HOUR)

        assert restore(later.id)
        assert restore(later.id) == Decision(Outcome.TOO_LATE, State.READY)
        drained(peer.url)
        assert (state_of(later), peer.published) == (State.WAITING, [])
        assert restore(head.id)
        drained(peer.url)

        assert ids(peer.published) == ids([head, later])
        assert {arrived.headers["cloudEvents:replay"] for arrived in peer.published} == {"operator"}
        assert state_of(later) == State.PUBLISHED

    def test_restored_message_expires_after_its_original_lifetime_each_time(self):
        message = ended(State.EXPIRED, expires_in=10 * A_MOMENT)
        make_due(message, 24 * HOUR)
        for _ in range(2):
            assert restore(message.id)

            row = row_of(message)
            assert is_about(row.expires_at - row.available_at, 10 * A_MOMENT)
            # An hour goes by, in which it expires.
            past = {name: getattr(row, name) - HOUR for name in ("created_at", "deliver_at", "available_at", "expires_at")}
            set_columns(message, state=State.EXPIRED, settled_at=DatabaseTime(), **past)

        set_columns(message, state=State.READY)
        assert reschedule(message.id, delay=HOUR)
        assert is_about(row_of(message).expires_at, timezone.now() + HOUR + 10 * A_MOMENT)

    @pytest.mark.parametrize("delay", [None, HOUR])
    def test_lifetime_of_a_message_that_was_restored_stays_the_same_after_backoffs_and_pauses(self, delay):
        message = ended(State.EXPIRED, expires_in=48 * HOUR, delay=delay)
        make_due(message, 100 * HOUR)
        assert restore(message.id)

        for backoff in (40 * HOUR, 60 * HOUR):
            failure = settling.Failure(positions=[message.position], error="refused", retry_after=backoff)
            settling.settle("default", settling.Settlement(failed=[failure]))
            assert restore(message.id)
            row = row_of(message)
            assert is_about(row.expires_at, timezone.now() + 48 * HOUR)

        # It was paused from the 10th hour on.
        set_columns(message, state=State.PAUSED, available_at=DatabaseTime(-10 * HOUR), expires_at=DatabaseTime(38 * HOUR))
        move("default", RESUME, [message.position])
        assert publish_now(message.id)
        assert is_about(row_of(message).expires_at, timezone.now() + 48 * HOUR)
        assert reschedule(message.id, delay=HOUR)
        assert is_about(row_of(message).expires_at, timezone.now() + 49 * HOUR)


@every_database
class TestRestore:
    def test_restore_is_rolled_back_with_the_transaction(self):
        message = ended()
        with transaction.atomic():
            assert restore(message.id)
            transaction.set_rollback(True)

        assert state_of(message) == State.CANCELLED
        assert not TrailEntry.objects.filter(message_id=message.id, became=State.READY).exists()

    def test_restore_can_be_limited_to_states_and_can_leave_overdue_messages(self):
        dead, cancelled = ended(State.DEAD, biz_id="b"), ended(biz_id="b")

        assert restore(topic=TOPIC, biz_id="b", states=["cancelled"]) == Decision(Outcome.RESTORED, State.READY)
        assert (state_of(dead), state_of(cancelled)) == (State.DEAD, State.READY)
        for states, shown in ((["dead", "published"], "published"), ([], r"states is \[\]")):
            with pytest.raises(InvalidMessage, match=shown):
                restore(dead.id, states=states)

        late, ahead = ended(biz_id="c"), ended(biz_id="c", delay=HOUR)
        assert restore(topic=TOPIC, biz_id="c", overdue=False) == Decision(Outcome.RESTORED, State.SCHEDULED)
        assert (state_of(late), state_of(ahead)) == (State.CANCELLED, State.SCHEDULED)

    @pytest.mark.django_db(databases=["default", "other"])
    def test_restore_with_using_affects_that_database_only(self):
        message = published(using="other", delay=HOUR)
        assert cancel(message.id, using="other")

        assert not restore(message.id)
        assert state_of(message, "other") == State.CANCELLED
        assert restore(message.id, using="other")
        assert state_of(message, "other") == State.SCHEDULED

    @pytest.mark.django_db(transaction=True)
    def test_concurrent_restores_restore_each_message_once(self):
        positions = [ended().position for _ in range(20)]

        def bring_back():
            return sum(bool(decision_rows.decide("default", RESTORE, [position])) for position in positions)

        counts = at_once([bring_back] * 2)

        assert sum(counts) == TrailEntry.objects.filter(became=State.READY).count() == 20


# On SQLite the only writer waits for the transaction before it: no row is locked.
@pytest.mark.django_db(transaction=True)
def test_restore_leaves_all_unchanged_if_another_transaction_has_locked_one(monkeypatch):
    monkeypatch.setattr("outbox.store.decision_rows.OPERATORS_WAIT", timedelta(milliseconds=50))
    locked, free = ended(biz_id="b"), ended(biz_id="b")
    with transaction.atomic():
        OutboxMessage.objects.select_for_update().get(pk=locked.position)
        [answers] = at_once([lambda: [restore(topic=TOPIC, biz_id="b"), run("--all")]])

    assert answers == [Decision(Outcome.TOO_LATE, State.CANCELLED), "1 message restored: 1 ready. 1 left: 1 locked."]
    assert answers[0].why == "another transaction has locked it"
    assert (state_of(locked), state_of(free)) == (State.CANCELLED, State.READY)


@every_database
class TestUniqueMessages:
    """Of several unique messages with one topic and biz-id, only the last can be restored, and only if it was given up."""

    @pytest.mark.parametrize("first", [State.CANCELLED, State.EXPIRED])
    @pytest.mark.parametrize("second", [State.SCHEDULED, State.READY, State.PUBLISHED, State.DEAD, State.CANCELLED])
    def test_restore_leaves_a_message_that_another_one_has_replaced(self, first, second):
        replaced = ended(first, biz_id="b", unique=True)
        latest = published(biz_id="b", unique=True)
        set_columns(latest, state=second)

        decision = restore(replaced.id)

        assert (decision, "unique=True" in decision.why) == (Decision(Outcome.TOO_LATE, first), True)
        assert (state_of(replaced), state_of(latest)) == (first, second)

    def test_restore_brings_back_the_last_of_several_cancelled_messages_and_is_prevented_by_unique_ones_only(self):
        messages = [ended(biz_id="b", unique=True) for _ in range(3)]
        assert restore(topic=TOPIC, biz_id="b") == Decision(Outcome.RESTORED, State.READY)
        assert [state_of(message) for message in messages] == [State.CANCELLED, State.CANCELLED, State.READY]
        assert not published(biz_id="b", unique=True).created

        plain, unique = ended(biz_id="c"), ended(biz_id="c", unique=True)
        published(biz_id="c")
        assert run("--all", "--dry-run").split("\n\n")[1].startswith("2 messages would be restored, 2 of them overdue")
        assert run("--all") == "2 messages restored: 2 ready. 2 left: 2 replaced."
        assert {state_of(message) for message in (plain, unique)} == {State.READY}

    def test_message_whose_biz_id_was_changed_by_hand_is_restored_under_its_new_one(self):
        message = ended(biz_id="b", unique=True)
        set_columns(message, biz_id="c")

        assert restore(message.id) == Decision(Outcome.RESTORED, State.READY)
        assert [*UniqueMessage.objects.values_list("biz_id", flat=True)] == ["c"]

    @pytest.mark.long
    @pytest.mark.django_db(transaction=True)
    def test_concurrent_publishing_settling_cancelling_and_restoring_leave_one_live_message_of_a_name(self):
        names, done = [f"b{n}" for n in range(20)], []

        def change(seed):
            random = Random(seed)
            for _ in range(120):
                name = random.choice(names)
                match random.choice([*["publish", "cancel", "restore"] * 5, "settle"]):
                    case "settle":
                        positions = OutboxMessage.objects.filter(biz_id=name, state=State.SCHEDULED).values_list(
                            "pk", flat=True
                        )
                        decision_rows.decide("default", PUBLISH_NOW, list(positions))
                        with transaction.atomic():
                            settled = settling.settle("default", settling.Settlement(published=list(positions)))
                        done.extend(["settled"] * settled)
                    case "publish":
                        done.extend(["published"] * published(biz_id=name, unique=True, delay=HOUR).created)
                    case "cancel":
                        done.extend(["cancelled"] * bool(cancel(topic=TOPIC, biz_id=name)))
                    case "restore":
                        decision = restore(topic=TOPIC, biz_id=name)
                        done.append(str(decision.outcome))

        at_once([partial(change, seed) for seed in range(4)])

        live = Counter(OutboxMessage.objects.exclude(state=State.CANCELLED).values_list("biz_id", flat=True))
        assert set(live.values()) <= {1}
        assert {"published", "settled", "cancelled", "restored", "too_late"} <= set(done)
        assert done.count("published") == OutboxMessage.objects.count()


# As above, PostgreSQL only.
@pytest.mark.django_db(transaction=True)
def test_restore_of_a_message_that_is_cancelled_meanwhile_returns_its_present_state():
    message = ended(State.RETRYING)
    with ExitStack() as beside, transaction.atomic():
        cancel(message.id)
        restoring = beside.enter_context(InAThread(lambda: restore(message.id)))
        wait_until(lambda: lock_waits("locktype = 'transactionid'"))

    assert restoring.answer == Decision(Outcome.TOO_LATE, State.CANCELLED)


# As above, PostgreSQL only.
@pytest.mark.long
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("ending", ["commits", "rolls back"])
def test_restore_waits_for_a_concurrent_publish_of_the_same_unique_message(ending):
    messages = [ended(biz_id=f"b{n}", unique=True) for n in range(20)]
    with ExitStack() as beside, transaction.atomic():
        publish(TOPIC, {}, biz_id="b7", unique=True)
        restoring = beside.enter_context(InAThread(lambda: run("--all")))
        wait_until(lambda: lock_waits("locktype = 'transactionid'"))
        assert not restoring.ended
        transaction.set_rollback(ending == "rolls back")

    replaced = [messages[7]] if ending == "commits" else []
    assert [message for message in messages if state_of(message) != State.READY] == replaced
    restored = len(messages) - len(replaced)
    left = " 1 left: 1 replaced." if replaced else ""
    assert restoring.answer == f"{restored} messages restored: {restored} ready.{left}"
    assert TrailEntry.objects.filter(became=State.READY, was=State.CANCELLED).count() == restored


@pytest.mark.long
@pytest.mark.django_db(transaction=True)
def test_restore_leaves_a_message_that_a_long_transaction_is_replacing_and_restores_the_others(monkeypatch):
    monkeypatch.setattr("outbox.store.decision_rows.OPERATORS_WAIT", timedelta(milliseconds=50))
    messages = [ended(biz_id=f"b{n}", unique=True) for n in range(20)]
    with transaction.atomic():
        publish(TOPIC, {}, biz_id="b7", unique=True)
        answers = at_once([lambda: run("--all")])

    assert answers == ["19 messages restored: 19 ready. 1 left: 1 locked."]
    assert state_of(messages[7]) == State.CANCELLED


class TestRestoreCommand:
    @every_database  # it groups and compares instants in SQL
    def test_restore_dry_run_shows_what_would_be_restored(self):
        ended(topic="a")
        ended(topic="a", delay=HOUR)
        ended(State.DEAD, topic="b")
        published()

        lines = [line.split() for line in run("--all", "--dry-run").splitlines()]

        assert lines[0] == ["topic", "state", "messages", "overdue", "oldest"]
        assert [line[:4] for line in lines[1:3]] == [["a", "cancelled", "2", "1"], ["b", "dead", "1", "1"]]
        assert lines[1][4].startswith("1:0")
        assert lines[-1][:7] == ["3", "messages", "would", "be", "restored,", "2", "of"]
        assert "1 message would be restored, and 2 overdue ones skipped" in run("--all", "--dry-run", "--without-overdue")
        assert OutboxMessage.objects.filter(state__in=RESTORABLE).count() == 3

    def test_restore_command_restores_all_of_a_topic_in_several_transactions_and_reports_it(self, monkeypatch):
        monkeypatch.setattr("outbox.management.commands.outbox_restore._AT_ONCE", 3)
        mine = [ended(topic="a", delay=HOUR if n % 2 else None) for n in range(8)]
        other, named, published_one = ended(topic="b"), ended(topic="c"), published()

        assert run("--topic", "a") == "8 messages restored: 4 ready, 4 scheduled."
        assert {state_of(message) for message in mine} == {State.READY, State.SCHEDULED}
        assert AuditEntry.objects.filter(action="restore").count() == 3
        with pytest.raises(CommandError, match=str(published_one.id)):
            run(str(named.id), str(published_one.id))
        assert run("--all", "--without-overdue") == "0 messages restored. 1 left: 1 overdue."
        assert run("--all") == "1 message restored: 1 ready."
        assert run("--all") == "0 messages restored."
        assert [state_of(message) for message in (other, named)] == [State.READY, State.READY]
        assert TrailEntry.objects.get(message_id=other.id, became=State.READY).reason == "outbox_restore"

    @every_database
    @pytest.mark.parametrize(
        ("options", "taken"),
        [
            (["--biz-id", "two"], ["two"]),
            (["--state", "dead"], ["one"]),
            (["--state", "dead", "--state", "expired"], ["one", "two"]),
            (["--since", "2026-03-01T10:00:00Z"], ["two", "three"]),
            (["--since", "2026-03-01T10:00:00Z", "--until", "2026-03-01T11:00:00Z"], ["two"]),
        ],
        ids=str,
    )
    def test_restore_command_selects_by_biz_id_state_and_time(self, options, taken):
        for hour, name, state in ((9, "one", State.DEAD), (10, "two", State.EXPIRED), (11, "three", State.CANCELLED)):
            set_columns(ended(state, biz_id=name), settled_at=datetime(2026, 3, 1, hour, tzinfo=UTC))

        run(*options)

        assert list(OutboxMessage.objects.filter(state=State.READY).order_by("pk").values_list("biz_id", flat=True)) == taken

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((), "--all"),
            (("--dry-run",), "Select the"),
            (("--without-overdue",), "Select the"),
            (("order-17",), "not a message id"),
            (("--since", "yesterday"), "--since is 'yesterday'"),
            (("--until", "2026-02-31T10:00"), "--until"),
        ],
    )
    def test_restore_command_refuses_invalid_arguments_and_restores_nothing(self, arguments, words):
        message = ended()

        with pytest.raises(CommandError, match=words):
            run(*arguments)
        assert state_of(message) == State.CANCELLED


@pytest.mark.django_db(transaction=True)
def test_restore_command_reads_at_most_2000_rows_at_a_time(tmp_path):
    """There may be millions. libpq records what the server sends."""
    multiply(row_of(ended()), 2_500)
    connection.ensure_connection()
    with (tmp_path / "trace").open("w") as trace:
        connection.connection.pgconn.trace(trace.fileno())
        try:
            output = run("--all")
        finally:
            connection.connection.pgconn.untrace()
    answers = (tmp_path / "trace").read_text().split("ReadyForQuery")

    assert output.startswith("2,501 messages restored")
    assert max(len(re.findall(r"\tDataRow\t", answer)) for answer in answers) == 2_000
