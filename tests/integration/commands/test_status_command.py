"""`exactly_once_status`: what it says of each app."""

import json
import re
from datetime import datetime, timedelta
from functools import partial

import pytest
from django.core.management import CommandError

from exactly_once.models import Process
from exactly_once.process.clock import utcnow
from exactly_once.sql.now import DatabaseTime
from exactly_once.upkeep.heartbeat_table import SILENT_AFTER
from inbox.conf import inbox_options
from inbox.models import InboxMessage
from inbox.receiving.admit import admit
from inbox.receiving.reading import read
from inbox.states import State as InboxState
from outbox.states import State
from tests.support.commands import output_of
from tests.support.deliveries import an_envelope, deliver, fails, run_to_the_end, the_effect, the_row
from tests.support.heartbeats import a_relay
from tests.support.relaying import published, row_of, set_columns
from tests.support.sql import executed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.django_db

DAY = timedelta(days=1)
LONG_AGO = timedelta(days=400)


run = partial(output_of, "exactly_once_status")


def status(app, **options):
    return json.loads(run(json=True, **options))[app]


def one_in(state, **columns):
    set_columns(published("t"), state=state, **columns)


class TestBoth:
    def test_status_names_both_apps_and_app_chooses_one(self):
        published()

        assert [block.splitlines()[0].split()[0] for block in run().split("\n\n")] == ["outbox", "No", "inbox"]
        assert run(app="outbox").split()[:2] == ["outbox", "default"]
        assert json.loads(run(json=True)).keys() == {"outbox", "inbox"}
        assert json.loads(run(app="inbox", json=True)).keys() == {"inbox"}
        with pytest.raises(CommandError, match=r"--conflicts is an option of the inbox and does not go with --app outbox\."):
            run(conflicts=True, app="outbox")
        with pytest.raises(CommandError, match="--app is 'orders': INSTALLED_APPS has outbox, inbox"):
            run(app="orders")

    def test_json_and_watch_exclude_each_other(self):
        with pytest.raises(CommandError, match="not allowed with argument"):
            output_of("exactly_once_status", "--json", "--watch")


@pytest.mark.every_database
class TestOutbox:
    def test_status_counts_every_state_and_as_json_with_the_oldest_due_time(self):
        empty = status("outbox")
        assert (empty["states"], empty["oldest_waiting"]) == ({state.value: 0 for state in State}, None)
        for state in (State.DEAD, State.DEAD, State.PUBLISHED):
            one_in(state)
        message = published()
        counts = {**empty["states"], "dead": 2, "published": 1, "ready": 1}

        lines = [line.split() for line in run(app="outbox").splitlines()]
        printed = status("outbox")

        assert lines[0] == ["outbox", "default"]
        last = 1 + len(State)
        assert {name: int(count) for name, count in lines[1:last]} == printed["states"] == counts
        assert lines[last][:2] == ["oldest", "waiting"]
        assert datetime.fromisoformat(printed["oldest_waiting"]) == row_of(message).available_at

    def test_status_counts_a_message_as_waiting_from_its_due_time(self):
        published(delay=DAY)
        assert status("outbox")["oldest_waiting"] is None

        late = published()
        set_columns(late, state=State.RETRYING, available_at=DatabaseTime(-DAY))
        published()
        printed = status("outbox")

        assert datetime.fromisoformat(printed["oldest_waiting"]) == row_of(late).available_at

    @pytest.mark.django_db(databases=["default", "other"])
    def test_status_reads_the_given_database(self, handles):
        published(using="other")
        deliver(handles(lambda message: None, using="other"))

        for app, state in (("outbox", "ready"), ("inbox", "done")):
            assert status(app, database="other")["states"][state] == 1
            assert status(app)["states"][state] == 0


class TestRelays:
    def test_status_shows_each_relay_and_its_state(self):
        a_relay(waits_for="the broker: connection refused", host="second", running_for=timedelta(minutes=1))
        a_relay()
        a_relay(last_pass_at=None, host="third", running_for=timedelta(seconds=0))

        head, starting, waiting, working = run(app="outbox").splitlines()[-4:]

        assert head.split() == [
            *("process", "kind", "version", "started", "heartbeat", "per", "second", "since", "its", "start", "state")
        ]
        assert waiting.startswith("second:4711")
        assert waiting.endswith("  running, waits for the broker: connection refused")
        assert working.split()[:3] == ["relay-1:4711", "relay", "1.2.3"]
        assert working.split()[3].startswith("5:00:0")
        assert "  812.5  1,234,567 published, shards " in working
        assert working.endswith("  running")
        assert starting.endswith("  running")

    def test_status_shows_a_killed_relay_as_silent_without_a_rate_and_says_when_no_relay_is_running(self):
        published()
        none = "No relay is running. Messages that are due: 1."
        assert run(app="outbox").splitlines()[-1] == none
        a_relay(silent_for=2 * SILENT_AFTER)

        *_, line, _empty, last = run(app="outbox").splitlines()

        assert "  -  1,234,567 published" in line
        assert line.endswith("  silent")
        assert last == none
        a_relay()
        assert "No relay is running" not in run(app="outbox")

    def test_status_as_json_has_every_column_of_a_relay(self):
        relay, silent = a_relay(waits_for="the broker"), a_relay(silent_for=2 * SILENT_AFTER, last_pass_at=None)

        printed = status("outbox")["relays"]

        assert [one["id"] for one in printed] == [str(relay.id), str(silent.id)]
        first, second = printed
        instants = ("started", "beat", "last_pass")
        assert set(first) == {"id", "host", "pid", "version", *instants, "rate", "published", "shards", "waits_for", "silent"}
        assert datetime.fromisoformat(first["beat"]) - datetime.fromisoformat(first["started"]) == timedelta(hours=5)
        assert datetime.fromisoformat(first["beat"]) - datetime.fromisoformat(first["last_pass"]) == timedelta(minutes=4)
        assert (first["host"], first["pid"], first["version"]) == ("relay-1", 4711, "1.2.3")
        assert (first["published"], first["rate"], first["waits_for"]) == (1_234_567, 812.5, "the broker")
        assert (first["silent"], second["silent"]) == (False, True)
        assert (second["last_pass"], second["rate"]) == (None, None)

    def test_status_without_the_relay_table_says_to_run_migrate(self):
        executed(f"DROP TABLE {Process._meta.db_table}")

        with pytest.raises(CommandError, match=r"no table exactly_once_process\. Run `python manage\.py migrate exactly_once`"):
            run(app="outbox")


@pytest.mark.every_database
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestInbox:
    def test_status_of_an_empty_inbox_is_all_zeros(self):
        numbers = ("duplicates_suppressed", "duplicates_conflicting", "edited", "delivered", "quarantined")
        lists = ("ahead_of_the_clock", "consumers", "unattended", "paused_handlers", "starting_handlers")
        assert status("inbox") == {
            "states": dict.fromkeys((str(state) for state in InboxState), 0),
            "duplicates_by_cause": dict.fromkeys(("redelivery", "resend", "replay", "business"), 0),
            **dict.fromkeys(numbers, 0),
            **{name: [] for name in lists},
            "oldest_waiting": None,
            "without_rows": {},
            "queued": {},
        }

    def test_status_counts_states_and_duplicates(self, handles):
        handler, envelope = handles(the_effect), an_envelope()
        for _ in range(3):
            deliver(handler, envelope)
        deliver(handler, an_envelope({"other": 1}, biz_id=envelope.biz_id))
        deliver(handles(fails, name="tests.fails"))
        run_to_the_end()
        deliver(handler, an_envelope(created_at=utcnow() - LONG_AGO))

        found = status("inbox")

        assert (found["states"]["done"], found["states"]["dead"], found["states"]["retrying"]) == (1, 2, 0)
        assert found["quarantined"] == 1
        assert (found["duplicates_suppressed"], found["duplicates_conflicting"]) == (3, 1)
        assert found["duplicates_by_cause"] == {"redelivery": 0, "resend": 2, "replay": 0, "business": 1}
        assert found["delivered"] == 6

    def test_status_lists_conflicts_with_the_latest_first(self, handles):
        assert run(conflicts=True).endswith("No duplicate has had different content.")
        handler = handles(the_effect)
        for biz_id in ("order-1", "order-2"):
            deliver(handler, an_envelope({"total": 1}, biz_id=biz_id))
        for biz_id in ("order-2", "order-1"):
            other = an_envelope({"total": 2}, biz_id=biz_id)
            deliver(handler, other)
            # SQLite's clock counts milliseconds.
            wait_until(InboxMessage.objects.filter(biz_id=biz_id, conflicting_at__lt=DatabaseTime()).exists)

        listed = status("inbox", conflicts=True)["conflicts"]

        assert [(found["biz_id"], found["conflicts"]) for found in listed] == [("order-1", 1), ("order-2", 1)]
        assert listed[0]["conflicting_id"] == other.id
        assert other.id in run(conflicts=True)

    def test_status_shows_the_due_time_of_the_oldest_overdue_message(self, handles):
        deliver(handles(fails))
        assert status("inbox")["oldest_waiting"] is None
        since = utcnow() - timedelta(hours=3)
        InboxMessage.objects.update(next_attempt_at=since)

        assert status("inbox")["oldest_waiting"] == since.isoformat()

    def test_status_counts_a_message_behind_a_dead_letter_as_waiting(self, handles):
        handler = handles(fails, ordered=True)
        given = inbox_options()
        admit(handler, [read(handler, an_envelope(biz_id=name, key="k"), given) for name in ("head", "behind")], given)
        InboxMessage.objects.filter(biz_id="head").update(state=InboxState.DEAD, next_attempt_at=None)

        assert status("inbox")["oldest_waiting"] == the_row(biz_id="behind").received_at.isoformat()

    def test_status_prints_a_table(self, handles):
        deliver(handles(the_effect))

        text = run(app="inbox")

        counts, running = text.split("\n\n")
        lines = dict(re.split(r"  +", line.strip()) for line in counts.splitlines())
        assert (lines["done"], lines["delivered, total"], lines["oldest waiting"]) == ("1", "1", "-")
        assert running.startswith("No consumer is running for: tests.handler0. ")
