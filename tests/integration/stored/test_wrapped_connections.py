"""Projects that put code of their own between both apps and the driver: every statement goes through it.

Their examples are tenants by schema, debug toolbars, tracers, and pools of other people.
"""

import functools
import re
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, connections
from django.db.backends import utils
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.postgresql import base
from django.db.backends.signals import connection_created

from inbox import Lease, RetryLater
from inbox.models import InboxMessage
from inbox.states import State
from outbox.models import OutboxMessage
from outbox.states import State as OutboxState
from outbox.store.dialect import LIVE_PART
from tests.support.aliases import the_default_at
from tests.support.deliveries import admitted, an_envelope, deliver, run_to_the_end, stored_due, the_effect
from tests.support.relaying import drained, published, states
from tests.support.sql import executed, fetched

pytestmark = [pytest.mark.django_db(transaction=True)]

FEW = 8
"""More than a connection inserts before it prepares the statement."""
MANY = 20


@pytest.fixture(autouse=True)
def _own_session(transactional_db):
    connection.close()
    yield
    connection.close()


def publish_some(count, **options):
    return [published(**options) for _ in range(count)]


def prepared(kind="outbox_insert"):
    """How often the prepared statements of this kind were run in this session, by name."""
    found = executed("SELECT name, generic_plans + custom_plans FROM pg_prepared_statements")
    return {name: runs for name, runs in found if name.startswith(kind)}


class Recorded:
    """A cursor that records what it executes."""

    def __init__(self, cursor, seen):
        self._cursor, self._seen = cursor, seen

    def execute(self, sql, params=None):
        self._seen.append(str(sql))
        return self._cursor.execute(sql, params)

    def __getattr__(self, name):
        return getattr(self._cursor, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._cursor.close()

    def __iter__(self):
        return iter(self._cursor)


def recorded_function(function, seen):
    """The function that returns a cursor, recorded."""

    @functools.wraps(function)
    def recording(*args, **kwargs):
        return Recorded(function(*args, **kwargs), seen)

    return recording


def recording_execute(execute, seen):
    @functools.wraps(execute)
    def recording(self, sql, *args, **kwargs):
        seen.append(str(sql))
        return execute(self, sql, *args, **kwargs)

    return recording


def method_of_the_connection(patch, seen):
    """As a debug toolbar does."""
    patch.setattr(connections["default"], "cursor", recorded_function(connection.cursor, seen))


def method_of_every_connection(patch, seen):
    patch.setattr(BaseDatabaseWrapper, "_cursor", recorded_function(BaseDatabaseWrapper._cursor, seen))


def method_of_every_cursor(patch, seen):
    """As Sentry does."""
    patch.setattr(utils.CursorWrapper, "execute", recording_execute(utils.CursorWrapper.execute, seen))


def class_of_every_cursor(patch, seen):
    execute = recording_execute(utils.CursorWrapper.execute, seen)
    patch.setattr(utils, "CursorWrapper", type("Recording", (utils.CursorWrapper,), {"execute": execute}))


def backend_of_the_project(patch, seen):
    """As django-prometheus has one."""
    backend = type(connections["default"])
    create = recorded_function(backend.create_cursor, seen)
    patch.setattr(connections["default"], "__class__", type("DatabaseWrapper", (backend,), {"create_cursor": create}))


def class_of_the_drivers_cursors(patch, seen):
    """As OpenTelemetry does."""
    factory = connection.connection.cursor_factory
    execute = recording_execute(factory.execute, seen)
    patch.setattr(connection.connection, "cursor_factory", type("Recording", (factory,), {"execute": execute}))


class WrappedConnection:
    """The driver's connection as a pool gives it."""

    def __init__(self, raw, seen):
        self.__dict__.update(_raw=raw, _seen=seen)

    def cursor(self, *args, **kwargs):
        return Recorded(self._raw.cursor(*args, **kwargs), self._seen)

    def __getattr__(self, name):
        return getattr(self._raw, name)

    def __setattr__(self, name, value):
        setattr(self._raw, name, value)


def connection_of_the_driver(patch, seen):
    patch.setattr(connections["default"], "connection", WrappedConnection(connection.connection, seen))


WAYS = [
    method_of_the_connection,
    method_of_every_connection,
    method_of_every_cursor,
    class_of_every_cursor,
    backend_of_the_project,
    class_of_the_drivers_cursors,
    connection_of_the_driver,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_insert_goes_through_what_was_patched_in_the_middle_of_a_connection(way):
    publish_some(FEW)
    (before,) = prepared().values()
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        way(patch, seen)
        publish_some(MANY)
    publish_some(1)

    assert sum("INSERT INTO outbox_" in sql for sql in seen) == MANY
    assert OutboxMessage.objects.count() == FEW + MANY + 1
    assert list(prepared().values()) == [before + 1]  # those after it are prepared again


@pytest.fixture
def sent(tmp_path):
    """The simple queries that libpq sends on connections of the default alias, and the names of its other messages."""
    path = tmp_path / "trace"
    with path.open("w") as trace:

        def begin(connection, **_):
            connection.connection.pgconn.trace(trace.fileno())

        connection_created.connect(begin)

        def read():
            connection.close()
            return re.findall(r"^[^\n]*\tF\t\d+\t(Query|Parse|Bind)\t (.*?)$", path.read_text(), re.MULTILINE)

        yield read
        connection_created.disconnect(begin)


def begins(sql):
    """What identifies a statement, however it was written into the trace."""
    return re.sub(r"\W+", " ", sql).strip()[:60]


def test_every_statement_of_both_apps_goes_through_the_projects_cursors(handles, sent, monkeypatch):
    execute, seen = utils.CursorWrapper.execute, []

    def recording(self, sql, params=None):
        try:
            return execute(self, sql, params)
        finally:
            seen.append(begins(self.cursor._query.query.decode()))

    monkeypatch.setattr(utils.CursorWrapper, "execute", recording)

    failed = set()

    def at_the_second_time(message):
        the_effect(message)
        if message.biz_id not in failed:
            failed.add(message.biz_id)
            raise RetryLater(timedelta(hours=1)) if message.biz_id == "later" else ValueError("no")

    plain, failing = handles(the_effect), handles(at_the_second_time, name="tests.failing")
    ordered = handles(the_effect, name="tests.ordered", ordered=True)
    leased = handles(the_effect, name="tests.leased", lease=Lease())
    publish_some(FEW)
    publish_some(2, unique=True, biz_id="order-1")
    drained("local://")
    for handler in (plain, ordered, leased, failing):
        for biz_id in ("first", "later"):
            envelope = an_envelope(biz_id=biz_id, key="k")
            deliver(handler, envelope)
            deliver(handler, envelope, redelivered=True)
        admitted(handler, *(an_envelope(biz_id=str(n), key="k") for n in range(3)))
        stored_due(handler)
    run_to_the_end()

    assert set(states()) == {OutboxState.PUBLISHED}
    assert set(InboxMessage.objects.values_list("state", flat=True)) == {State.DONE}
    executions = Counter(seen)
    kinds, queries = zip(*sent(), strict=True)
    assert set(kinds) == {"Query"}
    beside = Counter(map(begins, queries)) - executions
    assert {begun.split(" ")[0] for begun in beside} <= {"BEGIN", "COMMIT", "ROLLBACK"} | {"SELECT"}
    assert all("pg_notify" in begun or "set_config lock_timeout" in begun for begun in beside if begun.startswith("SELECT"))


class TenantBackend(base.DatabaseWrapper):
    """Each cursor sets `search_path` to the schema of the current tenant, as django-tenants does."""

    schema = "public"

    def _cursor(self, name=None):
        cursor = super()._cursor(name)
        cursor.execute(f"SET search_path TO {self.schema}")
        return cursor


@pytest.fixture
def tenants(monkeypatch):
    """The default alias has a schema for each of two tenants; their names."""
    schemas = ["one", "two"]
    for schema in schemas:
        executed(f"CREATE SCHEMA {schema}")
        executed(f"CREATE TABLE {schema}.{LIVE_PART} (LIKE public.{LIVE_PART} INCLUDING ALL)")
    with monkeypatch.context() as patch:
        patch.setattr(connections["default"], "__class__", TenantBackend)
        yield schemas
        connection.close()
    for schema in schemas:
        executed(f"DROP SCHEMA {schema} CASCADE")


def test_messages_of_each_tenant_are_in_the_schema_of_that_tenant(tenants, monkeypatch):
    for _ in range(FEW):
        for schema in tenants:
            monkeypatch.setattr(TenantBackend, "schema", schema)
            published(biz_id=schema)
    monkeypatch.undo()

    for schema in tenants:
        assert executed(f"SELECT biz_id FROM {schema}.{LIVE_PART}") == [(schema,)] * FEW
    assert executed(f"SELECT biz_id FROM public.{LIVE_PART}") == []


@contextmanager
def a_pool_of_one(**pool):
    options = {**connection.settings_dict["OPTIONS"], "pool": {"min_size": 1, "max_size": 1, **pool}}
    with the_default_at(OPTIONS=options):
        try:
            yield
        finally:
            connection.close()
            connection.close_pool()


@pytest.mark.parametrize("reset", ["DISCARD ALL", "DEALLOCATE ALL", None])
def test_every_message_is_published_whatever_a_pool_does_with_returned_connections(reset):
    pids, runs = set(), []
    with a_pool_of_one(**({"reset": lambda raw: raw.execute(reset)} if reset else {})):
        for _ in range(4):
            publish_some(FEW)
            pids.add(fetched("SELECT pg_backend_pid()"))
            runs += prepared().values()
            connection.close()

    assert OutboxMessage.objects.count() == 4 * FEW
    assert len(pids) == 1
    in_each = FEW - 5
    assert runs == ([in_each] * 4 if reset else [in_each * (n + 1) for n in range(4)])


def test_connection_whose_statements_are_discarded_again_and_again_prepares_nothing_more():
    """As by a pool or a proxy that Django does not know of."""
    failed = 0
    for _ in range(FEW):
        publish_some(FEW - 2)
        executed("DEALLOCATE ALL")
        try:
            publish_some(1)
        except OperationalError:
            failed += 1

    assert failed == 2
    assert prepared() == {}
    assert OutboxMessage.objects.count() == FEW * (FEW - 1) - failed
