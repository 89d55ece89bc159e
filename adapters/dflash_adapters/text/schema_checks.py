"""Checks of JSON schemas before they are compiled: what would take too long, and ``oneOf``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from dflash_protocol.errors import GrammarError

_MOST_MULTIPLE, _MOST_DECIMALS = 10_000, 3
_MOST_PATTERNS_AT_ONCE = 4
"""Of what a text has to match at the same time: the work of compiling doubles with each."""
_MOST_ALTERNATIVES = 64
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def check_cost(schema: object) -> None:
    """Raises: GrammarError for what would take minutes to compile."""
    num_patterns = 0
    for part, is_joined in _parts(schema):
        num_patterns += is_joined and "pattern" in part
        multiple = part.get("multipleOf", 1)
        if isinstance(multiple, int | float):
            decimals = len(repr(multiple).partition(".")[2].rstrip("0"))
            if multiple > _MOST_MULTIPLE or decimals > _MOST_DECIMALS:
                raise GrammarError(
                    f"multipleOf is at most {_MOST_MULTIPLE}, with {_MOST_DECIMALS} decimals"
                )
    if num_patterns > _MOST_PATTERNS_AT_ONCE:
        raise GrammarError(f"allOf has at most {_MOST_PATTERNS_AT_ONCE} patterns")


def has_disjoint_alternatives(schema: object) -> bool:
    """Whether no value is that of two alternatives of a ``oneOf``, as far as types, constants and
    properties with constants show: then it means what ``anyOf`` does."""
    for part, _ in _parts(schema):
        alternatives = part.get("oneOf")
        if alternatives is None:
            continue
        if not isinstance(alternatives, list) or len(alternatives) > _MOST_ALTERNATIVES:
            return False
        if not all(_are_disjoint(*each) for each in combinations(alternatives, 2)):
            return False
    return True


def _parts(schema: object) -> Iterator[tuple[dict[str, object], bool]]:
    """All objects within a schema, and whether each is below an ``allOf``."""
    parts: list[tuple[object, bool]] = [(schema, False)]
    while parts:
        part, is_joined = parts.pop()
        if isinstance(part, list):
            parts += [(each, is_joined) for each in part]
        elif isinstance(part, dict):
            yield part, is_joined
            parts += [(each, is_joined or name == "allOf") for name, each in part.items()]


def _are_disjoint(one: object, other: object) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    if not _types(one) & _types(other):
        return True
    values, other_values = _values(one), _values(other)
    if values is not None and other_values is not None:
        return not any(_is_same(each, more) for each in values for more in other_values)
    if _types(one) != {"object"} or _types(other) != {"object"}:
        return False
    properties, other_properties = one.get("properties"), other.get("properties")
    if not isinstance(properties, dict) or not isinstance(other_properties, dict):
        return False
    return any(
        name in _required(one)
        and name in _required(other)
        and _are_disjoint(properties[name], other_properties[name])
        for name in properties.keys() & other_properties.keys()
    )


def _types(schema: dict[str, object]) -> frozenset[str]:
    """Types of values that a schema may allow; integers are numbers."""
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    if given is None or not all(isinstance(name, str) for name in names):
        return _TYPES
    found = frozenset(name for name in names if isinstance(name, str))
    return found | {"integer"} if "number" in found else found


def _values(schema: dict[str, object]) -> list[object] | None:
    """The only values that a schema may allow; None: not known."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and len(values) <= _MOST_ALTERNATIVES else None


def _is_same(value: object, other: object) -> bool:
    """Equality in which 1 is 1.0, but not true; objects and lists count as the same."""
    if isinstance(value, dict | list) or isinstance(other, dict | list):
        return type(value) is type(other)
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _required(schema: dict[str, object]) -> list[object]:
    required = schema.get("required")
    return required if isinstance(required, list) else []
