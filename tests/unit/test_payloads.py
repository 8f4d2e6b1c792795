"""Instances of payload classes: what is published is read back equal, and what does not fit names field and value."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address
from numbers import Number
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pydantic
import pytest
from django.core.serializers.json import DjangoJSONEncoder
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypedDict

from exactly_once.wire.payloads import Misfit, plain, reader, why_unreadable
from exactly_once.wire.unreadable import Unreadable

ENCODER = DjangoJSONEncoder()
TEXT = st.text(max_size=5)
INTS = st.integers(-(2**62), 2**62)


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Line:
    sku: str
    count: int
    parts: list[Line] = field(default_factory=list)


@dataclass(frozen=True)
class Order:
    id: UUID
    total: Decimal
    at: datetime
    day: date
    opens: time
    size: Size
    level: Level
    kind: Literal["web", 7] | None
    lines: tuple[Line, ...]
    prices: dict[str, Decimal]
    note: str | None
    weight: Annotated[float, "kg"] = 0.0
    more: Any = None


class OrderModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, populate_by_name=True)
    id: UUID = pydantic.Field(alias="orderId")
    total: Decimal
    at: datetime
    size: Size
    lines: list[Line]
    note: str | None = None


class OrderStruct(msgspec.Struct, rename="camel"):
    order_id: UUID
    total: Decimal
    at: datetime
    size: Size
    lines: list[Line]
    note: str | None = None


@pydantic.dataclasses.dataclass
class PydanticLine:
    sku: str
    at: datetime


DECIMALS = st.decimals(allow_nan=False, allow_infinity=False)
# PostgreSQL's and Python's limits are not the point: an offset with seconds is not ISO 8601.
INSTANTS = st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-3, minutes=-30))])) | st.datetimes()
LINES = st.recursive(
    st.builds(Line, TEXT, INTS, st.just([])), lambda some: st.builds(Line, TEXT, INTS, st.lists(some, max_size=2)), max_leaves=4
)
COMMON = {
    "total": DECIMALS,
    "at": INSTANTS,
    "size": st.sampled_from(Size),
    "lines": st.lists(LINES, max_size=2),
    "note": st.none() | TEXT,
}
ORDERS = st.builds(
    Order,
    id=st.uuids(),
    **{**COMMON, "lines": st.lists(LINES, max_size=2).map(tuple)},
    day=st.dates(),
    opens=st.times(),
    level=st.sampled_from(Level),
    kind=st.sampled_from(["web", 7, None]),
    prices=st.dictionaries(TEXT, DECIMALS, max_size=2),
    weight=st.floats(allow_nan=False),
    more=st.none() | st.booleans() | st.lists(TEXT),
)


def on_the_wire(payload):
    return json.loads(ENCODER.encode(plain(payload, ENCODER)))


def why_not(kind, payload):
    with pytest.raises(Misfit) as refused:
        reader(kind)(payload)
    return str(refused.value)


@given(
    ORDERS
    | st.builds(OrderModel, id=st.uuids(), **COMMON)
    | st.builds(OrderStruct, st.uuids(), **COMMON)
    | st.builds(PydanticLine, TEXT, INSTANTS)
)
def test_an_instance_that_was_published_is_read_back_equal(published):
    found = reader(type(published))(on_the_wire(published))

    assert found == published
    assert type(found) is type(published)


@pytest.mark.parametrize("kind", [OrderModel, OrderStruct])
def test_an_instance_has_the_form_that_djangos_encoder_gives_to_its_values(kind):
    values = {
        "orderId": UUID(int=1),
        "total": Decimal("9.90"),
        "at": datetime(2026, 3, 1, 12, tzinfo=UTC),
        "size": "s",
        "lines": [],
    }
    by_django = json.loads(DjangoJSONEncoder().encode(values))

    assert on_the_wire(reader(kind)(by_django)) == {**by_django, "note": None}


class Whole(int):
    pass


class Real(float):
    pass


class Amount(Decimal):
    pass


class Instant(datetime):
    pass


class Day(date):
    pass


class Clock(time):
    pass


class Period(timedelta):
    pass


@dataclass
class Valued:
    value: Any


class ValuedStruct(msgspec.Struct):
    value: Any


@pytest.mark.parametrize("kind", [Valued, ValuedStruct])
@pytest.mark.parametrize(
    ("given", "same"),
    [
        (SafeString("a"), "a"),
        (gettext_lazy("a"), "a"),
        ([Whole(3), Real(1.5)], [3, 1.5]),
        (Amount("9.90"), Decimal("9.90")),
        (Instant(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC), datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)),
        (Day(2026, 3, 1), date(2026, 3, 1)),
        (Clock(1, 2, 3, 456789), time(1, 2, 3, 456789)),
        ({SafeString("a"): 1, Whole(3): 2}, {"a": 1, 3: 2}),
    ],
)
def test_a_value_of_a_subclass_is_written_as_its_base_is(kind, given, same):
    assert on_the_wire(kind(given)) == on_the_wire(kind(same))


def test_a_duration_of_a_subclass_is_read_back_equal():
    @dataclass
    class Wait:
        time: timedelta

    assert reader(Wait)(on_the_wire(Wait(Period(days=-1, microseconds=5)))) == Wait(timedelta(days=-1, microseconds=5))


@pytest.mark.parametrize("kind", [Valued, ValuedStruct])
def test_any_other_value_is_one_for_the_encoder(kind):
    class OfComplex(json.JSONEncoder):
        def default(self, o):
            return {"real": Real(o.real)} if isinstance(o, complex) else super().default(o)

    assert plain(kind([{"a": 1.5j + 2}]), OfComplex()) == {"value": [{"a": {"real": 2.0}}]}
    with pytest.raises(TypeError, match="Object of type object is not JSON serializable"):
        plain(kind(object()), OfComplex())


FITS = {"orderId": str(UUID(int=1)), "total": "1", "at": "2026-03-01T00:00:00Z", "size": "s", "lines": []}


@pytest.mark.parametrize("kind", [OrderModel, OrderStruct])
@pytest.mark.parametrize(
    ("changed", "field", "found"),
    [
        ({"lines": [{"sku": "a", "count": "two"}]}, "lines[0].count", "'two'"),
        ({"total": []}, "total", "[]"),
        ({"orderId": "x"}, "orderId", "'x'"),
        ({"size": "m"}, "size", "'m'"),
        ({"note": 1}, "note", "1"),
        ({"lines": [{"sku": "a"}]}, "lines[0]", "{'sku': 'a'}"),
    ],
)
def test_a_payload_that_does_not_fit_names_the_field_what_is_expected_and_what_was_found(kind, changed, field, found):
    reason = why_not(kind, {**FITS, **changed})

    assert reason.startswith(f"The payload does not fit {kind.__name__}: {field}")
    assert reason.endswith(f", found {found}.")


@pytest.mark.parametrize("payload", [[], None, "text", {"sku": "a", "count": "2"}, {"sku": "a", "count": True}, {"count": 1}])
def test_no_other_type_is_converted_for_a_dataclass(payload):
    assert "The payload does not fit Line: " in why_not(Line, payload)


def test_what_was_found_is_shown_in_part():
    assert len(why_not(Line, {"sku": "a", "count": "y" * 10_000})) < 200
    assert len(why_not(dict_of, {"values": {"x" * 10_000: "y" * 10_000}})) < 500


@dataclass
class dict_of:  # noqa: N801 - a class whose only field is shown above
    values: dict[str, int]


@dataclass
class Ambiguous:
    when: datetime | str


@dataclass
class Checked:
    count: int

    def __post_init__(self):
        if self.count < 1:
            raise ValueError("count must be positive")


def test_a_check_of_the_class_itself_is_a_reason():
    assert why_not(Checked, {"count": 0}) == "The payload does not fit Checked: it: count must be positive, found {'count': 0}."


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (str, "neither a dataclass, nor a model of Pydantic 2, nor a msgspec Struct"),
        (Ambiguous, "Type unions may not contain more than one str-like type"),
        (Order, ""),
    ],
)
def test_a_class_that_cannot_be_read_is_refused_before_a_message_comes(kind, reason):
    assert reason in why_unreadable(kind)
    assert bool(reason) is bool(why_unreadable(kind))


class Plain:
    pass


@dataclass
class Host:
    address: IPv4Address


@dataclass
class Hosts:
    found: dict[str, list[Host | None]]


@dataclass
class WithModel:
    line: PydanticModel


class PydanticModel(pydantic.BaseModel):
    sku: str


class Tree(msgspec.Struct):
    trees: list[Tree]
    leaf: tuple[Plain, ...]


@dataclass
class Files:
    path: Path | None = None


class Raw(msgspec.Struct):
    raw: msgspec.Raw


@dataclass
class Flags:
    flags: dict[bool, int]


@dataclass
class Open:
    some: list[object]
    iterable: Iterable[int]
    number: Number
    parent: Open | None = None
    kind: Literal["a", 7] | None = None


@pytest.mark.parametrize(
    ("kind", "field", "type_name"),
    [
        (Host, "Host.address", "IPv4Address"),
        (Hosts, "Host.address", "IPv4Address"),
        (WithModel, "WithModel.line", "PydanticModel"),
        (Tree, "Tree.leaf", "Plain"),
        (Files, "Files.path", "Path"),
        (Raw, "Raw.raw", "Raw"),
        (Flags, "Flags.flags", "bool"),
    ],
)
def test_a_field_that_msgspec_does_not_read_is_named(kind, field, type_name):
    assert why_unreadable(kind).startswith(f"{field} has ")
    assert type_name in why_unreadable(kind)


def test_a_class_that_values_of_json_are_instances_of_is_read():
    payload = {"some": [1, {}], "iterable": [1], "number": 1.5, "parent": None, "kind": 7}

    assert why_unreadable(Open) == ""
    assert reader(Open)(payload) == Open(**payload)


def model(annotation=int, /, field=None, **config):
    return pydantic.create_model("Model", __config__=config, a=(annotation, pydantic.Field(...) if field is None else field))


Field, Alias = pydantic.Field, pydantic.AliasChoices
WRITTEN_ONLY = model(int, Field(serialization_alias="x"))


@pydantic.dataclasses.dataclass
class WithInitVar:
    a: InitVar[int]


class RecursiveModel(pydantic.BaseModel):
    models: list[RecursiveModel]
    a: int = Field(1, serialization_alias="x")


class Typed(TypedDict):
    a: Annotated[int, Field(serialization_alias="x")]


def tagged(name, **options):
    return pydantic.create_model(name, type=(Literal[name], name), a=(int, Field(**options)))


TAGGED = Annotated[tagged("One", alias="x") | tagged("Two", serialization_alias="x"), Field(discriminator="type")]


@pytest.mark.parametrize(
    ("kind", "field", "remedy"),
    [
        (model(pydantic.SecretStr), "Model.a", "give it a field_serializer"),
        (model(pydantic.SecretBytes | None, None), "Model.a", "give it a field_serializer"),
        (model(dict[str, pydantic.Secret[date]]), "Model.a", "give it a field_serializer"),
        (WRITTEN_ONLY, "Model.a", "use alias="),
        (model(int, Field(3, serialization_alias="x")), "Model.a", "use alias="),
        (model(int, Field(validation_alias="x")), "Model.a", "use alias="),
        (model(int, Field(validation_alias=pydantic.AliasPath("a", 0))), "Model.a", "use alias="),
        (model(int, Field(exclude=True)), "Model.a", "give it a default"),
        (WithInitVar, "WithInitVar.a", "give it a default"),
        (model(Plain, arbitrary_types_allowed=True), "Model.a", "give it a validator"),
        (model(Sequence[WRITTEN_ONLY]), "Model.a", "use alias="),
        (model(Mapping[str, tuple[int, WRITTEN_ONLY]] | None), "Model.a", "use alias="),
        (pydantic.RootModel[list[WRITTEN_ONLY]], "Model.a", "use alias="),
        (model(TAGGED), "Two.a", "use alias="),
        (model(Typed), "a.a", "use alias="),
        (RecursiveModel, "RecursiveModel.a", "use alias="),
    ],
)
def test_a_field_that_pydantic_does_not_read_as_it_writes_it_is_named_with_its_remedy(kind, field, remedy):
    reason = why_unreadable(kind)

    assert f"{field} " in reason
    assert remedy in reason
    with pytest.raises(Unreadable, match=re.escape(reason)):
        plain(kind.__new__(kind), ENCODER)


REVEALED = Annotated[pydantic.SecretStr, pydantic.PlainSerializer(pydantic.SecretStr.get_secret_value)]


def as_plain(given):
    return given if isinstance(given, Plain) else Plain()


class Renamed(pydantic.BaseModel):
    a: int = Field(serialization_alias="x")

    @pydantic.model_validator(mode="before")
    @classmethod
    def named(cls, given):
        return {"a": given.get("x", given.get("a"))}


class RenamedBack(pydantic.BaseModel):
    a: int = Field(serialization_alias="x")

    @pydantic.model_serializer(mode="wrap")
    def named(self, write):
        return {"a": write(self)["x"]}


@pytest.mark.parametrize(
    "published",
    [
        model(int, Field(alias="x"))(x=1),
        model(int, Field(alias="x"), populate_by_name=True)(a=1),
        model(int, Field(validation_alias="x"), populate_by_name=True)(a=1),
        model(int, Field(validation_alias=Alias("y", "x"), serialization_alias="x"))(y=1),
        model(int, Field(validation_alias=Alias("y", "a")))(y=1),
        model(int, Field(3, exclude=True))(),
        model(Plain | None, Field(None, exclude=True), arbitrary_types_allowed=True)(),
        model(REVEALED)(a="s"),
        Renamed(a=1),
        RenamedBack(a=1),
        model(dict[str, PydanticModel])(a={"type": PydanticModel(sku="a")}),
        model(IPv4Address)(a=IPv4Address("127.0.0.1")),
        model(Path)(a=Path("a")),
    ],
)
def test_a_model_that_pydantic_reads_as_it_writes_it_is_accepted(published):
    assert why_unreadable(type(published)) == ""
    assert reader(type(published))(on_the_wire(published)) == published


def test_a_validator_and_a_serializer_of_the_project_make_any_type_readable():
    read = Annotated[Plain, pydantic.BeforeValidator(as_plain)]
    written = Annotated[read, pydantic.PlainSerializer(lambda value: None)]

    assert why_unreadable(model(read, arbitrary_types_allowed=True)) == ""
    assert why_unreadable(model(written, arbitrary_types_allowed=True)) == ""


def test_each_library_is_imported_only_for_its_classes_and_a_missing_one_is_named():
    code = """
import sys
from dataclasses import dataclass
from json import JSONEncoder
from exactly_once.wire.payloads import plain, reader, why_unreadable
@dataclass
class Line:
    sku: str
encoder = JSONEncoder()
plain({"sku": "a"}, encoder)
assert not {"pydantic", "msgspec"} & {*sys.modules}
assert reader(Line)(plain(Line("a"), encoder)) == Line("a")
assert "pydantic" not in sys.modules
sys.modules["msgspec"] = None
reader.cache_clear()
assert "run `pip install msgspec`" in why_unreadable(Line)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
