"""Lists with distinct elements, and lists that contain something, in terms of those that a grammar
can tell: what may stand at each place."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations
from math import perm
from typing import Any

from dflash_adapters.text.schema_parts import Schema, SchemaRewriter, finite_values, union
from dflash_protocol.errors import GrammarError

_MOST_FIRST = 64
_MOST_MORE = 7
"""How many more elements than the fewest may be what a list contains, if there is a bound."""
_MOST_ORDERS = 300
"""Of distinct values, of which a list's last one is left open."""


def containing(
    schema: Mapping[str, Any], wanted: Schema, others: Callable[[Any], list[Schema]]
) -> Schema:
    """Lists that begin with what they contain, which `wanted` describes; if there is a bound on how
    much that may be, only `others` of the schema are behind that. Raises: GrammarError."""
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    if not isinstance(least, int) or not 0 <= least <= _MOST_FIRST:
        raise GrammarError(f"contains: minContains is at most {_MOST_FIRST}")
    if most is None:
        return {"prefixItems": [wanted] * least, "minItems": least} if least else True
    if not isinstance(most, int):
        raise GrammarError("maxContains is a whole number")
    if most < least:
        return {"type": [*_OTHER_TYPES]}
    if wanted is True or wanted == {}:
        return {"minItems": least, "maxItems": most}
    if not (rest := others(schema["contains"])):
        raise GrammarError("maxContains: what contains does not allow cannot be described here")
    return union(
        [
            {"prefixItems": [wanted] * count, "items": union(rest), "minItems": count}
            for count in range(least, min(most, least + _MOST_MORE) + 1)
        ]
    )


_OTHER_TYPES = ("null", "boolean", "number", "string", "object")
_FEW: dict[str, list[object]] = {"null": [None], "boolean": [False, True]}


def of_distinct(rewriter: SchemaRewriter, schema: Mapping[str, Any]) -> Schema:
    """What makes a list's elements distinct: all orders of few values, or nothing if elements
    cannot be equal. Raises: GrammarError for other lists."""
    first = schema.get("prefixItems", [])
    first = [rewriter.resolved(each) for each in first] if isinstance(first, list) else []
    rest = rewriter.resolved(schema.get("items", True))
    most = schema.get("maxItems")
    if rest is False:
        most = min(len(first), most if isinstance(most, int) else len(first))
    if isinstance(most, int) and most <= 1:
        return True
    places = [*first, rest]
    if isinstance(most, int) and most <= len(first):
        places = first[:most]
        if all(rewriter.are_disjoint(one, other) for one, other in combinations(places, 2)):
            return True
    values = list[Any]()
    for each in {id(each): each for each in places}.values():
        values += _values(each)
    known = {_key(each): each for each in values}
    most = min(len(known), most if isinstance(most, int) else len(known))
    orders = _orders(list(known.values()), most)
    rewriter.take_parts(len(orders) * sum(1 + len(each) // 16 for each in known))
    return {"anyOf": [{"type": [*_OTHER_TYPES]}, *orders]}


def _values(schema: Any) -> list[Any]:
    """The only values of a schema. Raises: GrammarError if there are many, or it is not known."""
    if schema is False:
        return []
    if isinstance(schema, dict):
        found = finite_values(schema)
        if found is None and isinstance(kind := schema.get("type"), str):
            found = _FEW.get(kind)
        if found is not None:
            return found
    raise GrammarError("uniqueItems: only for lists of few values")


def _orders(values: Sequence[Any], most: int) -> list[Schema]:
    """Lists of up to `most` distinct values: those before the last, and what that may be, in
    steps of two, as the last one may be missing. Raises: GrammarError for too many."""
    lengths = range(most - 1, -1, -2)
    if sum(perm(len(values), each) for each in lengths) > _MOST_ORDERS:
        raise GrammarError(f"uniqueItems: more than {_MOST_ORDERS} orders of the elements")
    found: list[Schema] = [{"type": "array", "maxItems": 0}] if most % 2 == 0 else []
    for length in lengths:
        for order in permutations(range(len(values)), length):
            rest = [each for place, each in enumerate(values) if place not in order]
            known = [{"const": values[place]} for place in order]
            places = [*known, {"enum": rest}]
            part = {"prefixItems": places, "items": False, "minItems": length}
            found.append({"type": "array", **part})
    return found


def _key(value: Any) -> str:
    """The same for values that are equal in JSON: 1 is 1.0, and not true."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, list):
            return [plain(each) for each in value]
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        return value

    return json.dumps(plain(value), sort_keys=True)
