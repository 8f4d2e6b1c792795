"""The command of the inbox that retries dead messages."""

import pytest
from django.core.management import CommandError

from inbox.handlers.registry import registry
from inbox.models import InboxMessage
from inbox.states import State
from tests.support.commands import output_of
from tests.support.deliveries import an_envelope, deliver, drain, effects, fails, run_to_the_end, the_effect, the_row

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture
def dead(handles):
    """A dead letter for each (handler, topic) asked for; its message id."""

    def make(name="tests.h", topic="t"):
        handler = handles(fails, name=name, topic=topic)
        envelope = an_envelope(topic=topic)
        deliver(handler, envelope)
        run_to_the_end()
        handles(the_effect, name=name + " fixed", topic=topic)
        return envelope.id

    return make


class TestRetry:
    def test_retry_by_message_id_leaves_other_dead_messages_and_reports_ids_that_are_not_dead(self, dead):
        first, second = dead("tests.a"), dead("tests.b")

        assert output_of("inbox_retry", first) == "1 message is due now."
        assert the_row(message_id=first).state == State.RETRYING
        assert InboxMessage.objects.filter(state=State.DEAD).count() == 1

        with pytest.raises(CommandError, match="not dead or retrying: order-17"):
            output_of("inbox_retry", second, "order-17")
        assert the_row(message_id=second).state == State.RETRYING
        with pytest.raises(CommandError, match="--all"):
            output_of("inbox_retry")

    @pytest.mark.every_database
    @pytest.mark.parametrize(("chosen", "count"), [({"handler": "tests.a"}, 1), ({"topic": "b"}, 2), ({"all": True}, 3)])
    def test_retry_selects_by_handler_by_topic_or_all(self, dead, chosen, count):
        for name, topic in (("tests.a", "a"), ("tests.b", "b"), ("tests.c", "b")):
            dead(name, topic)

        output_of("inbox_retry", **chosen)

        assert InboxMessage.objects.filter(state=State.RETRYING, attempts=0).count() == count

    def test_retry_by_biz_id_changes_messages_that_match_every_option(self, dead):
        first, _second = dead("tests.a"), dead("tests.b")
        biz_id = the_row(message_id=first).biz_id

        assert output_of("inbox_retry", biz_id=biz_id, handler="tests.b") == "No selected message is dead."
        assert output_of("inbox_retry", biz_id=biz_id) == "1 message is due now."

    def test_retry_dry_run_only_counts(self, dead):
        dead()

        assert output_of("inbox_retry", all=True, dry_run=True) == "1 message would be retried."

        assert the_row().state == State.DEAD

    def test_retry_includes_retrying_messages_only_when_asked(self, handles):
        deliver(handles(fails))

        assert output_of("inbox_retry", all=True) == "No selected message is dead."
        assert drain() == 0
        assert output_of("inbox_retry", state=["retrying"]) == "1 message is due now."
        assert drain() == 1
        assert output_of("inbox_retry", the_row().message_id) == "1 message is due now."
        assert drain() == 1

    @pytest.mark.every_database
    def test_retry_after_the_handler_is_fixed_takes_effect_once(self, handles):
        deliver(handles(fails, name="tests.h"))
        run_to_the_end()
        registry.remove("tests.h")
        handles(the_effect, name="tests.h")

        output_of("inbox_retry", all=True)
        drain()
        output_of("inbox_retry", state=["dead", "retrying"])
        drain()

        assert (the_row().state, effects()) == (State.DONE, 1)
