"""The system checks of joins."""

from datetime import timedelta

import pytest
from django.core.checks import WARNING
from django.test import override_settings

from inbox.contrib.joins import correlated, joined_handler
from inbox.contrib.joins.decorators import check_cycles, check_tables
from inbox.handlers.decorator import idempotent_handler


@pytest.fixture
def declare(own_handlers):
    def declare(name, *topics, publishes=(), **arguments):
        if len(topics) == 1 and "deadline" not in arguments:
            decorator = idempotent_handler(topics[0], name=name, publishes=publishes)
        else:
            arguments = {"deadline": timedelta(hours=1), **arguments}
            decorator = joined_handler(all_of=topics, correlate="run_id", name=name, publishes=publishes, **arguments)
        decorator(lambda given: None)

    return declare


def a_join(topic):
    return joined_handler(all_of=[topic, f"{topic}.done"], correlate="run_id", deadline="1h")


def a_request(topic):
    return correlated(request=topic, answer=f"{topic}.done", timeout="1h")


def names():
    return [(problem.id, problem.msg.split()[2]) for problem in check_cycles(None)]


def test_join_that_waits_for_what_others_publish_passes(declare):
    declare("exports", "day.closed", publishes=["a.exported", "b.exported"])
    declare("report", "a.exported", "b.exported", publishes=["report.built"])
    declare("mail", "report.built", "b.exported")
    assert check_cycles(None) == []
    assert check_tables(None) == []


def test_join_that_waits_for_its_own_message_is_a_warning(declare):
    declare("report", "a.exported", "report.built", publishes=["report.built"])
    (problem,) = check_cycles(None)
    assert problem.id == "inbox_joins.W001"
    assert problem.level == WARNING
    assert (
        "The join report can never run, as far as is declared: it waits for 'report.built', which only report publishes"
        in problem.msg
    )


@pytest.mark.parametrize("decorator", [a_join, a_request])
def test_one_function_for_two_joins_needs_two_names(own_handlers, decorator):
    with pytest.raises(ValueError, match=r"on b, b\.done .* on a, a\.done.*name="):

        @decorator("a")
        @decorator("b")
        def report(*given):
            pass


def test_two_joins_that_wait_for_each_other_are_warned_of(declare):
    declare("first", "a", "second.done", publishes=["first.done"])
    declare("second", "a", "first.done", publishes=["second.done"])
    assert names() == [("inbox_joins.W001", "first"), ("inbox_joins.W001", "second")]


def test_cycle_through_plain_handlers_is_a_warning(declare):
    declare("report", "a", "mail.sent", publishes=["report.built"])
    declare("render", "report.built", publishes=["report.rendered"])
    declare("mail", "report.rendered", publishes=["mail.sent"])
    assert names() == [("inbox_joins.W001", "report")]


def test_topic_with_another_publisher_is_not_a_cycle(declare):
    declare("report", "a", "report.built", publishes=["report.built"])
    declare("import", "file.uploaded", publishes=["report.built"])
    assert check_cycles(None) == []


def test_topic_without_a_declared_publisher_may_come_from_elsewhere(declare):
    declare("report", "a", "b", publishes=["report.built"])
    assert check_cycles(None) == []


class NoJoinsOnOther:
    def allow_migrate(self, db, app_label, **hints):
        return False if (db, app_label) == ("other", "inbox_joins") else None


@pytest.mark.parametrize("using", ["other", "unknown"])
def test_join_on_a_database_without_its_tables_is_an_error(declare, using):
    declare("report", "a", "b", using=using)
    with override_settings(DATABASE_ROUTERS=[NoJoinsOnOther()]):
        (problem,) = check_tables(None)
    assert problem.id == "inbox_joins.E002"
    assert f"using={using!r}" in problem.msg
