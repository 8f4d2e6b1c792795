"""The commands of the outbox: what they print, and which messages they change."""

import json
import os
import signal
from datetime import timedelta
from functools import partial

import pytest
from django.core.management import CommandError

from exactly_once.process.loop import StopRequest
from exactly_once.sql.now import DatabaseTime
from exactly_once.transport.interface import PublishOutcome, Verdict
from outbox.relay.service import serve
from outbox.states import State
from outbox.store import paused_topics
from tests.support.commands import output_of
from tests.support.relaying import ids, published, row_of, set_columns, state_of
from tests.support.servers.private import free_port

pytestmark = pytest.mark.django_db

DAY = timedelta(days=1)


def one_in(state, **columns):
    message = published(columns.pop("topic", "t"))
    set_columns(message, state=state, **columns)
    return message


class TestPauseAndResume:
    def test_topic_is_paused_listed_by_status_and_resumed(self):
        assert "is paused." in output_of("outbox_pause", "shop.stock", "--reason", "consumer defect")
        assert "the reason is the new one" in output_of("outbox_pause", "shop.stock", "--reason", "broker is moved")
        one_in(State.PAUSED, topic="shop.stock")

        [line] = [line for line in output_of("exactly_once_status").splitlines() if line.startswith("shop.stock")]
        assert ": broker is moved" in line
        assert "with outbox_pause" in line
        [topic] = json.loads(output_of("exactly_once_status", "--json"))["outbox"]["paused_topics"]
        expected = {"topic": "shop.stock", "messages": 1, "reason": "broker is moved", "mode": "paused"}
        assert topic == {**topic, **expected}

        for command in ("outbox_pause", "outbox_resume"):
            with pytest.raises(CommandError, match="Name one topic exactly"):
                output_of(command, "shop.*")
        with pytest.raises(CommandError, match="is not paused"):
            output_of("outbox_resume", "shop.other")
        assert "is being resumed." in output_of("outbox_resume", "shop.stock")
        assert "is being resumed already" in output_of("outbox_resume", "shop.stock")
        assert "is being resumed" in output_of("exactly_once_status")

    def test_status_names_what_the_circuit_breaker_has_paused_and_what_a_rate_limits(self):
        assert "paused topic" not in output_of("exactly_once_status")
        paused_topics.pause_refused("default", "shop.refused", Verdict(PublishOutcome.RETURNED, "no queue"), 1.0, DAY)
        paused_topics.limit("default", "shop.limited", 5.0, [])

        printed = output_of("exactly_once_status")
        assert "the broker refuses it: no queue" in printed
        assert "its rate in OUTBOX['TOPICS'] limits it" in printed
        status = json.loads(output_of("exactly_once_status", "--json"))
        topics = {one["topic"]: one for one in status["outbox"]["paused_topics"]}
        refused, limited = topics["shop.refused"], topics["shop.limited"]
        assert (refused["mode"], refused["messages"], bool(refused["next_try"])) == ("refused", 0, True)
        assert (limited["mode"], limited["by"], limited["next_try"]) == ("limited", "", None)
        with pytest.raises(CommandError, match="is not paused"):
            output_of("outbox_resume", "shop.limited")
        assert "Its rate limited it" in output_of("outbox_pause", "shop.limited")


class TestResumeChecks:
    @pytest.mark.every_database
    def test_resume_returns_stuck_messages_to_prepared_with_zero_attempts(self):
        stuck, other, dead = one_in(State.STUCK, attempts=15), one_in(State.STUCK, topic="other"), one_in(State.DEAD)

        assert "1 message would be resumed." in output_of("outbox_resume", "t", "--checks", "--dry-run")
        assert "1 message resumed." in output_of("outbox_resume", "--checks", str(stuck.id))
        assert (state_of(stuck), row_of(stuck).attempts) == (State.PREPARED, 0)
        assert "1 message resumed." in output_of("outbox_resume", "--checks")
        assert [state_of(message) for message in (other, dead)] == [State.PREPARED, State.DEAD]

    def test_resume_without_a_topic_or_stuck_messages_says_what_to_name(self):
        dead = one_in(State.DEAD)
        refused = {("--checks", str(dead.id)): f"not stuck: {dead.id}"}
        refused |= dict.fromkeys([(), ("t", "--dry-run")], "Name the topic to resume")
        for arguments, said in refused.items():
            with pytest.raises(CommandError, match=said):
                output_of("outbox_resume", *arguments)

    def test_status_points_out_stuck_messages_and_missing_checkers(self):
        one_in(State.STUCK)

        printed = output_of("exactly_once_status")
        assert "1 prepared message is stuck" in printed
        assert "No checker is registered for prepared messages of: t." in printed


@pytest.mark.parametrize("named", ["by id", "by state"])
def test_restore_takes_a_retrying_message_only_when_it_is_named(named):
    message = one_in(State.RETRYING, available_at=DatabaseTime(DAY))
    output_of("outbox_restore", "--all")
    assert state_of(message) == State.RETRYING

    output_of("outbox_restore", *([str(message.id)] if named == "by id" else ["--state", "retrying"]))

    assert state_of(message) == State.READY


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestRelayProcess:
    @pytest.fixture
    def relay(self, command, peer):
        return partial(command, "outbox_relay", OUTBOX={"BROKER_URL": peer.url, "BATCH_DEADLINE": timedelta(seconds=30)})

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_relay_runs_until_a_signal_and_exits_with_0(self, relay, peer, number):
        with relay() as process:
            first = published()
            process.until(lambda: state_of(first) == State.PUBLISHED)
            second = published()
            process.until(lambda: state_of(second) == State.PUBLISHED)
            os.kill(process.pid, number)
            assert process.ends() == 0, process.said()

        assert ids(peer.published) == ids([first, second])
        assert "Traceback" not in process.said()
        assert "Messages published: 2" in process.said()

    def test_relay_settles_its_batch_before_it_exits(self, relay, peer):
        peer.hold()
        message = published()
        with relay() as process:
            [arrived] = peer.wait_for_published(1, timeout=60)
            process.terminate()
            peer.ack(arrived)
            assert process.ends() == 0

        assert state_of(message) == State.PUBLISHED

    def test_relay_that_drains_without_a_broker_names_its_address_and_what_it_waits_for(self, command):
        url = f"amqp://shop:secret@127.0.0.1:{free_port()}//"
        with command("outbox_relay", "--drain", OUTBOX={"BROKER_URL": url}) as process:
            process.until(lambda: "The broker is unavailable ('amqp://***@127.0.0.1:" in process.said())
            process.terminate()
            process.ends()

        assert "This process drains: it ends once the broker is available and nothing is due." in process.said()
        assert "secret" not in process.said()


@pytest.mark.parametrize(
    "command", ["outbox_relay", *(f"exactly_once_{name}" for name in ("status", "purge", "health", "trail"))]
)
def test_unknown_database_is_refused_with_the_names_of_the_known_ones(command):
    with pytest.raises(CommandError, match=r"There is no database 'nowhere'\. DATABASES has: default"):
        output_of(command, "--database", "nowhere")


def test_serve_with_a_stop_request_already_set_relays_nothing():
    stop = StopRequest()
    stop.set()
    message = published()

    assert serve("default", stop=stop) == 0
    assert state_of(message) == State.READY
