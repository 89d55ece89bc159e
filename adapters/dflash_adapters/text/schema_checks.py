"""What JSON schemas may cost, references within them, and the space in JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from dflash_protocol.errors import GrammarError

SPACE = r"( |\n{1,2}[ \t]{0,20})?"
"""Between the tokens of JSON, unless a request says otherwise. Bounded, as in llama.cpp's grammars:
a model that likes spaces would write nothing else."""
IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords with a list of schemas."""
IN_OBJECTS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords with schemas by names."""
SINGLE = (
    *("items", "additionalItems", "unevaluatedItems", "contains"),
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("not", "if", "then", "else"),
)
"""Keywords with one schema."""
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_MOST_MULTIPLE, _MOST_DECIMALS = 10_000, 3
_MOST_PATTERNS_AT_ONCE = 4
"""Of what a text has to match at the same time: the work of compiling doubles with each."""
_MOST_LEVELS = 1000
"""Of all schemas that ``$ref`` leads to, together: the compiler is as deep in calls."""
_MOST_TARGETS = 256
_MOST_PROPERTIES = 2000


def check_cost(schema: object) -> None:
    """Raises: GrammarError for what would take minutes to compile, or the whole stack."""
    num_patterns = 0
    if _chained_levels(schema) > _MOST_LEVELS:
        raise GrammarError(f"$ref leads through more than {_MOST_LEVELS} levels of schemas")
    for part, is_joined in parts_of(schema):
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


def parts_of(schema: object) -> Iterator[tuple[dict[str, object], bool]]:
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
    targets = {part["$ref"] for part, _ in parts_of(schema) if isinstance(part.get("$ref"), str)}
    if len(targets) > _MOST_TARGETS:
        return _MOST_LEVELS + 1
    levels = _levels(schema)
    for target in targets:
        levels += _levels(target_of(schema, str(target)))
    return levels


def inner_schemas(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas that a schema's keywords have, whatever they are."""
    for name in IN_LISTS:
        if isinstance(schema.get(name), list):
            yield from schema[name]
    for name in (*IN_OBJECTS, "dependencies"):
        if isinstance(schema.get(name), dict):
            yield from schema[name].values()
    for name in SINGLE:
        if name in schema:
            yield schema[name]
    if isinstance(schema.get("items"), list):  # of drafts up to 2019-09
        yield from schema["items"]


def target_of(root: object, reference: str) -> object:
    """What a ``$ref`` within `root` leads to, if it is a pointer; None if that is not known."""
    return at_pointer(root, unquote(reference[1:])) if reference.startswith("#") else None


def at_pointer(root: object, pointer: str) -> object:
    """What a JSON pointer leads to; None if there is nothing."""
    found, (first, *names) = root, pointer.split("/")
    if first:
        return None
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


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
