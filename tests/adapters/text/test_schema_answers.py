"""Answers to schemas whose keywords are rewritten: each is valid, and what is not cannot come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text.grammar import Grammar, GrammarKind, GrammarSource
from dflash_adapters.text.grammar_compiler import GrammarCompiler
from dflash_adapters.text.tokenizer import Tokenizer, load_tokenizer
from support.grammars import takes

DEMO = Path(__file__).parents[3] / "demo" / "dflash-demo.gguf"
DRAFT7 = "http://json-schema.org/draft-07/schema#"
NAMES = {"properties": {"a": {"type": "string"}}}
PERSON = {
    "properties": {"kind": {"type": "string"}},
    "oneOf": [
        {"properties": {"kind": {"const": "one"}, "a": {"type": "null"}}, "required": ["kind"]},
        {"properties": {"kind": {"const": "two"}, "b": {"type": "null"}}, "required": ["kind"]},
    ],
    "type": "object",
    "unevaluatedProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with GgufFile.open(DEMO) as file:
        tokenizer = load_tokenizer(file)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def written(grammar: Grammar, tokenizer: Tokenizer, seed: int, most: int = 120) -> str | None:
    """A random text that ends soon where it may; None if it does not end."""
    matcher, random = grammar.matcher(), np.random.default_rng(seed)
    token_ids: list[int] = []
    for _ in range(most):
        allowed = np.flatnonzero(matcher.allowed()).tolist()
        ends = [each for each in allowed if each in tokenizer.stop_ids]
        token_id = ends[0] if ends and random.random() < 0.5 else int(random.choice(allowed))
        matcher.accept(token_id)
        if token_id not in tokenizer.stop_ids:
            token_ids.append(token_id)
        if token_id in tokenizer.stop_ids or matcher.is_complete:
            return tokenizer.decode(token_ids)
    return None


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", 1, {"b": [None]}]}},
         ['["a", 1]', "[]", '[1,"a",{"b":[null]}]'],
         ["[1,1]", '[{"b":[null]},{"b":[null]}]', "[2]"]),
        ({"uniqueItems": True, "prefixItems": [{"type": "string"}, {"type": "integer"}],
          "items": False}, ['["a", 1]'], ['["a", 1, 2]', "[1]"]),
        ({"type": "array", "contains": {"type": "null"}, "maxContains": 1},
         ["[null]", "[null, 1]"], ["[]", "[null, null]", "[1]"]),
        ({"$schema": DRAFT7, "type": "array", "contains": {"const": 1}}, ["[1, 2]"], ["[2]", "[]"]),
        ({**NAMES, "allOf": [{"patternProperties": {"^b": True}}], "type": "object",
          "unevaluatedProperties": False},
         ['{"a": "x", "b1": 2}', "{}"], ['{"c": 1}', '{"a": 1}']),
        (PERSON, ['{"kind": "one", "a": null}', '{"kind": "two"}'],
         ['{"kind": "one", "b": null}', '{"kind": "two", "c": 1}']),
        ({"prefixItems": [{"type": "null"}], "anyOf": [{"prefixItems": [True, {"const": 1}]}],
          "type": "array", "unevaluatedItems": {"type": "string"}},
         ["[null]", '[null, 1, "a"]'], ["[null, 2]", "[null, 1, 1]"]),
        ({"$ref": "#n", "$defs": {"x": {"$anchor": "n", "type": "object",
          "properties": {"next": {"$ref": "#n"}}, "additionalProperties": False}}},
         ['{"next": {}}'], ['{"next": 1}', '{"a": {}}']),
        ({"type": "string", "format": "json-pointer"}, ['""', '"/a~0/"'], ['"a"', '"/~2"']),
        ({"type": "string", "format": "relative-json-pointer"},
         ['"0#"', '"12/a"'], ['"01"', '"/"']),
        ({"type": "string", "format": "uri-reference", "pattern": "^/"},
         ['"/a?b#c"'], ['"a"', '"/ "']),
        ({"type": "string", "format": "uri-template"}, ['"/{a,b*}/c"'], ['"/{"', '"{}"']),
        ({"type": "string", "format": "regex"}, ['"^a(b|c)*$"', '"[^ab]+"'], ['"("', '"*"']),
        ({"type": "string", "format": "iri"}, ['"http://a.org/"'], ['"a"']),
        ({"type": "integer", "format": "int64", "maximum": 9223372036854775807}, ["5"], ['"a"']),
        ({"type": "number", "maximum": 1e30, "minimum": -1e30}, ["-2.5"], ['"a"']),
        ({"type": ["array", "string"], "minItems": 1.0, "maxLength": 2.0},
         ["[1]", '"ab"'], ["[]", '"abc"']),
        ({"properties": {"a": False, "b": True}, "type": "object"}, ['{"b": 1}'], ['{"a": 1}']),
        ({"const": {"b": 1, "a": [True, {}]}}, ['{"b": 1, "a": [true, {}]}'], ['{"b": 1}']),
        ({"not": {"not": {"type": "string"}}}, ['"a"'], ["1"]),
    ],
    ids=lambda each: json.dumps(each)[:60],
)  # fmt: skip
def test_answers_are_valid(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, good: list[str], bad: list[str]
) -> None:
    known = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    is_valid = known(schema, format_checker=known.FORMAT_CHECKER).is_valid
    assert all(is_valid(json.loads(text)) for text in good)
    grammar = compiler.compile(GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    assert [text for text in good + bad if takes(grammar, tokenizer, text)] == good
    texts = [written(grammar, tokenizer, seed) for seed in range(8)]
    assert all(is_valid(json.loads(text)) for text in texts if text is not None)
