"""Grammars: what is compiled, what is refused in one line, and which tokens may come."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLParserLimits

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text import grammar_compiler
from dflash_adapters.text.answers.channels import FINAL_MESSAGE
from dflash_adapters.text.grammar import (
    MOST_GRAMMAR_BYTES,
    Grammar,
    GrammarKind,
    GrammarSource,
)
from dflash_adapters.text.grammar_compiler import GrammarCompiler
from dflash_adapters.text.tokenizer import Tokenizer, load_tokenizer
from dflash_protocol.errors import GrammarError
from support.examples import examples
from support.grammars import takes

DEMO = Path(__file__).parents[3] / "demo" / "dflash-demo.gguf"
NUMBERS = {"type": "array", "items": {"type": "integer"}, "maxItems": 4}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with GgufFile.open(DEMO) as file:
        tokenizer = load_tokenizer(file)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def schema(of: object, space: str | None = None) -> GrammarSource:
    return GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(of), space)


def written(grammar: Grammar, tokenizer: Tokenizer, seed: int, most: int = 200) -> str | None:
    """A random text; None if it does not end within `most` tokens."""
    matcher, random = grammar.matcher(), np.random.default_rng(seed)
    token_ids: list[int] = []
    for _ in range(most):
        token_id = int(random.choice(np.flatnonzero(matcher.allowed())))
        matcher.accept(token_id)
        if token_id in tokenizer.stop_ids:
            return tokenizer.decode(token_ids)
        token_ids.append(token_id)
        if matcher.is_complete:
            return tokenizer.decode(token_ids)
    return None


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (schema(NUMBERS), ["[]", "[1, 2]", "[ -3 ]"], ["", "[1", '["1"]', "[1,2,3,4,5]", "{}"]),
        (schema(NUMBERS, ""), ["[1,2]"], ["[1, 2]"]),
        (schema(NUMBERS, r"\t?"), ["[1,\t2]"], ["[1, 2]"]),
        (schema({"enum": ["a\x1a", "b"]}), ['"a\\u001a"', '"b"'], ['"a"', '"a\x1a"']),
        (schema({"enum": ["a", 1, None]}), ['"a"', "1", "null"], ["a", "2"]),
        (schema({"oneOf": [{"const": 1}, {"type": "string"}]}), ["1", '"1"'], ["2"]),
        (schema(True), ["{}", "[[]]", '"ü\\n"'], ["", "nul"]),
        (GrammarSource(GrammarKind.REGEX, r"a+b?"), ["a", "aab"], ["", "b", "abb"]),
        (GrammarSource(GrammarKind.REGEX, r"[^\n]*"), ["", "äß <b>"], ["a\n"]),
        (GrammarSource(GrammarKind.CHOICE, '["yes", "no\\n\\"x\\""]'), ["yes", 'no\n"x"'], ["y"]),
        (GrammarSource(GrammarKind.GBNF, 'root ::= "x" | "y" root'), ["x", "yyx"], ["", "y"]),
        (GrammarSource(GrammarKind.GBNF, "start: /[0-9]+/"), ["12"], ["a"]),
    ],
    ids=repr,
)
def test_a_text_follows_its_grammar(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    source: GrammarSource,
    good: list[str],
    bad: list[str],
) -> None:
    grammar = compiler.compile(source)
    assert {text for text in good + bad if takes(grammar, tokenizer, text)} == {*good}


@examples(60)
@given(st.integers(0, 1 << 32))
def test_what_is_written_at_random_follows_the_grammar(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int
) -> None:
    dated = {
        "type": "object",
        "properties": {
            "day": {"type": "string", "format": "date"},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["day"],
        "additionalProperties": False,
    }
    for source, is_good in (
        (schema(NUMBERS), lambda text: len(json.loads(text)) <= 4),
        (schema(dated), lambda text: {*json.loads(text)} <= {"day", "tags"}),
        (
            GrammarSource(GrammarKind.REGEX, r"(ab|[0-9]{2,5})+"),
            lambda text: re.fullmatch(r"(ab|[0-9]{2,5})+", text),
        ),
    ):
        text = written(compiler.compile(source), tokenizer, seed)
        assert text is None or is_good(text)


CHAIN = {
    "$ref": "#/$defs/a0",
    "$defs": {
        f"a{each}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{each + 1}"}}}
        for each in range(1000)
    },
}


def rules(form: str, count: int) -> str:
    """A chain of rules, each of which names the next."""
    lines = [form.format(each, each + 1) for each in range(count)]
    return "\n".join(["root ::= a0", *lines, form.format(count, count)])


HUGE_ENUM = {"enum": [f"value {i}" for i in range(20_000)]}


@pytest.mark.parametrize(
    "source",
    [
        GrammarSource(GrammarKind.JSON_SCHEMA, "{"),
        GrammarSource(GrammarKind.JSON_SCHEMA, "12"),
        GrammarSource(GrammarKind.JSON_SCHEMA, "[" * 1000),
        schema({"type": "strin"}),
        schema(False),
        schema({"$ref": "#"}),
        schema({"oneOf": [{}, {"multipleOf": 3}]}),
        schema({"$ref": "#/$defs/none"}),
        schema(CHAIN),
        schema({"properties": {f"p{each}": {} for each in range(7000)}}),
        GrammarSource(GrammarKind.GBNF, rules("a{} ::= a{}", 4000)),
        GrammarSource(GrammarKind.GBNF, rules("a{}: a{}", 4000).replace("root ::=", "start:")),
        GrammarSource(GrammarKind.GBNF, rules("A{}: A{}", 4000).replace("root ::= a", "start: A")),
        GrammarSource(GrammarKind.GBNF, "start: " + " | ".join(f'"{e}"' for e in range(40_000))),
        schema({"$ref": "http://127.0.0.1:1/schema.json"}),
        schema({"$ref": "file:///etc/passwd"}),
        schema({"not": {"pattern": "a"}}),
        schema({"type": "string", "pattern": "(a"}),
        schema(HUGE_ENUM | {"description": "x" * MOST_GRAMMAR_BYTES}),
        schema(NUMBERS, "("),
        GrammarSource(GrammarKind.REGEX, "(a"),
        GrammarSource(GrammarKind.REGEX, r"(?=a)b"),
        GrammarSource(GrammarKind.REGEX, "a" * (MOST_GRAMMAR_BYTES + 1)),
        GrammarSource(GrammarKind.CHOICE, "[]"),
        GrammarSource(GrammarKind.CHOICE, "no JSON"),
        GrammarSource(GrammarKind.CHOICE, '["\ud800"]'),
        GrammarSource(GrammarKind.REGEX, "a\ud800b"),
        schema({"type": "integer", "multipleOf": 99_999_999}),
        schema({"type": "number", "multipleOf": 0.12345}),
        schema({"allOf": [{"type": "string", "pattern": f"a.*{each}"} for each in range(30)]}),
        GrammarSource(GrammarKind.GBNF, "start: A\nA: " + " & ".join(["/a.*b/"] * 12)),
        GrammarSource(GrammarKind.GBNF, 'root ::= "x'),
        GrammarSource(GrammarKind.GBNF, "root ::= other"),
        GrammarSource(GrammarKind.GBNF, "(" * 50_000),
        GrammarSource(GrammarKind.GBNF, "root ::= " + "(" * 50_000),
        GrammarSource(GrammarKind.GBNF, "no grammar at all"),
        GrammarSource(GrammarKind.GBNF, "\ud800"),
    ],
    ids=lambda source: f"{source.kind}-{source.text[:30]!r}",
)
def test_what_cannot_be_followed_is_refused_in_one_line(
    compiler: GrammarCompiler, source: GrammarSource
) -> None:
    started_s = time.perf_counter()
    with pytest.raises(GrammarError) as caught:
        compiler.compile(source)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    assert time.perf_counter() - started_s < 10


def test_a_grammar_is_compiled_once_and_each_text_has_a_state_of_its_own(
    compiler: GrammarCompiler,
) -> None:
    source = GrammarSource(GrammarKind.CHOICE, '["ab", "cd"]')
    grammar = compiler.compile(source)
    assert compiler.compile(source) is grammar
    first, second = grammar.matcher(), grammar.matcher()
    before = second.allowed().copy()
    first.accept(int(np.flatnonzero(first.allowed())[0]))
    assert (second.allowed() == before).all()
    assert (grammar.matcher().allowed() == before).all()
    with pytest.raises(GrammarError):
        second.accept(int(np.flatnonzero(~before)[0]))
    with pytest.raises(GrammarError):  # it stays where it failed
        second.mask()


def test_a_model_with_fewer_tokens_gets_no_others(tokenizer: Tokenizer) -> None:
    num_tokens = max(tokenizer.stop_ids) + 1
    assert num_tokens % 32 == 0  # llguidance's own masks have a word more
    matcher = GrammarCompiler(tokenizer, num_tokens).compile(schema(True)).matcher()
    assert matcher.allowed().size == num_tokens
    assert matcher.mask().size == num_tokens // 8


@examples(20)
@given(st.randoms(use_true_random=False))
def test_a_forced_text_is_divided_as_the_tokenizer_does(
    compiler: GrammarCompiler, tokenizer: Tokenizer, chooser: random.Random
) -> None:
    """Each forced token is the only one that may come, and the grammar takes all."""
    text = '{"a long name of a property": "and a value", "more": '
    pattern = re.escape(text) + "[0-9]{3}"
    matcher = compiler.compile(GrammarSource(GrammarKind.REGEX, pattern)).matcher()
    written = list[int]()
    while not matcher.is_complete:
        allowed = np.flatnonzero(matcher.allowed()).tolist()
        if matcher.forced:
            assert allowed == [matcher.forced[0]]
        written.append(chooser.choice(allowed))
        matcher.accept(written[-1])
    assert re.fullmatch(pattern, tokenizer.decode(written))
    forced = tokenizer.encode(text, parse_special=False)[:-2]  # those before what may be joined
    assert written[: len(forced)] == forced


def test_a_grammar_may_begin_behind_a_free_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiler.compile(GrammarSource(GrammarKind.CHOICE, '["yes"]'))
    late = grammar.after(re.escape("</t>"), tokenizer)
    stop_id = min(tokenizer.stop_ids)
    for before in ("</t>", "no</t>", "</t</t>", "yes</</t>", "a.</t>", "(</t>\n"):
        matcher = late.matcher()
        token_ids = tokenizer.encode(before, parse_special=False)
        for token_id in token_ids:
            allowed = matcher.allowed()
            assert not allowed[stop_id]
            assert allowed.sum() == allowed.size - len(tokenizer.stop_ids)
            assert not matcher.is_complete
            matcher.accept(token_id)
            if "</t>" in tokenizer.decode(token_ids[: token_ids.index(token_id) + 1]):
                break
        for token_id in tokenizer.encode("yes", parse_special=False):
            assert matcher.allowed()[token_id]
            matcher.accept(token_id)
        assert matcher.is_complete


def test_a_grammar_may_begin_with_the_final_message(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiler.compile(GrammarSource(GrammarKind.CHOICE, '["yes"]'))
    late = grammar.after(FINAL_MESSAGE, tokenizer)
    thought = "<|channel|>analysis<|message|>final<|message|><|end|><|start|>assistant"
    for head in ("final", "final ", "final <|constrain|>json", "final json"):
        matcher = late.matcher()
        for token_id in tokenizer.encode(
            f"{thought}<|channel|>{head}<|message|>", parse_special=False
        ):
            assert matcher.allowed().sum() > 1
            matcher.accept(token_id)
        for token_id in tokenizer.encode("yes", parse_special=False):
            assert matcher.allowed()[token_id]
            matcher.accept(token_id)
        assert matcher.is_complete


def test_texts_of_a_grammar_do_not_use_up_what_others_may(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A bound on states that a few texts reach together, and each alone does not.
    monkeypatch.setattr(
        grammar_compiler, "_LIMITS", LLParserLimits(max_lexer_states=400, verbose_errors=False)
    )
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    grammar = compiler.compile(GrammarSource(GrammarKind.REGEX, "(a|b)*a(a|b){30}"))
    random, token_ids = np.random.default_rng(1), [tokenizer.encode(each)[0] for each in "ab"]
    for _ in range(30):
        matcher = grammar.matcher()
        for token_id in random.choice(token_ids, 40).tolist():
            assert matcher.allowed()[token_id]
            matcher.accept(token_id)


def test_names_of_properties_are_written_in_one_way(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiler.compile(schema({"properties": {"a": {"type": "integer"}}, "type": "object"}))
    for text, is_taken in (
        ('{"a":1}', True),
        ('{"b":"\\n\\\\"}', True),
        ('{"\\u0061":"x"}', False),
        ('{"a":"x"}', False),
    ):
        assert takes(grammar, tokenizer, text) == is_taken


def test_many_choices_and_odd_texts_can_be_chosen(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    texts = [f"number {each}" for each in range(4000)] + ["\x7f", "\x00\n", 'q"\\', "ü😀"]
    grammar = compiler.compile(GrammarSource(GrammarKind.CHOICE, json.dumps(texts)))
    for text in texts[-6:]:
        assert takes(grammar, tokenizer, text)
    assert not takes(grammar, tokenizer, "number 4000")


def test_numbers_of_any_size_may_stand_in_a_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiler.compile(schema({"type": "integer", "default": 2**70, "minimum": -5}))
    assert takes(grammar, tokenizer, "-5")
