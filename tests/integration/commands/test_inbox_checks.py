"""The system checks of the inbox."""

import sys
from dataclasses import dataclass
from datetime import timedelta

import pytest
from django.core import checks
from django.test import override_settings

from inbox import Lease
from inbox import checks as ours
from tests.support.deliveries import the_effect
from tests.support.http_api import HTTP

pytestmark = pytest.mark.django_db(databases=["default", "other"])


def found(*, deploy=False, databases=None):
    every = checks.run_checks(include_deployment_checks=deploy, databases=databases)
    return {message.id: message for message in every if (message.id or "").startswith("inbox.")}


@pytest.fixture(autouse=True)
def settings_of_a_service_without_a_broker():
    with override_settings(OUTBOX={}, INBOX={}):
        yield


@pytest.mark.every_database
def test_healthy_project_passes_every_check(handles):
    handles(the_effect)

    assert found() == {}


def test_every_mistake_in_the_inbox_setting_is_reported_at_once():
    with override_settings(INBOX={"MAX_ATEMPTS": 3, "PREFETCH": "many"}):
        problems = [message.msg for message in ours.check_options(None)]

    assert len(problems) == 2
    assert "Did you mean 'MAX_ATTEMPTS'" in problems[0]


@pytest.mark.parametrize("given", [None, [], "amqp://", {"PREFETCH": 0}])
def test_invalid_inbox_setting_is_an_error_and_does_not_break_the_other_checks(handles, given):
    handles(the_effect)
    with override_settings(INBOX=given):
        assert set(found(deploy=True)) == ({"inbox.E001"} if given is not None else set())


@pytest.mark.parametrize("name", ["HTTP", "ALERTS", "BROKER_SSL"])
def test_invalid_option_that_the_inbox_takes_from_the_outbox_is_an_error_and_does_not_break_the_other_checks(name):
    with override_settings(OUTBOX={name: {"TOKEN": 1}}):
        assert set(found(deploy=True)) == {"inbox.E001"}


class NoInboxOnOther:
    """A router that keeps the tables of the inbox out of the database `other`."""

    def allow_migrate(self, db, app_label, **hints):
        return False if (db, app_label) == ("other", "inbox") else None


def test_handler_on_an_unknown_database_or_one_that_the_routers_keep_the_inbox_out_of_is_an_error(handles):
    handles(the_effect, using="other", name="tests.there")
    handles(the_effect, name="tests.here")
    assert "inbox.E002" not in found()

    with override_settings(DATABASE_ROUTERS=[NoInboxOnOther()]):
        problem = found()["inbox.E002"]
    handles(the_effect, using="elsewhere")
    unknown = found()["inbox.E002"]

    assert "tests.there" in problem.msg
    assert "'other'" in problem.msg
    assert "elsewhere" in unknown.msg
    assert (problem.is_serious(), unknown.is_serious()) == (True, True)


def test_outbox_and_inbox_on_different_brokers_is_a_warning(handles):
    with override_settings(OUTBOX={"BROKER_URL": "amqp://user:secret@host//"}, INBOX={"BROKER_URL": "local://"}):
        problem = found()["inbox.W001"]

    assert "secret" not in problem.msg
    assert "local://" in problem.msg


def test_ordered_handler_on_a_broker_that_does_not_keep_order_is_an_error(handles):
    handles(the_effect)
    handles(the_effect, ordered=True, name="tests.ordered")
    for url in ("amqp://host//", "local://"):
        with override_settings(OUTBOX={"BROKER_URL": url}, INBOX={"GROUP": "shop"}):
            assert found() == {}
    with override_settings(OUTBOX={"BROKER_URL": "redis://user:secret@host/0"}, INBOX={"GROUP": "shop"}):
        problem = found()["inbox.E006"]

    assert "tests.ordered" in problem.msg
    assert "secret" not in problem.msg


@pytest.mark.parametrize(
    ("outbox", "inbox"), [({"BROKER_URL": "amqp://host//"}, {}), ({}, {"LEASE_STORE": "redis://host/0"})], ids=str
)
def test_broker_or_lease_store_in_redis_without_a_group_is_a_deployment_warning(handles, outbox, inbox):
    handles(the_effect, biz_id=lambda message: message.id)
    with override_settings(OUTBOX=outbox, INBOX=inbox):
        assert "tests" in found(deploy=True)["inbox.W002"].msg
    with override_settings(OUTBOX=outbox, INBOX={**inbox, "GROUP": "shop"}):
        assert "inbox.W002" not in found(deploy=True)


def test_handler_without_biz_id_is_reported_on_deployment_behind_a_broker_only(handles):
    handles(the_effect, name="tests.keyless")
    handles(the_effect, name="tests.keyed", biz_id=lambda message: message.id)
    with override_settings(OUTBOX={"BROKER_URL": "amqp://host//"}, INBOX={"GROUP": "shop"}):
        problem = found(deploy=True)["inbox.I001"]

        assert "inbox.I001" not in found()

    assert problem.level == checks.INFO
    assert "tests.keyless" in problem.msg
    assert "tests.keyed" not in problem.msg
    for outbox in ({}, {"BROKER_URL": "local://"}):
        with override_settings(OUTBOX=outbox, INBOX={"GROUP": "shop"}):
            assert "inbox.I001" not in found(deploy=True)


@pytest.mark.parametrize(
    "given",
    [{"timeout": timedelta(minutes=16)}, {"timeout": timedelta(minutes=1), "group_commit": 20}],
    ids=["one call", "a group"],
)
def test_handler_that_may_outlast_the_consumer_timeout_is_a_warning(handles, given):
    handles(the_effect, name="tests.slow", **given)
    handles(the_effect, name="tests.quick", timeout=timedelta(minutes=1), group_commit=15)
    handles(the_effect, name="tests.unbounded")
    handles(the_effect, name="tests.ordered", ordered=True, timeout=given["timeout"] * 20)

    assert "inbox.W004" not in found()
    with override_settings(INBOX={"BROKER_URL": "amqp://host//"}):
        (problem,) = ours.check_timeouts(None)
    with override_settings(INBOX={"BROKER_URL": "amqp://host//", "ACK_TIMEOUT": timedelta(hours=1)}):
        assert "inbox.W004" not in found()

    assert (problem.id, "tests.slow" in problem.msg) == ("inbox.W004", True)
    assert "0:30:00" in problem.hint


def test_lease_in_redis_that_may_outlast_the_consumer_timeout_is_a_warning(handles):
    """With leases in the database a delivery is acknowledged before it is run."""
    handles(the_effect, name="tests.long", lease=Lease(limit=timedelta(minutes=20)))
    handles(the_effect, name="tests.short", lease=Lease(limit=timedelta(minutes=15)))
    # What is ordered is acknowledged when it is stored.
    handles(the_effect, name="tests.ordered", lease=Lease(limit=timedelta(minutes=20)), ordered=True)
    broker = {"BROKER_URL": "amqp://host//"}

    with override_settings(INBOX={**broker, "LEASE_STORE": "redis://host"}):
        (problem,) = ours.check_timeouts(None)
    with override_settings(INBOX=broker):
        assert ours.check_timeouts(None) == []

    assert "tests.long may take 0:20:00" in problem.msg
    assert "limit=0:20:00" in problem.msg


def test_lease_store_in_redis_requires_the_redis_library(monkeypatch):
    with override_settings(INBOX={"LEASE_STORE": "redis://:secret@host/0"}):
        assert "inbox.E007" not in found()
        monkeypatch.setitem(sys.modules, "redis", None)

        problem = found()["inbox.E007"]

    assert "redis://***@host/0" in problem.msg
    assert "django-exactly-once[redis]" in problem.hint


@pytest.mark.parametrize(("places", "expected"), [(1, ["inbox.W006"]), (3, []), (None, [])])
def test_fewer_places_for_waiting_clients_than_clients_is_a_warning(places, expected):
    with override_settings(INBOX={"HTTP": {**HTTP, "MAX_WAITING": places}}):
        warnings = [one for one in checks.run_checks() if one.id == "inbox.W006"]

    assert [one.id for one in warnings] == expected
    assert all("3 of its clients" in one.msg for one in warnings)


@dataclass
class OfText:
    text: str


@dataclass
class Tagged:
    tag: str | timedelta


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("tests.support.arounds.tenant", "did you mean 'tests.support.arounds.tenant_of'?"),
        ("tenant_of", "not a dotted path"),
        ("tests.support.missing.tenant_of", "No module named"),
        ("tests.support.arounds.async_tenant_of", "it is async"),
    ],
)
def test_function_around_handlers_that_cannot_be_called_is_an_error(path, reason):
    with override_settings(INBOX={"AROUND": ["tests.support.arounds.tenant_of", path]}):
        problem = found()["inbox.E008"]

    assert repr(path) in problem.msg
    assert reason in problem.msg


def test_payload_class_that_no_payload_can_be_read_as_is_an_error(handles):
    handles(the_effect, name="good", payload=OfText)
    handles(the_effect, name="bad", payload={"shop.order.placed": Tagged})
    problem = found()["inbox.E009"]

    assert "The handler bad has payload=Tagged, which cannot be read: Type unions may not contain more" in problem.msg
