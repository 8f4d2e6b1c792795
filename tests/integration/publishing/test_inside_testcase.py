"""What a user's own tests do: publish and drain inside the transaction of a TestCase."""

from __future__ import annotations

from typing import ClassVar

import pytest
from django.core.management import call_command
from django.db import transaction
from django.test import TestCase

from inbox import idempotent_handler
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.states import State as InboxState
from outbox import PublishedOutsideTransaction, publish
from outbox.models import OutboxMessage
from outbox.states import State
from tests.support.apps.effects.models import Effect
from tests.support.sql import executed

TOPIC = "tests.inside_a_test_case"


class HandlerTestCase(TestCase):
    def handle_by(self, function):
        idempotent_handler(TOPIC, name="tests.inside_a_test_case")(function)
        self.addCleanup(registry.remove, "tests.inside_a_test_case")


@pytest.mark.every_database
class TestOutboxInsideTestCase(HandlerTestCase):
    databases: ClassVar = {"default", "other"}

    def test_publish_without_atomic_is_refused_inside_a_testcase(self):
        for alias in self.databases:
            with pytest.raises(PublishedOutsideTransaction):
                publish(TOPIC, {}, using=alias)
            assert not OutboxMessage.objects.using(alias).exists()

    def test_drain_runs_the_handlers_inside_a_testcase(self):
        self.handle_by(lambda message: Effect.objects.create(name=message.payload["name"]))
        with transaction.atomic():
            publish(TOPIC, {"name": "seen"})

        call_command("outbox_relay", "--drain", verbosity=0)

        assert Effect.objects.get().name == "seen"
        assert InboxMessage.objects.get().state == InboxState.DONE
        assert OutboxMessage.objects.get().state == State.PUBLISHED


# SQLite has no timeouts that a transaction could keep.
class TestPostgreSQLInsideTestCase(HandlerTestCase):
    def test_drain_leaves_the_timeouts_of_the_testcase_transaction_unchanged(self):
        self.handle_by(lambda message: None)
        with transaction.atomic():
            publish(TOPIC, {})

        call_command("outbox_relay", "--drain", verbosity=0)

        assert OutboxMessage.objects.get().state == State.PUBLISHED
        shown = executed("SELECT current_setting('idle_in_transaction_session_timeout'), current_setting('lock_timeout')")
        assert shown == [("0", "0")]
