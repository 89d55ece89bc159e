"""A schema in one form allows what it did: of other drafts, with names and with references."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.text.schema_checks import at_pointer
from dflash_adapters.text.schema_forms import in_one_form
from dflash_protocol.errors import GrammarError
from support.examples import examples

DRAFT7 = "http://json-schema.org/draft-07/schema#"
DRAFT2019 = "https://json-schema.org/draft/2019-09/schema"
STRINGS, INTEGERS = {"type": "string"}, {"type": "integer"}
NAMED, ANCHORED = {"$id": "b", **STRINGS}, {"$anchor": "n", **STRINGS}
WITHIN = {"$id": "http://a.org/b", "$defs": {"y": ANCHORED}}
TREE = {
    "$id": "https://a.org/tree",
    "$dynamicAnchor": "node",
    "properties": {"value": True, "children": {"items": {"$dynamicRef": "#node"}}},
    "required": ["value"],
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", **INTEGERS}}}, [1], ["a"]),
        ({"$ref": "b", "$id": "http://a.org/a", "$defs": {"c": NAMED}}, ["a"], [1]),
        ({"$ref": "http://a.org/b#/$defs/y", "$defs": {"c": WITHIN}}, ["a"], [1]),
        ({"$ref": "http://a.org/b#n", "$defs": {"c": WITHIN}}, ["a"], [1]),
        ({"$id": "urn:x:y", "$ref": "urn:x:y#/$defs/a", "$defs": {"a": STRINGS}}, ["a"], [1]),
        ({"$ref": "#/$defs/a~1b%25c~0d%22", "$defs": {'a/b%c~d"': ANCHORED}}, ["a"], [1]),
        ({"$ref": "#/allOf/1", "allOf": [{}, ANCHORED]}, ["a"], [1]),
        (
            {
                "allOf": [{"$ref": "#n"}],
                "$defs": {"a": {"$anchor": "n", "$ref": "#/$defs/b"}, "b": STRINGS},
            },
            ["a"],
            [1],
        ),
        ({"$ref": "#/$defs/no", "$anchor": "n", "$defs": {"no": False}}, [], [1, "a"]),
        ({"enum": [{"$id": "x", "$ref": "y"}], "$anchor": "n"}, [{"$id": "x", "$ref": "y"}], [{}]),
        (TREE, [{"value": 1, "children": [{"value": 2}]}], [{"value": 1, "children": [{}]}, {}]),
        ({"minItems": 1.0, "maxLength": 2.0}, [[1], "ab"], [[], "abc"]),
        (
            {"$schema": DRAFT7, "items": [STRINGS], "additionalItems": False},
            [["a"], []],
            [[1], ["a", 1]],
        ),
        ({"$schema": DRAFT7, "items": STRINGS, "additionalItems": False}, [["a", "b"]], [[1]]),
        ({"$schema": DRAFT7, "contains": {"const": 1}, "minContains": 0}, [[1]], [[2], []]),
        ({"$schema": DRAFT7, "prefixItems": [STRINGS]}, [[1]], []),
        (
            {
                "$schema": DRAFT7,
                "properties": {"a": {"$ref": "#/definitions/b", "maxLength": 1}},
                "definitions": {"b": STRINGS},
            },
            [{"a": "xx"}],
            [{"a": 1}],
        ),
        (
            {"$schema": DRAFT7, "$ref": "#b", "definitions": {"b": {"$id": "#b", **STRINGS}}},
            ["a"],
            [1],
        ),
        ({"$schema": DRAFT7, "allOf": [{"$ref": "#/items/0"}], "items": [STRINGS]}, ["a"], [1]),
        ({"$schema": DRAFT2019, "prefixItems": [STRINGS]}, [[1]], []),
    ],
    ids=lambda each: json.dumps(each)[:60],
)
def test_what_is_allowed_stays_the_same(schema: Any, good: list[Any], bad: list[Any]) -> None:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    plain = in_one_form(schema)
    assert "$id" not in plain
    for known in (kind(schema), jsonschema.Draft202012Validator(plain)):
        assert [each for each in good + bad if known.is_valid(each)] == good


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "x",
            "$ref": "#/$defs/a",
        },
        {"$schema": "http://json-schema.org/draft-04/schema#", "id": "x"},
        {"properties": {"a": {"$ref": "#"}}, "const": 1.0},
    ],
    ids=json.dumps,
)
def test_a_schema_in_that_form_stays_as_it_is(schema: Any) -> None:
    assert in_one_form(schema) is schema


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#nowhere"},
        {"$anchor": "x", "$ref": "#/$defs/none"},
        {"$anchor": "x", "$ref": "#/title", "title": "text"},
        {"$anchor": "x", "$defs": {"a": {"$id": "b"}, "c": {"$id": "b"}}},
        {"$dynamicRef": "http://elsewhere.org/#x"},
        {"$id": "http://[", "$defs": {"a": {"$id": "b"}}},
        {"$ref": "#a", "allOf": 5, "$defs": {"b": {"$anchor": "a", "$schema": DRAFT7}}},
        {
            "$dynamicRef": "#a",
            "$defs": {"b": {"$dynamicAnchor": "a"}, "c": {"$id": "c", "$dynamicAnchor": "a"}},
        },
        {
            "$defs": {"x" * 10_000: {"$anchor": "a"}},
            "properties": {str(each): {"$ref": "#a"} for each in range(1000)},
        },
    ],
    ids=lambda each: json.dumps(each)[:50],
)
def test_what_leads_nowhere_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError) as caught:
        in_one_form(schema)
    assert len(str(caught.value)) < 200


WORDS = st.sampled_from(
    ["$id", "$anchor", "$dynamicAnchor", "$ref", "$dynamicRef", "$schema", "$defs", "items",
     "allOf", "properties", "prefixItems", "additionalItems", "minItems", "const"]
)  # fmt: skip
JUNK = st.recursive(
    st.sampled_from(
        [None, True, 2.0, "a", "b", "#a", "#", "b#a", "#/$defs/a", "#/allOf/0", "#/items", DRAFT7]
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.just("a"), inner, max_size=4)
    ),
    max_leaves=20,
)


@examples(300)
@given(st.dictionaries(WORDS, JUNK, min_size=1, max_size=4))
def test_what_is_no_schema_is_refused_if_anything(schema: Any) -> None:
    before = json.dumps(schema)
    with contextlib.suppress(GrammarError):
        in_one_form(schema)
    assert json.dumps(schema) == before


def test_many_references_through_a_long_list_take_no_time() -> None:
    started_s = time.process_time()
    parts = [{"$ref": f"#/allOf/{each}", "$anchor": f"a{each}"} for each in range(4000)]
    in_one_form({"allOf": parts})
    assert time.process_time() - started_s < 3.0


@pytest.mark.parametrize(
    ("pointer", "found"),
    [
        *(("", {"a": [1, {"": 2}], "~/": 3}), ("/a/0", 1), ("/a/1/", 2), ("/~0~1", 3)),
        *((each, None) for each in ("a", "/a/2", "/a/-1", "/a/01", "/a/²", "/a/0/0", "/b")),
        ("/a/99999999999", None),
    ],
)
def test_pointers(pointer: str, found: Any) -> None:
    assert at_pointer({"a": [1, {"": 2}], "~/": 3}, pointer) == found
