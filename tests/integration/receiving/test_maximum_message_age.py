"""The maximum message age: a copy that arrives after its row may be purged is quarantined and runs only by an override."""

import subprocess
from datetime import timedelta
from functools import partial

import pytest
from django.core.management import CommandError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exactly_once.process.clock import utcnow
from inbox.handlers.registry import registry
from inbox.models import InboxMessage, Receipt
from inbox.receiving import reading
from inbox.states import Outcome, State
from tests.support import decisions
from tests.support.apps.effects.models import Effect
from tests.support.apps.worker import JOB
from tests.support.commands import output_of
from tests.support.deliveries import OPTIONS, an_envelope, deliver, drain, effects, fails, run_to_the_end, the_effect, the_row
from tests.support.inbox_rows import delete_messages, rename_messages
from tests.support.servers import binaries
from tests.support.waiting import wait_until
from tests.support.workers import OF_THE_WORKERS, broker_options, declare, length_of, send

pytestmark = [pytest.mark.django_db(transaction=True)]

DAY = timedelta(days=1)
HOUR = timedelta(hours=1)
SKEW = 2 * HOUR


retry = partial(output_of, "inbox_retry")
purge = partial(output_of, "exactly_once_purge")


def shift_into_the_past(duration, envelope=None):
    """Move the instants of every stored row, and of `envelope`, back by `duration`."""
    for row in InboxMessage.objects.all():
        moved = {
            name: value - duration
            for name in ("created_at", "received_at", "settled_at", "next_attempt_at")
            if (value := getattr(row, name)) is not None
        }
        if row.day:
            moved["day"] = row.day - duration.days
        InboxMessage.objects.filter(pk=row.pk).update(**moved)
    for receipt in Receipt.objects.all():
        Receipt.objects.filter(pk=receipt.pk).update(received_at=receipt.received_at - duration)
    return envelope and envelope._replace(created_at=envelope.created_at - duration)


@pytest.fixture
def quarantined_copy(handles):
    """The copy, delivered on day 400, of a message that was handled and whose row was purged."""
    handler, envelope = handles(the_effect), an_envelope()
    deliver(handler, envelope)
    envelope = shift_into_the_past(400 * DAY, envelope)
    purge()
    assert not Receipt.objects.exists()
    assert deliver(handler, envelope) is Outcome.DEAD
    return envelope


@pytest.mark.every_database
class TestLateCopy:
    def test_late_copy_after_the_purge_is_quarantined_with_its_reason(self, quarantined_copy):
        row = the_row()

        assert (row.state, row.quarantined, effects()) == (State.DEAD, True, 1)
        assert "400 d old" in row.last_error
        assert "override the maximum message age" in row.last_error

    def test_second_late_copy_is_a_duplicate_of_the_quarantined_one_which_is_never_purged(self, handles, quarantined_copy):
        handler = handles(the_effect, name="tests.handler0")
        shift_into_the_past(100 * DAY)
        purge()

        assert deliver(handler, quarantined_copy, redelivered=True) is Outcome.DUPLICATE

        assert (the_row().state, the_row().quarantined, the_row().duplicates, effects()) == (State.DEAD, True, 1, 1)

    def test_late_message_that_is_unreadable_is_an_ordinary_dead_letter(self, handles):
        deliver(handles(the_effect), an_envelope(body=b"not JSON", created_at=utcnow() - 400 * DAY))

        assert (the_row().state, the_row().quarantined) == (State.DEAD, False)


class TestPlainRetry:
    def test_plain_retry_of_a_quarantined_message_fails(self, quarantined_copy):
        with pytest.raises(CommandError, match="Not all of the given messages"):
            retry(quarantined_copy.id)
        assert not decisions.retry("default", the_row().pk)
        run_to_the_end()

        assert (the_row().state, the_row().quarantined, effects()) == (State.DEAD, True, 1)

    def test_plain_retry_of_all_makes_ordinary_dead_letters_due(self, handles, quarantined_copy):
        deliver(handles(lambda message: 1 / 0, name="tests.fails"))
        run_to_the_end()

        said = retry(all=True)

        assert said.startswith("1 message is due now. In quarantine: 1.")
        assert "--override-maximum-age" in said
        assert sorted(InboxMessage.objects.values_list("handler", "state")) == [
            ("tests.fails", State.RETRYING),
            ("tests.handler0", State.DEAD),
        ]


class TestOverride:
    def test_override_runs_a_quarantined_message_exactly_once(self, handles, quarantined_copy, caplog):
        """The message was handled before: the operator is wrong about it, or has reverted the first effect."""
        handler = handles(the_effect, name="tests.handler0")

        assert retry(quarantined_copy.id, override_maximum_age=True) == "1 message is due now."
        assert not decisions.override_maximum_age("default", the_row().pk), "a second time"
        assert f"overridden for message {quarantined_copy.id} (tests.handler0)" in caplog.text
        assert drain() == 1

        row = the_row()
        assert (row.state, row.quarantined, effects()) == (State.DONE, False, 2)
        with pytest.raises(CommandError, match="not dead"):
            retry(quarantined_copy.id, override_maximum_age=True)
        deliver(handler, quarantined_copy)
        deliver(handler, quarantined_copy, redelivered=True)
        run_to_the_end()
        assert (the_row().duplicates, effects()) == (2, 2)

    def test_overridden_message_that_fails_becomes_an_ordinary_dead_letter(self, handles, quarantined_copy):
        registry.remove("tests.handler0")
        handles(fails, name="tests.handler0")
        retry(quarantined_copy.id, override_maximum_age=True)
        run_to_the_end()
        assert (the_row().state, the_row().quarantined) == (State.DEAD, False)

        assert retry(quarantined_copy.id) == "1 message is due now."

    def test_dry_run_of_an_override_counts_and_changes_nothing(self, quarantined_copy):
        assert retry(all=True, dry_run=True).startswith("0 messages would be retried. In quarantine: 1.")
        assert retry(all=True, dry_run=True, override_maximum_age=True) == "1 message would be retried."

        assert the_row().quarantined

    def test_override_of_an_ordinary_dead_letter_does_nothing(self, handles):
        deliver(handles(lambda message: 1 / 0))
        run_to_the_end()

        assert not decisions.override_maximum_age("default", the_row().pk)

        assert (the_row().state, the_row().quarantined) == (State.DEAD, False)

    def test_quarantined_message_can_be_skipped_without_an_override(self, quarantined_copy):
        assert decisions.skip("default", the_row().pk, "handled in May, see the books")

        assert (the_row().state, effects()) == (State.SKIPPED, 1)


class TestDeadLetterOnDay400:
    def test_dead_letter_is_never_purged_and_runs_once_by_a_plain_retry_on_day_400(self, handles):
        handler, envelope = handles(fails, name="tests.h"), an_envelope()
        deliver(handler, envelope)
        run_to_the_end()
        envelope = shift_into_the_past(400 * DAY, envelope)
        purge()
        handler = handles(the_effect, name="tests.h2")
        rename_messages(handler=handler.name)

        assert deliver(handler, envelope) is Outcome.DUPLICATE, "the broker's copy is a duplicate of the row"
        assert retry(envelope.id) == "1 message is due now."
        assert drain() == 1

        assert (the_row().state, effects()) == (State.DONE, 1)


class TestClockSkew:
    @pytest.fixture
    def clock(self, monkeypatch):
        """Shift this machine's clock: `clock(skew)`."""
        return lambda skew: monkeypatch.setattr(reading, "utcnow", lambda: utcnow() + skew)

    @pytest.mark.long
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        producer=st.floats(-2, 2),
        consumer=st.floats(-2, 2),
        age_when_handled=st.floats(0, 29 * 24 - 4),
        hours_until_the_copy=st.floats(0, 60 * 24) | st.floats(28 * 24, 31 * 24),
    )
    def test_clock_skew_of_two_hours_on_either_side_lets_no_copy_run_again(
        self, handles, clock, producer, consumer, age_when_handled, hours_until_the_copy
    ):
        """The effect happens once, at any time of the copy's arrival and whether or not the row was purged."""
        delete_messages()
        Effect.objects.all().delete()
        handler = handles(the_effect)
        clock(consumer * HOUR)
        envelope = an_envelope(created_at=utcnow() - (age_when_handled - producer) * HOUR)
        assert deliver(handler, envelope) is Outcome.HANDLED

        envelope = shift_into_the_past(hours_until_the_copy * HOUR, envelope)
        purge()

        assert deliver(handler, envelope) in {Outcome.DUPLICATE, Outcome.DEAD}
        run_to_the_end()
        assert effects() == 1

    def test_clock_skew_beyond_the_margin_would_run_a_copy_again(self, handles, clock):
        """This is why the margin is a day, and what happens on a machine whose clock is days behind."""
        handler, envelope = handles(the_effect), an_envelope()
        deliver(handler, envelope)
        envelope = shift_into_the_past(OPTIONS.RETENTION + HOUR, envelope)
        purge()

        clock(-OPTIONS.age_margin - 2 * HOUR)

        assert deliver(handler, envelope) is Outcome.HANDLED
        assert effects() == 2


class TestConsumerWithSkewedClock:
    """A real process under faketime; the databases and the broker have the right time."""

    @pytest.fixture
    def skewed_by(self, a_process, process_environment, rabbitmq_url):
        def start(hours):
            shown = subprocess.run(
                [str(binaries.faketime()), "-f", f"{hours:+}h", "env"], check=True, capture_output=True, text=True
            )
            clock = dict(
                line.partition("=")[::2] for line in shown.stdout.splitlines() if line.startswith(("LD_", "DYLD", "FAKE"))
            )
            process_environment.update(clock, FAKETIME_DONT_FAKE_MONOTONIC="1")
            declare(OF_THE_WORKERS, broker_options(rabbitmq_url))
            return a_process("inbox_consume")

        return start

    @pytest.mark.parametrize("hours", [-2, 2])
    @pytest.mark.django_db(transaction=True, databases=["default", "other"])
    def test_consumer_with_skewed_clock_handles_fresh_and_quarantines_old_messages(
        self, skewed_by, rabbitmq_server, rabbitmq_url, hours
    ):
        def sent(name, age):
            created_at = utcnow() - age
            send(rabbitmq_url, JOB, {}, message_id=name, headers={"cloudEvents:time": created_at.isoformat()})

        with skewed_by(hours) as process:
            sent("fresh", timedelta())
            sent("young enough", OPTIONS.oldest_run - SKEW - HOUR)
            sent("too old", OPTIONS.RETENTION + timedelta(minutes=1))
            process.until(lambda: InboxMessage.objects.filter(state__in=[State.DONE, State.DEAD]).count() == 3)
            assert process.end() == 0

        assert dict(InboxMessage.objects.values_list("message_id", "state")) == {
            "fresh": State.DONE,
            "young enough": State.DONE,
            "too old": State.DEAD,
        }
        # The age is in whole days, so it shows which clock was used.
        too_old = the_row(message_id="too old")
        assert too_old.last_error.startswith(f"It is {364 if hours < 0 else 365} d old")
        assert too_old.quarantined
        assert effects("too old") == 0
        wait_until(lambda: length_of(rabbitmq_server, OF_THE_WORKERS, broker_options(rabbitmq_url)) == 0)
