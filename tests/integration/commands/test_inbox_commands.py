"""The commands of the inbox: inbox_status, inbox_retry, inbox_purge."""

from __future__ import annotations

import io
import json
import re
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command

from exactly_once.process.clock import utcnow
from exactly_once.sql.now import DatabaseTime
from inbox.conf import inbox_options
from inbox.handlers.registry import registry
from inbox.models import InboxMessage, State
from inbox.receiving.admit import admit
from inbox.receiving.reading import read
from tests.support.deliveries import an_envelope, deliver, drain, effects, run_to_the_end, the_effect, the_row
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"]), pytest.mark.every_database]

LONG_AGO = timedelta(days=400)


def run(command, *arguments, **options):
    out = io.StringIO()
    call_command(command, *arguments, stdout=out, **options)
    return out.getvalue().strip()


def status(**options):
    return json.loads(run("inbox_status", json=True, **options))


def fails(message):
    the_effect(message)
    raise ValueError("no stock")


@pytest.fixture
def dead(handles):
    """A dead letter for each (handler, topic) asked for; its message id."""

    def make(name="tests.h", topic="t"):
        handler = handles(fails, name=name, topic=topic)
        envelope = an_envelope(topic=topic)
        deliver(handler, envelope)
        run_to_the_end()
        handles(the_effect, name=name + " fixed", topic=topic)
        return envelope.id

    return make


def make_every_row_old():
    InboxMessage.objects.update(settled_at=utcnow() - LONG_AGO, received_at=utcnow() - LONG_AGO)


class TestStatus:
    def test_status_of_an_empty_inbox_is_all_zeros(self):
        assert status() == {
            "states": dict.fromkeys((str(state) for state in State), 0),
            "duplicates_suppressed": 0,
            "duplicates_by_cause": {"redelivery": 0, "resend": 0, "replay": 0, "business": 0},
            "duplicates_conflicting": 0,
            "edited": 0,
            "delivered": 0,
            "quarantined": 0,
            "oldest_waiting": None,
            "without_rows": {},
            "consumers": [],
            "unattended": [],
            "paused_handlers": [],
            "starting_handlers": [],
        }

    def test_status_counts_states_and_duplicates(self, handles, dead):
        handler, envelope = handles(the_effect), an_envelope()
        for _ in range(3):
            deliver(handler, envelope)
        deliver(handler, an_envelope({"other": 1}, biz_id=envelope.biz_id))
        dead()

        found = status()

        assert (found["states"]["done"], found["states"]["dead"], found["states"]["retrying"]) == (1, 1, 0)
        assert (found["duplicates_suppressed"], found["duplicates_conflicting"]) == (3, 1)
        assert found["duplicates_by_cause"] == {"redelivery": 0, "resend": 2, "replay": 0, "business": 1}
        assert found["delivered"] == 5

    def test_status_counts_quarantined_messages(self, handles):
        deliver(handles(the_effect), an_envelope(created_at=utcnow() - LONG_AGO))

        found = status()

        assert (found["states"]["dead"], found["quarantined"]) == (1, 1)

    def test_status_lists_conflicts_with_the_latest_first(self, handles):
        handler = handles(the_effect)
        for biz_id in ("order-1", "order-2"):
            deliver(handler, an_envelope({"total": 1}, biz_id=biz_id))
        for biz_id in ("order-2", "order-1"):
            other = an_envelope({"total": 2}, biz_id=biz_id)
            deliver(handler, other)
            # SQLite's clock counts milliseconds.
            wait_until(InboxMessage.objects.filter(biz_id=biz_id, conflicting_at__lt=DatabaseTime()).exists)

        listed = status(conflicts=True)["conflicts"]

        assert [(found["biz_id"], found["conflicts"]) for found in listed] == [("order-1", 1), ("order-2", 1)]
        assert listed[0]["conflicting_id"] == other.id
        assert other.id in run("inbox_status", conflicts=True)

    def test_status_says_when_there_are_no_conflicts(self):
        assert run("inbox_status", conflicts=True).endswith("No duplicate has had different content.")

    def test_status_shows_the_due_time_of_the_oldest_overdue_message(self, handles):
        deliver(handles(fails))
        assert status()["oldest_waiting"] is None
        since = utcnow() - timedelta(hours=3)
        InboxMessage.objects.update(next_attempt_at=since)

        assert status()["oldest_waiting"] == since.isoformat()

    def test_status_counts_a_message_behind_a_dead_letter_as_waiting(self, handles):
        handler = handles(fails, ordered=True)
        given = inbox_options()
        admit(handler, [(read(handler, an_envelope(biz_id=name, key="k"), given), False) for name in ("head", "behind")], given)
        InboxMessage.objects.filter(biz_id="head").update(state=State.DEAD, next_attempt_at=None)

        assert status()["oldest_waiting"] == the_row(biz_id="behind").received_at.isoformat()

    def test_status_prints_a_table(self, handles):
        deliver(handles(the_effect))

        text = run("inbox_status")

        counts, running = text.split("\n\n")
        lines = dict(re.split(r"  +", line.strip()) for line in counts.splitlines())
        assert (lines["done"], lines["delivered, total"], lines["oldest waiting"]) == ("1", "1", "-")
        assert running.startswith("No consumer is running for: tests.handler0. ")

    def test_status_reads_the_given_database(self, handles):
        deliver(handles(lambda message: None, using="other"))

        assert (status()["states"]["done"], status(database="other")["states"]["done"]) == (0, 1)


class TestRetry:
    def test_retry_without_a_selection_is_refused(self):
        with pytest.raises(CommandError, match="--all"):
            run("inbox_retry")

    def test_retry_by_message_id_leaves_other_dead_messages(self, dead):
        first, _second = dead("tests.a"), dead("tests.b")

        assert run("inbox_retry", first) == "1 message is due now."

        assert the_row(message_id=first).state == State.RETRYING
        assert InboxMessage.objects.filter(state=State.DEAD).count() == 1

    def test_retry_reports_ids_that_are_not_dead_and_retries_the_others(self, dead):
        first = dead("tests.a")

        with pytest.raises(CommandError, match="not dead: order-17"):
            run("inbox_retry", first, "order-17")

        assert the_row(message_id=first).state == State.RETRYING

    @pytest.mark.parametrize(("chosen", "count"), [({"handler": "tests.a"}, 1), ({"topic": "b"}, 2), ({"all": True}, 3)])
    def test_retry_selects_by_handler_by_topic_or_all(self, dead, chosen, count):
        for name, topic in (("tests.a", "a"), ("tests.b", "b"), ("tests.c", "b")):
            dead(name, topic)

        run("inbox_retry", **chosen)

        assert InboxMessage.objects.filter(state=State.RETRYING, attempts=0).count() == count

    def test_retry_dry_run_only_counts(self, dead):
        dead()

        assert run("inbox_retry", all=True, dry_run=True) == "1 message would be retried."

        assert the_row().state == State.DEAD

    def test_retry_includes_retrying_messages_only_when_asked(self, handles):
        deliver(handles(fails))

        assert run("inbox_retry", all=True) == "0 messages are due now."
        assert drain() == 0
        assert run("inbox_retry", all=True, retrying=True) == "1 message is due now."
        assert drain() == 1

    def test_retry_after_the_handler_is_fixed_takes_effect_once(self, handles):
        deliver(handles(fails, name="tests.h"))
        run_to_the_end()
        registry.remove("tests.h")
        handles(the_effect, name="tests.h")

        run("inbox_retry", all=True)
        drain()
        run("inbox_retry", all=True, retrying=True)
        drain()

        assert (the_row().state, effects()) == (State.DONE, 1)


class TestPurge:
    def test_purge_deletes_done_messages_past_the_retention_and_keeps_dead_ones(self, handles, dead):
        handler = handles(the_effect)
        for _ in range(3):
            deliver(handler)
        dead()
        make_every_row_old()
        deliver(handler)

        assert run("inbox_purge", dry_run=True) == "3 messages would be deleted."
        assert run("inbox_purge") == "3 messages deleted."

        assert sorted(InboxMessage.objects.values_list("state", flat=True)) == [State.DEAD, State.DONE]

    def test_purge_refuses_an_age_below_the_retention(self, handles):
        deliver(handles(the_effect))
        retention = inbox_options().RETENTION.days

        with pytest.raises(CommandError, match="RETENTION"):
            run("inbox_purge", older_than_days=retention - 1.0)

        assert InboxMessage.objects.count() == 1

    def test_purge_with_a_longer_age_keeps_more(self, handles):
        deliver(handles(the_effect))
        make_every_row_old()

        assert run("inbox_purge", older_than_days=float(LONG_AGO.days + 1)) == "0 messages deleted."
        assert run("inbox_purge", older_than_days=float(LONG_AGO.days - 1)) == "1 message deleted."

    @pytest.mark.parametrize("days", ["nan", "inf", "1e300", "900000", "-1"])
    def test_purge_refuses_an_impossible_age(self, handles, days):
        deliver(handles(the_effect))
        make_every_row_old()

        with pytest.raises(CommandError):
            run("inbox_purge", f"--older-than-days={days}")

        assert InboxMessage.objects.count() == 1
