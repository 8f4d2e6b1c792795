"""The prepared statements of the inbox: reused, prepared again when dropped, and not used behind a pooler."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import DataError, connection, transaction
from django.test.utils import CaptureQueriesContext
from psycopg import IsolationLevel

from exactly_once.process.clock import utcnow
from exactly_once.sql import prepared_statements
from exactly_once.sql.prepared_statements import PreparedStatement, is_usable
from inbox import Lease
from inbox.consumer import runner
from inbox.models import InboxMessage
from inbox.receiving.admit import admit
from inbox.receiving.reading import read
from inbox.states import Outcome, State
from inbox.store import arrivals, lease_rows, sentinel
from tests.support.aliases import the_default_at
from tests.support.deliveries import (
    OPTIONS,
    admitted,
    an_envelope,
    at_once,
    deliver,
    effects,
    options,
    run_to_the_end,
    the_effect,
)
from tests.support.inbox_rows import delete_messages, rows_of, store_message
from tests.support.sql import executed, fetched
from tests.support.waiting import A_WHILE, wait_until

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

OURS = {"inbox_begin", "inbox_prove"}


@pytest.fixture(autouse=True)
def _new_connection():
    connection.close()


def prepared():
    return {name for (name,) in executed("SELECT name FROM pg_prepared_statements")}


def runs():
    """How often each statement was run since it was prepared."""
    return [count for (count,) in executed("SELECT generic_plans + custom_plans FROM pg_prepared_statements ORDER BY name")]


@contextmanager
def plain_cursors():
    """While queries are captured, statements go through Django's cursors and are not prepared."""
    with CaptureQueriesContext(connection):
        yield


def test_statements_are_prepared_again_after_a_number_of_runs(handles, monkeypatch):
    """A plan made while the table was empty reads all of it."""
    for statement in (arrivals._ONE, sentinel._PROVE_ONE):
        monkeypatch.setattr(statement, "_most_runs", 7)
    handler = handles(the_effect)
    for _ in range(16):
        assert deliver(handler) is Outcome.HANDLED

    assert prepared() == OURS
    assert runs() == [2, 2]
    assert effects() == 16


def test_messages_are_handled_with_plans_that_postgresql_keeps(handles):
    """From the sixth run on. Planning a statement for each run takes longer than running it."""
    handler, leased = handles(the_effect), handles(the_effect, name="tests.leased", lease=Lease())
    for _ in range(8):
        assert deliver(handler) is Outcome.HANDLED
        assert deliver(leased) is Outcome.HANDLED

    kept = executed("SELECT name FROM pg_prepared_statements WHERE custom_plans = 5 AND generic_plans >= 3")
    assert {name for (name,) in kept} == prepared() == OURS | {"inbox_consume"}


def test_prepared_statements_write_the_same_rows_as_a_plain_cursor(handles):
    envelopes = [
        an_envelope(
            {"text": "Zoë \x00 ☃ %s", "n": [1, None]},
            biz_id=name,
            key="k",
            headers={"tenant": "acme", "n": 2, "ok": True},
            correlation_id="c",
            causation_id="d",
            traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            **more,
        )
        for name, more in {"a": {}, "ü%s": {"created_at": None}, "b'\"": {"id": "", "source": ""}}.items()
    ]
    fast, ordinary = handles(the_effect, name="tests.fast"), handles(the_effect, name="tests.ordinary")
    for envelope in envelopes:
        assert [deliver(fast, envelope) for _ in range(2)] == [Outcome.HANDLED, Outcome.DUPLICATE]
        with plain_cursors():
            assert [deliver(ordinary, envelope) for _ in range(2)] == [Outcome.HANDLED, Outcome.DUPLICATE]

    rows = rows_of(fast.name)
    assert (len(rows), rows_of(ordinary.name)) == (3, rows)


def test_lease_is_granted_alike_with_and_without_prepared_statements(handles):
    columns = [field.name for field in InboxMessage._meta.fields if field.name != "id"]
    granted = []
    for name, writing in {"prepared": nullcontext, "plain": plain_cursors}.items():
        row = read(handles(the_effect, name="tests.leased"), an_envelope(biz_id="one", id="i", key="k"), OPTIONS).row
        with writing():
            assert lease_rows.lease_fresh("default", row, timedelta(minutes=1), timedelta(seconds=1)).fence == 1, name
            assert lease_rows.lease_fresh("default", row, timedelta(minutes=1), timedelta(seconds=1)) is None, name
        stored = InboxMessage.objects.values(*columns).get()
        assert stored.pop("next_attempt_at") - stored.pop("received_at") == timedelta(minutes=1)
        granted.append({**stored, "created_at": None})
        delete_messages()

    assert granted[0] == granted[1]
    assert "inbox_begin" in prepared()


def test_loads_of_any_size_are_stored_by_one_prepared_statement(handles):
    handler = handles(the_effect, ordered=True)
    for size in (1, 3, 40):
        load = [an_envelope(biz_id=f"{size}-{n}", key="k") for n in range(size)]
        assert admitted(handler, *load) == [Outcome.STORED] * size

    assert prepared() == {"inbox_insert_ordered"}
    assert runs() == [3]
    assert InboxMessage.objects.count() == 44


def test_load_is_stored_alike_with_and_without_prepared_statements(handles):
    bodies = [b"", b"\x00\xff", b'"{}\\,', b"x" * 100_000]
    instants = frozenset({"received_at", "settled_at", "failing_since", "failed_at", "next_attempt_at", "created_at"})
    rows = []
    for name, writing in {"tests.prepared": nullcontext, "tests.plain": plain_cursors}.items():
        handler = handles(the_effect, name=name, ordered=True)
        load = [
            replace(read(handler, an_envelope(id="i", biz_id=str(n), key="k"), OPTIONS), refused="no" * (n % 2))
            for n, body in enumerate(bodies)
        ]
        load = [replace(arrival, row=replace(arrival.row, body=body)) for arrival, body in zip(load, bodies, strict=True)]
        with writing():
            admit(handler, load, OPTIONS)
        rows.append(rows_of(name, but=instants))

    assert [bytes(row["body"]) for row in rows[0]] == bodies
    assert [row["state"] for row in rows[0]] == [State.RECEIVED, State.DEAD, State.WAITING, State.DEAD]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("key", ["", "a\x1fb", "\x1f", "None"])
@pytest.mark.parametrize("size", [1, 2])
def test_value_that_contains_the_separator_of_a_load_is_stored_unchanged(handles, key, size):
    """Nothing stores such a name today: names are cleaned when a message is read."""
    handler = handles(the_effect)
    load = [read(handler, an_envelope(biz_id=str(n), created_at=None), OPTIONS) for n in range(size)]
    load = [replace(arrival, refused="no", row=replace(arrival.row, key=key, source=str(n))) for n, arrival in enumerate(load)]
    admit(handler, load, OPTIONS)

    rows = InboxMessage.objects.order_by("pk").values_list("biz_id", "key", "source", "created_at")
    assert list(rows) == [(str(n), key, str(n), None) for n in range(size)]


@pytest.mark.parametrize("clean", ["DISCARD ALL", "DEALLOCATE ALL", "DEALLOCATE inbox_begin", "DEALLOCATE inbox_prove"])
def test_statements_dropped_between_two_messages_are_prepared_again(handles, clean):
    calls = []
    handler = handles(lambda message: (calls.append(message), the_effect(message)))
    deliver(handler)
    executed(clean)

    assert [deliver(handler) for _ in range(2)] == [Outcome.HANDLED] * 2

    assert (effects(), prepared()) == (3, OURS)
    # One missing at the beginning is noticed before the handler runs, and then all are looked for. One missing at the end makes
    # it run again.
    assert len(calls) == (4 if clean.endswith("prove") else 3)


def test_handler_that_deallocates_all_statements_succeeds_and_so_does_the_next(handles):
    rude = handles(lambda message: (the_effect(message), executed("DEALLOCATE ALL")), name="tests.rude")
    handler = handles(the_effect)

    for _ in range(3):
        assert deliver(rude) is Outcome.HANDLED
        assert deliver(handler) is Outcome.HANDLED

    assert effects() == 6
    assert set(InboxMessage.objects.values_list("state", "attempts")) == {(State.DONE, 1)}


def test_handler_that_discards_all_fails_and_the_next_one_succeeds(handles):
    """PostgreSQL refuses that inside a transaction."""
    rude = handles(lambda message: (the_effect(message), executed("DISCARD ALL")), name="tests.rude")
    handler = handles(the_effect)
    deliver(handler)

    assert deliver(rude) is Outcome.STORED
    assert deliver(handler) is Outcome.HANDLED

    run_to_the_end()
    assert effects() == 2


def test_foreign_statements_of_the_same_name_are_not_used(handles):
    """As behind a pooler that changes the server process unnoticed."""
    handler = handles(the_effect)
    for name in OURS:
        executed(f"PREPARE {name} AS SELECT 1")

    for _ in range(3):
        assert deliver(handler) is Outcome.HANDLED

    assert (effects(), set(InboxMessage.objects.values_list("attempts", flat=True))) == (3, {1})


@pytest.mark.parametrize("way", [plain_cursors, lambda: transaction.atomic(using="other")], ids=["plain cursor", "prepared"])
def test_duplicate_of_a_message_in_progress_is_deferred_after_the_timeout(handles, way):
    handler, envelope = handles(the_effect), an_envelope()
    deliver(handler)
    with transaction.atomic():
        store_message(handler=handler.name, topic=handler.topics[0], biz_id=envelope.biz_id, body=b"", received_at=utcnow())

        def second():
            with way():
                return deliver(handler, envelope, given=options(DUPLICATE_TIMEOUT=timedelta(milliseconds=50)))

        assert at_once([second]) == [Outcome.DEFERRED]
        transaction.set_rollback(True)

    # The process remembers for a moment that another one was handling it.
    wait_until(lambda: deliver(handler, envelope) is Outcome.HANDLED)


def test_transaction_has_the_isolation_level_of_the_settings(handles):
    shown = []
    handler = handles(lambda message: shown.append(fetched("SHOW transaction_isolation")))
    with the_default_at(OPTIONS={"isolation_level": IsolationLevel.REPEATABLE_READ}):
        for _ in range(2):
            assert deliver(handler) is Outcome.HANDLED

        assert (shown, prepared()) == (["repeatable read"] * 2, OURS)


def test_backend_terminated_between_two_messages_causes_no_failure(handles):
    handler = handles(the_effect)
    deliver(handler)
    pid = fetched("SELECT pg_backend_pid()")
    at_once([lambda: executed(f"SELECT pg_terminate_backend({pid}, 5000)")])

    assert deliver(handler) is Outcome.HANDLED
    assert (effects(), prepared()) == (2, OURS)


@pytest.mark.parametrize("text", ["a\x00b", "\ud800"], ids=["nul", "surrogate"])
def test_text_that_no_column_accepts_raises_and_is_not_truncated(text):
    """Neither gets this far: names are cleaned when a message is read."""
    statement = PreparedStatement("test", ["text"], "SELECT $1")
    with transaction.atomic():
        assert is_usable(connection)
        with pytest.raises((DataError, UnicodeEncodeError)):
            statement.execute(connection, [text])

        assert statement.execute(connection, ["a"]).rows == [["a"]]


def test_nothing_is_prepared_under_gevent(handles, monkeypatch):
    monkeypatch.setattr("exactly_once.sql.prepared_statements._is_green", lambda: True)

    assert deliver(handles(the_effect)) is Outcome.HANDLED
    assert (effects(), prepared()) == (1, set())


class _Interrupted(BaseException):
    """Such as Celery's soft time limit, which arrives between any two steps."""


def test_body_larger_than_the_socket_takes_is_sent_with_the_begin(handles):
    handler = handles(the_effect)
    deliver(handler)  # from now on the statements are prepared

    assert deliver(handler, an_envelope("x" * 9_000_000, biz_id="large")) is Outcome.HANDLED
    assert len(InboxMessage.objects.get(biz_id="large").body) > 9_000_000


@pytest.mark.parametrize("last_step", ["begin", "commit"])
def test_connection_interrupted_while_a_pipeline_is_in_flight_is_closed(handles, monkeypatch, last_step):
    handler = handles(the_effect)
    deliver(handler)
    before = connection.connection
    original, calls = prepared_statements._results, iter(range(100))
    interrupted_at = {"begin": 0, "commit": 1}[last_step]

    def interrupted(pgconn):
        if next(calls) == interrupted_at:
            raise _Interrupted
        return original(pgconn)

    with monkeypatch.context() as patch:
        patch.setattr(prepared_statements, "_results", interrupted)
        received = deliver(handler, an_envelope(biz_id="interrupted"))

    assert before.closed
    # What was in flight may have been committed. Then the message is found handled, and never a dead letter.
    state = InboxMessage.objects.get(biz_id="interrupted").state
    assert (received, state) in {(Outcome.STORED, State.RETRYING), (Outcome.DUPLICATE, State.DONE)}
    run_to_the_end()
    assert effects() == 2


@pytest.fixture
def pipelines(monkeypatch):
    """The statements of each pipeline that is sent."""
    sent = []
    original = prepared_statements._pipelined

    def recorded(raw, before, prepared, after, then=None):
        names = [name for name, *_ in prepared]
        last = [] if then is None else [b"BEGIN", names.pop(), *then]
        sent.append((*before, *names, *after, *last))
        return original(raw, before, prepared, after, then)

    monkeypatch.setattr(prepared_statements, "_pipelined", recorded)
    return sent


def store_three(handler):
    assert admitted(handler, *(an_envelope(biz_id=str(n), key="k") for n in range(3))) == [Outcome.STORED] * 3


def test_ordered_message_is_settled_and_the_next_one_claimed_and_begun_in_one_round_trip(handles, pipelines, monkeypatch):
    monkeypatch.setattr(runner, "_SUCCESSORS_SECONDS", A_WHILE)
    store_three(handles(the_effect, ordered=True))
    run_to_the_end()

    begin = (b"BEGIN", b"inbox_begin_stored", b"SAVEPOINT inbox_guard")
    end = (b"RELEASE SAVEPOINT inbox_guard", b"inbox_finish", b"inbox_follow", b"COMMIT")
    assert pipelines == [begin, end, begin, end + begin, end + begin]
    assert effects() == 3


@pytest.mark.parametrize(
    ("missing", "called"),
    [("inbox_finish", "0112"), ("inbox_follow", "0112"), ("inbox_begin_stored", "012")],
)
def test_each_statement_of_a_round_trip_is_prepared_again_when_it_is_missing(handles, missing, called, monkeypatch):
    monkeypatch.setattr(runner, "_SUCCESSORS_SECONDS", A_WHILE)
    calls = []

    def impolite(message):
        calls.append(message.biz_id)
        the_effect(message)
        if len(calls) == 2:
            executed(f"DEALLOCATE {missing}")

    store_three(handles(impolite, ordered=True))
    run_to_the_end()

    assert ("".join(calls), effects()) == (called, 3)
    assert missing in prepared()


def test_constraint_that_fails_at_the_commit_is_a_failed_attempt_with_its_own_error(handles):
    executed(
        "CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)"
    )
    try:
        handler = handles(lambda message: executed("INSERT INTO child VALUES (1)"))

        assert deliver(handler) is Outcome.STORED
        row = InboxMessage.objects.get()
        assert (row.state, row.last_error.partition(":")[0]) == (State.RETRYING, "IntegrityError")
        assert fetched("SELECT count(*) FROM child") == 0
    finally:
        executed("DROP TABLE child, parent")
