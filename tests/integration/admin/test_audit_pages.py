"""The audit log: what is written, in which transaction, and the page with its filters and exports."""

import csv
import io
import json
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.core.management import call_command
from django.db import DatabaseError
from django.test import AsyncClient
from django.urls import reverse

from exactly_once.console.admin import acting as acting_admin
from exactly_once.console.admin import pages
from exactly_once.console.operators.audit import Actor, Subject, record
from exactly_once.models import AuditEntry
from exactly_once.sql.now import DatabaseTime
from inbox.models import InboxMessage
from inbox.states import State as InboxState
from outbox.admin import OutboxMessageAdmin
from outbox.states import State
from tests.support.admin_names import CANCEL, VIEW
from tests.support.admin_pages import Page, a_message, act, listed, said, staff_client, state_of
from tests.support.deliveries import deliver, fails, run_to_the_end

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

AUDIT = "admin:exactly_once_auditentry_changelist"
VIEW_AUDIT, EXPORT = "view_auditentry", "export_auditentry"
ADA = Actor(name="ada", place="admin", address="192.0.2.7")


def an_entry(action="cancel", *, actor=ADA, ago=timedelta(), parameters=None, kind="message", name="shop.order.placed 1"):
    record("outbox", "default", actor, action, [Subject(kind=kind, id="m-1", name=name)], parameters)
    AuditEntry.objects.filter(pk=AuditEntry.objects.latest("pk").pk).update(at=DatabaseTime(-ago))
    return AuditEntry.objects.latest("pk")


def the_page(**query):
    return Page(staff_client(VIEW_AUDIT).get(reverse(AUDIT), query))


class TestActions:
    @pytest.mark.every_database
    @pytest.mark.parametrize(("owner", "name"), [(acting_admin, "record"), (OutboxMessageAdmin, "log_change")])
    def test_entry_is_rolled_back_with_its_action(self, monkeypatch, owner, name):
        write, message = getattr(owner, name), a_message()

        def fails(*args, **kwargs):
            write(*args, **kwargs)
            raise DatabaseError("disk full")

        monkeypatch.setattr(owner, name, fails)
        ((level, words),) = said(act(staff_client(VIEW, CANCEL), "cancel", message, confirmed="yes", reason="x"))

        assert (level, "disk full" in words, state_of(message)) == ("error", True, State.READY)
        assert not AuditEntry.objects.exists()

    def test_commands_write_entries_with_the_user_and_the_host(self):
        call_command("outbox_pause", "shop.order.placed", reason="defect", stdout=io.StringIO())
        call_command("outbox_resume", "shop.order.placed", stdout=io.StringIO())
        a_message(State.CANCELLED, topic="shop.restored", settled_at=DatabaseTime())
        call_command("outbox_restore", topic="shop.restored", stdout=io.StringIO())
        call_command("exactly_once_purge", app="outbox", stdout=io.StringIO())

        found = AuditEntry.objects.order_by("pk").values_list("place", "action", "kind")
        assert list(found) == [
            ("outbox_pause", "pause", "topic"),
            ("outbox_resume", "resume", "topic"),
            ("outbox_restore", "restore", "messages"),
            ("exactly_once_purge", "purge", "messages"),
        ]
        assert all(entry.actor and entry.address for entry in AuditEntry.objects.all())
        assert AuditEntry.objects.get(action="restore").parameters["topic"] == "shop.restored"

    def test_retrying_and_correcting_by_command_is_recorded(self, handles, tmp_path):
        deliver(handles(fails, name="tests.h"))
        run_to_the_end()
        dead = InboxMessage.objects.get(state=InboxState.DEAD)
        corrected = tmp_path / "payload.json"
        corrected.write_text('{"order_id": 2}')

        call_command("inbox_edit", dead.message_id, payload=str(corrected), stdout=io.StringIO())
        run_to_the_end()
        call_command("inbox_retry", all=True, stdout=io.StringIO())

        edit, retry = AuditEntry.objects.order_by("pk")
        assert (edit.place, edit.action, edit.object_id) == ("inbox_edit", "edit", dead.message_id)
        assert edit.parameters["payload"] == "15 characters"
        assert (retry.place, retry.action) == ("inbox_retry", "retry")


class TestEntries:
    def test_entry_is_never_changed_or_deleted_by_itself(self):
        entry = an_entry()

        with pytest.raises(TypeError, match="never changed"):
            entry.save()
        with pytest.raises(TypeError, match="not deleted"):
            entry.delete()

    @pytest.mark.every_database
    def test_purge_deletes_entries_only_after_their_retention(self):
        _old, recent = an_entry(ago=timedelta(days=366)), an_entry(ago=timedelta(days=364))

        call_command("exactly_once_purge", app="outbox", stdout=io.StringIO())

        assert AuditEntry.objects.exclude(action="purge").get().pk == recent.pk


class TestPage:
    def test_list_shows_who_what_when_where_and_the_parameters(self):
        assert "No operator has done anything yet." in the_page().text
        an_entry(parameters={"reason": "wrong price"}, ago=timedelta(hours=2))

        text = the_page().text

        expected = ("ada", "admin", "192.0.2.7", "cancel", "message", "shop.order.placed 1", "reason: wrong price")
        assert [words for words in expected if words not in text] == []

    @pytest.mark.every_database
    def test_filters_by_who_action_kind_and_time_and_search_finds_object_user_and_address_exactly(self):
        old = an_entry(ago=timedelta(days=3))
        bobs = an_entry("pause", actor=Actor(name="bob", place="outbox_pause", address="host"), kind="topic", name="shop.t")
        client = staff_client(VIEW_AUDIT)

        assert listed(client, AUDIT, actor="bob") == [bobs.pk]
        assert listed(client, AUDIT, action="cancel") == [old.pk]
        assert listed(client, AUDIT, kind="topic") == [bobs.pk]
        assert listed(client, AUDIT, within="day") == [bobs.pk]
        assert listed(client, AUDIT, within="week") == [bobs.pk, old.pk]
        for term in ("ada", "192.0.2.7", "shop.order.placed 1"):
            assert listed(client, AUDIT, q=term) == [old.pk]
        assert listed(client, AUDIT, q="m-1") == [bobs.pk, old.pk]
        assert listed(client, AUDIT, q="m-") == []


class TestExport:
    def exported(self, form, **query):
        url = reverse("admin:exactly_once_auditentry_export", args=[form])
        response = staff_client(VIEW_AUDIT, EXPORT).get(url, query)
        assert response.status_code == 200
        return b"".join(response.streaming_content).decode()

    def test_csv_has_the_entries_of_the_list(self):
        an_entry(parameters={"reason": "wrong"}, name="=HYPERLINK(1)")
        an_entry("pause")

        (row,) = csv.DictReader(io.StringIO(self.exported("csv", action="cancel")))
        last, first = (json.loads(line) for line in self.exported("jsonl").splitlines())

        assert (row["actor"], row["action"], json.loads(row["parameters"])) == ("ada", "cancel", {"reason": "wrong"})
        assert row["name"] == "'=HYPERLINK(1)", "no formula"
        assert (last["action"], first["action"], first["name"]) == ("pause", "cancel", "=HYPERLINK(1)")

    def test_under_asgi_lines_are_read_while_they_are_sent(self, monkeypatch):
        monkeypatch.setattr(pages, "_AT_ONCE", 1)
        for _ in range(3):
            an_entry()
        client = AsyncClient()
        client.cookies = staff_client(VIEW_AUDIT, EXPORT).cookies

        @async_to_sync
        async def parts():
            return [part async for part in await client.get(reverse("admin:exactly_once_auditentry_export", args=["csv"]))]

        assert len(parts()) == 4  # with the names of the columns

    def test_export_requires_its_permission_and_is_not_linked_without_it(self):
        urls = [reverse("admin:exactly_once_auditentry_export", args=[form]) for form in ("csv", "xml")]

        assert staff_client(VIEW_AUDIT).get(urls[0]).status_code == 403
        assert staff_client(EXPORT).get(urls[0]).status_code == 403
        assert staff_client(VIEW_AUDIT, EXPORT).get(urls[1]).status_code == 404
        assert "Export CSV" not in the_page().text
        page = Page(staff_client(VIEW_AUDIT, EXPORT).get(reverse(AUDIT), {"actor": "ada"}))
        assert "Export CSV" in page.text
        assert page.all("a", href=f"{urls[0]}?actor=ada"), "of what the list shows"
