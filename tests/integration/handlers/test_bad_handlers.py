"""Handlers that do what handlers must not, and what becomes of their messages.

The promise is the same for all of them: a message is never acknowledged for good without its effect, and its effect never
happens twice, however often it is run or delivered again.

`test_bad_handlers_lose_messages_without_the_commit_sentinel` runs some of them with the sentinel removed and sees messages get
lost, which shows that the other tests of this module can fail.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import methodcaller

import pytest
from django.db import DatabaseError, IntegrityError, close_old_connections, connection, transaction

from inbox.errors import NotCallable
from inbox.handlers.decorator import idempotent_handler
from inbox.handlers.message import Message
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.states import Outcome, State
from inbox.store import sentinel
from inbox.transactions import running
from tests.support.apps.effects.models import Effect, Unique
from tests.support.deliveries import TOPIC, an_envelope, at_once, deliver, effects, run_to_the_end, the_effect, the_row
from tests.support.inbox_rows import rename_messages
from tests.support.signals import recorded_signals
from tests.support.sql import executed

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

SETTLED = {Outcome.HANDLED, Outcome.DUPLICATE}
TAKEN = "taken"
EVERYWHERE = ("postgresql", "sqlite")
POSTGRESQL = ("postgresql",)


@dataclass(frozen=True)
class BadHandler:
    """One bad handler.

    Attributes:
        handle: the handler function.
        end_state: the state of its message after all attempts.
        takes_effect: whether the effect is in the database after all attempts.
        reason: what the error of its message must contain; "" means that there must be no error.
        databases: the databases that it can run on.
        lost_on: the databases on which its message would be lost without the sentinel.
    """

    handle: Callable[[Message], object]
    end_state: State
    takes_effect: bool
    reason: str = ""
    databases: tuple[str, ...] = EVERYWHERE
    lost_on: tuple[str, ...] = ()

    def __str__(self):
        return self.handle.__name__


BAD_HANDLERS: list[BadHandler] = []
COMMITTED_BY_ITSELF = "committed by itself"


def fails(reason, *, databases=EVERYWHERE, lost_on=()):
    """The message of this handler ends as a dead letter without an effect."""

    def add(function):
        BAD_HANDLERS.append(
            BadHandler(function, State.DEAD, takes_effect=False, reason=reason, databases=databases, lost_on=lost_on)
        )
        return function

    return add


def fail_by(reason, *, lost_on=(), **actions):
    """`fails` of handlers with these names, each of which has its effect and does this."""
    for name, action in actions.items():

        def handle(message, action=action):
            the_effect(message)
            action()

        handle.__name__ = name
        fails(reason, lost_on=lost_on)(handle)


def swallow(error, action):
    with contextlib.suppress(error):
        action()


def does_no_harm(*, databases=EVERYWHERE):
    """The message of this handler is done, with its effect, although the handler looks bad."""

    def add(function):
        BAD_HANDLERS.append(BadHandler(function, State.DONE, takes_effect=True, databases=databases))
        return function

    return add


def commits_by_itself(function):
    """The effect is committed outside the control of the inbox, so the message is a dead letter for an operator."""
    BAD_HANDLERS.append(BadHandler(function, State.DEAD, takes_effect=True, reason=COMMITTED_BY_ITSELF))
    return function


# ------------------------------------------------------------ swallowed database errors


fail_by(
    "can no longer commit",
    lost_on=EVERYWHERE,
    swallows_an_integrity_error_of_orm_create=partial(swallow, IntegrityError, partial(Unique.objects.create, name=TAKEN)),
    asks_django_to_roll_back=partial(transaction.set_rollback, True),
    closes_the_connection=partial(methodcaller("close"), connection),
    closes_old_connections=close_old_connections,
)


@fails("can no longer commit", lost_on=EVERYWHERE)
def swallows_an_integrity_error_of_orm_update(message):
    the_effect(message)
    free = Unique.objects.create(name=f"free {message.attempt}")
    with contextlib.suppress(IntegrityError):
        Unique.objects.filter(pk=free.pk).update(name=TAKEN)


@fails("can no longer commit", lost_on=POSTGRESQL, databases=POSTGRESQL)
def swallows_an_integrity_error_of_raw_sql(message):
    the_effect(message)
    with contextlib.suppress(IntegrityError):
        executed("INSERT INTO testapp_unique (name) VALUES (%s)", [TAKEN])


@fails("can no longer commit", lost_on=POSTGRESQL, databases=POSTGRESQL)
def swallows_an_error_before_its_effect(message):
    """The effect fails as well, because the transaction is aborted."""
    with contextlib.suppress(DatabaseError):
        executed("SELECT 1/0")
    with contextlib.suppress(DatabaseError):
        the_effect(message)


# ------------------------------------------------------------ hands on the connection


@fails("closed")
def closes_the_connection_and_goes_on(message):
    the_effect(message)
    connection.close()
    the_effect(message)


fail_by(
    "'atomic' block is active",
    commits=partial(methodcaller("commit"), connection),
    rolls_back=partial(methodcaller("rollback"), connection),
    sets_autocommit=partial(transaction.set_autocommit, True),
)


@does_no_harm()
def swallows_the_refusal_of_commit_and_rollback(message):
    the_effect(message)
    for forbidden in (connection.commit, connection.rollback, lambda: transaction.set_autocommit(True)):
        with contextlib.suppress(transaction.TransactionManagementError):
            forbidden()


@fails("durable")
def asks_for_a_durable_transaction(message):
    the_effect(message)
    with transaction.atomic(durable=True):
        pass


fail_by(
    "must commit together",
    commits_by_sql=partial(executed, "COMMIT"),
    rolls_back_by_sql=partial(executed, "  rollback work ;"),
    begins_by_sql=partial(executed, "BEGIN"),
    hides_a_commit_behind_another_statement=partial(executed, "SELECT ';'; COMMIT"),
)


@does_no_harm()
def swallows_the_refusal_of_commit_by_sql(message):
    the_effect(message)
    for sql in ("COMMIT", "END", "ABORT", "ROLLBACK", "BEGIN"):
        with contextlib.suppress(Exception):
            executed(sql)


@does_no_harm()
def uses_savepoints_by_sql(message):
    executed("SAVEPOINT mine")
    Effect.objects.create(name="undone")
    executed("ROLLBACK TO SAVEPOINT mine")
    executed("RELEASE SAVEPOINT mine")
    the_effect(message)


@commits_by_itself
def commits_through_the_driver_after_its_effect(message):
    the_effect(message)
    connection.connection.commit()


@commits_by_itself
def commits_through_the_driver_and_then_swallows_an_error(message):
    the_effect(message)
    connection.connection.commit()
    with contextlib.suppress(IntegrityError):
        Unique.objects.create(name=TAKEN)


@fails("ended the inbox's transaction", lost_on=EVERYWHERE)
def rolls_back_through_the_driver_after_its_effect(message):
    the_effect(message)
    connection.connection.rollback()


# ------------------------------------------------------------ savepoints, as they are meant


@does_no_harm()
def gets_or_creates(message):
    """Django wraps each call in a savepoint, also when the name is taken."""
    Unique.objects.get_or_create(name=TAKEN)
    Unique.objects.get_or_create(name="new")
    Unique.objects.update_or_create(name="newer")
    the_effect(message)


@does_no_harm()
def swallows_an_error_around_a_savepoint(message):
    the_effect(message)
    with contextlib.suppress(IntegrityError), transaction.atomic():
        Unique.objects.create(name=TAKEN)


# ------------------------------------------------------------ ways not to return


def throw(error):
    raise error


fail_by("SystemExit", exits=partial(throw, SystemExit(3)))
fail_by("KeyboardInterrupt", raises_keyboard_interrupt=partial(throw, KeyboardInterrupt))
fail_by("MemoryError", raises_memory_error=partial(throw, MemoryError))
fail_by("GeneratorExit", raises_generator_exit=partial(throw, GeneratorExit))


@fails("RecursionError")
def recurses_for_ever(message):
    the_effect(message)
    recurses_for_ever(message)


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("even my text is broken")


UNSTORABLE = ValueError("nul \x00, lone \ud800, long " + "x" * 100_000)
fail_by("Unprintable", raises_an_error_that_cannot_be_printed=partial(throw, Unprintable()))
fail_by("ValueError", raises_an_error_text_that_no_column_can_store=partial(throw, UNSTORABLE))


# ------------------------------------------------------------ things that are not done


async def _later(message):
    the_effect(message)


@fails("which the inbox does not run")
def returns_a_coroutine(message):
    return _later(message)


@fails("which the inbox does not run")
def returns_a_generator(message):
    return (the_effect(message) for _ in range(1))


@fails("which the inbox does not run")
def returns_a_map(message):
    return map(the_effect, [message])


@does_no_harm()
def returns_a_lazy_queryset(message):
    the_effect(message)
    return Effect.objects.filter(name="never looked at")


@does_no_harm()
def raises_in_an_on_commit_hook(message):
    the_effect(message)
    transaction.on_commit(lambda: 1 / 0)


@does_no_harm()
def exits_in_an_on_commit_hook(message):
    the_effect(message)
    transaction.on_commit(sys.exit)


# ------------------------------------------------------------ outside the transaction


@does_no_harm()
def writes_to_the_other_database(message):
    Effect.objects.using("other").create(name=message.biz_id)
    the_effect(message)


@does_no_harm(databases=POSTGRESQL)
def writes_from_another_thread(message):
    """The write is outside the transaction, which cannot be detected; it happens once as long as the handler succeeds."""

    at_once([partial(the_effect, message)])


# ------------------------------------------------------------ transactions left open


_LEFT_OPEN = []
"""References to the open blocks: garbage collection would close them."""


def _leave_open(alias="default"):
    _LEFT_OPEN.append(transaction.atomic(using=alias))
    _LEFT_OPEN[-1].__enter__()


fail_by(
    "with an open transaction",
    leaves_an_atomic_block_open=_leave_open,
    leaves_an_atomic_block_open_on_another_database=partial(_leave_open, "other"),
    closes_the_connection_in_a_block_and_leaves_it_open=lambda: (_leave_open(), connection.close()),
)


@fails("on purpose")
def leaves_an_atomic_block_open_and_fails(message):
    the_effect(message)
    _leave_open()
    raise ValueError("on purpose")


@fails("on purpose")
def times_out_while_leaving_an_atomic_block(message):
    """A timeout in the middle of Django's own code: one of the two stacks has been restored, the other has not."""
    the_effect(message)
    _leave_open()
    connection.atomic_blocks.pop()
    raise ValueError("on purpose")

    # The locks end with the transaction, which is longer than this block; the rival connection ends then.


@pytest.fixture(autouse=True)
def taken_name(db):
    Unique.objects.create(name=TAKEN)


CASES = [
    pytest.param(
        bad_handler, id=str(bad_handler), marks=[pytest.mark.every_database] if "sqlite" in bad_handler.databases else []
    )
    for bad_handler in BAD_HANDLERS
]


@pytest.mark.parametrize("bad_handler", CASES)
@pytest.mark.parametrize("redelivered", [False, True], ids=["fresh", "redelivered"])
def test_bad_handler_is_never_acknowledged_without_its_effect_nor_repeats_it(bad_handler, redelivered, handles):
    handler = handles(bad_handler.handle)
    envelope = an_envelope()

    received = deliver(handler, envelope, redelivered=redelivered)

    # Acknowledged for good means that the effect is committed, and the other way round.
    assert (effects(envelope.biz_id) == 1) is (received in SETTLED or bad_handler.reason == COMMITTED_BY_ITSELF)
    run_to_the_end()
    for again in (False, True):
        assert deliver(handler, envelope, redelivered=again) is Outcome.DUPLICATE
    run_to_the_end()
    row = the_row()
    assert effects(envelope.biz_id) == bad_handler.takes_effect
    assert row.state == bad_handler.end_state
    assert bad_handler.reason in row.last_error if bad_handler.reason else row.last_error == ""


@pytest.mark.parametrize("bad_handler", CASES)
def test_messages_after_a_bad_handler_commit_on_the_same_thread(bad_handler, handles):
    bad, good = handles(bad_handler.handle), handles(the_effect, topic="shop.good")
    elsewhere = handles(the_effect, topic="shop.good", using="other")

    def work():
        deliver(bad)
        return [deliver(one, an_envelope(topic="shop.good")) for one in (good, elsewhere)]

    assert at_once([work]) == [[Outcome.HANDLED, Outcome.HANDLED]]
    for one in (good, elsewhere):
        assert InboxMessage.objects.using(one.using).get(handler=one.name).state == State.DONE


@pytest.mark.every_database
@pytest.mark.parametrize(
    "bad_handler", [bad_handler for bad_handler in BAD_HANDLERS if connection.vendor in bad_handler.lost_on], ids=str
)
def test_bad_handlers_lose_messages_without_the_commit_sentinel(bad_handler, handles, monkeypatch):
    """If this fails, something other than the sentinel keeps the messages, and the test above proves little."""
    monkeypatch.setattr(sentinel, "finish", lambda *args, **kwargs: None)
    # The second check, which detects those that Django rolls back without running the on_commit hooks.
    monkeypatch.setattr(running, "refuse_if_uncommitted", lambda alias: None)

    received = deliver(handles(bad_handler.handle))

    assert received is Outcome.HANDLED
    assert effects() == 0
    assert not InboxMessage.objects.exists()


@pytest.mark.every_database
@pytest.mark.parametrize("path", ["fresh", "redelivered", "retried"])
def test_message_of_a_handler_that_commits_by_itself_is_signalled_as_dead(path, handles):
    """Its effect may be there in part, so it is neither done nor run again, and an operator is informed."""
    handler = handles(commits_through_the_driver_after_its_effect)
    envelope = an_envelope()
    with recorded_signals("message_dead") as dead:
        if path == "retried":
            assert deliver(handles(_raises, name=handler.name + "x"), envelope) is Outcome.STORED
            rename_messages(handler=handler.name)
            run_to_the_end()
        else:
            assert deliver(handler, envelope, redelivered=path == "redelivered") is Outcome.DEAD

    assert [arguments["message_id"] for _, arguments in dead] == [envelope.id]
    assert the_row().state == State.DEAD


def _raises(message):
    raise ValueError("no")


@pytest.mark.every_database
def test_handler_that_rolls_back_through_the_driver_and_goes_on_repeats_no_effect(handles):
    """On SQLite the driver commits every later statement, so the effect is committed and must not be repeated."""

    def handle(message):
        connection.connection.rollback()
        the_effect(message)

    deliver(handles(handle))
    run_to_the_end()

    assert effects() == (1 if connection.vendor == "sqlite" else 0)
    assert the_row().state == State.DEAD


def test_write_to_another_database_is_logged_once_for_each_handler(handles, caplog):
    names = ["tests.one elsewhere", "tests.other elsewhere"]
    with caplog.at_level(logging.WARNING, "inbox"):
        for handler in [handles(writes_to_the_other_database, name=name) for name in names]:
            for _ in range(3):
                assert deliver(handler) is Outcome.HANDLED

    said = [record.getMessage() for record in caplog.records if "outside its transaction" in record.getMessage()]
    assert [text.partition(":")[0] for text in said] == names
    assert all("'other'" in text and "set using='other'" in text and "publish a message on 'default'" in text for text in said)


@pytest.mark.parametrize(
    ("name", "statement"),
    [
        ("in lower case", "  delete from testapp_effect"),
        ("with a subquery", "WITH one AS (SELECT 1) DELETE FROM testapp_effect"),
    ],
)
def test_every_form_of_a_write_to_another_database_is_logged(handles, caplog, name, statement):
    def handle(message):
        executed(statement, using="other")

    with caplog.at_level(logging.WARNING, "inbox"):
        assert deliver(handles(handle, name=f"tests.write {name}")) is Outcome.HANDLED

    assert "outside its transaction" in caplog.text


def test_read_from_another_database_logs_no_warning(handles, caplog):
    read = []

    def handle(message):
        the_effect(message)
        read.append(Effect.objects.using("other").count())

    with caplog.at_level(logging.WARNING, "inbox"):
        assert deliver(handles(handle)) is Outcome.HANDLED

    assert read == [0]
    assert not caplog.records


def generates(message):
    yield the_effect(message)


async def generates_asynchronously(message):
    yield message


@pytest.mark.parametrize("function", [generates, generates_asynchronously])
def test_generator_function_is_refused_at_decoration(function):
    before = registry.all()

    with pytest.raises(NotCallable, match="generator function"):
        idempotent_handler(TOPIC, name="tests.refused")(function)

    assert registry.all() == before


def _return():
    """As a handler does that has nothing more to do."""


def _raise():
    raise ValueError("in the child")


def _exit():
    raise SystemExit(0)


@pytest.mark.parametrize("leave", [_return, _raise, _exit])
def test_child_that_a_handler_forks_does_not_go_on_as_a_worker(handles, leave):
    statuses = []

    def fork(message):
        the_effect(message)
        if (child := os.fork()) == 0:
            leave()
            return
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert deliver(handles(fork)) is Outcome.HANDLED
    assert statuses == [1]
    assert effects() == 1
    assert the_row().state == State.DONE
