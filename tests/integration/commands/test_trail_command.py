"""`exactly_once_trail`: the history of one message, both apps joined by its id."""

import io
import json
import uuid
from datetime import timedelta
from functools import partial

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from exactly_once.console.operators.message_history import history_of
from exactly_once.sql.now import DatabaseTime
from inbox.models import InboxMessage
from outbox import cancel
from outbox.models import OutboxMessage, TrailEntry
from outbox.store import settling
from outbox.store.settling import Failure, Settlement
from tests.support.commands import output_of
from tests.support.deliveries import an_envelope, deliver, the_effect
from tests.support.relaying import TOPIC, published, set_columns

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

HANDLER = "tests.reserve_stock"
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def local():
    with override_settings(OUTBOX={"BROKER_URL": "local://"}, INBOX={}):
        yield


def relay():
    call_command("outbox_relay", drain=True, verbosity=0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


printed_by_trail = partial(output_of, "exactly_once_trail")


def transitions(message):
    return [(moment.where, moment.was, moment.became) for moment in history_of(str(message.id)).moments]


class TestLifeOfAMessage:
    @pytest.mark.every_database
    def test_life_joins_outbox_and_inbox_by_message_id(self, handles):
        handles(the_effect, name=HANDLER)
        message, _another = published(biz_id="order-1"), published(biz_id="order-2")

        relay()

        found = transitions(message)
        # Received and published are one transaction here, and on SQLite one instant.
        assert found[0] == ("outbox", "", "ready")
        assert set(found[1:3]) == {(HANDLER, "", "received"), ("outbox", "ready", "published")}
        assert found[3:] == [(HANDLER, "received", "done")]
        standings = {standing.where: standing for standing in history_of(str(message.id)).standings}
        assert {where: (one.state, one.attempts) for where, one in standings.items()} == {
            "outbox": ("published", 1),
            HANDLER: ("done", 1),
        }

    def test_life_takes_its_beginning_from_the_row_when_the_trail_lacks_it(self):
        message = published(delay=HOUR)
        set_columns(message, state="ready", deliver_at=DatabaseTime())
        cancel(message.id)

        moments = history_of(str(message.id)).moments

        assert [(one.was, one.became, bool(one.process)) for one in moments] == [
            ("", "scheduled", False),
            ("ready", "cancelled", True),
        ]

    def test_life_of_a_foreign_message_begins_where_it_was_received(self, handles):
        handler = handles(the_effect, name=HANDLER)
        deliver(handler, an_envelope(id="not-a-uuid", biz_id="order-9"))

        life = history_of("not-a-uuid")

        assert [(one.where, one.became) for one in life.moments] == [(HANDLER, "received"), (HANDLER, "done")]
        assert any("published elsewhere" in words for words in life.unknown)

    def test_life_says_when_the_message_or_its_trail_may_have_been_purged(self):
        message, old = published(delay=HOUR), published()
        cancel(message.id)
        OutboxMessage.objects.filter(message_id=message.id).delete()
        set_columns(old, created_at=DatabaseTime(timedelta(days=-31)))

        life = history_of(str(message.id))

        assert [one.became for one in life.moments] == ["cancelled"]
        assert any("has been purged; only its trail is left" in words for words in life.unknown)
        assert any("may be purged" in words for words in history_of(str(old.id)).unknown)

    @pytest.mark.parametrize(("state", "is_missed"), [("stuck", False), ("rolled_back", False), ("cancelled", True)])
    def test_life_misses_a_handler_only_when_the_message_may_have_been_sent(self, state, is_missed):
        message = published()
        set_columns(message, state=state)

        assert any("No handler of this project has it" in words for words in history_of(str(message.id)).unknown) is is_missed

    @pytest.mark.every_database
    def test_life_shows_an_entry_once_when_two_aliases_name_one_database(self):
        message = published()
        cancel(message.id)

        TrailEntry.objects.get().save(using="other")

        assert [one.became for one in history_of(str(message.id)).moments] == ["ready", "cancelled"]


class TestTrailCommand:
    @pytest.mark.long
    @pytest.mark.parametrize("columns", [80, 140])
    def test_trail_fits_the_width_of_the_terminal(self, monkeypatch, handles, columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "dumb")  # no escape sequences but those of the message
        handles(the_effect, name=HANDLER)
        message = published(biz_id="order-1", delay=HOUR)
        set_columns(message, state="ready", deliver_at=DatabaseTime())
        error = "x\x1b[2J" + "too large " * 60
        settling.settle("default", Settlement(failed=[Failure(positions=[message.position], error=error, retry_after=None)]))
        call_command("outbox_restore", str(message.id), verbosity=0)
        relay()

        call_command("exactly_once_trail", message.id, stdout=(terminal := Terminal()))

        printed = terminal.getvalue()
        lines = printed.splitlines()
        assert max(map(len, lines)) <= columns
        assert "\x1b" not in printed
        for words in ("order-1", TOPIC, "→ scheduled", "dead → ready", "outbox_restore", "ready → published", HANDLER, "Now"):
            assert words in printed

    def test_trail_is_printed_as_json(self, handles):
        handles(the_effect, name=HANDLER)
        message = published(biz_id="order-1")
        relay()

        read = json.loads(printed_by_trail(message.id, "--json"))
        assert read["message_id"] == str(message.id)
        assert {one["became"] for one in read["life"]} == {"ready", "received", "published", "done"}
        assert [one["state"] for one in read["now"]] == ["published", "done"]

    def test_trail_by_topic_and_biz_id_prints_every_message(self, handles):
        handles(the_effect, name=HANDLER)
        first, second = published(biz_id="order-1"), published(biz_id="order-1")
        relay()
        assert InboxMessage.objects.count() == 1

        lives = [json.loads(line) for line in printed_by_trail("--topic", TOPIC, "--biz-id", "order-1", "--json").splitlines()]

        assert [one["message_id"] for one in lives] == [str(first.id), str(second.id)]
        assert [one["namesakes"] for one in lives] == [[str(second.id)], [str(first.id)]]
        assert str(first.id) in printed_by_trail(second.id)

    def test_trail_of_an_unknown_message_names_the_databases_searched(self):
        unknown = uuid.uuid4()

        with pytest.raises(CommandError, match=rf"{unknown}.*the outbox \(default, other\); the inbox \(default, other\)"):
            printed_by_trail(unknown)
        with pytest.raises(CommandError, match=r"No message has topic.*the inbox \(default, other\)\. Check the spelling"):
            printed_by_trail("--topic", TOPIC, "--biz-id", "unknown")

    @pytest.mark.parametrize("given", [[], ["--topic", TOPIC], [uuid.uuid4(), "--topic", TOPIC, "--biz-id", "order-1"]])
    def test_trail_without_exactly_one_selection_is_refused(self, given):
        with pytest.raises(CommandError, match="Say which messages"):
            printed_by_trail(*given)
