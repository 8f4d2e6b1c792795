"""A worker keeps its database session; what one handler changes in it, or does to it, reaches no other handler."""

from contextlib import contextmanager, suppress
from datetime import timedelta

import psycopg
import pytest
from django.db import connection, transaction

from exactly_once.sql.connections import lock_timeout
from inbox import Lease
from inbox.models import InboxMessage
from inbox.receiving import reading
from inbox.receiving.admit import hand_over
from inbox.states import Outcome, State
from tests.support.aliases import the_default_at
from tests.support.apps.effects.models import Effect
from tests.support.deliveries import (
    OPTIONS,
    an_envelope,
    deliver,
    effects,
    fails,
    options,
    run_to_the_end,
    running,
    stored_due,
    the_effect,
    the_row,
)
from tests.support.loads import receive_together
from tests.support.servers import PgBouncer
from tests.support.sql import another_session, executed, fetched
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True)]

CHANGES = {
    "statement_timeout": "SET statement_timeout = '30s'",
    "default_transaction_read_only": "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
    "search_path": "/* of the tenant */ set search_path to nowhere",
    "TimeZone": "SET TIME ZONE 'Asia/Tokyo'",
    "lock_timeout": "SELECT set_config('lock_timeout', '30s', false)",
    "work_mem after a local one": "SELECT set_config('a.b', '1', true), set_config('work_mem', concat('64', 'kB'), (1 > 2))",
    "work_mem": "SELECT 1; SET work_mem TO '64kB'",
}


@pytest.fixture(autouse=True)
def _own_session(transactional_db):
    """What a test changes in its session does not reach the next test."""
    yield
    connection.close()


def setting(name, alias="default"):
    return fetched("SELECT current_setting(%s)", [name], using=alias)


def executing(*statements, then=the_effect):
    def handle(message):
        for statement in statements:
            executed(statement)
        if then is not None:
            then(message)

    return handle


def a_slow_effect(message):
    """It takes longer than the timeout below, which a busy machine does not reach with anything else."""
    executed("SELECT pg_sleep(0.6)")
    the_effect(message)


@pytest.mark.parametrize("given", [{}, {"lease": Lease()}, {"group_commit": 2}], ids=["transaction", "lease", "group_commit"])
@pytest.mark.parametrize("name", CHANGES)
def test_setting_that_a_handler_changes_is_not_seen_by_the_next_handler(handles, name, given):
    statement, name = CHANGES[name], name.partition(" ")[0]
    seen, before = [], setting(name)
    changing = handles(executing(statement, then=None), name="tests.changing", **given)
    other = handles(lambda message: seen.append(setting(name)) or the_effect(message), name="tests.other")

    assert deliver(changing, an_envelope(biz_id="changing")) is Outcome.HANDLED
    assert deliver(other, an_envelope(biz_id="other")) is Outcome.HANDLED

    assert seen == [before]
    assert effects("other") == 1


@pytest.mark.parametrize(
    "statement",
    [
        "SET LOCAL work_mem = '64kB'",
        "SELECT set_config('work_mem', '64kB', true)",
        "SELECT set_config('app.user', coalesce((SELECT 'a)'), ''), true)",
        "SELECT set_config('a.c', concat('(', current_user, ''',x'), 't'), set_config('a.b', now()::text, true)",
        "SELECT set_config('app.user', $$,)($$ /* , (*/, TRUE::boolean), 1",
    ],
)
def test_handler_that_sets_for_its_transaction_only_keeps_the_session(handles, statement):
    pids = []

    def note_session(message):
        pids.append(connection.connection.info.backend_pid)

    handler = handles(executing(statement, then=note_session))
    for _ in range(3):
        assert deliver(handler) is Outcome.HANDLED

    assert len(set(pids)) == 1


@pytest.mark.long
def test_session_that_a_function_of_the_database_changed_is_replaced_after_the_first_error(handles):
    """No statement says that it changes a setting, so the next handler fails once."""
    changing = handles(through_the_driver("SET statement_timeout = '500ms'"), name="tests.changing")
    other = handles(a_slow_effect, name="tests.other")

    deliver(changing, an_envelope(biz_id="changing"))
    deliver(other, an_envelope(biz_id="other"))
    run_to_the_end()

    assert (effects("other"), the_row(biz_id="other").state) == (1, State.DONE)
    assert the_row(biz_id="other").attempts <= 2


def through_the_driver(statement):
    def handle(message):
        connection.connection.execute(statement)

    return handle


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("SET search_path = nowhere", "search_path of this session is nowhere"),
        ("SET default_transaction_read_only = on", "read-only"),
    ],
    ids=["search_path", "read-only"],
)
def test_session_that_cannot_store_any_more_is_replaced_and_named_in_the_log(handles, caplog, statement, named):
    """Changed through the driver, where nothing of Django's sees it."""

    def change_after_the_commit(message):
        transaction.on_commit(lambda: through_the_driver(statement)(message))

    changing = handles(change_after_the_commit, name="tests.changing")
    other = handles(the_effect, name="tests.other")

    assert deliver(changing) is Outcome.HANDLED
    assert deliver(other, an_envelope(biz_id="other")) is Outcome.HANDLED

    assert (effects("other"), the_row(biz_id="other").attempts) == (1, 1)
    (logged,) = [record.getMessage() for record in caplog.records if "session" in record.getMessage()]
    assert named in logged


def test_search_path_that_a_handler_changed_unseen_is_named_in_its_error(handles):
    handler = handles(through_the_driver("SET search_path = nowhere"))

    assert deliver(handler) is Outcome.STORED

    assert "search_path" in the_row().last_error


@contextmanager
def behind_pgbouncer():
    """The default alias behind a pooler with one server connection; it yields what another client of that sees of a setting."""
    settings = connection.settings_dict

    def seen_by_another(name):
        connection.close()
        with psycopg.connect(pooler.url_of(settings["NAME"])) as another_client:
            return another_client.execute("SELECT current_setting(%s)", [name]).fetchone()[0]

    with (
        PgBouncer(int(settings["PORT"] or 5432), pool_size=1, user=settings["USER"]) as pooler,
        the_default_at(PORT=pooler.port),
    ):
        yield seen_by_another


@pytest.mark.parametrize("given", [{}, {"lease": Lease()}], ids=["transaction", "lease"])
@pytest.mark.parametrize(
    ("name", "statement", "parameters"),
    [
        ("statement_timeout", "SET statement_timeout = '12345ms'", None),
        ("default_transaction_read_only", "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY", None),
        ("default_transaction_read_only", "SET work_mem = '64kB'; SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY", None),
        ("search_path", "SET SCHEMA 'nowhere'", None),
        ("search_path", 'SET "search_path" TO nowhere', None),
        ("search_path", "SELECT set_config(%s, %s, false)", ["search_path", "nowhere"]),
        ("role", "SET ROLE pg_monitor", None),
        ("role", "SET role TO pg_monitor", None),
        ("session_authorization", "SET SESSION AUTHORIZATION pg_monitor", None),
    ],
    ids=[
        "by name",
        "by another name",
        "one of two by another name",
        "by a synonym",
        "by a quoted name",
        "by a parameter",
        "role",
        "role by its setting",
        "session authorization",
    ],
)
def test_setting_that_a_handler_changes_behind_pgbouncer_does_not_stay_on_the_server_connection(
    handles, given, name, statement, parameters
):
    before = setting(name)
    handler = handles(lambda message: executed(statement, parameters) and None, **given)
    with behind_pgbouncer() as seen_by_another:
        assert deliver(handler) is Outcome.HANDLED
        assert seen_by_another(name) == before


def test_setting_that_a_failing_handler_changes_under_a_lease_does_not_stay_on_the_server_connection(handles):
    handler = handles(executing("SET statement_timeout = '12345ms'", then=fails), lease=Lease())
    with behind_pgbouncer() as seen_by_another:
        assert deliver(handler) is Outcome.STORED
        assert seen_by_another("statement_timeout") == "0"


@pytest.mark.parametrize("given", [{}, {"lease": Lease()}], ids=["transaction", "lease"])
def test_health_checks_query_nothing_before_a_message_and_a_lost_session_is_replaced(handles, given, tmp_path):
    """The first statement of a message is the inbox's, and is run again if the session was lost meanwhile."""
    pids = []

    def handle(message):
        pids.append(connection.connection.info.backend_pid)
        the_effect(message)

    handler = handles(handle, **given)
    with the_default_at(CONN_HEALTH_CHECKS=True, CONN_MAX_AGE=60), (tmp_path / "sent").open("w+") as log:
        assert deliver(handler, an_envelope(biz_id="first")) is Outcome.HANDLED
        connection.connection.pgconn.trace(log.fileno())
        assert deliver(handler, an_envelope(biz_id="second")) is Outcome.HANDLED
        connection.connection.pgconn.untrace()
        log.seek(0)
        sent = [line for line in log if "\tF\t" in line]
        assert "second" in "".join(sent)
        assert not [line for line in sent if '"SELECT 1"' in line]
        with another_session(autocommit=True) as operator:
            operator.execute("SELECT pg_terminate_backend(%s)", [pids[-1]])
            wait_until(lambda: not operator.execute("SELECT FROM pg_stat_activity WHERE pid = %s", [pids[-1]]).fetchall())
        assert deliver(handler, an_envelope(biz_id="third")) is Outcome.HANDLED

    assert (pids[0], len(set(pids)), len(pids), Effect.objects.count()) == (pids[1], 2, 3, 3)


def test_role_that_a_handler_sets_does_not_store_its_message(handles):
    """The role may not write to the inbox. The one that Django sets comes back."""
    roles = []
    assumed = connection.settings_dict["USER"]
    handler = handles(executing("SET ROLE pg_monitor", then=lambda message: roles.append(setting("role"))))
    with the_default_at(OPTIONS={**connection.settings_dict["OPTIONS"], "assume_role": assumed}):
        assert deliver(handler) is Outcome.HANDLED
        assert (roles, setting("role")) == (["pg_monitor"], assumed)


class TestLostSessions:
    @staticmethod
    def end_own_session(message):
        executed("SELECT pg_terminate_backend(pg_backend_pid())")

    @pytest.mark.parametrize("redelivered", [False, True], ids=["first delivery", "redelivery"])
    def test_handler_that_ends_its_own_session_runs_once_per_attempt_and_once_more(self, handles, redelivered):
        runs = []
        handler = handles(lambda message: runs.append(message.attempt) or self.end_own_session(message))
        given = options(MAX_ATTEMPTS=4)

        deliver(handler, given=given, redelivered=redelivered)
        run_to_the_end(given)

        assert runs == [1, 1, 2, 3, 4]
        assert (the_row().state, the_row().attempts) == (State.DEAD, 4)

    def test_message_that_ends_its_session_in_a_load_is_run_once_for_the_load_and_then_alone(self, handles):
        runs = []

        def handle(message):
            runs.append(message.biz_id)
            if message.biz_id == "b":
                self.end_own_session(message)
            the_effect(message)

        handler = handles(handle, group_commit=3)
        receive_together(handler, [an_envelope(biz_id=name) for name in "abc"])

        assert runs.count("b") == 3  # with the load, alone, and alone once more
        assert sorted(Effect.objects.values_list("name", flat=True)) == ["a", "c"]


@pytest.mark.long
class TestLockedRows:
    """Another session locks a row after it was claimed, such as an operator's SELECT … FOR UPDATE."""

    @pytest.fixture
    def locking(self, monkeypatch):
        """`with locking() as unlock`: the next stored message that is claimed gets its row locked."""
        operator = another_session(application_name="operator")
        stored_envelope = reading.stored_envelope

        def lock_first(stored):
            if not operator.info.transaction_status:
                operator.execute("SELECT 1 FROM inbox_inboxmessage WHERE id = %s FOR UPDATE", [stored.pk])
            return stored_envelope(stored)

        @contextmanager
        def lock():
            monkeypatch.setattr(reading, "stored_envelope", lock_first)
            yield
            monkeypatch.setattr(reading, "stored_envelope", stored_envelope)
            operator.rollback()

        with operator:
            yield lock

    @pytest.mark.parametrize("given", [{}, {"ordered": True}, {"lease": Lease()}], ids=["single", "ordered", "lease"])
    def test_row_locked_by_another_session_is_deferred_while_others_run(self, handles, locking, caplog, given):
        handler = handles(the_effect, **given)
        for name in ("locked", "free"):
            stored_due(handler, an_envelope(biz_id=name, key=name))

        with running(options(REDELIVERY_AFTER=timedelta(seconds=5), MAX_ATTEMPTS=2)):
            with locking():
                wait_until(lambda: "has locked row" in caplog.text)
                wait_until(lambda: effects() == 1)
            wait_until(lambda: effects() == 2)

        assert set(InboxMessage.objects.values_list("state", "attempts")) == {(State.DONE, 1), (State.DONE, 2)}
        (logged,) = [record.getMessage() for record in caplog.records if "has locked row" in record.getMessage()]
        assert "End that session" in logged


OF_THE_CALLER = "1234ms"


@pytest.fixture
def callers_transaction(transactional_db):
    with transaction.atomic():
        executed("SELECT set_config('lock_timeout', %s, true)", [OF_THE_CALLER])
        yield


def test_bound_of_a_block_that_fails_ends_with_the_block(callers_transaction):
    with suppress(ValueError), lock_timeout("default", timedelta(seconds=7)):
        assert setting("lock_timeout") == "7s"
        raise ValueError

    assert setting("lock_timeout") == OF_THE_CALLER


@pytest.mark.parametrize("copies", [1, 2])
def test_message_and_its_duplicate_are_stored_under_their_own_bound(handles, callers_transaction, copies):
    handler, envelope = handles(the_effect), an_envelope()
    for _ in range(copies):
        hand_over(handler, reading.read(handler, envelope, OPTIONS))

    assert setting("lock_timeout") == OF_THE_CALLER
