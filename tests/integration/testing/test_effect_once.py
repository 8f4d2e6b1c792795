"""A handler whose process is killed at each step; the effect is counted afterwards.

Each handler that is wrong on purpose must be found, or the helper would prove nothing.
"""

import os
import sys
import uuid
from dataclasses import replace

import pytest
from django.db import connection, transaction
from django.db.models.signals import post_save

from inbox import Lease
from inbox.consumer.reception import Reception
from inbox.models import InboxMessage
from inbox.states import Outcome
from inbox.store import arrivals
from inbox.testing import assert_effect_once, make_message
from inbox.testing.crashing import _Step
from outbox import publish
from outbox.testing import published
from tests.support import ROOT
from tests.support.apps.effects.models import Effect
from tests.support.commands import ran
from tests.support.deliveries import fails
from tests.support.signals import listening

TOPIC = "tests.effect_once"
STEPS = len(_Step)

pytestmark = [pytest.mark.every_database, pytest.mark.long]


def a_message(**attributes):
    return make_message(TOPIC, {"name": "a"}, **attributes)


def the_effect(message):
    Effect.objects.create(name=message.payload["name"], detail=str(os.getpid()))


def count():
    return Effect.objects.count()


@pytest.fixture
def in_a_file(tmp_path):
    """What a handler does outside of its transaction."""
    path = tmp_path / "effects"
    path.touch()

    def write(message):
        with path.open("a") as file:
            file.write(f"{message.id}\n")

    write.count = lambda: len(path.read_text().splitlines())
    write.count_once = lambda: len(set(path.read_text().splitlines()))
    return write


def by_step(said):
    """How many effects the failure counts, by delivery and step."""
    lines = [line.split(" in a ") for line in said.splitlines()[1:]]
    return {name.removesuffix("  <--"): int(number) for number, name in lines}


@pytest.mark.django_db(transaction=True)
class TestAnEffectInTheTransaction:
    def test_effect_happens_once_wherever_the_process_is_killed(self, handles):
        handles(the_effect, topic=TOPIC, name="tests.effect")

        assert_effect_once("tests.effect", a_message(), effect=count)

        assert count() == 2 * STEPS
        assert set(InboxMessage.objects.values_list("state", flat=True)) == {"done"}
        assert len(set(InboxMessage.objects.values_list("biz_id", flat=True))) == 2 * STEPS
        processes = set(Effect.objects.values_list("detail", flat=True))
        assert str(os.getpid()) in processes
        assert len(processes) > 1

    @pytest.mark.parametrize(
        "options", [{"ordered": True}, {"size": 5}, {"group_commit": 5}, {"biz_id": lambda message: message.id}]
    )
    def test_effect_happens_once_for_each_kind_of_handler(self, handles, options):
        def one_effect(given):
            for message in given if options.get("size") else [given]:
                the_effect(message)

        handles(one_effect, topic=TOPIC, **options)

        assert_effect_once(one_effect, a_message(key="k"), effect=count)

    def test_message_that_a_handler_publishes_is_published_once(self, handles):
        def chain(message):
            publish("tests.second", message.payload)

        handles(chain, topic=TOPIC)

        assert_effect_once(chain, a_message(), effect=lambda: len(published("tests.second")))

    def test_handler_with_a_biz_id_from_the_payload_gets_a_message_for_each_process(self, handles):
        numbers = iter(range(100))
        handles(the_effect, topic=TOPIC, biz_id="name")

        with pytest.raises(ValueError, match=r"biz-id 'a', so the second would be a duplicate\. Pass a function"):
            assert_effect_once(the_effect, a_message(), effect=count)

        assert_effect_once(the_effect, lambda: make_message(TOPIC, {"name": f"{next(numbers)}"}), effect=count)


@pytest.mark.django_db(transaction=True)
class TestAWrongHandler:
    def test_effect_outside_of_the_transaction_is_found_where_it_happens_twice(self, handles, in_a_file):
        handles(in_a_file, topic=TOPIC, name="orders.send_mail")

        with pytest.raises(AssertionError) as raised:
            assert_effect_once(in_a_file, a_message(), effect=in_a_file.count)

        said = str(raised.value)
        page = (ROOT / "docs" / "how-to" / "test-your-handlers.md").read_text()
        assert said.startswith(page.partition("```text\n")[2].partition("```")[0])
        twice = {_Step.SENTINEL, _Step.COMMIT}
        assert by_step(said) == {
            f"{delivery}, killed {step.value}": 2 if step in twice else 1
            for delivery in ("delivery", "redelivery")
            for step in _Step
        }
        assert said.count("  <--") == 2 * len(twice)

    def test_effect_that_is_distinguished_from_its_repetition_is_one(self, handles, in_a_file):
        handles(in_a_file, topic=TOPIC)

        assert_effect_once(in_a_file, a_message(), effect=in_a_file.count_once)

    def test_effect_under_a_lease_happens_at_least_once(self, handles, in_a_file):
        handles(in_a_file, topic=TOPIC, lease=Lease())

        with pytest.raises(AssertionError) as raised:
            assert_effect_once(in_a_file, a_message(), effect=in_a_file.count)

        counted = by_step(str(raised.value))
        assert len(counted) == 2 * (STEPS - 1)
        assert {name for name, number in counted.items() if number != 1} == {
            f"{delivery}, killed {_Step.SENTINEL.value}" for delivery in ("delivery", "redelivery")
        }

    def test_effect_that_does_not_happen_is_found(self, handles):
        def forget(message):
            pass

        handles(forget, topic=TOPIC)

        with pytest.raises(AssertionError) as raised:
            assert_effect_once(forget, a_message(), effect=count)

        assert set(by_step(str(raised.value)).values()) == {0}

    def test_handler_that_fails_without_being_killed_reaches_the_test(self, handles):
        handles(fails, topic=TOPIC)

        with pytest.raises(ValueError, match="no stock") as raised:
            assert_effect_once(fails, a_message(), effect=count)

        assert raised.traceback[-1].name == "fails"

    def test_handler_that_fails_before_its_step_is_reported_with_its_error(self, handles):
        parent = os.getpid()

        def fail(message):
            if os.getpid() != parent:
                raise ValueError("only there")

        handles(fail, topic=TOPIC)

        with pytest.raises(AssertionError, match=r"was not killed after the handler.*\n.*ended before that step.*only there"):
            assert_effect_once(fail, a_message(), effect=count)


@pytest.mark.django_db(transaction=True)
class TestAWrongInbox:
    """A forked process has what the test has patched."""

    def test_acknowledgement_before_the_commit_loses_the_effect(self, handles, monkeypatch):
        def receive_too_late(reception, load):
            for delivery in load:
                reception._answer([(delivery, Outcome.HANDLED)])
            receive(reception, load)

        receive = Reception.receive
        monkeypatch.setattr(Reception, "receive", receive_too_late)
        handles(the_effect, topic=TOPIC)

        with pytest.raises(AssertionError) as raised:
            assert_effect_once(the_effect, a_message(), effect=count)

        counted = by_step(str(raised.value))
        lost = {_Step.HANDLER, _Step.SENTINEL, _Step.COMMIT, _Step.END}
        assert {step for step in _Step if counted[f"delivery, killed {step.value}"] == 0} == lost

    def test_row_under_another_name_has_the_effect_twice(self, handles, monkeypatch):
        def begin_nameless(alias, rows, *args, **kwargs):
            return begin_fresh(alias, [replace(row, biz_id=f"{uuid.uuid4()}") for row in rows], *args, **kwargs)

        begin_fresh = arrivals.begin_fresh
        monkeypatch.setattr(arrivals, "begin_fresh", begin_nameless)
        handles(the_effect, topic=TOPIC)

        with pytest.raises(AssertionError) as raised:
            assert_effect_once(the_effect, a_message(), effect=count)

        counted = by_step(str(raised.value))
        assert [name for name, number in counted.items() if number != 1] == [f"delivery, killed {_Step.ACK.value}"]
        assert max(counted.values()) == 2


@pytest.mark.django_db(transaction=True)
def test_connections_of_the_test_work_on(handles):
    handles(the_effect, topic=TOPIC)
    called = []
    with listening(post_save, lambda **named: called.append(named["instance"])):
        assert_effect_once(the_effect, a_message(), effect=count)
    with transaction.atomic():
        Effect.objects.create(name="b")

    assert Effect.objects.filter(name="b").exists()
    assert called


@pytest.mark.django_db
def test_test_inside_a_transaction_is_refused(handles):
    handles(the_effect, topic=TOPIC)
    assert connection.in_atomic_block

    with pytest.raises(RuntimeError, match=r"see only committed rows\. Use TransactionTestCase"):
        assert_effect_once(the_effect, a_message(), effect=count)


@pytest.mark.django_db(transaction=True)
def test_lease_in_redis_is_refused(handles, settings):
    settings.INBOX = {"LEASE_STORE": "redis://nobody.invalid"}
    handles(the_effect, topic=TOPIC, lease=Lease())

    with pytest.raises(RuntimeError, match="is in Redis"):
        assert_effect_once(the_effect, a_message(), effect=count)


def test_database_in_memory_is_refused():
    code = """
import django
django.setup()
from django.core.management import call_command
from django.test.utils import setup_test_environment
from inbox import idempotent_handler
from inbox.testing import assert_effect_once, make_message
setup_test_environment()
call_command("migrate", verbosity=0)
handle = idempotent_handler("tests.memory", name="tests.memory")(print)
assert_effect_once(handle, make_message("tests.memory", {}), effect=int)
"""
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "DATABASE_URL": "sqlite://:memory:"}

    done = ran(sys.executable, "-c", code, environment=environment)

    assert "RuntimeError: assert_effect_once() needs a database that several processes can open" in done.stdout
    assert 'DATABASES[\'default\']["TEST"] = {"NAME": BASE_DIR / "test.sqlite3"}' in done.stdout
