"""Relaying without a broker, and running the project's own handlers, in each kind of test that Django knows."""

import os
import re
import sys
import threading
from datetime import timedelta
from functools import partial
from importlib import import_module

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction
from django.test import TestCase, TransactionTestCase

import inbox.testing
import outbox.testing
from exactly_once.models import Process
from inbox import Lease, Retry, idempotent_handler
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.testing.observing import HandlerFailed
from outbox import callbacks, on_published, publish
from outbox.testing import assert_published, run_relay
from tests.support.apps.effects.models import Effect
from tests.support.commands import ran
from tests.support.deliveries import fails, in_the_order_of_their_effects, stored_due, the_effect

TOPIC = "tests.run_relay"


def say(name, **options):
    with transaction.atomic():
        return publish(options.pop("topic", TOPIC), {"name": name}, biz_id=name, **options)


def commits_of(work, monkeypatch):
    """What each commit of this thread on the default connection has written, in their order; a read is none."""
    commits, written = [], []

    def statement(execute, sql, params, many, context):
        if verb := re.search(r"\b(INSERT INTO|(?<!FOR )UPDATE|DELETE FROM)\b", sql):
            written.append(verb[1])
            if not connection.in_atomic_block:
                commit()
        return execute(sql, params, many, context)

    def commit():
        commits.append(tuple(written))
        written.clear()

    with monkeypatch.context() as patched, connection.execute_wrapper(statement):
        committed = type(connections["default"]).commit
        patched.setattr(type(connections["default"]), "commit", lambda self: (committed(self), commit()))
        work()
    return commits


@pytest.mark.every_database
@pytest.mark.django_db(transaction=True)
def test_two_reproducible_runs_over_equal_data_make_the_same_commits_in_this_thread(handles, monkeypatch):
    def publishes(message):
        the_effect(message)
        publish("tests.next", {}, biz_id=message.biz_id)

    handles(publishes, topic=TOPIC, ordered=True)
    handles(fails, topic=TOPIC, retry=Retry(max_attempts=1), on_dead=the_effect)
    handles(the_effect, topic="tests.next")
    made, before = [], set(threading.enumerate())
    for run in range(2):
        for number in range(3):
            say(f"{run}.{number}", key="a key" if number else "")
        made.append(commits_of(partial(run_relay, reproducible=True, raise_errors=False), monkeypatch))

    assert made[0] == made[1]
    assert len(made[0]) > 20, "a message is claimed and settled alone"
    assert Effect.objects.count() == 2 * 3 * 3
    assert not set(threading.enumerate()) - before
    assert not Process.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_drain_runs_the_messages_of_the_given_handlers(handles):
    one, other = handles(the_effect), handles(the_effect)
    for handler in (one, other):
        stored_due(handler)

    assert [inbox.testing.drain(one.name), inbox.testing.drain(one.name), inbox.testing.drain()] == [1, 0, 1]


class WhatEveryTestCaseCanDo:
    def test_handlers_run_once_for_each_message(self):
        idempotent_handler(TOPIC, name=TOPIC)(the_effect)
        self.addCleanup(registry.remove, TOPIC)
        say("a")
        say("a")

        assert len(run_relay()) == 2
        assert run_relay() == []
        assert in_the_order_of_their_effects() == ["a"]
        assert_published(TOPIC, state="published", count=2)


@pytest.mark.every_database
class TestInATestCase(WhatEveryTestCaseCanDo, TestCase):
    def test_hooks_of_handlers_run_when_they_are_captured(self):
        called = []
        idempotent_handler(TOPIC, name=TOPIC)(lambda message: transaction.on_commit(lambda: called.append(message.biz_id)))
        self.addCleanup(registry.remove, TOPIC)
        say("a")

        with self.captureOnCommitCallbacks(execute=True):
            run_relay()

        assert called == ["a"]

    async def test_async_test_calls_it_by_sync_to_async(self):
        idempotent_handler(TOPIC, name=TOPIC)(the_effect)
        self.addCleanup(registry.remove, TOPIC)
        await sync_to_async(say)("a")

        await sync_to_async(run_relay)()

        assert await sync_to_async(in_the_order_of_their_effects)() == ["a"]


@pytest.mark.every_database
class TestInATransactionTestCase(WhatEveryTestCaseCanDo, TransactionTestCase):
    pass


@pytest.mark.every_database
@pytest.mark.usefixtures("transaction_of_the_test")
class TestWithLocalHandlers:
    def test_what_handlers_publish_is_relayed_too(self, handles, outbox_run_relay, outbox_assert_published):
        handles(lambda message: publish("tests.second", message.payload, biz_id=message.biz_id), topic=TOPIC)
        handles(the_effect, topic="tests.second")
        say("a")

        sent = outbox_run_relay()

        assert [message.topic for message in sent] == [TOPIC, "tests.second"]
        assert in_the_order_of_their_effects() == ["a"]
        assert outbox_assert_published("tests.second").causation_id == outbox_assert_published(TOPIC).id

    @pytest.mark.long
    def test_failing_handler_leaves_no_effect_and_the_test_goes_on(self, handles, outbox_run_relay):
        handles(fails, topic=TOPIC)
        say("a")

        with pytest.raises(ValueError, match="no stock") as raised:
            outbox_run_relay()

        assert raised.traceback[-1].name == "fails"
        assert in_the_order_of_their_effects() == []
        assert InboxMessage.objects.get().state == "retrying"
        say("b")
        assert len(outbox_run_relay(raise_errors=False)) == 1
        assert InboxMessage.objects.filter(state="retrying").count() == 2

    def test_failing_handler_keeps_no_other_from_running(self, handles, outbox_run_relay):
        def fail_for_a(message):
            if message.payload["name"] == "a":
                raise ValueError("no")
            the_effect(message)

        handles(fail_for_a, topic=TOPIC)
        for name in "abc":
            say(name)

        with pytest.raises(ValueError, match="no"):
            outbox_run_relay()

        # Without a key, no order is promised.
        assert sorted(in_the_order_of_their_effects()) == ["b", "c"]
        assert outbox_run_relay() == []

    def test_message_that_the_inbox_refuses_is_raised_as_such(self, handles, outbox_run_relay):
        handles(the_effect, topic=TOPIC, biz_id="order.id")
        say("a")

        with pytest.raises(HandlerFailed, match=r"the payload has no field 'order\.id'"):
            outbox_run_relay()

        assert InboxMessage.objects.get().state == "dead"

    def test_handler_that_breaks_its_transaction_does_not_break_the_test(self, handles, outbox_run_relay):
        def swallow(message):
            try:
                with transaction.atomic():
                    the_effect(message)
                    Effect.objects.create(pk=Effect.objects.get().pk)
            except Exception:  # noqa: BLE001
                pass
            the_effect(message)

        handles(swallow, topic=TOPIC)
        say("a")

        outbox_run_relay()

        assert in_the_order_of_their_effects() == ["a"]

    @pytest.mark.parametrize(
        "options",
        [{"ordered": True}, {"rate_limit": "1/h"}, {"group_commit": 5}, {"lease": Lease()}],
        ids=["ordered", "rate limit", "group commit", "lease"],
    )
    def test_handlers_of_each_kind_get_all_messages_and_nothing_is_waited_for(self, handles, outbox_run_relay, options):
        handles(the_effect, topic=TOPIC, **options)
        for name in "abc":
            say(name, key="k")

        outbox_run_relay()

        assert in_the_order_of_their_effects() == ["a", "b", "c"]

    def test_message_that_no_handler_takes_is_not_published(self, outbox_run_relay, outbox_assert_published):
        say("a", topic="tests.unhandled")

        assert outbox_run_relay() == []
        message = outbox_assert_published("tests.unhandled", state="retrying")
        assert "no handler is registered for the topic" in message.last_error

    def test_callbacks_are_called(self, outbox_run_relay):
        called = []
        on_published(TOPIC, name="tests.run_relay")(lambda message: called.append(message.biz_id))
        try:
            say("a")
            outbox_run_relay(handlers=False)
        finally:
            callbacks.registry.remove("tests.run_relay")

        assert called == ["a"]


@pytest.mark.django_db(databases=["default", "other"])
@pytest.mark.usefixtures("amqp")
class TestWithAnotherBroker:
    def test_handlers_on_another_database_run_there(self, handles, outbox_run_relay):
        handles(lambda message: Effect.objects.using("other").create(name="a"), topic=TOPIC, using="other")
        say("a")

        outbox_run_relay()

        assert Effect.objects.using("other").get().name == "a"
        assert InboxMessage.objects.using("other").get().state == "done"
        assert not InboxMessage.objects.exists()

    def test_every_message_is_captured_as_it_travels(self, outbox_run_relay, outbox_assert_published):
        written = say("a", headers={"tenant": "acme"}, key="k")

        (sent,) = outbox_run_relay()

        assert (sent.id, sent.topic, sent.payload, sent.body) == (str(written.id), TOPIC, {"name": "a"}, b'{"name":"a"}')
        assert sent.headers["tenant"] == "acme"
        assert sent.headers["cloudEvents:id"] == sent.id
        assert sent.headers["cloudEvents:orderingkey"] == "k"
        outbox_assert_published(TOPIC, state="published")

    @pytest.mark.parametrize("wanted", [True, False])
    def test_handlers_of_the_project_run_if_they_are_wanted(self, handles, outbox_run_relay, wanted):
        handles(the_effect, topic=TOPIC)
        say("a")
        say("b", topic="tests.of_another_service")

        assert [message.payload["name"] for message in outbox_run_relay(handlers=wanted)] == ["a", "b"]
        assert in_the_order_of_their_effects() == ["a"] * wanted
        assert InboxMessage.objects.count() == wanted


@pytest.mark.django_db
class TestWithoutTheInbox:
    @pytest.fixture(autouse=True)
    def _without(self, settings):
        settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if not app.startswith("inbox")]

    @pytest.mark.usefixtures("amqp")
    def test_messages_are_captured(self, outbox_run_relay, outbox_travel):
        say("a", delay=timedelta(hours=1))
        outbox_travel(timedelta(hours=1))

        assert [message.payload for message in outbox_run_relay()] == [{"name": "a"}]

    def test_local_broker_names_what_is_missing(self, outbox_run_relay):
        with pytest.raises(ImportError, match="'inbox', which is not in INSTALLED_APPS"):
            outbox_run_relay()


class TestMisuse:
    @pytest.mark.django_db
    def test_call_inside_atomic_is_refused(self, outbox_run_relay):
        with transaction.atomic(), pytest.raises(RuntimeError, match="call it after that block"):
            outbox_run_relay()

    @pytest.mark.long
    @pytest.mark.parametrize("call", ["run_relay()", "travel(timedelta(days=1))"])
    def test_use_outside_of_tests_is_refused(self, call):
        code = f"import django; django.setup(); from datetime import timedelta; from outbox.testing import *; {call}"
        environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "DATABASE_URL": "sqlite://:memory:"}

        done = ran(sys.executable, "-c", code, environment=environment)

        assert done.returncode == 1
        assert "RuntimeError" in done.stdout
        assert "is for tests only" in done.stdout


@pytest.mark.parametrize("testing", [outbox.testing, inbox.testing])
def test_each_helper_is_a_fixture_with_the_prefix_of_its_app(request, testing):
    app = testing.__name__.partition(".")[0]
    helpers = {name for name in testing.__all__ if name.islower()}

    assert {name for name in vars(import_module(f"{app}.pytest_plugin")) if name.startswith(f"{app}_")} == {
        f"{app}_{name}" for name in helpers
    }
    assert all(request.getfixturevalue(f"{app}_{name}") is getattr(testing, name) for name in helpers)


@pytest.mark.parametrize(
    ("plugin", "is_wrong"),
    [("outbox", "'django' in sys.modules"), ("inbox", "import_module('django.conf').settings.configured")],
)
def test_plugin_is_imported_before_django_is_set_up(plugin, is_wrong):
    environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    code = f"import sys; from importlib import import_module; import {plugin}.pytest_plugin; sys.exit({is_wrong})"

    done = ran(sys.executable, "-c", code, environment=environment)

    assert done.returncode == 0
