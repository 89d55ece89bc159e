"""What is settled of JSON schemas before they are compiled: cost, ``oneOf``, space in JSON."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from dflash_protocol.errors import GrammarError

SPACE = r"( |\n{1,2}[ \t]{0,20})?"
"""Between the tokens of JSON, unless a request says otherwise. Bounded, as in llama.cpp's grammars:
a model that likes spaces would write nothing else."""
_MOST_MULTIPLE, _MOST_DECIMALS = 10_000, 3
_MOST_PATTERNS_AT_ONCE = 4
"""Of what a text has to match at the same time: the work of compiling doubles with each."""
_MOST_ALTERNATIVES = 64
_MOST_LEVELS = 1000
"""Of all schemas that ``$ref`` leads to, together: the compiler is as deep in calls."""
_MOST_TARGETS = 256
_MOST_PROPERTIES = 2000
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def check_cost(schema: object) -> None:
    """Raises: GrammarError for what would take minutes to compile, or the whole stack."""
    num_patterns = 0
    if _chained_levels(schema) > _MOST_LEVELS:
        raise GrammarError(f"$ref leads through more than {_MOST_LEVELS} levels of schemas")
    for part, is_joined in _parts(schema):
        properties = part.get("properties")
        if isinstance(properties, dict) and len(properties) > _MOST_PROPERTIES:
            raise GrammarError(f"an object has at most {_MOST_PROPERTIES} properties")
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


def _chained_levels(schema: object) -> int:
    """The levels of all schemas that a ``$ref`` within `schema` leads to, and its own: no chain of
    references has more."""
    targets = {part["$ref"] for part, _ in _parts(schema) if isinstance(part.get("$ref"), str)}
    if len(targets) > _MOST_TARGETS:
        return _MOST_LEVELS + 1
    levels = _levels(schema)
    for target in targets:
        found = schema
        for name in str(target).removeprefix("#").strip("/").split("/"):
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        levels += _levels(found)
    return levels


def _levels(schema: object) -> int:
    """How deep a schema's objects and lists are nested."""
    level, parts = 0, [schema]
    while parts := [
        inner
        for part in parts
        if isinstance(part, dict | list)
        for inner in (part.values() if isinstance(part, dict) else part)
    ]:
        level += 1
    return level


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
