"""The export of dead letters from the lists of both apps."""

import json

import pytest

from exactly_once.console.operators import dead_letters
from exactly_once.models import AuditEntry
from outbox.admin import OutboxMessageAdmin
from outbox.states import State
from tests.support.admin_names import VIEW
from tests.support.admin_pages import Page, a_message, act, said, staff_client

pytestmark = pytest.mark.django_db(databases=["default", "other"])

EXPORT = "export_outboxmessage"


def lines(response):
    assert response["Content-Type"].startswith("application/jsonl")
    return [json.loads(line) for line in b"".join(response.streaming_content).splitlines()]


def ids(response):
    return [line["message_id"] for line in lines(response)]


def test_selected_dead_letters_are_a_file_and_each_is_in_the_audit_log():
    chosen, _other = a_message(State.DEAD, payload={"total": "9.90"}), a_message(State.DEAD)
    response = act(staff_client(VIEW, EXPORT), "export", chosen)
    assert response["Content-Disposition"] == 'attachment; filename="outbox-dead-letters.jsonl"'
    [line] = lines(response)
    assert (line["message_id"], line["body"]) == (str(chosen.message_id), '{"total": "9.90"}')
    entry = AuditEntry.objects.get()
    assert (entry.action, entry.object_id, entry.parameters) == ("export", str(chosen.message_id), {"messages": 1})


@pytest.mark.long
@pytest.mark.every_database
def test_all_matching_are_exported_and_only_dead_letters_of_them(monkeypatch):
    """Also more than an action may change."""
    monkeypatch.setattr(dead_letters, "_AT_ONCE", 2)
    monkeypatch.setattr(OutboxMessageAdmin, "ACTION_LIMIT", 4)
    dead = [a_message(State.DEAD, topic="shop.a") for _ in range(5)]
    a_message(State.DEAD, topic="shop.b")
    a_message(State.READY, topic="shop.a")
    client = staff_client(VIEW, EXPORT)
    response = act(client, "export", dead[0], query="?q=shop.a", select_across="1")
    assert ids(response) == [str(row.message_id) for row in dead]
    entry = AuditEntry.objects.get()
    assert (entry.name, entry.parameters) == ("all messages with q shop.a", {"messages": 5})


def test_selection_without_a_dead_letter_is_reported():
    response = act(staff_client(VIEW, EXPORT), "export", a_message(State.READY))
    assert said(response) == [("error", "Nothing was exported: none of the messages is a dead letter.")]
    assert not AuditEntry.objects.exists()


def test_page_of_a_dead_letter_has_the_button_and_others_do_not():
    client = staff_client(VIEW, EXPORT)
    for state, buttons in ((State.DEAD, 1), (State.RETRYING, 0)):
        page = Page(client.get(f"/admin/outbox/outboxmessage/{a_message(state).pk}/change/"))
        assert len(page.all("button", name="action", value="export")) == buttons
