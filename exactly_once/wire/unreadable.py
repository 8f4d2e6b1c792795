"""Payload classes with a field that would not be read back, found from the class alone.

msgspec accepts any class as the type of a field, and Pydantic writes some fields in another form than it reads, or not at all.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import NoneType
from typing import Any

JSON_TYPES = (dict, list, str, int, float, bool, NoneType)
_MODELS = {"model", "dataclass", "typed-dict"}
_FIELDS = {"model-fields", "dataclass-args", "typed-dict"}
_OWN = {"function-before", "function-wrap"}
_FROM_PYTHON = {"is-instance", "is-subclass", "callable"}
_UNWRITTEN = ("serialization_exclude", "serialization_exclude_if", "init_only")
_PARTS = ("schema", "items_schema", "keys_schema", "values_schema", "extras_schema", "choices", "json_schema", "lax_schema")


class Unreadable(TypeError):
    """No payload can be an instance of this class, for this reason."""


def check_fields(kind: type) -> None:
    """Check the fields of a dataclass or Struct, and of the classes of its fields.

    Raises:
        Unreadable: msgspec does not read the type of one.
    """
    inspect = import_module("msgspec.inspect")
    try:
        types, seen = [(kind.__qualname__, inspect.type_info(kind))], set()
    except TypeError:  # msgspec 0.19 does not sort literals of several types
        return
    for at, node in types:
        custom = isinstance(node, inspect.CustomType) and not any(issubclass(each, node.cls) for each in JSON_TYPES)
        if custom or isinstance(node, inspect.RawType):
            raise Unreadable(f"{at} has a type that msgspec does not read from JSON: {getattr(node, 'cls', node)!r}")
        if isinstance(node, inspect.DictType) and isinstance(node.key_type, inspect.BoolType):
            raise Unreadable(f"{at} has keys of the type bool, which msgspec does not read from JSON")
        if id(node) in seen:
            continue
        seen.add(id(node))
        for value in (getattr(node, name) for name in node.__struct_fields__):
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, inspect.Field):
                    types.append((f"{node.cls.__qualname__}.{part.name}", part.type))
                elif isinstance(part, inspect.Type):
                    types.append((at, part))


def check_schema(kind: type, schema: Mapping[str, Any]) -> None:
    """Check the fields of a Pydantic model, and of the models of its fields, by their core schema.

    What the project writes or reads by a serializer or validator of its own is not checked.

    Raises:
        Unreadable: a field is not written, or is written in a form that Pydantic does not read.
    """
    definitions = {each["ref"]: each for each in schema.get("definitions", ())}
    parts, seen = [_Part(schema, kind.__qualname__)], set()
    for part in parts:
        node, at = part.node, part.at
        writer = node.get("serialization", {})
        if node["type"] == "definition-ref":
            if (seeing := (node["schema_ref"], part.own)) not in seen:
                seen.add(seeing)
                parts.append(replace(part, node=definitions[node["schema_ref"]]))
        elif writer.get("type") == "function-plain":
            if _hides(writer["function"]):
                raise Unreadable(
                    f"{at} is a secret, which Pydantic writes as asterisks: give it a field_serializer or another type"
                )
        elif node["type"] in _FROM_PYTHON and not part.own:
            raise Unreadable(f"{at} has a type that Pydantic does not read from JSON: give it a validator of mode 'before'")
        else:
            parts += _parts(part)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a core schema.

    Attributes:
        at: the field that it is the type of.
        config: of the model that it is in.
        own: a validator or serializer of the project comes before it.
    """

    node: Mapping[str, Any]
    at: str
    config: Mapping[str, Any] = field(default_factory=dict)
    own: bool = False


def _hides(function: Any) -> bool:
    """Whether it is how Pydantic writes SecretStr, SecretBytes and Secret."""
    name = function.__qualname__.lower() if getattr(function, "__module__", "") == "pydantic.types" else ""
    return "secret" in name and "serialize" in name


def _parts(whole: _Part) -> Iterator[_Part]:
    node = whole.node
    if node["type"] in _MODELS:
        whole = replace(whole, config=node.get("config", {}), own=whole.own or "serialization" in node)
    elif node["type"] in _OWN:
        whole = replace(whole, own=True)
    if node["type"] in _FIELDS:
        yield from _fields(whole)
    for value in (node[name] for name in _PARTS if name in node):
        if isinstance(value, Mapping) and isinstance(value.get("type"), str):
            yield replace(whole, node=value)
        else:  # choices are a dict, or a list of schemas or of tuples of a schema and its label
            several = value.values() if isinstance(value, Mapping) else value
            yield from (replace(whole, node=each[0] if isinstance(each, tuple) else each) for each in several)


def _fields(whole: _Part) -> Iterator[_Part]:
    node, fields = whole.node, whole.node["fields"]
    owner = node.get("model_name") or node.get("dataclass_name") or node.get("cls_name") or whole.at
    for name, given in fields.items() if isinstance(fields, Mapping) else [(each["name"], each) for each in fields]:
        at, schema = f"{owner}.{name}", given["schema"]
        if any(given.get(option) for option in _UNWRITTEN):
            if schema["type"] != "default" and not whole.own:
                raise Unreadable(f"{at} is required, but not written (exclude, InitVar): give it a default")
            continue
        if not (whole.own or _is_read(name, given, whole.config)):
            raise Unreadable(f"{at} is written by one name and read by another: use alias=, which is for both")
        yield replace(whole, node=schema, at=at)


def _is_read(name: str, given: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether the field is read by the name that it is written by."""
    written, alias = given.get("serialization_alias", name), given.get("validation_alias")
    if written == name and (alias is None or config.get("validate_by_name", config.get("populate_by_name"))):
        return True
    if alias is None or not config.get("validate_by_alias", True):
        return False
    return alias == written or [written] in [alias, *alias]  # a name, a path, or several paths
