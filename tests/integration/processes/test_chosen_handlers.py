"""`inbox_consume --handlers` and `--except`: a process that receives and runs some handlers of the project only."""

import json
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command

from inbox.contrib.joins import joined_handler
from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.states import State
from tests.support.apps.effects.models import Effect
from tests.support.apps.worker import JOB, NAMED
from tests.support.deliveries import admitted, an_envelope, effects, the_effect
from tests.support.waiting import wait_until
from tests.support.workers import NAMED_OF_THE_WORKERS, OF_THE_WORKERS, broker_options, declare, send

pytestmark = [pytest.mark.django_db(transaction=True, databases=["default", "other"])]

WORK, NAMED_WORK = "worker.work", "worker.named"


def store(handler, biz_id):
    """A message that is due for any process with this handler."""
    admitted(handler, an_envelope(topic=handler.topics[0], biz_id=biz_id))


def test_processes_share_the_handlers_and_health_knows_which_have_no_process(a_process, waiting, rabbitmq_url):
    named = NAMED_OF_THE_WORKERS[0]
    for handler in (OF_THE_WORKERS, named):
        declare(handler, broker_options(rabbitmq_url))
    send(rabbitmq_url, JOB, {}, message_id="job")
    send(rabbitmq_url, NAMED, {"name": "fresh"}, message_id="named")
    store(named, "stored")

    def unattended():
        with a_process("exactly_once_status", "--json", log="status") as status:
            status.ends()
        return json.loads(status.said().splitlines()[-1])["inbox"]["unattended"]

    with a_process("inbox_consume", "--handlers", WORK, log="first") as first:
        first.until(lambda: effects() == 1)
        store(OF_THE_WORKERS, "another job")
        first.until(lambda: effects() == 2)
        assert NAMED_WORK in wait_until(unattended)
        assert WORK not in unattended()
        assert waiting(named) == 1
        assert "stored messages wait for the handler" not in first.said()

        with a_process("inbox_consume", "--except", WORK, log="second") as second:
            second.until(lambda: effects() == 4)
            second.until(lambda: unattended() == [])

    assert set(InboxMessage.objects.values_list("state", flat=True)) == {State.DONE}
    assert {*Effect.objects.values_list("name", flat=True)} >= {"another job", "fresh", "stored"}


@pytest.mark.parametrize("option", ["handlers", "except"])
def test_unknown_name_is_an_error_that_names_similar_ones(handles, option):
    handles(the_effect, name="tests.reserve_stock")

    for names, said in (
        ("tests.reserve_stok", r"'tests\.reserve_stok'; did you mean 'tests\.reserve_stock'"),
        ("tests.reserve_stock,", r"No handler is called ''"),
        ("tests.reserve_stock,zzz", r"'zzz'; known: .*tests\.reserve_stock"),
    ):
        with pytest.raises(CommandError, match=said):
            call_command("inbox_consume", drain=True, **{option: names})


def test_leaving_out_all_handlers_and_both_options_are_errors(handles):
    handles(the_effect, name="tests.reserve_stock")

    with pytest.raises(CommandError, match="--except leaves no handler"):
        call_command("inbox_consume", drain=True, **{"except": ",".join(handler.name for handler in registry.all())})
    with pytest.raises(CommandError, match="not allowed with"):
        call_command("inbox_consume", "--handlers", "a", "--except", "b")


def test_a_join_brings_the_handlers_that_collect_its_messages(own_handlers):
    joined_handler(all_of=["a", "b"], correlate="run_id", deadline=timedelta(hours=1), name="tests.joined")(print)

    chosen = [handler.name for handler in registry.selected("tests.joined")]
    assert chosen == ["tests.joined/a", "tests.joined/b", "tests.joined"]
