"""Decisions in the admin: their transaction, in a project whose default is serializable, and the queries of one click."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from inbox.contrib.joins.models import Run
from inbox.contrib.outgoing_webhooks import Endpoint
from outbox.states import State
from tests.support.admin_names import LIST, RESTORE, VIEW
from tests.support.admin_pages import a_message, act, act_on_all, an_inbox_message, staff_client, superuser_client
from tests.support.joins import TOPICS, comes, report
from tests.support.sql import executed

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

CONFIRMED = {"confirmed": "yes", "reason": "because"}
INBOX_LIST = "admin:inbox_inboxmessage_changelist"
CONTROL = {"BEGIN", "COMMIT", "SAVEPOINT", "ROLLBACK", "RELEASE"}
READ_COMMITTED = ("read committed", "10s")


@pytest.fixture(params=[False, True], ids=["", "ATOMIC_REQUESTS"])
def recorded(request, monkeypatch):
    """The isolation and the idle timeout of each transaction that has written into the audit log."""
    found = []

    def look(execute, sql, *arguments):
        if sql.startswith('INSERT INTO "exactly_once_auditentry"'):
            with connection.connection.cursor() as cursor:
                names = ("transaction_isolation", "idle_in_transaction_session_timeout")
                cursor.execute("SELECT current_setting(%s), current_setting(%s)", names)
                found.append(cursor.fetchone())
        return execute(sql, *arguments)

    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", request.param)
    executed("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL SERIALIZABLE")
    with connection.execute_wrapper(look):
        yield found
    connection.close()


def skip(client):
    act(client, "skip", an_inbox_message(), page=INBOX_LIST, **CONFIRMED)


def cancel(client):
    act(client, "cancel", a_message(), **CONFIRMED)


def cancel_all(client):
    a_message()
    act_on_all(client, "cancel", reason="because")


def add_and_disable_an_endpoint(client):
    fields = {"name": "partner", "url": "https://example.com/hooks", "topics": "[]", "concurrency": "2"}
    client.post(reverse("admin:inbox_outgoing_webhooks_endpoint_add"), fields)
    act(client, "disable", Endpoint.objects.get(), page="admin:inbox_outgoing_webhooks_endpoint_changelist", **CONFIRMED)


def note(client):
    group = {"app": "inbox", "class": "ValueError", "place": "shop.py:pay:1"}
    client.post(reverse("admin:exactly_once_failurenote_group", query=group), {"action": "note", "note": "see #7"})


def start_a_run(client):
    comes(TOPICS[0], "monday", rows=7)
    act(client, "start", Run.objects.get(), page="admin:inbox_joins_run_changelist", **CONFIRMED)


@pytest.mark.parametrize("decide", [skip, cancel, cancel_all, add_and_disable_an_endpoint, note, start_a_run])
def test_decision_and_audit_entry_are_one_read_committed_transaction_with_an_idle_timeout(decide, joins, recorded):
    joins(report)
    decide(superuser_client())

    assert set(recorded) == {READ_COMMITTED}


@pytest.mark.every_database
@pytest.mark.parametrize("own_page", [{}, {"own_page": "1"}], ids=["in the list", "on the message's page"])
@pytest.mark.parametrize(
    ("page", "action", "fields"),
    [(LIST, "restore", {}), (LIST, "restore", {**CONFIRMED, "overdue": "on"}), (INBOX_LIST, "retry", {})],
    ids=["restore, before it is confirmed", "restore, confirmed", "retry"],
)
def test_click_on_an_action_takes_at_most_15_queries(page, action, fields, own_page):
    rows = [a_message(State.DEAD) if page == LIST else an_inbox_message() for _ in range(2)]
    client = staff_client(VIEW, RESTORE, "view_inboxmessage", "retry_inboxmessage")
    act(client, action, rows[0], page=page, **fields)  # a process reads the content types once

    with CaptureQueriesContext(connection) as captured:
        assert act(client, action, rows[1], page=page, **fields, **own_page).status_code in {200, 302}

    queries = [each["sql"] for each in captured if each["sql"].split()[0] not in CONTROL]
    assert len(queries) <= 15, queries
