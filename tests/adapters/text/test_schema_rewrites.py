"""What is rewritten of JSON schemas allows nothing more, and most of what they allow."""

from __future__ import annotations

import contextlib
import json
import time
from functools import reduce
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.text.schema_rewrites import rewritten
from dflash_protocol.errors import GrammarError
from support.examples import examples

NAMES = st.sampled_from(["a", "b", "c"])
SCALARS = st.none() | st.booleans() | st.integers(-4, 6) | st.sampled_from([0.5, "", "a", "ab"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
SMALL = st.integers(0, 3)


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    types = ["null", "boolean", "integer", "number", "string", "array", "object"]
    known = {
        "type": st.sampled_from([*types, ["integer", "string"], ["object", "null"]]),
        "const": VALUES,
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        **dict.fromkeys(("minimum", "exclusiveMaximum"), st.integers(-3, 3)),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), SMALL),
        "items": inner,
        "required": st.lists(NAMES, min_size=1, max_size=2, unique=True),
        "properties": st.dictionaries(NAMES, inner, max_size=2),
        "additionalProperties": st.just(False) | inner,
        **dict.fromkeys(("oneOf", "anyOf", "allOf"), several),
        **dict.fromkeys(("not", "if", "then", "else", "contains"), inner),
        "$ref": st.just("#/$defs/x"),
        "prefixItems": several,
        **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), st.just(False) | inner),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=1),
        "uniqueItems": st.booleans(),
        **dict.fromkeys(("minContains", "maxContains"), SMALL),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=1), max_size=1),
        "dependentSchemas": st.dictionaries(NAMES, inner, max_size=1),
        "propertyNames": st.sampled_from(
            [{"enum": ["a", "b"]}, {"pattern": "^a"}, {"maxLength": 1}, {"const": "c"}, False]
        ),
    }
    some = st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=3, unique=True)
    return some.flatmap(lambda names: st.fixed_dictionaries({name: known[name] for name in names}))


LEAVES = st.booleans() | st.sampled_from([{}, {"type": "null"}, {"type": "integer"}])
SCHEMAS = st.recursive(LEAVES, keywords, max_leaves=8).filter(lambda each: isinstance(each, dict))


@examples(300)
@given(SCHEMAS, keywords(LEAVES), st.lists(VALUES, min_size=20, max_size=20))
def test_nothing_more_is_allowed(schema: Any, target: Any, values: list[Any]) -> None:
    target.pop("$ref", None)
    schema = {**schema, "$defs": {"x": target}}
    before = json.dumps(schema)
    try:
        known = rewritten(schema)
    except GrammarError:
        return
    assert json.dumps(schema) == before
    is_valid, is_still_valid = (
        jsonschema.Draft202012Validator(each).is_valid for each in (schema, known)
    )
    for value in values:
        assert is_valid(value) or not is_still_valid(value)


def tagged(name: str) -> dict[str, Any]:
    kind = {"type": "string", "enum": [name]}
    return {"type": "object", "properties": {"kind": kind}, "required": ["kind"]}


STRINGS, NUMBERS = {"type": "string"}, {"type": "number"}
REFERENCES = {
    "$defs": {"cat": tagged("cat"), "dog": tagged("dog")},
    "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
}


@pytest.mark.parametrize(
    ("schema", "kept", "lost"),
    [
        ({"oneOf": [STRINGS, NUMBERS]}, ["a", 1], []),
        ({"oneOf": [{"type": ["string", "null"]}, {"type": "null"}]}, ["a"], []),
        ({"oneOf": [{"maximum": 5}, {"minimum": 3}]}, [2, 6], [4, "a"]),
        ({"oneOf": [{"const": "a"}, STRINGS]}, ["abc", ""], ["b"]),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], []),
        (REFERENCES, [{"kind": "cat"}, {"kind": "dog", "more": 1}], []),
        (
            {
                "type": "object",
                "oneOf": [
                    {"properties": {"a": {"const": each}}, "required": ["a"]} for each in ("b", "c")
                ],
            },
            [{"a": "b"}, {"a": "c"}],
            [],
        ),
        ({"not": {"type": "string"}}, [1, None], []),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, [{"a": 1, "b": 1}, {}], []),
        ({"dependencies": {"a": ["b"], "b": {"minProperties": 2}}}, [{"a": 1, "b": 1}, {}], []),
        ({"contains": {"const": 1}}, [[1], [1, 2]], [[2, 1]]),
        ({"propertyNames": {"pattern": "^a"}}, [{"ab": 1}, {}], []),
        ({"not": {"not": {"type": "string"}}}, ["a"], []),
        ({"not": {}}, [], [1]),
        ({"if": {"pattern": "a"}}, ["a", 1], []),
        ({"contains": {"const": 1}, "maxContains": 2}, [[1], [1, 1, 2], "a"], [[1, 2, 1]]),
        ({"contains": {"const": 1}, "minContains": 0, "maxContains": 1}, [[], [2], [1, 2]], []),
        ({"contains": {}, "maxContains": 2}, [[1], [1, 2]], []),
        ({"contains": {}, "minContains": 3, "maxContains": 2}, ["a"], []),
        (
            {"uniqueItems": True, "items": {"enum": ["a", "b", 1, 1.0, True]}, "maxItems": 4},
            [[], ["a"], ["b", "a"], ["a", 1, "b", True], "a"],
            [],
        ),
        ({"uniqueItems": True, "items": {"type": "boolean"}}, [[True, False], [False]], []),
        ({"uniqueItems": True, "maxItems": 1}, [[], [{}]], []),
        ({"uniqueItems": False}, [[1, 1]], []),
        (
            {"uniqueItems": True, "prefixItems": [STRINGS, NUMBERS], "items": False},
            [["a", 1], ["a"]],
            [],
        ),
        (
            {"uniqueItems": True, "items": {"enum": [*range(10)]}, "maxItems": 3},
            [[9, 0, 5], [], [1, 2]],
            [],
        ),
        (
            {
                "properties": {"a": STRINGS},
                "allOf": [{"patternProperties": {"^b": True}}, {"$ref": "#/$defs/c"}],
                "unevaluatedProperties": False,
                "$defs": {"c": {"properties": {"c": True}}},
            },
            [{"a": "a", "b2": 1, "c": 1}, {}, 5],
            [],
        ),
        (
            {
                "anyOf": [
                    {"required": ["a"], "properties": {"a": True}},
                    {"properties": {"b": True}},
                ],
                "unevaluatedProperties": NUMBERS,
            },
            [{"a": "x"}, {"b": "x"}, {"a": "x", "c": 1}],
            [{"a": "x", "b": "x"}],
        ),
        (
            {
                "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
                "then": {"properties": {"b": True}},
                "else": {"properties": {"c": True}},
                "unevaluatedProperties": False,
            },
            [{"a": 1, "b": 1}, {"c": 1}],
            [],
        ),
        (
            {
                "properties": {"a": True},
                "dependentSchemas": {"a": {"properties": {"b": True}}},
                "unevaluatedProperties": False,
            },
            [{"a": 1, "b": 1}, {"a": 1}, {}],
            [],
        ),
        (
            {"allOf": [{"additionalProperties": True}], "unevaluatedProperties": False},
            [{"a": 1}],
            [],
        ),
        (
            {
                "prefixItems": [True],
                "allOf": [{"prefixItems": [True, True]}],
                "unevaluatedItems": False,
            },
            [[1], [1, 2], {}],
            [],
        ),
        ({"items": STRINGS, "unevaluatedItems": False}, [["a", "b"]], []),
        (
            {
                "definitions": {"b": STRINGS},
                "dependencies": {"a": {"not": {"$ref": "#/definitions/b"}}},
            },
            [{"a": 1}, 5, "b"],
            [],
        ),
    ],
    ids=lambda each: json.dumps(each)[:50],
)
def test_values_that_stay(schema: Any, kept: list[Any], lost: list[Any]) -> None:
    """What is lost is allowed by the schema, but not told from what it does not allow."""
    known = jsonschema.Draft202012Validator(rewritten(schema))
    assert all(map(known.is_valid, kept))
    assert not any(map(known.is_valid, lost))


def test_a_schema_without_these_keywords_stays_as_it_is() -> None:
    schema = {"const": {"oneOf": [1]}, "properties": {"not": {"enum": [{"if": 1}]}}}
    assert rewritten(schema) is schema


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"pattern": "a"}},
        {"oneOf": [{}, {"multipleOf": 3}]},
        {"contains": {"pattern": "a"}, "maxContains": 2},
        {"contains": {}, "minContains": 1_000_000},
        {"contains": {}, "maxContains": "a"},
        {"uniqueItems": True},
        {"uniqueItems": True, "items": {"type": "string"}, "maxItems": 2},
        {"uniqueItems": True, "items": {"enum": [*range(30)]}},
        {"uniqueItems": True, "prefixItems": [True, True], "items": False},
        {"propertyNames": {"format": "date"}},
        {"oneOf": [{"type": "string"}] * 65},
        {"oneOf": [{"anyOf": [{"anyOf": [{"minimum": 1}] * 50}] * 50}] * 60},
        {"not": {"$ref": "#/$defs/x"}, "$defs": {"x": {"$ref": "#/$defs/x"}}},
        {"not": {"type": "string"}, "allOf": 5},
        {"propertyNames": {"pattern": ["a"]}},
        {"oneOf": [{"properties": 5}, {}]},
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "allOf": {"a": 1}},
    ],
    ids=lambda each: json.dumps(each)[:50],
)
def test_what_cannot_be_described_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError):
        rewritten(schema)


NAMES_OF_KEYWORDS = st.sampled_from(
    ["oneOf", "anyOf", "allOf", "not", "if", "then", "else", "dependencies", "dependentRequired",
     "dependentSchemas", "propertyNames", "contains", "minContains", "properties", "required",
     "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties", "format",
     "items", "prefixItems", "type", "enum", "const", "minimum", "maxLength", "minItems",
     "pattern", "$ref", "$defs", "additionalProperties"]
)  # fmt: skip
JUNK = st.recursive(
    st.sampled_from([None, True, False, -1, 1.5, 10**30, "a", "#", "#/properties/a", "string"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(NAMES_OF_KEYWORDS | NAMES, inner, max_size=4)
    ),
    max_leaves=20,
)


@examples(200)
@given(st.dictionaries(NAMES_OF_KEYWORDS, JUNK, min_size=1, max_size=4))
def test_what_is_no_schema_is_refused_if_anything(schema: Any) -> None:
    with contextlib.suppress(GrammarError):
        rewritten(schema)


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    innermost: dict[str, Any] = {"not": {}}
    with pytest.raises(GrammarError):
        rewritten(reduce(lambda inner, _: {"items": inner}, range(5000), innermost))


NAMED: dict[str, Any] = {str(each): {} for each in range(300)}
TEXTS: dict[str, Any] = {"type": "string"}
DOUBLED = reduce(
    lambda inner, _: {
        "anyOf": [{"properties": {each: True}, "items": inner} for each in "abcd"],
        "unevaluatedProperties": False,
    },
    range(5),
    TEXTS,
)
CHOICES: dict[str, Any] = {
    "oneOf": [{"enum": [f"{one}-{two}" for two in range(64)]} for one in range(64)]
}


@pytest.mark.parametrize(
    "schema",
    [
        CHOICES,
        reduce(lambda inner, _: {"not": inner}, range(14), CHOICES),
        reduce(lambda inner, _: {"not": inner, "if": {"not": inner}}, range(2), CHOICES),
        {"properties": {str(each): CHOICES for each in range(6)}},
        {
            "oneOf": [{"type": "object", "required": [*NAMED], "properties": NAMED}] * 30,
        },
        {
            "allOf": [{"anyOf": [{"properties": NAMED}] * 8}] * 8,
            "unevaluatedProperties": False,
        },
        {
            "$ref": "#/$defs/x",
            "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x", "properties": NAMED}] * 8}},
            "unevaluatedProperties": False,
        },
        DOUBLED,
        {"allOf": [{"uniqueItems": True, "items": {"enum": [*range(64)]}, "maxItems": 2}] * 3000},
    ],
    ids=[
        *("choices", "nested", "conditions", "many", "properties"),
        *("unevaluated", "recursive", "doubled", "distinct"),
    ],
)
def test_no_schema_takes_long(schema: Any) -> None:
    """Clients send them, and a server rewrites them while it serves others."""
    started_s = time.process_time()
    with contextlib.suppress(GrammarError):
        rewritten(schema)
    assert time.process_time() - started_s < 3.0
