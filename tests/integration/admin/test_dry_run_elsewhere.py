"""What a dry run does on the databases other than its handler's: it reads them and writes nothing."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
from django.db import connections, transaction

from tests.support.admin_pages import Page, act, staff_client
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import an_envelope, deliver, options, the_row
from tests.support.sql import executed

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

TABLE = Effect._meta.db_table
READ_ONLY = "Read-only in a dry run, so writes to them fail: other."
DELETE = f'DELETE FROM "{TABLE}"'
DELETING = {
    "a CTE": f"WITH deleted AS ({DELETE} RETURNING *) SELECT count(*) FROM deleted",
    "a second statement": f"SELECT 1; {DELETE}",
    "EXPLAIN ANALYZE": f"EXPLAIN ANALYZE {DELETE}",
    "a function": "SELECT empty_the_effects()",
    "a DO block": f"DO $$ BEGIN {DELETE}; END $$",
}


execute = partial(executed, using="other")


def with_the_driver(sql=DELETE):
    connections["other"].ensure_connection()
    connections["other"].connection.cursor().execute(sql)


@pytest.fixture
def run_dry(handles):
    """Dead-letter a message, store one effect in the other database, run the handler dry, and return the page."""

    def run(does):
        failed = []

        def handler(message):
            if not failed:
                failed.append(message)
                raise ValueError("at first")
            return does()

        deliver(handles(handler), an_envelope(), given=options(MAX_ATTEMPTS=1))
        Effect.objects.using("other").create(name="kept")
        connections["other"].close()
        client = staff_client("view_inboxmessage", "dry_run_inboxmessage")
        page = "admin:inbox_inboxmessage_changelist"
        return Page(act(client, "dry_run", the_row(), page=page, confirmed="yes", seconds="10"))

    return run


@pytest.fixture
def emptying_function(transactional_db):
    execute(f"CREATE FUNCTION empty_the_effects() RETURNS void LANGUAGE sql AS $$ {DELETE} $$")
    yield
    execute("DROP FUNCTION empty_the_effects()")


def the_names():
    return list(Effect.objects.using("other").order_by("pk").values_list("name", flat=True))


@pytest.mark.parametrize("sql", DELETING.values(), ids=DELETING)
@pytest.mark.usefixtures("emptying_function")
def test_statement_that_writes_to_another_database_in_any_form_is_refused_by_the_database(run_dry, sql):
    page = run_dry(lambda: execute(sql))
    assert the_names() == ["kept"]
    assert "It would fail" in page.text
    assert READ_ONLY in page.text


@pytest.mark.every_database
def test_write_through_the_drivers_connection_to_another_database_is_refused(run_dry):
    page = run_dry(with_the_driver)
    assert the_names() == ["kept"]
    assert "It would fail" in page.text


@pytest.mark.every_database
def test_write_to_another_database_stays_refused_after_the_handler_has_reconnected(run_dry):
    def reconnect():
        Effect.objects.using("other").count()
        connections["other"].close()
        connections["other"].connect()
        execute(DELETE)

    run_dry(reconnect)
    assert the_names() == ["kept"]


class WrappedConnection:
    """The driver's connection as SQLAlchemy's pool gives it: attributes that are set do not reach the driver."""

    def __init__(self, raw):
        self._raw = raw

    def __getattr__(self, name):
        return getattr(self._raw, name)


def test_write_on_a_connection_that_a_pool_wraps_is_refused(run_dry, monkeypatch):
    backend = type(connections["other"])
    connect = backend.get_new_connection
    monkeypatch.setattr(backend, "get_new_connection", lambda self, parameters: WrappedConnection(connect(self, parameters)))
    monkeypatch.setattr(backend, "_set_autocommit", lambda self, value: setattr(self.connection._raw, "autocommit", value))
    connections.close_all()

    page = run_dry(lambda: execute(DELETE))
    assert the_names() == ["kept"]
    assert "cannot execute DELETE in a read-only transaction" in page.text
    connections.close_all()


@pytest.mark.every_database
def test_error_that_the_handler_swallows_still_leaves_the_other_database_as_it_was(run_dry):
    def swallow():
        with suppress(Exception), transaction.atomic(using="other"):
            execute(DELETE)

    page = run_dry(swallow)
    assert the_names() == ["kept"]
    assert READ_ONLY in page.text


def test_transaction_that_the_handler_ends_makes_another_database_no_more_writable(run_dry):
    def end():
        with suppress(Exception):
            execute("COMMIT")
        with suppress(Exception), transaction.atomic(using="other", durable=True):
            Effect.objects.using("other").count()
        with suppress(Exception):
            transaction.commit(using="other")
        execute(DELETE)

    page = run_dry(end)
    assert the_names() == ["kept"]
    assert "It would fail" in page.text


@pytest.mark.every_database
def test_commit_of_the_drivers_connection_makes_another_database_no_more_writable(run_dry):
    def commit():
        with_the_driver("SELECT 1")
        connections["other"].connection.commit()
        with_the_driver()
        connections["other"].connection.commit()

    page = run_dry(commit)
    assert the_names() == ["kept"]
    assert "It would fail" in page.text


def test_handler_reads_another_database_also_in_a_transaction_and_its_commit_hooks_do_not_run(run_dry):
    ran, read = [], []

    def reads():
        with transaction.atomic(using="other"):
            transaction.on_commit(lambda: ran.append("hook"), using="other")
            read.extend(Effect.objects.using("other").values_list("name", flat=True))

        transaction.on_commit(lambda: ran.append("hook"), using="other")

    assert "It would be handled" in run_dry(reads).text
    assert read == ["kept"]
    assert not ran


@pytest.mark.every_database
def test_other_threads_of_the_web_process_write_to_another_database_during_a_dry_run(run_dry):
    def elsewhere():
        Effect.objects.using("other").create(name="written meanwhile")
        connections["other"].close()

    def while_it_runs():
        Effect.objects.using("other").count()
        with ThreadPoolExecutor(1) as web:
            web.submit(elsewhere).result()

    assert "It would be handled" in run_dry(while_it_runs).text
    assert the_names() == ["kept", "written meanwhile"]


@pytest.mark.parametrize("outcome", ["handled", "refused", "closed by the handler"])
def test_pooled_connection_writes_again_after_a_dry_run(run_dry, the_only_session, outcome):
    """The pool has one connection, so the dry run and the web process use the same session."""
    sessions = []

    def look():
        sessions.append(the_only_session())
        if outcome == "refused":
            execute(DELETE)
        if outcome == "closed by the handler":
            connections["other"].close()

    page = run_dry(look)
    assert ("It would fail" if outcome == "refused" else "It would be handled") in page.text
    sessions.append(the_only_session())
    with transaction.atomic(using="other"):
        Effect.objects.using("other").create(name="written afterwards")
    assert the_names() == ["kept", "written afterwards"]
    assert len(set(sessions)) == 1


@pytest.fixture
def the_only_session(transactional_db):
    """A pool of one connection; the process id of its session."""

    def pid():
        return executed("SELECT pg_backend_pid()", using="other")[0]

    other = connections["other"]
    given = other.settings_dict["OPTIONS"]
    other.close()
    other.settings_dict["OPTIONS"] = {**given, "pool": {"min_size": 1, "max_size": 1, "timeout": 10}}
    yield pid
    other.close()
    other.close_pool()
    other.settings_dict["OPTIONS"] = given
