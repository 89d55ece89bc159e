"""``unevaluatedProperties`` and ``unevaluatedItems``, as ``additionalProperties`` and ``items``
beside the names and places that a schema's parts know.

What a part knows counts if the value follows that part. So there is an alternative for each choice
of parts, which asks the value to follow them, and has the names of these parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dflash_adapters.text.schema_parts import (
    MOST_ALTERNATIVES,
    Schema,
    SchemaRewriter,
    all_of,
    union,
)

_MOST_DEPTH = 8
"""Of parts within parts, through references too; what is deeper is taken to know nothing."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of values that also follow the schemas `given`."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    num_places: int = 0
    has_all: bool = False
    given: tuple[Schema, ...] = ()

    @property
    def is_nothing(self) -> bool:
        return self == _Known(given=self.given)

    def with_given(self, schema: Schema) -> _Known:
        return _joined([_Known(given=(schema,)), self])


def evaluated(
    rewriter: SchemaRewriter, schema: dict[str, Any], keyword: str, *, rest: Any
) -> Schema:
    """What `keyword` of `schema` asks for; its value, rewritten, is `rest`. Raises: GrammarError
    if that takes too much."""
    if rest is True or rest == {}:
        return True
    beside = {name: value for name, value in schema.items() if name != keyword}
    ways = _Ways(rewriter, keyword).of(beside, 0)
    return union([all_of(*way.given, _closed(rewriter, way, keyword, rest)) for way in ways])


def _closed(rewriter: SchemaRewriter, known: _Known, keyword: str, rest: Schema) -> Schema:
    if known.has_all:
        return True
    rewriter.take_parts(len(known.names) + len(known.patterns) + known.num_places)
    if keyword == "unevaluatedItems":
        return {"prefixItems": [True] * known.num_places, "items": rest}
    closed: dict[str, Any] = {"additionalProperties": rest}
    for name, each in (("properties", known.names), ("patternProperties", known.patterns)):
        if each:
            closed[name] = dict.fromkeys(sorted(each), True)
    return closed


class _Ways:
    """Finds what parts of schemas know, for one of the two keywords."""

    def __init__(self, rewriter: SchemaRewriter, keyword: str) -> None:
        self._rewriter, self._is_of_items = rewriter, keyword == "unevaluatedItems"

    def of(self, schema: Any, depth: int) -> list[_Known]:
        """At least one way; those that know less if there are many."""
        self._rewriter.take_parts(1)
        if not isinstance(schema, dict) or depth > _MOST_DEPTH:
            return [_Known()]
        found = [self._of_items(schema) if self._is_of_items else _of_properties(schema)]
        if found[0].has_all:
            return found
        for choices in self._choices(schema, depth):
            if all(each.is_nothing for each in choices):
                continue
            if len(found) * len(choices) <= MOST_ALTERNATIVES:
                found = [_joined(each) for each in product(found, choices)]
        return found

    def _choices(self, schema: dict[str, Any], depth: int) -> Iterator[list[_Known]]:
        """Of each part: the ways to follow it, of which there is one."""
        if isinstance(schema.get("$ref"), str):
            target = self._rewriter.resolved({"$ref": schema["$ref"]})
            yield self.of(target, depth + 1)
        for each in _list(schema, "allOf"):
            yield self.of(each, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if parts := _list(schema, keyword):
                yield [way for each in parts for way in self._given(each, depth)]
        if "if" in schema:
            given = self._rewriter.rewritten(schema["if"])
            yes = [way.with_given(given) for way in self.of(schema["if"], depth + 1)]
            then = self.of(schema.get("then", True), depth + 1)
            others = self._rewriter.others(schema["if"]) if "else" in schema else []
            no = self.of(schema.get("else", True), depth + 1)
            yield [
                *(_joined(each) for each in product(yes, then)),
                *(way.with_given(each) for each in others for way in no),
                *([] if others else [_Known()]),
            ]
        dependent = schema.get("dependentSchemas")
        for name, part in dependent.items() if isinstance(dependent, dict) else ():
            there: Schema = {"required": [name]}
            yield [*(way.with_given(there) for way in self.of(part, depth + 1)), _Known()]

    def _given(self, schema: Any, depth: int) -> list[_Known]:
        """What is known if a value follows a part, which it need not."""
        ways = self.of(schema, depth + 1)
        if all(way.is_nothing for way in ways):
            return [_Known()]
        return [way.with_given(self._rewriter.rewritten(schema)) for way in ways]

    @staticmethod
    def _of_items(schema: dict[str, Any]) -> _Known:
        has_all = "items" in schema or "unevaluatedItems" in schema
        return _Known(num_places=len(_list(schema, "prefixItems")), has_all=has_all)


def _of_properties(schema: dict[str, Any]) -> _Known:
    has_all = any(name in schema for name in ("additionalProperties", "unevaluatedProperties"))
    names, patterns = (
        frozenset(value) if isinstance(value := schema.get(keyword), dict) else frozenset[str]()
        for keyword in ("properties", "patternProperties")
    )
    return _Known(names, patterns, has_all=has_all)


def _joined(parts: Iterable[_Known]) -> _Known:
    """What all of them know of a value for which all is given."""
    known = list(parts)
    return _Known(
        frozenset[str]().union(*(each.names for each in known)),
        frozenset[str]().union(*(each.patterns for each in known)),
        max(each.num_places for each in known),
        any(each.has_all for each in known),
        tuple(schema for each in known for schema in each.given),
    )


def _list(schema: dict[str, Any], name: str) -> Sequence[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []
