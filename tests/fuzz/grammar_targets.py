"""Fuzz target of grammars as clients send them."""

from __future__ import annotations

import json

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text.grammar import GrammarKind, GrammarSource
from dflash_adapters.text.grammar_compiler import GrammarCompiler
from dflash_adapters.text.tokenizer import Tokenizer, load_tokenizer
from dflash_protocol.errors import GrammarError
from dflash_runtime.engine.demo_model import demo_model_path
from fuzz.mutation import Mutator
from fuzz.target import Target

_SCHEMAS = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
            "size": {"type": "integer", "minimum": -5, "maximum": 99},
            "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
            "next": {"$ref": "#/$defs/node"},
        },
        "required": ["name"],
        "additionalProperties": False,
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    },
    {"anyOf": [{"type": "string", "format": "date-time"}, {"const": {"a": [1, 2.5]}}]},
    {"oneOf": [{"type": "number", "multipleOf": 3}, {"type": "boolean"}], "$schema": "x"},
    {"type": "array", "prefixItems": [{}, True, {"type": "null"}], "items": False},
    {
        "$id": "http://a.org/a",
        "anyOf": [{"$ref": "b#c"}, {"$dynamicRef": "#d"}],
        "properties": {"e": {"uniqueItems": True, "items": {"enum": [1, "x", {}]}}},
        "unevaluatedProperties": False,
        "$defs": {
            "b": {"$id": "b", "$defs": {"c": {"$anchor": "c", "maxProperties": 2.0}}},
            "d": {"$dynamicAnchor": "d", "contains": {"const": 1}, "maxContains": 2},
        },
    },
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "items": [{"format": "json-pointer"}, {"$ref": "#/items/0", "maxLength": 3}],
        "additionalItems": False,
    },
)
_TEXTS = {
    GrammarKind.JSON_SCHEMA: [json.dumps(schema) for schema in _SCHEMAS],
    GrammarKind.REGEX: [
        r"(\d{2,4}-)*[^\s\"]+\.(txt|md)?",
        r"(?i)a{3,}|\p{L}+[\x00-\x1f]?",
        "(a|b)*c",
    ],
    GrammarKind.GBNF: [
        'root ::= item ("," item)* \nitem ::= [a-z]+ | "\\"" [^"]* "\\"" | num{1,3}\nnum ::= [0-9]',
        'root ::= Foo foo-1 . \nFoo ::= ("\\u00e9"*)* # x\nfoo-1 ::= [^a-z&&\\]]{0,2} | Foo{1}',
        'start: expr\nexpr: NUMBER | "(" expr /[+*]/ expr ")"\nNUMBER: /[0-9]{1,4}/',
    ],
    GrammarKind.CHOICE: [json.dumps(["yes", 'n"o\n', "ü"])],
}
_MOST_STEPS = 6


class Grammars(Target):
    """Frames: the kind, the text, and what may be between JSON's tokens."""

    refusals = (GrammarError,)

    def __init__(self) -> None:
        with GgufFile.open(demo_model_path()) as file:
            tokenizer = load_tokenizer(file)
        assert tokenizer is not None
        self._tokenizer: Tokenizer = tokenizer
        self._compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
        self._texts = {kind: [text.encode() for text in texts] for kind, texts in _TEXTS.items()}

    def make(self, mutator: Mutator) -> list[bytes]:
        kind = mutator.choose(list(self._texts))
        texts = self._texts[kind]
        text = mutator.damage(mutator.choose(texts), mutator.choose(texts))
        space = mutator.choose([b"", b" ?", b"[ \n]{0,9}", b"("])
        return [kind.encode(), text, space]

    def feed(self, frames: list[bytes]) -> None:
        kind, text, space = (frame.decode(errors="replace") for frame in frames)
        if kind == GrammarKind.CHOICE:  # made of a checked list, never sent as JSON
            text = json.dumps([text, text[::-1]])
        source = GrammarSource(GrammarKind(kind), text, space or None)
        matcher = self._compiler.compile(source).matcher()
        for step in range(_MOST_STEPS):
            allowed = np.flatnonzero(matcher.allowed())
            token_id = int(allowed[(step * 7919) % allowed.size])
            matcher.accept(token_id)
            if matcher.is_complete:
                return

    def serve_good(self) -> None:
        grammar = self._compiler.compile(GrammarSource(GrammarKind.REGEX, "[a-c]{2}"))
        matcher = grammar.matcher()
        for token_id in self._tokenizer.encode("ab"):
            assert matcher.allowed()[token_id]
            matcher.accept(token_id)
        assert matcher.is_complete
