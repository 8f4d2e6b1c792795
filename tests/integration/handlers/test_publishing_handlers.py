"""A handler publishes: the INSERT of the outbox is a prepared statement, unless a project watches what is executed."""

from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import connection, connections, transaction
from django.db.backends.utils import CursorWrapper
from django.test.utils import CaptureQueriesContext

from inbox import Lease
from inbox.states import Outcome
from outbox import publish
from outbox.models import OutboxMessage
from tests.support.deliveries import an_envelope, deliver

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

TOPIC = "shop.order.placed"
MESSAGES = 9  # a connection prepares what it has executed a few times


@pytest.fixture(autouse=True)
def _own_session(transactional_db):
    connection.close()
    yield
    connection.close()


def deliver_all(handler):
    for number in range(MESSAGES):
        assert deliver(handler, an_envelope(biz_id=f"publishes {number}")) is Outcome.HANDLED


def prepared_inserts():
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'outbox_insert%%'")
        return cursor.fetchone()[0]


def in_a_transaction(message):
    with transaction.atomic():
        publish(TOPIC, {})


@pytest.mark.parametrize("given", [{}, {"timeout": timedelta(minutes=1)}, {"lease": Lease()}])
def test_insert_of_a_handler_that_publishes_is_prepared(handles, given):
    deliver_all(handles(in_a_transaction, **given))

    assert prepared_inserts() == 1
    assert OutboxMessage.objects.count() == MESSAGES


@contextmanager
def by_execute_wrapper(seen, monkeypatch):
    def watch(execute, sql, params, many, context):
        seen.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(watch):
        yield


@contextmanager
def by_captured_queries(seen, monkeypatch):
    with CaptureQueriesContext(connection) as queries:
        yield
    seen.extend(query["sql"] for query in queries)


@contextmanager
def by_another_cursor(seen, monkeypatch):
    """As django-prometheus, a tracer or a backend with tenants by schema."""

    class Cursor(CursorWrapper):
        def execute(self, sql, params=None):
            seen.append(sql)
            return super().execute(sql, params)

    with monkeypatch.context() as patch:
        patch.setattr("django.db.backends.utils.CursorWrapper", Cursor)
        yield


@pytest.mark.parametrize("watched", [by_execute_wrapper, by_captured_queries, by_another_cursor])
@pytest.mark.parametrize("around", ["run", "publish"])
def test_project_that_watches_statements_sees_each_publish_of_a_handler(handles, monkeypatch, watched, around):
    seen = []

    def handle(message):
        with watched(seen, monkeypatch):
            publish(TOPIC, {})

    if around == "publish":
        deliver_all(handles(handle))
    else:
        handler = handles(in_a_transaction)
        with watched(seen, monkeypatch):
            deliver_all(handler)

    assert len([sql for sql in seen if sql.startswith(f"INSERT INTO {OutboxMessage._meta.db_table}")]) == MESSAGES


def test_handler_that_publishes_on_another_database_is_warned_of_it(handles, caplog):
    """Also by a connection that has prepared the statement."""

    def publish_elsewhere(message):
        with transaction.atomic(using="other"):
            publish(TOPIC, {}, using="other")

    with transaction.atomic(using="other"):
        for _ in range(MESSAGES):
            publish(TOPIC, {}, using="other")
    deliver_all(handles(publish_elsewhere, name="tests.publishes-elsewhere"))

    assert caplog.text.count("the handler writes to the database 'other'") == 1
    connections["other"].close()
