"""The dry run of a message in the admin: what its handler would write and publish, without any effect on any database."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial

import pytest
from django.db import connections, transaction

from inbox import Lease, Reject, RetryLater
from inbox.models import InboxMessage
from inbox.states import State
from outbox import publish
from outbox.models import OutboxMessage
from tests.support.admin_pages import NASTY, Page, act, said, staff_client
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import an_envelope, deliver, fails, options, the_effect, the_row
from tests.support.inbox_rows import settle
from tests.support.sql import executed

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

VIEW, DRY_RUN = "view_inboxmessage", "dry_run_inboxmessage"
LIST = "admin:inbox_inboxmessage_changelist"


def asked(**fields):
    return act(staff_client(VIEW, DRY_RUN), "dry_run", the_row(), page=LIST, **fields)


@pytest.fixture
def run_dry(handles):
    """Dead-letter a message, store one effect in the other database, run the handler dry, and return the page.

    It leaves nothing in the database of the message.
    """

    def run(does, seconds="10"):
        failed = []

        def handler(message):
            if not failed:
                failed.append(message)
                raise ValueError("at first")
            return does(message)

        deliver(handles(handler), an_envelope(), given=options(MAX_ATTEMPTS=1))
        before = InboxMessage.objects.values().get()
        Effect.objects.using("other").create(name="kept")
        connections["other"].close()
        page = Page(asked(confirmed="yes", seconds=seconds))
        assert InboxMessage.objects.values().get() == before
        assert not Effect.objects.exists()
        assert not OutboxMessage.objects.exists()
        return page

    return run


@pytest.mark.every_database
def test_dry_run_shows_what_would_be_written_and_published_and_leaves_nothing(run_dry):
    def work(message):
        the_effect(message)
        publish("shop.reserved", {"order": 7}, biz_id="reserved-7")

    page = run_dry(work)
    assert "It would be handled" in page.text
    assert "INSERT INTO" in page.text
    assert Effect._meta.db_table in page.text
    assert "shop.reserved reserved-7" in page.text
    assert '"order": 7' in page.text


@pytest.mark.every_database
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("the card was refused"), "It would fail"),
        (RetryLater(timedelta(minutes=1), "out of stock"), "It would be deferred"),
        (Reject("nonsense"), "It would become a dead letter"),
        (SystemExit(3), "It would fail"),
    ],
)
def test_dry_run_shows_what_the_handler_raises(run_dry, error, outcome):
    def fail(message):
        the_effect(message)
        raise error

    page = run_dry(fail)
    assert outcome in page.text
    assert str(error) in page.text
    assert "tests/integration/admin/test_dry_run.py" in page.text


@pytest.mark.long
@pytest.mark.every_database
def test_handler_that_takes_too_long_is_interrupted(run_dry):
    ended = threading.Event()

    def loop(message):
        try:
            the_effect(message)
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    assert "It did not end in time" in run_dry(loop, seconds="1").text
    assert ended.wait(10)


@pytest.mark.every_database
def test_statement_that_would_end_the_transaction_is_refused(run_dry):
    def commit(message):
        the_effect(message)
        executed("COMMIT")

    assert "It would fail" in run_dry(commit).text


def test_dry_run_asks_first_and_warns_of_real_effects(handles):
    deliver(handles(fails), an_envelope(), given=options(MAX_ATTEMPTS=1))
    assert "Mail, HTTP requests and other effects outside the database are real." in Page(asked()).text


def test_handler_under_a_lease_and_a_done_message_are_refused(handles):
    ran = []

    def work(message):
        ran.append(message)
        raise ValueError("no")

    deliver(handles(work, lease=Lease()), an_envelope(), given=options(MAX_ATTEMPTS=1))
    assert the_row().state == State.DEAD
    ran.clear()
    for reason in ("cannot be rolled back", "only dead and retrying messages"):
        ((level, words),) = said(asked(confirmed="yes", seconds="10"))
        assert (level, reason in words) == ("error", True)
        settle(InboxMessage.objects.all())
    assert not ran


def test_markup_in_writes_and_payloads_stays_text(run_dry):
    def work(message):
        Effect.objects.create(name="x", detail=NASTY[:60])
        publish("shop.x", {"text": NASTY})

    page = run_dry(work)
    assert "<script>" in page.text
    assert not page.all("img")


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
def emptying_function(transactional_db):
    execute(f"CREATE FUNCTION empty_the_effects() RETURNS void LANGUAGE sql AS $$ {DELETE} $$")
    yield
    execute("DROP FUNCTION empty_the_effects()")


def the_names():
    return list(Effect.objects.using("other").order_by("pk").values_list("name", flat=True))


@pytest.mark.parametrize("sql", DELETING.values(), ids=DELETING)
@pytest.mark.usefixtures("emptying_function")
def test_statement_that_writes_to_another_database_in_any_form_is_refused_by_the_database(run_dry, sql):
    page = run_dry(lambda message: execute(sql))
    assert the_names() == ["kept"]
    assert "It would fail" in page.text
    assert READ_ONLY in page.text


def reconnect():
    Effect.objects.using("other").count()
    connections["other"].close()
    connections["other"].connect()
    execute(DELETE)


def commit_by_the_driver():
    with_the_driver("SELECT 1")
    connections["other"].connection.commit()
    with_the_driver()
    connections["other"].connection.commit()


@pytest.mark.every_database
@pytest.mark.parametrize("write", [with_the_driver, reconnect, commit_by_the_driver])
def test_write_to_another_database_by_the_driver_or_after_a_reconnect_is_refused(run_dry, write):
    page = run_dry(lambda message: write())
    assert the_names() == ["kept"]
    assert "It would fail" in page.text


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

    page = run_dry(lambda message: execute(DELETE))
    assert the_names() == ["kept"]
    assert "cannot execute DELETE in a read-only transaction" in page.text
    connections.close_all()


@pytest.mark.every_database
def test_error_that_the_handler_swallows_still_leaves_the_other_database_as_it_was(run_dry):
    def swallow(message):
        with suppress(Exception), transaction.atomic(using="other"):
            execute(DELETE)

    page = run_dry(swallow)
    assert the_names() == ["kept"]
    assert READ_ONLY in page.text


def test_transaction_that_the_handler_ends_makes_another_database_no_more_writable(run_dry):
    def end(message):
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


def test_handler_reads_another_database_also_in_a_transaction_and_its_commit_hooks_do_not_run(run_dry):
    ran, read = [], []

    def reads(message):
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

    def while_it_runs(message):
        Effect.objects.using("other").count()
        with ThreadPoolExecutor(1) as web:
            web.submit(elsewhere).result()

    assert "It would be handled" in run_dry(while_it_runs).text
    assert the_names() == ["kept", "written meanwhile"]


@pytest.mark.parametrize("outcome", ["handled", "refused", "closed by the handler"])
def test_pooled_connection_writes_again_after_a_dry_run(run_dry, the_only_session, outcome):
    """The pool has one connection, so the dry run and the web process use the same session."""
    sessions = []

    def look(message):
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
