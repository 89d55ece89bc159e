"""What JSON schemas tell at first sight: the types and values that they may allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_adapters.text.schema_parts import finite_values

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


@dataclass(frozen=True, slots=True)
class SchemaKind:
    """What tells that two alternatives have no value in common."""

    types: frozenset[str]
    values: frozenset[object] | None
    """None: not known. 1 is 1.0, but not true; objects and lists count as the same."""
    required: frozenset[str]
    """Of objects, if only these are allowed: names of properties that have schemas."""


def kind_of(schema: dict[str, Any]) -> SchemaKind:
    """What is told by a schema's own keywords."""
    types, values, properties = _types(schema), finite_values(schema), schema.get("properties")
    required: frozenset[str] = frozenset()
    if types == {"object"} and isinstance(properties, dict):
        listed = schema.get("required")
        names = listed if isinstance(listed, list) else []
        required = frozenset(each for each in names if isinstance(each, str) and each in properties)
    keys = None if values is None else frozenset(map(_key, values))
    return SchemaKind(types, keys, required)


def _types(schema: dict[str, object]) -> frozenset[str]:
    """Types of values that a schema may allow; integers are numbers."""
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    if given is None or not all(isinstance(name, str) for name in names):
        return TYPES
    found = frozenset(name for name in names if isinstance(name, str))
    return found | {"integer"} if "number" in found else found


def all_types(schema: dict[str, Any]) -> frozenset[str]:
    """Types of which `schema` may allow a value; a number may be an integer."""
    found = _types(schema)
    if (values := finite_values(schema)) is not None:
        found &= frozenset().union(*map(types_of_value, values))
    return found | {"number"} if "integer" in found else found


def types_of_value(value: object) -> frozenset[str]:
    """Those that may be the type of a value that JSON has."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int() | float():
            return frozenset({"integer", "number"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
    return frozenset({"object"})


def _key(value: object) -> object:
    if isinstance(value, dict | list):
        return type(value)
    return isinstance(value, bool), value
