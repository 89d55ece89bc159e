"""Values of arguments that a format writes as text only: a tool's schema tells their types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dflash_adapters.text.answers.calls import json_value
from dflash_adapters.text.answers.literals import literal

_MOST_LEVELS = 2  # of alternatives within alternatives
_MOST = 64  # of alternatives, or of constants, that are looked at: for each argument of each call
_UNIONS = ("anyOf", "oneOf", "allOf")
_PYTHON = {"True": True, "False": False, "None": None}


def typed(text: str, parameters: Mapping[str, Any], key: str) -> Any:
    """The value of the argument `key` of a tool with the schema `parameters`.

    A string stays the text; other types are JSON. With several types, JSON of one that is no string
    comes first. Without a type, in the schema or at all, a value is JSON if it can be. What is not
    as the schema says stays text, for the tool to refuse.
    """
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    types = frozenset(_types(schema, 0))
    if types == {"string"}:
        return text
    if not types:
        found = _first(text, json_value)
    elif "string" in types:
        found = _first(text, _constant, json_value)
        if found is not None and not (types - {"string"}) & _types_of(found[0]):
            found = None
    else:
        found = _first(text, _constant, json_value, literal)
    return text if found is None else found[0]


def is_of_type(parameters: Mapping[str, Any], key: str, kind: str) -> bool:
    """Whether a schema says that the argument `key` is of this type alone."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_types(schema, 0)) == {kind}


def _first(text: str, *readers: Callable[[str], Any]) -> tuple[Any] | None:
    """The value of the first reader that finds one."""
    for read in readers:
        try:
            return (read(text.strip()),)
        except (ValueError, RecursionError):
            continue
    return None


def _constant(text: str) -> Any:
    # Templates write constants as Python does, so that models learn them.
    if text not in _PYTHON:
        raise ValueError("no constant")
    return _PYTHON[text]


def _types(schema: Any, level: int) -> Iterator[str]:
    """The types that a schema allows; none if it does not tell."""
    if not isinstance(schema, Mapping) or level > _MOST_LEVELS:
        return
    named = schema.get("type")
    for name in named if isinstance(named, list) else [named]:
        if isinstance(name, str):
            yield name
    if schema.get("nullable") is True:
        yield "null"
    if named is None:
        constants = schema.get("enum")
        for constant in constants[:_MOST] if isinstance(constants, list) else []:
            yield from _types_of(constant)
        if "const" in schema:
            yield from _types_of(schema["const"])
    for union in _UNIONS:
        alternatives = schema.get(union)
        for alternative in alternatives[:_MOST] if isinstance(alternatives, list) else []:
            yield from _types(alternative, level + 1)


def _types_of(value: Any) -> frozenset[str]:
    """JSON Schema's types that a value has."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
    return frozenset({"object"})
