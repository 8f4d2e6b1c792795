"""The transaction of a decision in the admin, in a project whose transactions are serializable unless they say otherwise."""

import pytest
from django.db import connection
from django.urls import reverse

from inbox.contrib.joins.models import Run
from inbox.contrib.outgoing_webhooks import Endpoint
from tests.support.admin_pages import a_message, act, act_on_all, an_inbox_message, superuser_client
from tests.support.joins import TOPICS, comes, report
from tests.support.sql import executed

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

CONFIRMED = {"confirmed": "yes", "reason": "because"}
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
    act(client, "skip", an_inbox_message(), page="admin:inbox_inboxmessage_changelist", **CONFIRMED)


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


@pytest.mark.parametrize("decide", [skip, cancel, cancel_all, add_and_disable_an_endpoint, note])
def test_decision_and_audit_entry_are_one_read_committed_transaction_with_an_idle_timeout(decide, recorded):
    decide(superuser_client())

    assert set(recorded) == {READ_COMMITTED}


def test_decision_about_a_run_is_read_committed(joins, recorded):
    joins(report)
    comes(TOPICS[0], "monday", rows=7)
    recorded.clear()
    act(superuser_client(), "start", Run.objects.get(), page="admin:inbox_joins_run_changelist", **CONFIRMED)

    assert recorded == [READ_COMMITTED]
