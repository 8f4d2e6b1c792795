"""The deduplication window: what comes later than rows are kept is held back, and only a person's explicit word runs it."""

from __future__ import annotations

import io
import subprocess
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inbox import reading, store
from inbox.handlers import registry
from inbox.models import InboxMessage, State
from inbox.receiving import Received
from outbox.kernel.clock import utcnow
from tests.support.apps.effects.models import Effect
from tests.support.apps.worker import JOB
from tests.support.deliveries import (
    OPTIONS,
    an_envelope,
    deliver,
    drain,
    effects,
    run_to_the_end,
    the_effect,
    the_row,
    wait_until,
)
from tests.support.servers import binaries
from tests.support.workers import OF_THE_WORKERS, Process, as_environment, broker_options, declare, length_of, send

pytestmark = [pytest.mark.django_db(transaction=True)]

every_database = pytest.mark.every_database

DAY = timedelta(days=1)
HOUR = timedelta(hours=1)
SKEW = 2 * HOUR


def retry(*arguments, **options):
    out = io.StringIO()
    call_command("inbox_retry", *arguments, stdout=out, **options)
    return out.getvalue().strip()


def purge():
    call_command("inbox_purge", stdout=io.StringIO())


def days_go_by(span, envelope=None):
    """Everything that is stored, and `envelope`, happened that much longer ago."""
    for row in InboxMessage.objects.all():
        moved = {
            name: value - span
            for name in ("created_at", "received_at", "settled_at", "next_attempt_at")
            if (value := getattr(row, name)) is not None
        }
        InboxMessage.objects.filter(pk=row.pk).update(**moved)
    return envelope and envelope._replace(created_at=envelope.created_at - span)


@pytest.fixture
def held_back(handles):
    """A message that was handled, its row purged, and a copy that came on day 40."""
    handler, envelope = handles(the_effect), an_envelope()
    deliver(handler, envelope)
    envelope = days_go_by(40 * DAY, envelope)
    purge()
    assert not InboxMessage.objects.exists()
    assert deliver(handler, envelope) is Received.DEAD
    return envelope


@every_database
class TestALateCopy:
    def test_after_the_purge_is_quarantined_with_its_reason(self, held_back):
        row = the_row()

        assert (row.state, row.quarantined, effects()) == (State.DEAD, True, 1)
        assert "40 days old" in row.last_error
        assert "override of the age fence" in row.last_error

    def test_of_a_row_that_is_still_there_is_only_a_duplicate(self, handles):
        handler, envelope = handles(the_effect), an_envelope()
        deliver(handler, envelope)
        envelope = days_go_by(40 * DAY, envelope)

        assert deliver(handler, envelope) is Received.DUPLICATE

        row = the_row()
        assert (row.state, row.quarantined, row.duplicates, effects()) == (State.DONE, False, 1, 1)

    def test_that_comes_again_is_a_duplicate_of_the_one_held_back(self, handles, held_back):
        handler = handles(the_effect, name="tests.handler0")

        assert deliver(handler, held_back, redelivered=True) is Received.DUPLICATE

        assert (the_row().state, the_row().duplicates, effects()) == (State.DEAD, 1, 1)

    def test_stays_whatever_is_purged(self, held_back):
        days_go_by(100 * DAY)

        purge()

        assert the_row().quarantined

    def test_from_the_future_is_quarantined_too(self, handles):
        deliver(handles(the_effect), an_envelope(created_at=utcnow() + 2 * DAY))

        assert (the_row().quarantined, effects()) == (True, 0)

    def test_that_could_not_be_handled_at_any_age_is_an_ordinary_dead_letter(self, handles):
        deliver(handles(the_effect), an_envelope(body=b"not JSON", created_at=utcnow() - 400 * DAY))

        assert (the_row().state, the_row().quarantined) == (State.DEAD, False)


@every_database
class TestAPlainRetry:
    def test_does_not_run_it_and_says_what_would(self, held_back):
        said = retry(all=True)

        assert said.startswith("0 messages are due now. In quarantine: 1.")
        assert "--override-age-fence" in said
        run_to_the_end()
        assert (the_row().state, effects()) == (State.DEAD, 1)

    def test_of_just_that_message_fails(self, held_back):
        with pytest.raises(CommandError, match="Not every message"):
            retry(held_back.id)

        assert the_row().state == State.DEAD

    def test_runs_the_others(self, handles, held_back):
        handler = handles(lambda message: 1 / 0, name="tests.fails")
        deliver(handler)
        run_to_the_end()

        assert retry(all=True).startswith("1 messages are due now. In quarantine: 1.")

        assert sorted(InboxMessage.objects.values_list("handler", "state")) == [
            ("tests.fails", State.RETRYING),
            ("tests.handler0", State.DEAD),
        ]

    def test_is_refused_by_the_store_itself(self, held_back):
        assert not store.retry("default", the_row().pk)


@every_database
class TestTheOverride:
    def test_runs_it_exactly_once(self, handles, held_back):
        """Here the operator is wrong, or has taken the first effect back: it was handled before."""
        handler = handles(the_effect, name="tests.handler0")

        assert retry(held_back.id, override_age_fence=True) == "1 messages are due now."
        assert drain() == 1

        row = the_row()
        assert (row.state, row.quarantined, effects()) == (State.DONE, False, 2)
        with pytest.raises(CommandError, match="not dead"):
            retry(held_back.id, override_age_fence=True)
        deliver(handler, held_back)
        deliver(handler, held_back, redelivered=True)
        run_to_the_end()
        assert (the_row().duplicates, effects()) == (2, 2)

    def test_twice_at_once_runs_it_once(self, held_back):
        row = the_row().pk

        assert [store.override_age_fence("default", row) for _ in range(2)] == [True, False]

        assert (drain(), drain(), effects()) == (1, 0, 2)

    def test_of_one_that_fails_makes_it_a_message_like_others(self, handles, held_back):
        def fails(message):
            raise ValueError("no stock")

        registry.remove("tests.handler0")
        handles(fails, name="tests.handler0")
        retry(held_back.id, override_age_fence=True)
        run_to_the_end()
        assert (the_row().state, the_row().quarantined) == (State.DEAD, False)

        assert retry(held_back.id) == "1 messages are due now."

    def test_is_written_to_the_log(self, held_back, caplog):
        retry(held_back.id, override_age_fence=True)

        assert f"overridden for message {held_back.id} of tests.handler0" in caplog.text

    def test_is_counted_beforehand(self, held_back):
        assert retry(all=True, dry_run=True).startswith("0 messages would be retried. In quarantine: 1.")
        assert retry(all=True, dry_run=True, override_age_fence=True) == "1 messages would be retried."

        assert the_row().quarantined

    def test_does_not_release_what_is_not_held_back(self, handles):
        deliver(handles(lambda message: 1 / 0))
        run_to_the_end()

        assert not store.override_age_fence("default", the_row().pk)

    def test_is_not_needed_to_skip_it(self, held_back):
        assert store.skip("default", the_row().pk, "handled in May, see the books")

        assert (the_row().state, effects()) == (State.SKIPPED, 1)


@every_database
class TestADeadLetterOnDay40:
    def test_is_run_once_by_a_plain_retry_because_its_row_was_never_purged(self, handles):
        def fails(message):
            raise ValueError("no stock")

        handler, envelope = handles(fails, name="tests.h"), an_envelope()
        deliver(handler, envelope)
        run_to_the_end()
        envelope = days_go_by(40 * DAY, envelope)
        purge()
        handler = handles(the_effect, name="tests.h2")
        InboxMessage.objects.update(handler=handler.name)

        assert deliver(handler, envelope) is Received.DUPLICATE, "the broker's copy meets the row"
        assert retry(envelope.id) == "1 messages are due now."
        assert drain() == 1

        assert (the_row().state, effects()) == (State.DONE, 1)

    def test_that_the_broker_kept_is_held_back(self, handles):
        """Replayed from a dead-letter queue: nothing here knows it."""
        late = an_envelope(created_at=utcnow() - 40 * DAY)

        assert deliver(handles(the_effect), late, redelivered=True) is Received.DEAD

        assert (the_row().quarantined, effects()) == (True, 0)


@every_database
class TestClocksThatDiffer:
    @pytest.fixture
    def clock(self, monkeypatch):
        """Put this machine's clock off by a span."""
        return lambda skew: monkeypatch.setattr(reading, "utcnow", lambda: utcnow() + skew)

    @pytest.mark.parametrize("skew", [-SKEW, SKEW])
    def test_by_two_hours_change_nothing_for_a_fresh_message(self, handles, clock, skew):
        clock(skew)

        assert deliver(handles(the_effect)) is Received.HANDLED

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        producer=st.floats(-2, 2),
        consumer=st.floats(-2, 2),
        age_when_handled=st.floats(0, 29 * 24 - 4),
        hours_until_the_copy=st.floats(0, 60 * 24) | st.floats(28 * 24, 31 * 24),
    )
    def test_by_two_hours_on_either_side_let_no_copy_run_again(
        self, handles, clock, producer, consumer, age_when_handled, hours_until_the_copy
    ):
        """Whenever it comes and whatever was purged before: the effect happens once."""
        InboxMessage.objects.all().delete()
        Effect.objects.all().delete()
        handler = handles(the_effect)
        clock(consumer * HOUR)
        envelope = an_envelope(created_at=utcnow() - (age_when_handled - producer) * HOUR)
        assert deliver(handler, envelope) is Received.HANDLED

        envelope = days_go_by(hours_until_the_copy * HOUR, envelope)
        purge()

        assert deliver(handler, envelope) in {Received.DUPLICATE, Received.DEAD}
        run_to_the_end()
        assert effects() == 1

    def test_by_more_than_the_margin_would_let_a_copy_in(self, handles, clock):
        """Why the margin is a day, and what a machine whose clock is days behind does."""
        handler, envelope = handles(the_effect), an_envelope()
        deliver(handler, envelope)
        envelope = days_go_by(OPTIONS.RETENTION + HOUR, envelope)
        purge()

        clock(-OPTIONS.AGE_FENCE_MARGIN - 2 * HOUR)

        assert deliver(handler, envelope) is Received.HANDLED


class TestAConsumerWhoseClockIsOff:
    """A real process that is shown another time; the databases and the broker keep theirs."""

    @pytest.fixture
    def skewed_by(self, process_environment, rabbitmq_url, tmp_path):
        def start(hours):
            shown = subprocess.run(
                [str(binaries.faketime()), "-f", f"{hours:+}h", "env"], check=True, capture_output=True, text=True
            )
            clock = dict(
                line.partition("=")[::2] for line in shown.stdout.splitlines() if line.startswith(("LD_", "DYLD", "FAKE"))
            )
            declare(OF_THE_WORKERS, broker_options(rabbitmq_url))
            environment = {
                **process_environment,
                **as_environment(
                    INBOX={"BROKER_URL": rabbitmq_url, "EXCHANGE": "outbox", "GROUP": "tests"},
                    OUTBOX={"BROKER_URL": rabbitmq_url},
                ),
                **clock,
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "DJANGO_SETTINGS_MODULE": "tests.support.apps.worker.settings",
            }
            return Process(environment, tmp_path / "consumer.log", "inbox_consume")

        return start

    @pytest.mark.parametrize("hours", [-2, 2])
    @pytest.mark.django_db(transaction=True, databases=["default", "other"])
    def test_handles_what_is_fresh_and_holds_back_what_may_have_been_purged(
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
            process.terminate()
            assert process.ends() == 0

        assert dict(InboxMessage.objects.values_list("message_id", "state")) == {
            "fresh": State.DONE,
            "young enough": State.DONE,
            "too old": State.DEAD,
        }
        # In whole days, so this tells which clock it looked at.
        too_old = the_row(message_id="too old")
        assert too_old.last_error.startswith(f"It is {29 if hours < 0 else 30} days old")
        assert too_old.quarantined
        assert effects("too old") == 0
        wait_until(lambda: length_of(rabbitmq_server, OF_THE_WORKERS, broker_options(rabbitmq_url)) == 0)
