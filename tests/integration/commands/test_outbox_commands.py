"""The commands of the outbox: what they print, and which messages they change."""

import io
import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from datetime import datetime, timedelta

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from exactly_once.models import Lease, Process
from exactly_once.process.heartbeat import SILENT_AFTER
from exactly_once.process.loop import StopRequest
from exactly_once.sql.now import DatabaseTime
from outbox.models import OutboxMessage
from outbox.relay.service import serve
from outbox.states import RESTORE, State
from outbox.store import history, pausing
from tests.support.fakes.amqp_peer import FakeAmqpPeer
from tests.support.heartbeats import a_relay
from tests.support.relaying import ids, published, row_of, set_columns, state_of, states
from tests.support.servers.private import watch
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.every_database, pytest.mark.django_db]

DAY = timedelta(days=1)


def run(*arguments):
    out = io.StringIO()
    call_command(*arguments, stdout=out, stderr=out)
    return out.getvalue()


def one_in(state, **columns):
    message = published(columns.pop("topic", "t"))
    set_columns(message, state=state, **columns)
    return message


class TestPauseAndResume:
    def test_topic_is_paused_listed_by_status_and_resumed(self):
        assert "is paused." in run("outbox_pause", "shop.stock", "--reason", "consumer defect")
        assert "the reason is the new one" in run("outbox_pause", "shop.stock", "--reason", "broker is moved")
        one_in(State.PAUSED, topic="shop.stock")

        [line] = [line for line in run("outbox_status").splitlines() if line.startswith("shop.stock")]
        assert ": broker is moved" in line
        [topic] = json.loads(run("outbox_status", "--json"))["paused_topics"]
        assert (topic["topic"], topic["messages"], topic["reason"], topic["resuming"]) == (
            "shop.stock",
            1,
            "broker is moved",
            False,
        )

        assert "is being resumed." in run("outbox_resume", "shop.stock")
        assert "is being resumed already" in run("outbox_resume", "shop.stock")
        assert "is being resumed" in run("outbox_status")

    def test_status_names_what_the_circuit_breaker_has_paused(self):
        assert "paused topic" not in run("outbox_status")
        pausing.pause_refused("default", "shop.stock", "no queue", 1.0, DAY)

        assert "the broker refuses it: no queue" in run("outbox_status")
        [topic] = json.loads(run("outbox_status", "--json"))["paused_topics"]
        assert (topic["by"], topic["messages"], bool(topic["next_try"])) == ("circuit breaker", 0, True)

    def test_topic_that_is_not_paused_cannot_be_resumed(self):
        with pytest.raises(CommandError, match="is not paused"):
            run("outbox_resume", "shop.stock")

    @pytest.mark.parametrize("command", ["outbox_pause", "outbox_resume"])
    def test_topic_with_a_wildcard_is_refused(self, command):
        with pytest.raises(CommandError, match="Name one topic exactly"):
            run(command, "shop.*")


class TestResumeChecks:
    def test_resume_returns_stuck_messages_to_prepared_with_zero_attempts(self):
        stuck, other, dead = one_in(State.STUCK, attempts=15), one_in(State.STUCK, topic="other"), one_in(State.DEAD)

        assert "1 message would be resumed." in run("outbox_resume_checks", "--topic", "t", "--dry-run")
        assert "1 message resumed." in run("outbox_resume_checks", str(stuck.id))
        assert (state_of(stuck), row_of(stuck).attempts) == (State.PREPARED, 0)
        assert "1 message resumed." in run("outbox_resume_checks")
        assert [state_of(message) for message in (other, dead)] == [State.PREPARED, State.DEAD]

    def test_resume_names_messages_that_are_not_stuck(self):
        dead = one_in(State.DEAD)
        with pytest.raises(CommandError, match=f"not stuck: {dead.id}"):
            run("outbox_resume_checks", str(dead.id))

    def test_status_points_out_stuck_messages_and_missing_checkers(self):
        one_in(State.STUCK)

        printed = run("outbox_status")
        assert "1 prepared message is stuck" in printed
        assert "No checker is registered for prepared messages of: t." in printed


class TestStatus:
    def test_status_counts_every_state(self):
        for state in (State.DEAD, State.DEAD, State.PUBLISHED):
            one_in(state)
        published()

        lines = [line.split() for line in run("outbox_status").splitlines()]

        assert lines[0] == ["outbox", "default"]
        last = 1 + len(State)
        assert dict(lines[1:last]) == {
            **{state.value: "0" for state in State},
            "dead": "2",
            "published": "1",
            "ready": "1",
        }
        assert lines[last][:2] == ["oldest", "waiting"]

    def test_status_as_json_has_the_counts_and_the_oldest_due_time(self):
        message = published()
        one_in(State.DEAD)

        printed = json.loads(run("outbox_status", "--json"))

        assert printed["states"] == {**{state.value: 0 for state in State}, "ready": 1, "dead": 1}
        assert datetime.fromisoformat(printed["oldest_waiting"]) == row_of(message).available_at

    def test_status_of_an_empty_outbox_has_no_oldest_waiting_message(self):
        assert json.loads(run("outbox_status", "--json"))["oldest_waiting"] is None

    def test_status_counts_a_message_as_waiting_from_its_due_time(self):
        published(delay=DAY)
        assert json.loads(run("outbox_status", "--json"))["oldest_waiting"] is None

        late = one_in(State.RETRYING, available_at=DatabaseTime(-DAY))
        published()
        printed = json.loads(run("outbox_status", "--json"))

        assert datetime.fromisoformat(printed["oldest_waiting"]) == row_of(late).available_at

    @pytest.mark.django_db(databases=["default", "other"])
    def test_status_reads_the_given_database(self):
        published(using="other")

        assert json.loads(run("outbox_status", "--json", "--database", "other"))["states"]["ready"] == 1
        assert json.loads(run("outbox_status", "--json"))["states"]["ready"] == 0


class TestRelayStatus:
    def test_status_shows_each_relay_and_its_state(self):
        a_relay(waits_for="the broker: connection refused", host="second", running_for=timedelta(minutes=1))
        a_relay()
        a_relay(last_pass_at=None, host="third", running_for=timedelta(seconds=0))

        head, starting, waiting, working = run("outbox_status").splitlines()[-4:]

        assert head.split() == [
            *("relay", "version", "started", "heartbeat", "last", "pass", "published", "per", "second", "state")
        ]
        assert waiting.startswith("second:4711")
        assert waiting.endswith("  waits for the broker: connection refused")
        assert working.split()[:2] == ["relay-1:4711", "1.2.3"]
        assert working.split()[2].startswith("5:00:0")
        assert working.split()[-3:] == ["1,234,567", "812.5", "working"]
        assert starting.split()[-4:] == ["-", "1,234,567", "812.5", "starting"]

    def test_status_shows_a_killed_relay_as_silent_without_a_rate(self):
        a_relay(silent_for=2 * SILENT_AFTER)

        line = run("outbox_status").splitlines()[-3]

        assert line.split()[-2:] == ["-", "silent"]

    @pytest.mark.parametrize("silent", [False, True])
    @pytest.mark.parametrize(
        ("ready", "expected"),
        [
            (0, "No relay is running."),
            (1, "No relay is running: 1 message is ready."),
            (2, "No relay is running: 2 messages are ready."),
        ],
    )
    def test_status_says_when_no_relay_is_running(self, silent, ready, expected):
        if silent:
            a_relay(silent_for=2 * SILENT_AFTER)
        for _ in range(ready):
            published()

        assert run("outbox_status").splitlines()[-1] == expected

    def test_status_does_not_say_that_no_relay_is_running_while_one_runs(self):
        a_relay(silent_for=2 * SILENT_AFTER)
        a_relay()
        published()

        assert "No relay is running" not in run("outbox_status")

    def test_status_as_json_has_every_column_of_a_relay(self):
        relay, silent = a_relay(waits_for="the broker"), a_relay(silent_for=2 * SILENT_AFTER, last_pass_at=None)

        printed = json.loads(run("outbox_status", "--json"))["relays"]

        assert [one["id"] for one in printed] == [str(relay.id), str(silent.id)]
        first, second = printed
        instants = ("started", "beat", "last_pass")
        assert set(first) == {"id", "host", "pid", "version", *instants, "published", "rate", "waits_for", "silent"}
        assert datetime.fromisoformat(first["beat"]) - datetime.fromisoformat(first["started"]) == timedelta(hours=5)
        assert datetime.fromisoformat(first["beat"]) - datetime.fromisoformat(first["last_pass"]) == timedelta(minutes=4)
        assert (first["host"], first["pid"], first["version"]) == ("relay-1", 4711, "1.2.3")
        assert (first["published"], first["rate"], first["waits_for"]) == (1_234_567, 812.5, "the broker")
        assert (first["silent"], second["silent"]) == (False, True)
        assert (second["last_pass"], second["rate"]) == (None, None)

    def test_status_without_the_relay_table_says_to_run_migrate(self):
        with connection.cursor() as cursor:
            cursor.execute(f"DROP TABLE {Process._meta.db_table}")

        with pytest.raises(CommandError, match=r"no table exactly_once_process\. Run `python manage\.py migrate exactly_once`"):
            run("outbox_status")


class TestRestore:
    def test_restore_makes_a_dead_message_ready_with_zero_attempts(self):
        dead, other = one_in(State.DEAD, attempts=16), one_in(State.DEAD, attempts=16)

        assert "1 message restored" in run("outbox_restore", str(dead.id))

        row = row_of(dead)
        assert (row.state, row.attempts, row.settled_at) == (State.READY, 0, None)
        assert state_of(other) == State.DEAD

    @pytest.mark.parametrize("state", [state for state in State if state not in RESTORE.sources])
    def test_restore_changes_no_message_in_another_state(self, state):
        message = one_in(state)

        assert "0 messages restored" in run("outbox_restore", "--all")
        assert state_of(message) == state

    @pytest.mark.parametrize("named", ["by id", "by state"])
    def test_restore_takes_a_retrying_message_only_when_it_is_named(self, named):
        message = one_in(State.RETRYING, available_at=DatabaseTime(DAY))
        run("outbox_restore", "--all")
        assert state_of(message) == State.RETRYING

        run("outbox_restore", *([str(message.id)] if named == "by id" else ["--state", "retrying"]))

        assert state_of(message) == State.READY


class TestPurge:
    def settled(self, state, age):
        return one_in(state, settled_at=DatabaseTime(-age))

    @pytest.mark.parametrize("state", [State.PUBLISHED, State.CANCELLED, State.EXPIRED, State.ROLLED_BACK])
    def test_purge_deletes_settled_messages_older_than_the_retention(self, state):
        self.settled(state, 8 * DAY)
        young = self.settled(state, 6 * DAY)

        assert "1 message deleted" in run("outbox_purge")
        assert [row.message_id for row in OutboxMessage.objects.all()] == [young.id]

    @pytest.mark.parametrize("state", [State.DEAD, State.RETRYING, State.READY, State.SCHEDULED, State.PREPARED])
    def test_purge_keeps_dead_and_unsettled_messages(self, state):
        self.settled(state, 900 * DAY)

        assert "0 messages deleted" in run("outbox_purge", "--older-than-days", "0")
        assert states() == [state]

    def test_purge_deletes_messages_older_than_the_given_age(self):
        self.settled(State.PUBLISHED, DAY)

        assert "0 messages deleted" in run("outbox_purge", "--older-than-days", "1.5")
        assert "1 message deleted" in run("outbox_purge", "--older-than-days", "0.5")

    def test_purge_dry_run_only_counts(self):
        self.settled(State.PUBLISHED, 8 * DAY)

        assert "1 message would be deleted" in run("outbox_purge", "--dry-run")
        assert states() == [State.PUBLISHED]

    def test_purge_deletes_in_chunks(self):
        for _ in range(7):
            self.settled(State.PUBLISHED, 8 * DAY)

        assert list(history.purge_settled("default", DAY, chunk=3)) == [3, 3, 1]
        assert states() == []

    @pytest.mark.parametrize("days", ["-1", "nan", "1e12"])
    def test_purge_refuses_an_impossible_age(self, days):
        self.settled(State.PUBLISHED, timedelta(seconds=1))

        with pytest.raises(CommandError, match="older-than-days"):
            run("outbox_purge", f"--older-than-days={days}")
        assert states() == [State.PUBLISHED]


@contextmanager
def a_process(environment, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-m", "django", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watch(process)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestRelayProcess:
    @pytest.fixture
    def peer(self):
        with FakeAmqpPeer() as peer:
            yield peer

    @pytest.fixture
    def environment(self, process_environment, peer, tmp_path):
        (tmp_path / "relay_settings.py").write_text(
            "from datetime import timedelta\nfrom tests.settings import *\n"
            f"OUTBOX = {{'BROKER_URL': {peer.url!r}, 'BATCH_DEADLINE': timedelta(seconds=30)}}\n"
        )
        path = f"{tmp_path}:{process_environment['PYTHONPATH']}"
        return {**process_environment, "PYTHONPATH": path, "DJANGO_SETTINGS_MODULE": "relay_settings"}

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_relay_runs_until_a_signal_and_exits_with_0(self, environment, peer, number):
        with a_process(environment, "outbox_relay") as process:
            first = published()
            wait_until(lambda: state_of(first) == State.PUBLISHED)
            second = published()
            wait_until(lambda: state_of(second) == State.PUBLISHED)
            process.send_signal(number)
            out, _ = process.communicate(timeout=60)

        assert process.returncode == 0, out
        assert ids(peer.published) == ids([first, second])
        assert "Traceback" not in out
        assert "Messages published: 2" in out

    def test_relay_settles_its_batch_before_it_exits(self, environment, peer):
        peer.hold()
        message = published()
        with a_process(environment, "outbox_relay") as process:
            [arrived] = peer.wait_for_published(1, timeout=60)
            process.send_signal(signal.SIGTERM)
            peer.ack(arrived)
            process.communicate(timeout=60)

        assert process.returncode == 0
        assert state_of(message) == State.PUBLISHED

    def test_killed_relay_leaves_its_messages_to_the_next_relay(self, environment, peer):
        peer.hold()
        message = published(using="other")
        with a_process(environment, "outbox_relay", "--database", "other") as process:
            peer.wait_for_published(1, timeout=60)
            process.kill()
            process.wait()
        assert state_of(message, "other") == State.READY
        expire_the_relay_lease()
        peer.ack_all_automatically = True

        with a_process(environment, "outbox_relay", "--database", "other", "--drain") as process:
            process.communicate(timeout=60)

        assert process.returncode == 0
        assert state_of(message, "other") == State.PUBLISHED
        assert ids(peer.published) == ids([message]) * 2

    def test_relay_with_drain_exits_when_no_message_is_left(self, environment, peer):
        message = published()
        with a_process(environment, "outbox_relay", "--drain") as process:
            out, _ = process.communicate(timeout=60)

        assert process.returncode == 0, out
        assert state_of(message) == State.PUBLISHED

    def test_relay_refuses_to_start_with_an_invalid_setting(self, environment, tmp_path):
        (tmp_path / "relay_settings.py").write_text("from tests.settings import *\nOUTBOX = {'BROKER_ULR': 'x'}\n")
        with a_process(environment, "outbox_relay") as process:
            out, _ = process.communicate(timeout=60)

        assert process.returncode != 0
        assert "Did you mean 'BROKER_URL'?" in out


def expire_the_relay_lease():
    """On SQLite the lease of a killed relay ends by time only."""
    Lease.objects.using("other").update(expires_at=DatabaseTime())


@pytest.mark.parametrize("command", ["outbox_relay", "outbox_status", "outbox_purge", "inbox_status", "inbox_purge"])
def test_unknown_database_is_refused_with_the_names_of_the_known_ones(command):
    with pytest.raises(CommandError, match=r"There is no database 'nowhere'\. DATABASES has: default"):
        run(command, "--database", "nowhere")


def test_serve_with_a_stop_request_already_set_relays_nothing():
    stop = StopRequest()
    stop.set()
    message = published()

    assert serve("default", stop=stop) == 0
    assert state_of(message) == State.READY
