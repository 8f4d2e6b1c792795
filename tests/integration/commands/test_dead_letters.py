"""Export and import of dead letters, in a file of JSON lines."""

import base64
import json
import uuid
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from exactly_once.models import AuditEntry
from exactly_once.process.clock import utcnow
from inbox.models import InboxMessage, Step
from inbox.models import TrailEntry as InboxTrail
from inbox.states import State as InboxState
from outbox.models import OutboxMessage, TrailEntry
from outbox.states import State
from tests.support import decisions
from tests.support.admin_pages import a_message
from tests.support.commands import output_of
from tests.support.deliveries import TOPIC, an_envelope, deliver, drain, effects, make_due, options, the_effect, the_row
from tests.support.inbox_rows import delete_messages

pytestmark = pytest.mark.django_db

BINARY = b"\xff\x00binary"


def exported(*arguments):
    return [json.loads(line) for line in output_of("exactly_once_export", *arguments).splitlines()]


def columns(row):
    """All values of a row but its primary key."""
    values = {field.column: getattr(row, field.attname) for field in row._meta.concrete_fields if not field.primary_key}
    return {name: bytes(value) if isinstance(value, memoryview) else value for name, value in values.items()}


def written(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def refused(path):
    """The report of an import that refuses lines, and its error."""
    out = StringIO()
    with pytest.raises(CommandError) as failed:
        call_command("exactly_once_import", str(path), stdout=out)
    return out.getvalue(), str(failed.value)


def a_dead_letter(**given):
    at = utcnow()
    values = {
        "state": State.DEAD,
        "attempts": 16,
        "key": "customer-1",
        "headers": {"tenant": "acme"},
        "last_error": "NACK",
        "error_class": "nacked",
        "failing_since": at,
        "failed_at": at,
        "settled_at": at,
        "expires_at": at + timedelta(days=1),
    }
    return a_message(**{**values, **given})


class TestOutbox:
    @pytest.mark.every_database
    def test_exported_message_is_imported_elsewhere_with_every_column_but_its_position(self, tmp_path):
        row = a_dead_letter()
        other = a_dead_letter(body=BINARY, wire='{"content_type": "application/x-binary"}')
        before = [columns(each) for each in (row, other)]
        file = tmp_path / "letters.jsonl"
        output_of("exactly_once_export", output=str(file))
        OutboxMessage.objects.all().delete()

        said = output_of("exactly_once_import", file)

        # The shard follows from the key.
        after = [columns(each) for each in OutboxMessage.objects.order_by("pk")]
        assert [{**each, "shard": 0} for each in after] == [{**each, "shard": 0} for each in before]
        assert "line 1: imported" in said
        assert said.endswith("2 imported, 0 here already, 0 refused.")

    def test_body_that_is_not_text_is_base64(self):
        a_dead_letter(body=BINARY)
        [line] = exported()
        assert base64.b64decode(line["body_base64"]) == BINARY
        assert "body" not in line

    def test_only_dead_letters_of_the_selection_are_exported(self):
        chosen, other = a_dead_letter(topic="shop.chosen"), a_dead_letter()
        a_message(State.READY, topic="shop.chosen")
        a_message(State.CANCELLED)
        assert [line["message_id"] for line in exported("--topic", "shop.chosen")] == [str(chosen.message_id)]
        assert [line["message_id"] for line in exported(other.message_id)] == [str(other.message_id)]
        assert len(exported()) == 2

    def test_same_file_twice_changes_nothing(self, tmp_path):
        a_dead_letter()
        file = written(tmp_path / "letters.jsonl", *exported())
        before, audit = columns(OutboxMessage.objects.get()), AuditEntry.objects.count()
        said = output_of("exactly_once_import", file)
        assert "line 1: here already" in said
        assert said.endswith("0 imported, 1 here already, 0 refused.")
        assert columns(OutboxMessage.objects.get()) == before
        assert AuditEntry.objects.count() == audit
        assert not TrailEntry.objects.exists()

    def test_message_that_was_published_meanwhile_is_left_alone(self, tmp_path):
        row = a_dead_letter()
        file = written(tmp_path / "letters.jsonl", *exported())
        OutboxMessage.objects.all().delete()
        a_message(State.PUBLISHED, message_id=row.message_id, settled_at=utcnow())
        assert "line 1: here already" in output_of("exactly_once_import", file)
        assert OutboxMessage.objects.get().state == State.PUBLISHED

    def test_line_that_cannot_be_imported_is_reported_with_its_number_and_does_not_stop_the_others(self, tmp_path):
        a_dead_letter()
        [line] = exported()
        OutboxMessage.objects.all().delete()
        bad = [
            "{not json\n",
            "[1]\n",
            {**line, "dead_letter": "inbox"},
            {**line, "topic": "shop.*"},
            *({**line, "attempts": attempts} for attempts in ("16", 16.7, True, -1, 2**31, None)),
            *({**line, "created_at": at} for at in ("yesterday", "2026-03-01T10:00:00", "2026-03-01", 5, None)),
            {**line, "is_unique": 1},
            {**line, "headers": {"weight": float("nan")}},
            {**line, "topic": "x" * 256},
            {**line, "headers": [1]},
            {**line, "body": None},
            {**line, "colour": "red"},
            *({name: line[name] for name in line if name != missing} for missing in ("created_at", "message_id")),
            {**line, "body": "\x00", "key": "a\x00b"},
            {**line, "last_error": "\ud800"},
            {**line, "message_id": "1"},
        ]
        said, error = refused(written(tmp_path / "letters.jsonl", "\n", *bad, line))
        reports = said.splitlines()
        assert [report.split(":")[0] for report in reports] == [f"line {number}" for number in range(2, len(bad) + 3)]
        assert all("refused" in report for report in reports[:-1])
        assert "imported" in reports[-1]
        assert error == f"1 imported, 0 here already, {len(bad)} refused."
        assert OutboxMessage.objects.count() == 1

    @pytest.mark.every_database
    def test_second_unique_message_of_a_topic_and_biz_id_is_refused(self, tmp_path):
        a_dead_letter(is_unique=True, biz_id="order-1")
        file = written(tmp_path / "letters.jsonl", *exported())
        OutboxMessage.objects.all().delete()
        a_message(State.PUBLISHED, is_unique=True, biz_id="order-1", settled_at=utcnow())
        said, _ = refused(file)
        assert "another message that was published with unique=True has its topic and biz-id" in said

    def test_dry_run_reports_and_stores_nothing(self, tmp_path):
        a_dead_letter()
        file = written(tmp_path / "letters.jsonl", *exported())
        OutboxMessage.objects.all().delete()
        audit = AuditEntry.objects.count()
        assert output_of("exactly_once_import", file, "--dry-run").endswith("1 would be imported, 0 here already, 0 refused.")
        assert not OutboxMessage.objects.exists()
        assert not TrailEntry.objects.exists()
        assert AuditEntry.objects.count() == audit

    def test_export_and_import_are_in_the_audit_log_and_the_import_in_the_trail(self, tmp_path):
        row = a_dead_letter()
        file = tmp_path / "letters.jsonl"
        output_of("exactly_once_export", "--topic", row.topic, output=str(file))
        OutboxMessage.objects.all().delete()
        output_of("exactly_once_import", file)
        export, imported = AuditEntry.objects.order_by("pk")
        assert (export.app, export.action, export.name) == ("outbox", "export", "1 messages")
        assert export.place == "exactly_once_export"
        assert export.parameters == {"topic": row.topic, "output": str(file)}
        assert (imported.action, imported.object_id, imported.parameters) == (
            "import",
            str(row.message_id),
            {"file": str(file)},
        )
        entry = TrailEntry.objects.get(message_id=row.message_id)
        assert (entry.was, entry.became) == ("", State.DEAD)
        assert str(file) in entry.reason

    def test_exported_file_is_readable_by_its_owner_only(self, tmp_path):
        a_dead_letter()
        file = tmp_path / "letters.jsonl"
        file.touch()
        file.chmod(0o644)
        output_of("exactly_once_export", output=str(file))
        assert file.stat().st_mode & 0o777 == 0o600

    @pytest.mark.parametrize("command", ["exactly_once_export", "exactly_once_import"])
    def test_file_that_cannot_be_opened_is_an_error(self, command, tmp_path):
        arguments = [tmp_path / "no" / "file"]
        with pytest.raises(CommandError, match="No such file"):
            output_of(command, *(arguments if command == "exactly_once_import" else ["--output", *arguments]))


class TestInbox:
    @pytest.fixture
    def handler(self, handles):
        def fails(message):
            if FAILING:
                raise ValueError(message.payload["order_id"])
            the_effect(message)

        FAILING.append(True)
        yield handles(fails, topic=TOPIC)
        FAILING.clear()

    def a_dead_letter(self, handler, **given):
        deliver(handler, an_envelope(key="customer-1", headers={"tenant": "acme"}, **given), given=options(MAX_ATTEMPTS=1))
        return InboxMessage.objects.latest("pk")

    @pytest.mark.every_database
    def test_exported_message_is_imported_elsewhere_with_its_errors_and_steps(self, handler, tmp_path):
        row = self.a_dead_letter(handler)
        Step.objects.create(message=row, name="charge", result={"id": 7}, taken_at=utcnow())
        before, step = columns(row), columns(row.steps.get())
        file = tmp_path / "letters.jsonl"
        output_of("exactly_once_export", output=str(file))
        delete_messages()

        said = output_of("exactly_once_import", file)

        assert said.endswith("1 imported, 0 here already, 0 refused.")
        after = the_row()
        assert columns(after) == before
        assert {**columns(after.steps.get()), "message_id": 0} == {**step, "message_id": 0}
        assert InboxTrail.objects.filter(message_id=row.message_id, was="", became=InboxState.DEAD, reason__contains="import")
        assert list(AuditEntry.objects.order_by("pk").values_list("action", flat=True)) == ["export", "import"]

    @pytest.mark.every_database
    def test_imported_message_runs_once_after_an_operator_retries_it(self, handler, tmp_path):
        row = self.a_dead_letter(handler)
        file = written(tmp_path / "letters.jsonl", *exported())
        delete_messages()
        output_of("exactly_once_import", file)
        make_due()
        drain()
        assert effects() == 0
        FAILING.clear()
        output_of("inbox_retry", row.message_id)
        drain()
        assert effects(row.biz_id) == 1
        assert "here already" in output_of("exactly_once_import", file)
        drain()
        assert effects(row.biz_id) == 1

    def test_message_past_the_maximum_age_is_quarantined_because_its_row_may_have_been_purged(self, handler, tmp_path):
        self.a_dead_letter(handler)
        [line] = exported()
        delete_messages()
        line["created_at"] = (utcnow() - timedelta(days=400)).isoformat()
        output_of("exactly_once_import", written(tmp_path / "letters.jsonl", line))
        assert the_row().quarantined
        assert "Its error was: ValueError" in the_row().last_error
        assert not decisions.retry("default", the_row().pk)

    def test_only_dead_letters_of_the_selection_are_exported(self, handler, handles):
        other = handles(lambda message: 1 / 0, name="other", topic=TOPIC)
        self.a_dead_letter(handler), self.a_dead_letter(other)
        deliver(handles(the_effect, name="third", topic=TOPIC))
        assert [line["handler"] for line in exported("--handler", "other")] == ["other"]
        assert len(exported("--topic", TOPIC)) == 2

    def test_unknown_handler_is_refused(self, handler, tmp_path):
        self.a_dead_letter(handler)
        [line] = exported()
        said, _ = refused(written(tmp_path / "letters.jsonl", {**line, "handler": "no.such"}))
        assert "line 1: refused: this project has no handler no.such" in said

    def test_steps_that_cannot_be_read_are_refused(self, handler, tmp_path):
        self.a_dead_letter(handler)
        [line] = exported()
        line |= {"biz_id": str(uuid.uuid4()), "steps": [{"name": "charge"}]}
        said, _ = refused(written(tmp_path / "letters.jsonl", line))
        assert "steps" in said
        assert InboxMessage.objects.count() == 1


FAILING = []
