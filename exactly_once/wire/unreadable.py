"""Payload classes with a field that would not be read back, found from the class alone.

msgspec accepts any class as the type of a field.
"""

from importlib import import_module
from types import NoneType

JSON_TYPES = (dict, list, str, int, float, bool, NoneType)


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
