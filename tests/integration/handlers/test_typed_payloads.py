"""Handlers with a payload class: they get an instance, and a payload that does not fit is a dead letter that says why."""

import json
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial

import msgspec
import pydantic
import pytest
from django.db import InterfaceError, transaction
from django.utils.safestring import mark_safe

from inbox.conf import inbox_options
from inbox.contrib.joins.models import Part, Run
from inbox.contrib.joins.runs import NotDecidable, complete
from inbox.errors import NotEditable
from inbox.handlers.handler import PayloadField
from inbox.handlers.registry import registry
from inbox.operators.dry_run import LONGEST, dry_run
from inbox.operators.editing import correct, replace_message
from inbox.receiving.admit import hand_over
from inbox.receiving.reading import read_unread
from inbox.states import Outcome, State
from inbox.testing import make_message, run_handler
from outbox import Draft, InvalidMessage, publish, publish_many
from outbox.testing import published, run_relay
from tests.support.decisions import retry
from tests.support.deliveries import OPTIONS, TOPIC, an_envelope, deliver, drain, effects, the_effect, the_row
from tests.support.joins import NAME, comes
from tests.support.loads import receive_together

pytestmark = [pytest.mark.every_database, pytest.mark.django_db(transaction=True, databases=["default", "other"])]


@dataclass
class OrderData:
    order: str
    total: Decimal


class OrderModel(pydantic.BaseModel):
    order: str
    total: Decimal


class OrderStruct(msgspec.Struct):
    order: str
    total: Decimal


CLASSES = (OrderData, OrderModel, OrderStruct)
FITS, MISFIT = {"order": "17", "total": "9.90"}, {"order": "17", "total": []}
WHY = "The payload does not fit OrderData: total: Expected `decimal`, got `array`, found []."

seen = []


@pytest.fixture(autouse=True)
def _nothing_seen():
    seen.clear()


def takes(message):
    seen.append(message.payload)
    the_effect(message)


def takes_many(messages):
    for message in messages:
        takes(message)


def as_local_does(handler, envelope):
    with transaction.atomic():
        hand_over(handler, read_unread(handler, envelope, OPTIONS))
    drain()


def is_dead(why=WHY, *, attempts=0):
    row = the_row()
    assert (row.state, row.last_error, row.attempts, seen, effects()) == (State.DEAD, why, attempts, [], 0)
    return row


@pytest.mark.parametrize("kind", CLASSES)
def test_handler_gets_an_instance_and_the_inbox_keeps_the_raw_payload(handles, kind):
    handler = handles(takes, payload=kind)

    assert deliver(handler, an_envelope({**FITS, "new field": 1})) is Outcome.HANDLED
    assert seen == [kind(order="17", total=Decimal("9.90"))]
    assert json.loads(bytes(the_row().body)) == {**FITS, "new field": 1}


@pytest.mark.parametrize("kind", CLASSES)
def test_published_instances_arrive_as_equal_instances(handles, kind):
    handles(takes, payload=kind, biz_id="order")
    orders = [kind(order=name, total=Decimal("9.90")) for name in "ab"]
    with transaction.atomic():
        publish(TOPIC, orders[0])
        publish_many([Draft(TOPIC, orders[1])])
    run_relay()

    assert sorted(seen, key=lambda order: order.order) == orders
    assert [message.payload for message in published(TOPIC)] == [{"order": name, "total": "9.90"} for name in "ab"]


class RealPart(json.JSONEncoder):
    def default(self, value):
        return value.real if isinstance(value, complex) else super().default(value)


@dataclass
class Untyped:
    value: object


class UntypedStruct(msgspec.Struct):
    value: object


@pytest.mark.parametrize("kind", [Untyped, UntypedStruct])
def test_fields_of_an_instance_are_written_by_the_encoder_of_the_topic(kind, settings):
    settings.OUTBOX = {"TOPICS": {"audit.*": {"ENCODER": f"{__name__}.RealPart"}}}
    with transaction.atomic():
        publish("audit.entry", kind(2.5j + 1.5))
        publish(TOPIC, kind(mark_safe("<b>")))
        with pytest.raises(InvalidMessage, match="Object of type complex is not JSON serializable"):
            publish(TOPIC, kind(1j))

    assert [message.payload["value"] for topic in ("audit.entry", TOPIC) for message in published(topic)] == [1.5, "<b>"]


class Login(pydantic.BaseModel):
    password: pydantic.SecretStr


def test_model_that_would_not_be_read_back_is_not_published():
    login = Login(password="secret-17")
    with transaction.atomic(), pytest.raises(InvalidMessage, match=r"Login.password is a secret, .*: give it a") as refused:
        publish(TOPIC, login)

    assert "secret-17" not in str(refused.value)
    assert not published(TOPIC)


@pytest.mark.parametrize("ways", [deliver, partial(deliver, redelivered=True), as_local_does])
@pytest.mark.parametrize("options", [{}, {"biz_id": "order"}, {"ordered": True}, {"lease": None}, {"size": 5}])
def test_payload_that_does_not_fit_is_a_dead_letter_without_an_attempt_or_a_call(handles, ways, options):
    handler = handles(takes_many if "size" in options else takes, payload=OrderData, **options)
    ways(handler, an_envelope(MISFIT, key="k"))
    drain()

    is_dead()


def test_message_that_does_not_fit_does_not_stop_the_others_of_its_batch(handles):
    handler = handles(takes_many, payload=OrderData, size=5, biz_id="order")
    given = zip("abc", [FITS, MISFIT, FITS], strict=True)
    receive_together(handler, [an_envelope({**payload, "order": name}) for name, payload in given])

    assert sorted(order.order for order in seen) == ["a", "c"]
    assert the_row(state=State.DEAD).last_error == WHY


def test_message_that_does_not_fit_does_not_take_the_biz_id_from_a_later_one_that_does(handles):
    handler = handles(takes, payload=OrderData)
    assert deliver(handler, an_envelope(MISFIT, biz_id="order-17")) is Outcome.DEAD

    assert deliver(handler, an_envelope(FITS, biz_id="order-17")) is Outcome.HANDLED


def test_correction_of_an_operator_is_validated_again(handles):
    handler = handles(takes, payload=OrderData, biz_id="order")
    deliver(handler, an_envelope(MISFIT))
    row = is_dead()

    with pytest.raises(NotEditable, match=r"total: .*, found 'many'"):
        correct(row, json.dumps({**FITS, "total": "many"}))
    assert replace_message("default", row.pk, json.dumps(FITS), by="anna")
    drain()
    assert seen == [OrderData("17", Decimal("9.90"))]


def test_retry_validates_again_with_the_class_of_today(handles):
    handler = handles(takes, payload=OrderData, name="orders")
    deliver(handler, an_envelope(MISFIT))
    assert retry("default", is_dead().pk)
    drain()
    is_dead()

    @dataclass
    class Order:
        order: str

    registry.add(replace(handler, payloads={TOPIC: Order}))
    assert dry_run("default", the_row().pk, LONGEST).outcome == "handled"
    seen.clear()
    assert retry("default", the_row().pk)
    drain()
    assert (seen, effects()) == ([Order("17")], 1)


def hide(text):
    return text.replace("4111", "****")


def test_what_was_found_is_redacted_like_other_errors_and_fits_its_column(handles, settings):
    settings.INBOX = {"REDACT_ERRORS": f"{__name__}.hide"}
    handler = handles(takes, payload=OrderData)
    deliver(handler, an_envelope({**FITS, "total": "4111" + "\u202e" * 100_000}), given=inbox_options())

    assert the_row().last_error.startswith("The payload does not fit OrderData: total: Invalid decimal string, found '****")
    assert len(the_row().last_error) < 300


def test_database_that_fails_while_a_payload_is_validated_is_an_outage_and_not_a_dead_letter(handles):
    class Order(pydantic.BaseModel):
        order: str

        @pydantic.field_validator("order")
        @classmethod
        def known(cls, value):
            raise InterfaceError("connection already closed")

    handler = handles(takes, payload=Order)
    with pytest.raises(Exception, match=r"payload of tests.handler0 failed with InterfaceError"):
        deliver(handler, an_envelope(FITS))


class TestBizId:
    def test_path_reads_the_published_payload_so_that_a_class_does_not_change_biz_ids(self, handles):
        handler = handles(takes, biz_id="total", name="orders")
        deliver(handler, an_envelope(FITS))
        typed = replace(handler, payloads={TOPIC: OrderModel})

        assert deliver(typed, an_envelope({**FITS, "total": "9.90"})) is Outcome.DUPLICATE
        assert the_row().biz_id == "9.90"

    def test_function_gets_the_typed_payload(self, handles):
        deliver(handles(takes, payload=OrderData, biz_id=lambda message: message.payload.total * 2), an_envelope(FITS))

        assert the_row().biz_id == "19.80"

    def test_several_paths_are_a_json_array_so_that_no_two_tuples_collide(self, handles):
        handler = handles(takes, biz_id=("tenant", "order.id"))
        for tenant, order in [("a", "b,c"), ("a,b", "c"), ('a","b', "c"), ("a", 'b","c'), ("a", 1), ("a", "1")]:
            deliver(handler, an_envelope({"tenant": tenant, "order": {"id": order}}))

        assert effects() == 5  # a number has the name of its digits, as that of a single path has
        assert the_row(biz_id='["a","b,c"]').state == State.DONE

    @pytest.mark.parametrize("given", [(), ("order", 1), ["order"], 5])
    def test_what_is_neither_path_nor_function_is_refused(self, handles, given):
        with pytest.raises(TypeError, match="it must be a function of the message, or the path of a payload field, or a tuple"):
            handles(takes, biz_id=given)

    def test_missing_or_empty_part_is_a_dead_letter(self, handles):
        handler = handles(takes, biz_id=("tenant", "order"))

        assert deliver(handler, an_envelope({"tenant": "", "order": 1})) is Outcome.DEAD
        assert deliver(handler, an_envelope({"order": 1})) is Outcome.DEAD


class TestTopics:
    def test_each_topic_may_have_a_class_of_its_own(self, handles):
        handler = handles(takes, topic=["a", "b", "c"], payload={"a": OrderData, "b": OrderModel})
        for topic in "abc":
            deliver(handler, an_envelope(FITS, topic=topic))

        assert [type(payload) for payload in seen] == [OrderData, OrderModel, dict]

    @pytest.mark.parametrize(
        ("given", "error"), [({"other": OrderData}, ValueError), ("OrderData", TypeError), ({TOPIC: 5}, TypeError)]
    )
    def test_what_is_not_a_class_of_a_topic_is_refused(self, handles, given, error):
        with pytest.raises(error, match="payload "):
            handles(takes, payload=given)


class TestJoins:
    CLASSES = {"orders.exported": OrderData}  # noqa: RUF012

    def test_join_gets_instances_and_stores_raw_payloads(self, joins):
        joins(lambda join: seen.append(join["orders.exported"].payload), topics=["orders.exported"], payload=self.CLASSES)
        comes("orders.exported", **FITS, more=1)
        drain()

        assert seen == [OrderData("17", Decimal("9.90"))]
        assert json.loads(bytes(Part.objects.get().body)) == {"run_id": "monday", **FITS, "more": 1}

    def test_payload_that_does_not_fit_is_a_dead_letter_and_an_operators_one_is_refused(self, joins):
        topics = ["orders.exported", "stock.exported"]
        joins(lambda join: seen.append(join["orders.exported"].payload), topics=topics, payload=self.CLASSES)
        assert comes("orders.exported", **MISFIT) is Outcome.DEAD
        assert the_row(handler=f"{NAME}/orders.exported").last_error == WHY

        comes("stock.exported")
        run = Run.objects.get()
        with pytest.raises(NotDecidable, match=r"orders.exported: .* total: "):
            complete("default", run.pk, {"orders.exported": MISFIT}, by="anna")
        assert complete("default", run.pk, {"orders.exported": FITS}, by="anna")
        drain()
        assert seen == [OrderData("17", Decimal("9.90"))]


def test_helpers_for_tests_give_instances_too(handles):
    handler = handles(takes, payload=OrderData)
    run_handler(takes, OrderData("1", Decimal(1)))
    run_handler(takes, make_message(TOPIC, FITS))

    assert seen == [OrderData("1", Decimal(1)), OrderData("17", Decimal("9.90"))]
    assert PayloadField("order")(handler.typed(make_message(TOPIC, FITS))) == "17"
