"""Keywords of JSON schemas that the compiler of grammars does not know, in terms of those it knows.

``oneOf``, ``not``, ``if`` and dependencies speak of values that a schema does *not* allow. For most
schemas some of these values can be described: ``{"minimum": 5}`` does not allow
``{"type": "number", "exclusiveMaximum": 5}``. What is rewritten with such descriptions allows no
value that the schema does not; it may allow fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from dflash_adapters.text.schema_checks import (
    IN_LISTS,
    IN_OBJECTS,
    SINGLE,
    parts_of,
    target_of,
)
from dflash_adapters.text.schema_kinds import TYPES, SchemaKind, all_types, kind_of, types_of_value
from dflash_adapters.text.schema_lists import containing, of_distinct
from dflash_adapters.text.schema_parts import (
    MOST_ALTERNATIVES,
    Schema,
    all_of,
    finite_values,
    union,
)
from dflash_adapters.text.schema_texts import as_known
from dflash_adapters.text.schema_unevaluated import evaluated
from dflash_protocol.errors import GrammarError

_REWRITTEN = (
    *("oneOf", "not", "if", "then", "else", "dependencies", "dependentRequired"),
    *("dependentSchemas", "propertyNames", "contains", "minContains", "maxContains"),
    *("uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
)
_USED_AS_WRITTEN = frozenset({"not", "propertyNames"})
_MOST_DEPTH = 4
"""Of properties and references that the description of a value that is not allowed goes through."""
_MOST_PARTS = 20_000
"""Of all descriptions within schemas, beside their own: references and negations repeat them."""
_MOST_CHARACTERS = 1 << 22
"""Of a rewritten schema, about."""
_MOST_PAIRS = 50_000
"""Of alternatives that are looked at for a value of both."""
_OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
"""By keyword: the type that it speaks of, the opposite keyword, what its value is more."""


@dataclass(slots=True)
class RewritingWork:
    """What is left of the work that schemas of one grammar may take together."""

    num_parts: int = _MOST_PARTS
    num_pairs: int = _MOST_PAIRS

    def take_parts(self, count: int) -> None:
        """Raises: GrammarError once there were too many."""
        self.num_parts -= count
        if self.num_parts < 0:
            raise GrammarError("what stands for oneOf, not, uniqueItems or the like is too large")

    def take_pair(self) -> None:
        """Raises: GrammarError once there were too many."""
        self.num_pairs -= 1
        if self.num_pairs < 0:
            raise GrammarError("oneOf: there are too many alternatives")


def rewritten(schema: Any, work: RewritingWork | None = None) -> Any:
    """The schema without the keywords of this module; itself if it has none. `work` is shared with
    others.

    Raises: GrammarError if what is not allowed cannot be described, or that would take long.
    """
    try:
        found = _Rewriter(schema, work or RewritingWork()).rewritten(schema)
    except RecursionError:
        raise GrammarError("schemas within schemas are nested too deeply") from None
    if found is not schema:
        _check_size(found)
    return found


def _check_size(schema: Any) -> None:
    """Raises: GrammarError for too large a text. Parts that are the same object are written each
    time."""
    left, waiting = _MOST_CHARACTERS, [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting += part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
        left -= 2 + (len(part) if isinstance(part, str) else 0)
        if left < 2 * len(waiting):
            raise GrammarError("what stands for oneOf, not, uniqueItems or the like is too large")


class _Rewriter:
    """Rewrites what is within one schema, the `root` of references."""

    def __init__(self, root: Any, work: RewritingWork) -> None:
        self._root, self._work = root, work
        work.num_parts += sum(1 for _ in parts_of(root))
        self._kinds: dict[int, SchemaKind] = {}
        """Of alternatives, by identity; the root keeps them, or what is below."""
        self._typed_schemas: list[Any] = []

    def take_parts(self, count: int) -> None:
        """Count schemas that are made. Raises: GrammarError for too many."""
        self._work.take_parts(count)

    def rewritten(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        self.take_parts(1)
        result = dict(schema)
        for name in IN_LISTS:
            if isinstance(schema.get(name), list):
                result[name] = [self.rewritten(each) for each in schema[name]]
        for name in IN_OBJECTS:
            if isinstance(schema.get(name), dict):
                result[name] = {key: self.rewritten(each) for key, each in schema[name].items()}
        for name in SINGLE:
            if name in schema and name not in _USED_AS_WRITTEN:
                result[name] = self.rewritten(schema[name])
        if isinstance(schema.get("items"), list):  # of drafts up to 2019-09
            result["items"] = [self.rewritten(each) for each in schema["items"]]
        more = list(self._instead(schema, result))
        for name in _REWRITTEN:
            result.pop(name, None)
        if more:
            others = result.get("allOf", [])
            if not isinstance(others, list):
                raise GrammarError("allOf is a list of schemas")
            result["allOf"] = [*others, *more]
        result = as_known(result)
        return result if result != schema else schema

    def _instead(self, schema: dict[str, Any], inner: dict[str, Any]) -> Iterator[Schema]:
        """Schemas in place of keywords; `inner` has what is within the schema rewritten."""
        if isinstance(schema.get("oneOf"), list):
            yield self._one_of(schema["oneOf"], inner["oneOf"], kind=schema.get("type"))
        if "not" in schema:
            nothing = schema["not"] is True or schema["not"] == {}
            yield False if nothing else _any_of("not", self.others(schema["not"]))
        if "if" in schema and ("then" in schema or "else" in schema):
            others = [all_of(each, inner.get("else", True)) for each in self.others(schema["if"])]
            yield _any_of("if", [all_of(inner["if"], inner.get("then", True)), *others])
        if "propertyNames" in schema:
            yield _of_names(schema["propertyNames"])
        if "contains" in schema:
            yield containing(schema, inner["contains"], self.others)
        for name, wanted in _dependencies(schema, inner, self.rewritten):
            absent = {"properties": {name: False}}
            yield {"anyOf": [absent, all_of({"required": [name]}, wanted)]}
        if schema.get("uniqueItems") is True:
            yield of_distinct(self, schema)
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            if keyword in schema:
                yield evaluated(self, schema, keyword, rest=inner[keyword])

    def _one_of(self, alternatives: list[Any], inner: list[Any], *, kind: object) -> Schema:
        """`kind`: the types of the schema that has the alternatives; None: all."""
        if len(alternatives) > MOST_ALTERNATIVES:
            raise GrammarError(f"oneOf has at most {MOST_ALTERNATIVES} alternatives")
        plain = [self._typed(self.resolved(each), kind) for each in alternatives]
        overlaps: list[list[Any]] = [[] for _ in plain]
        """Of each alternative, the others that may allow the same value."""
        for (place, one), (other_place, other) in combinations(enumerate(plain), 2):
            if not self.are_disjoint(one, other):
                overlaps[place].append(other)
                overlaps[other_place].append(one)
        found: list[Schema] = []
        for place, one in enumerate(plain):
            parts: list[Schema] = [inner[place]]
            hints = one.get("properties") if isinstance(one, dict) else None
            hints = hints if isinstance(hints, dict) else {}
            for other in overlaps[place]:
                others = self.others(other, hints=tuple(hints))
                parts.append(union(others) if others else False)
            if False not in parts:
                found.append(all_of(*parts))
        return _any_of("oneOf", found)

    def _typed(self, schema: Any, kind: object) -> Any:
        """A schema of which only values of these types count."""
        if not isinstance(schema, dict) or "type" in schema or "$ref" in schema or kind is None:
            return schema
        self._typed_schemas.append({**schema, "type": kind})
        return self._typed_schemas[-1]

    def resolved(self, schema: Any) -> Any:
        """What a schema that is a reference leads to."""
        for _ in range(_MOST_DEPTH):
            reference = schema.get("$ref") if isinstance(schema, dict) else None
            target = target_of(self._root, reference) if isinstance(reference, str) else None
            if target is None:
                break
            schema = target
        return schema

    def are_disjoint(self, one: object, other: object) -> bool:
        """Whether no value is allowed by both, as far as types, constants and properties with
        constants show. Raises: GrammarError once there were too many to look at."""
        self._work.take_pair()
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        kind, other_kind = self._kind(one), self._kind(other)
        if not kind.types & other_kind.types:
            return True
        if kind.values is not None and other_kind.values is not None:
            return kind.values.isdisjoint(other_kind.values)
        names = kind.required & other_kind.required
        return any(
            self.are_disjoint(one["properties"][name], other["properties"][name]) for name in names
        )

    def _kind(self, schema: dict[str, Any]) -> SchemaKind:
        kind = self._kinds.get(id(schema))
        if kind is None:
            kind = self._kinds[id(schema)] = kind_of(schema)
        return kind

    def others(self, schema: Any, *, hints: Sequence[str] = (), depth: int = 0) -> list[Schema]:
        """Schemas that allow nothing that `schema` does; none if there are none, or it is not known
        how to describe one. `hints`: names of properties that are worth requiring."""
        self.take_parts(1)
        if schema is False:
            return [True]
        if depth > _MOST_DEPTH:
            return []
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            # What is beside it counts in some drafts only.
            schema = target_of(self._root, schema["$ref"])
            return self.others(schema, hints=hints, depth=depth + 1)
        if not isinstance(schema, dict):
            return []
        found: list[Schema] = []
        if others := sorted(TYPES - all_types(schema)):
            found.append({"type": others})
        if (values := finite_values(schema)) is not None:
            found += _other_values(values, hints)
        for name, (kind, opposite, more) in _OPPOSITES.items():
            bound = schema.get(name)
            if not isinstance(bound, int | float) or isinstance(bound, bool):
                continue
            if kind == "number" or bound + more >= 0:
                found.append({"type": kind, opposite: bound + more})
        found += self._other_objects(schema, hints, depth)
        found += self._other_lists(schema, depth)
        for each in _list(schema, "allOf"):
            found += self.others(each, hints=hints, depth=depth + 1)
        for name in ("anyOf", "oneOf"):
            each_others = [
                self.others(each, hints=hints, depth=depth + 1) for each in _list(schema, name)
            ]
            if each_others and all(each_others):
                found.append({"allOf": [union(each) for each in each_others]})
        if "not" in schema:
            found.append(self.rewritten(schema["not"]))
        return found[:MOST_ALTERNATIVES]

    def _other_objects(
        self, schema: dict[str, Any], hints: Sequence[str], depth: int
    ) -> Iterator[Schema]:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        if schema.get("additionalProperties") is False and "patternProperties" not in schema:
            for name in hints:
                if name not in properties:
                    yield {"type": "object", "required": [name]}
        for name in _list(schema, "required"):
            if isinstance(name, str):
                yield {"type": "object", "properties": {name: False}}
        for name, value in properties.items():
            if others := self.others(value, depth=depth + 1):
                part = {"properties": {name: union(others)}, "required": [name]}
                yield {"type": "object", **part}

    def _other_lists(self, schema: dict[str, Any], depth: int) -> Iterator[Schema]:
        if "items" not in schema or "prefixItems" in schema:
            return
        if others := self.others(schema["items"], depth=depth + 1):
            yield {"type": "array", "items": union(others), "minItems": 1}


def _of_names(names: Any) -> Schema:
    """Objects whose properties all have such names. Raises: GrammarError if that is not known."""
    if names in (True, {}):
        return True
    if names is False:
        return {"maxProperties": 0}
    keywords = set(names) - {"type"} if isinstance(names, dict) else set()
    part: dict[str, Any] | None = None
    if len(keywords) == 1 and (values := finite_values(names)) is not None:
        part = {"properties": {each: True for each in values if isinstance(each, str)}}
    elif keywords == {"pattern"} and isinstance(names["pattern"], str):
        part = {"patternProperties": {names["pattern"]: True}}
    elif keywords and keywords <= {"minLength", "maxLength"}:
        sizes = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
        part = {"patternProperties": {f"^[\\s\\S]{{{sizes}}}$": True}}
    if part is None or names.get("type", "string") != "string":
        raise GrammarError("propertyNames: only a pattern, lengths or values are supported")
    return {**part, "additionalProperties": False}


def _dependencies(
    schema: Mapping[str, Any], inner: Mapping[str, Any], rewrite: Callable[[Any], Any]
) -> Iterator[tuple[str, Schema]]:
    """Names of properties, and what an object with one of them has to be, too. `rewrite`: of what
    is not yet in `inner`."""
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        wanted = schema.get(keyword)
        for name, each in wanted.items() if isinstance(wanted, dict) else ():
            if isinstance(each, list):
                yield name, {"required": each}
            elif keyword == "dependentSchemas":
                yield name, inner[keyword][name]
            else:
                yield name, rewrite(each)


def _other_values(values: Sequence[Any], hints: Sequence[str]) -> Iterator[Schema]:
    """Schemas of values of the same types that are none of these."""
    flags = {each for each in values if isinstance(each, bool)}
    if len(flags) == 1:
        yield {"const": flags == {False}}
    if numbers := [each for each in values if types_of_value(each) >= {"number"}]:
        yield {"type": "number", "exclusiveMaximum": min(numbers)}
        yield {"type": "number", "exclusiveMinimum": max(numbers)}
    for kind, least, most, type_ in (
        ("string", "minLength", "maxLength", str),
        ("array", "minItems", "maxItems", list),
    ):
        if sizes := [len(each) for each in values if isinstance(each, type_)]:
            yield {"type": kind, least: max(sizes) + 1}
            if min(sizes) > 0:
                yield {"type": kind, most: min(sizes) - 1}
    if objects := [each for each in values if isinstance(each, dict)]:
        for name in sorted(set.intersection(*map(set, objects))):
            yield {"type": "object", "properties": {name: False}}
        for name in hints:
            if not any(name in each for each in objects):
                yield {"type": "object", "required": [name]}


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _any_of(keyword: str, schemas: Sequence[Schema]) -> Schema:
    if not schemas:
        raise GrammarError(f"{keyword}: what it does not allow cannot be described here")
    return union(schemas)
