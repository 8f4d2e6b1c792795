"""An operator corrects the payload of a dead message: another row, run like any stored one, while the first stays protected."""

import json
import zlib
from functools import partial

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction

from exactly_once.console.operators.message_history import history_of
from exactly_once.process.clock import utcnow
from inbox import Lease, Ordered, Reject, housekeeping
from inbox.conf import inbox_options
from inbox.errors import NotEditable
from inbox.handlers.registry import registry
from inbox.models import InboxMessage, Step, TrailEntry
from inbox.operators.editing import correct, editable, replace_message
from inbox.states import Outcome, State
from inbox.store.ordering import release_stuck
from tests.support import decisions
from tests.support.deliveries import (
    OPTIONS,
    TOPIC,
    admitted,
    an_envelope,
    at_once,
    deliver,
    drain,
    effects,
    handed_over,
    in_the_order_of_their_effects,
    make_due,
    options,
    the_effect,
    the_row,
)
from tests.support.inbox_rows import copy_of, make_older
from tests.support.loads import receive_together

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

BY = "by anna in the admin"
GOOD, BAD = {"order_id": 7, "amount": 5}, {"order_id": 7, "amount": "five"}
RIGHT = json.dumps(GOOD)

seen = []


@pytest.fixture(autouse=True)
def _nothing_seen():
    seen.clear()


def takes_whole_amounts(message):
    seen.append(message)
    if not isinstance(message.payload.get("amount"), int):
        raise Reject("the amount is not a whole number")
    the_effect(message)


def takes_whole_amounts_in_bulk(messages):
    for message in messages:
        takes_whole_amounts(message)


@pytest.fixture
def handler(handles):
    return handles(takes_whole_amounts)


def dead(handler, payload=BAD, **attributes):
    """Deliver a message that the handler rejects: its envelope and its row."""
    envelope = an_envelope(payload, **{"biz_id": "order-7", **attributes})
    if handler.ordered:
        handed_over(handler, envelope)
        drain()
    else:
        deliver(handler, envelope)
    row = the_row(message_id=envelope.id)
    assert row.state == State.DEAD
    return envelope, row


def corrected(row, text=RIGHT):
    """The row that replaces `row`, which an operator has corrected."""
    pk = replace_message("default", row.pk, text, by=BY)
    assert pk is not None
    return the_row(pk=pk)


def refusal(row, text=RIGHT):
    before = list(InboxMessage.objects.order_by("pk").values())
    with pytest.raises(NotEditable) as refused:
        replace_message("default", row.pk, text, by=BY)
    assert list(InboxMessage.objects.order_by("pk").values()) == before
    return str(refused.value)


@pytest.mark.every_database
class TestCorrectedMessage:
    def test_corrected_message_is_another_row_that_is_run_once_with_the_new_payload(self, handler):
        envelope, row = dead(handler)

        new = corrected(row)
        drain()
        drain()

        assert list(row.replacements.all()) == [new]
        assert (the_row(pk=new.pk).state, effects()) == (State.DONE, 1)
        message = seen[-1]
        assert message.payload == GOOD
        assert (message.id, message.biz_id, message.topic, message.attempt) == (envelope.id, "order-7", TOPIC, 1)
        assert bytes(the_row(pk=row.pk).body) == envelope.body

    def test_both_rows_have_an_entry_in_the_trail_and_the_message_has_one_history(self, handler):
        envelope, row = dead(handler)

        new = corrected(row)
        drain()

        entries = TrailEntry.objects.filter(message_id=envelope.id).order_by("pk").values_list("was", "became", "reason")
        assert list(entries)[1:] == [
            ("dead", "skipped", f"replaced by row {new.pk} (biz-id {new.biz_id}); {BY}"),
            ("", "received", f"replaces row {row.pk} (biz-id order-7) with another payload; {BY}"),
        ]
        assert the_row(pk=row.pk).last_error == f"skipped: replaced by row {new.pk} (biz-id {new.biz_id}); {BY}"
        life = history_of(envelope.id)
        assert [(moment.was, moment.became) for moment in life.moments] == [
            ("", "dead"),
            ("dead", "skipped"),
            ("", "received"),
            ("received", "done"),
        ]
        assert [(one.state, one.biz_id) for one in life.standings] == [("skipped", "order-7"), ("done", new.biz_id)]
        assert f"replaces row {row.pk}" in life.standings[1].also

    def test_rolled_back_correction_leaves_both_row_and_trail_as_they_were(self, handler):
        _, row = dead(handler)
        before = TrailEntry.objects.count()

        with transaction.atomic():
            corrected(row)
            transaction.set_rollback(True)

        assert (InboxMessage.objects.get().state, TrailEntry.objects.count()) == (State.DEAD, before)

    def test_content_type_headers_and_ids_are_kept_and_a_compressed_body_is_stored_inflated(self, handler):
        _, row = dead(
            handler,
            body=zlib.compress(json.dumps(BAD).encode()),
            headers={"compression": "gzip", "tenant": "acme"},
            content_type="application/json; charset=utf-8",
            correlation_id="c-1",
            causation_id="c-2",
            source="/billing",
        )

        new = corrected(row)
        drain()

        assert (new.content_type, new.headers) == ("application/json; charset=utf-8", {"tenant": "acme"})
        assert (new.correlation_id, new.causation_id, new.source) == ("c-1", "c-2", "/billing")
        assert json.loads(bytes(new.body)) == GOOD
        assert the_row(pk=new.pk).state == State.DONE

    def test_text_to_edit_is_the_same_payload_with_invisible_characters_escaped(self, handler):
        payload = {"amount": "five", "name": "a\u202eb\x00 \ud83d", "nested": [1.5, None, "ä🙂"]}
        _, row = dead(handler, payload)

        text = editable(row)

        assert json.loads(text) == payload
        assert "\\u202e" in text
        assert "ä🙂" in text

    @pytest.mark.long
    def test_payload_that_indentation_would_make_a_thousand_times_longer_is_not_edited(self, handler):
        nested = b"[" * 900 + b"]" * 900
        _, row = dead(handler, body=b'{"amount": [' + b", ".join([nested] * 20) + b"]}")

        with pytest.raises(NotEditable, match="nested too deeply to be edited"):
            editable(row)

    def test_correction_that_is_rejected_again_can_be_corrected_again(self, handler):
        _, row = dead(handler)
        second = corrected(row, json.dumps({"order_id": 7, "amount": "six"}))
        drain()

        third = corrected(the_row(pk=second.pk))
        drain()

        assert third.biz_id == f"edited:{second.pk}:order-7"
        assert seen[-1].biz_id == "order-7"
        states = list(InboxMessage.objects.order_by("pk").values_list("state", flat=True))
        assert (states, effects()) == ([State.SKIPPED, State.SKIPPED, State.DONE], 1)

    def test_of_two_corrections_at_once_one_is_stored(self, handler):
        _, row = dead(handler)

        found = at_once([partial(replace_message, "default", row.pk, RIGHT, by=BY) for _ in range(2)])
        drain()

        assert sum(pk is not None for pk in found) == 1
        assert (InboxMessage.objects.count(), effects()) == (2, 1)

    def test_link_to_a_purged_first_row_has_no_effect(self, handler):
        envelope, row = dead(handler)
        new = corrected(row)
        make_older(InboxMessage.objects.filter(pk=row.pk), 2 * OPTIONS.KEEP_HISTORY)

        assert sum(housekeeping.HISTORY.purge("default", OPTIONS.KEEP_HISTORY)) == 1
        drain()

        assert (the_row(pk=new.pk).state, seen[-1].biz_id) == (State.DONE, "order-7")
        assert [moment.became for moment in history_of(envelope.id).moments][-1] == "done"


class TestFurtherDeliveries:
    def test_copies_of_the_published_message_are_duplicates_of_the_first_row_and_not_conflicts(self, handler):
        envelope, row = dead(handler)
        corrected(row)
        drain()

        received = [deliver(handler, envelope), deliver(handler, envelope, redelivered=True)]

        row.refresh_from_db()
        assert received == [Outcome.DUPLICATE] * 2
        assert (row.duplicates, row.redeliveries, row.conflicts, effects()) == (2, 1, 0, 1)

        assert deliver(handler, an_envelope(GOOD, biz_id="order-7")) is Outcome.DUPLICATE
        row.refresh_from_db()
        assert (row.conflicts, effects()) == (1, 1), "the correction, published under the same biz-id, is a conflict"

    def test_published_biz_id_that_looks_like_that_of_a_correction_is_another_fact(self, handler):
        _, row = dead(handler)
        new = corrected(row)

        assert deliver(handler, an_envelope(GOOD, biz_id=new.biz_id)) is Outcome.HANDLED
        drain()

        assert seen[0].biz_id == "order-7"
        assert effects() == 2


class TestBizIdOfTheCorrection:
    """Of a handler that takes the biz-id from the payload."""

    @pytest.fixture
    def handler(self, handles):
        return handles(takes_whole_amounts, biz_id=lambda message: message.payload["order_id"])

    def test_correction_about_the_same_fact_leaves_the_fact_protected(self, handler):
        _, row = dead(handler)

        new = corrected(row)
        drain()

        assert (new.biz_id, seen[-1].biz_id) == (f"edited:{row.pk}:7", "7")
        assert deliver(handler, an_envelope(GOOD)) is Outcome.DUPLICATE
        assert effects() == 1

    def test_correction_about_another_fact_takes_its_biz_id_so_that_copies_of_that_are_duplicates(self, handler):
        _, row = dead(handler)

        new = corrected(row, json.dumps({"order_id": 8, "amount": 5}))
        drain()

        assert new.biz_id == "8"
        assert deliver(handler, an_envelope({"order_id": 8, "amount": 5})) is Outcome.DUPLICATE
        assert deliver(handler, an_envelope(GOOD)) is Outcome.DUPLICATE
        assert effects("8") == effects() == 1

    def test_correction_with_the_biz_id_of_another_message_is_refused_and_names_its_row(self, handler):
        deliver(handler, an_envelope({"order_id": 8, "amount": 5}))
        other = the_row()
        _, row = dead(handler)

        reason = refusal(row, '{"order_id": 8, "amount": 6}')

        assert f"biz-id 8, which the message in row {other.pk} (done) already has" in reason

    def test_body_that_is_not_json_gets_the_biz_id_that_its_correction_has(self, handler):
        _, row = dead(handler, body=b"{")

        assert editable(row) == "{"
        new = corrected(row)
        drain()

        assert (new.biz_id, seen[-1].payload) == ("7", GOOD)
        assert deliver(handler, an_envelope(GOOD)) is Outcome.DUPLICATE

    def test_correction_without_a_biz_id_is_refused_with_the_error_of_the_handler(self, handler):
        _, row = dead(handler)

        assert f"biz_id of {handler.name} failed with KeyError: 'order_id'" in refusal(row, '{"amount": 5}')

    def test_handler_that_builds_the_biz_id_of_more_than_a_row_has_keeps_the_first_one(self, handles):
        handler = handles(takes_whole_amounts, biz_id=lambda message: f"{message.biz_id}/{message.payload['order_id']}")
        _, row = dead(handler)

        new = corrected(row)
        drain()

        assert (row.biz_id, new.biz_id, seen[-1].biz_id) == ("order-7/7", f"edited:{row.pk}:order-7/7", "order-7/7")


def take_step(row):
    Step.objects.create(message=row, name="charge", result=None, taken_at=utcnow())


class TestRefusals:
    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ('{"order_id": 7,\n "amount" 5}', "Line 2, column 11: the text is not JSON (Expecting ':' delimiter)."),
            ("", "Line 1, column 1: the text is not JSON (Expecting value)."),
            ('{"amount": NaN}', "NaN and Infinity are not JSON."),
            ('{"amount": 1e999}', "NaN and Infinity are not JSON."),
            ('{"amount":"five",  "order_id": 7}', None),
            (json.dumps(BAD, indent=9), "The payload is unchanged. Retry the message instead."),
            ("[" * 100_000, "is not JSON"),
            (json.dumps({"amount": 5, "note": "x" * 5000}), "more than 4096"),
        ],
    )
    def test_text_that_cannot_be_stored_is_refused_with_its_place(self, handler, settings, text, reason):
        settings.INBOX = {"BODY_LIMIT_BYTES": 4096 if "4096" in str(reason) else inbox_options().BODY_LIMIT_BYTES}
        _, row = dead(handler)

        if reason is None:  # another order of the fields is another payload
            assert corrected(row, text)
        else:
            assert reason in refusal(row, text)

    @pytest.mark.parametrize(
        ("biz_id", "happens", "reason"),
        [
            ("order-7", lambda row: InboxMessage.objects.update(quarantined=True), "It is in quarantine"),
            ("order-7", lambda row: registry.remove(row.handler), "has no handler 'tests.handler0'"),
            ("order-7", take_step, "Its steps (charge) were taken with the present payload"),
            ("x" * 255, lambda row: None, "and the limit is 255"),
        ],
        ids=["in quarantine", "unknown handler", "with steps", "biz-id without room for the name of a correction"],
    )
    def test_message_that_must_not_be_corrected_is_refused_with_the_reason(self, handler, biz_id, happens, reason):
        _, row = dead(handler, biz_id=biz_id)
        happens(row)

        assert reason in refusal(row)

    def test_message_that_is_not_dead_any_more_is_left_alone(self, handler):
        _, row = dead(handler)
        assert decisions.retry("default", row.pk)

        assert replace_message("default", row.pk, RIGHT, by=BY) is None
        with pytest.raises(NotEditable, match="Its state is retrying; only a dead message"):
            correct(the_row(pk=row.pk), RIGHT)


@pytest.mark.parametrize("kind", [{"size": 10}, {"group_commit": 5}, {"ordered": True}], ids=str)
def test_corrected_message_of_any_handler_is_run_once(handles, kind):
    function = takes_whole_amounts_in_bulk if "size" in kind else takes_whole_amounts
    handler = handles(function, **kind)
    if "size" in kind or "group_commit" in kind:
        given = [an_envelope(payload, biz_id=f"m{number}") for number, payload in enumerate([GOOD, BAD, GOOD])]
        receive_together(handler, given)
        row = the_row(state=State.DEAD)
    else:
        _, row = dead(handler, key="k")
    before = effects()

    new = corrected(row)
    for _ in range(3):
        drain()

    assert (the_row(pk=new.pk).state, effects()) == (State.DONE, before + 1)
    assert seen[-1].biz_id == row.biz_id


class TestLeases:
    @pytest.fixture(params=["database", "redis"])
    def given(self, request):
        return options(LEASE_STORE="database" if request.param == "database" else request.getfixturevalue("redis_url"))

    def test_corrected_message_is_run_once_and_copies_of_the_first_are_duplicates(self, handles, given):
        handler, envelope = handles(takes_whole_amounts, lease=Lease()), an_envelope(BAD, biz_id="order-7")
        assert deliver(handler, envelope, given=given) is Outcome.DEAD
        row = the_row()

        new = corrected(row)
        drain(given)
        received = [deliver(handler, envelope, given=given, redelivered=again) for again in (False, True)]

        row.refresh_from_db()
        assert (the_row(pk=new.pk).state, effects(), received) == (State.DONE, 1, [Outcome.DUPLICATE] * 2)
        assert (seen[-1].biz_id, seen[-1].attempt, seen[-1].fence > 0) == ("order-7", 1, True)
        assert (row.duplicates, row.conflicts) == (2, 0)


@pytest.mark.every_database
class TestOrder:
    @pytest.fixture
    def handler(self, handles):
        return handles(takes_whole_amounts, ordered=True)

    def arrive(self, handler, **amounts):
        """Take messages of one key in, in this order; each is named after its amount."""
        envelopes = [an_envelope({"amount": amount}, biz_id=name, key="k") for name, amount in amounts.items()]
        admitted(handler, *envelopes)

    def drain(self):
        for _ in range(4):
            drain()

    def test_correction_takes_the_place_of_the_dead_head_before_the_messages_that_wait_for_it(self, handler):
        self.arrive(handler, a="bad", b=2, c=3)
        self.drain()
        row = the_row(biz_id="a")

        new = corrected(row, '{"amount": 1}')
        assert (new.state, new.ordered, new.place) == (State.RECEIVED, True, row.pk)
        self.arrive(handler, d=4)
        self.drain()

        assert in_the_order_of_their_effects() == ["a", "b", "c", "d"]

    def test_correction_that_is_dead_again_still_holds_back_its_key_and_keeps_its_place(self, handler):
        self.arrive(handler, a="bad", b=2)
        self.drain()
        second = corrected(the_row(biz_id="a"), '{"amount": "worse"}')
        self.drain()
        assert in_the_order_of_their_effects() == []

        third = corrected(the_row(pk=second.pk), '{"amount": 1}')
        self.drain()

        assert third.place == second.place
        assert in_the_order_of_their_effects() == ["a", "b"]

    def test_correction_of_a_message_behind_a_dead_head_waits_in_its_place(self, handler):
        self.arrive(handler, a="bad")
        refused = an_envelope(body=b"{", biz_id="b", key="k")
        admitted(handler, refused)
        self.arrive(handler, c=3)
        self.drain()
        head, behind = the_row(biz_id="a"), the_row(message_id=refused.id)
        assert (head.state, behind.state) == (State.DEAD, State.DEAD)

        new = corrected(behind, '{"amount": 2}')
        assert (new.state, new.next_attempt_at) == (State.WAITING, None)
        self.drain()
        assert in_the_order_of_their_effects() == []
        corrected(head, '{"amount": 1}')
        self.drain()

        assert in_the_order_of_their_effects() == ["a", "b", "c"]

    def test_waiting_correction_is_skipped_and_the_next_one_follows(self, handler):
        self.arrive(handler, a="bad", b=2)
        self.drain()
        new = corrected(the_row(biz_id="a"), '{"amount": "worse"}')
        self.drain()

        assert decisions.skip("default", new.pk, "not wanted")
        self.drain()

        assert in_the_order_of_their_effects() == ["b"]

    def test_safety_net_finds_the_correction_to_be_the_head(self, handler):
        self.arrive(handler, a="bad", b=2)
        self.drain()
        new = corrected(the_row(biz_id="a"), '{"amount": 1}')
        InboxMessage.objects.filter(pk=new.pk).update(state=State.WAITING, next_attempt_at=None)
        released = release_stuck("default", [], None)
        self.drain()

        assert released.stuck == 1
        assert in_the_order_of_their_effects() == ["a", "b"]

    def test_correction_of_a_dead_letter_that_was_passed_over_is_run_beside_the_order(self, handles):
        handler = handles(takes_whole_amounts, name="tests.passing", ordered=Ordered(on_dead="skip"))
        self.arrive(handler, a="bad", b=2)
        self.drain()

        new = corrected(the_row(biz_id="a"), '{"amount": 1}')
        self.drain()

        assert (new.ordered, new.place) == (False, None)
        assert in_the_order_of_their_effects() == ["b", "a"]


class TestCommand:
    def run(self, capsys, *arguments):
        call_command("inbox_edit", *arguments)
        return capsys.readouterr().out

    def test_command_shows_what_changes_and_replaces_the_message(self, handler, capsys, tmp_path):
        envelope, row = dead(handler)
        file = tmp_path / "payload.json"
        file.write_text(RIGHT)

        shown = self.run(capsys, envelope.id, "--payload", str(file), "--dry-run")
        assert '-   "amount": "five"\n+   "amount": 5\n' in shown
        assert InboxMessage.objects.count() == 1
        said = self.run(capsys, envelope.id, "--payload", str(file))
        make_due()
        drain()

        row.refresh_from_db()
        assert f"Row {row.pk} is replaced by row {row.replacements.get().pk}, which is due now." in said
        assert "with inbox_edit" in row.last_error
        assert effects() == 1

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["--payload", "missing.json"], "--payload missing.json cannot be read"),
            (["--handler", "tests.other"], "Not here, or not dead"),
        ],
    )
    def test_command_refuses_what_it_cannot_do(self, handler, arguments, reason):
        envelope, _ = dead(handler)

        with pytest.raises(CommandError, match=reason):
            call_command("inbox_edit", envelope.id, *arguments)

    def test_command_says_why_it_did_not_replace_the_message(self, handler, short_lock_waits, tmp_path):
        envelope, row = dead(handler)
        file = tmp_path / "payload.json"
        file.write_text(RIGHT)
        arguments = ["inbox_edit", envelope.id, "--payload", str(file)]

        def error():
            with pytest.raises(CommandError) as refused:
                call_command(*arguments)
            return str(refused.value)

        with transaction.atomic():
            InboxMessage.objects.filter(pk=row.pk).update(attempts=row.attempts)
            (locked,) = at_once([error])
        other = copy_of(the_row(pk=row.pk), biz_id=f"edited:{row.pk}:order-7", message_id="another")
        taken = error()
        other.delete()

        prefix = f"Message {envelope.id} of {handler.name} was not edited."
        assert locked.startswith(f"{prefix} Row {row.pk} is locked by another transaction")
        assert taken.startswith(f"{prefix} Another row of this handler has the biz-id edited:{row.pk}:order-7")

    def test_message_that_is_dead_in_several_handlers_must_be_chosen(self, handles, capsys):
        first, second = (handles(takes_whole_amounts, name=f"tests.h{number}") for number in range(2))
        envelope, _ = dead(first)
        deliver(second, envelope)

        with pytest.raises(CommandError, match=r"choose one of tests.h0, tests.h1 with --handler"):
            call_command("inbox_edit", envelope.id)
        assert json.loads(self.run(capsys, envelope.id, "--handler", "tests.h1")) == BAD
