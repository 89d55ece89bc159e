"""Grammars of answers whose calls follow their tools' schemas: what they take and refuse."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text.answers import AnswerFormat, ToolCall, answer_parser, enforced
from dflash_adapters.text.answers.enforced import ENFORCED_FORMATS, call_grammar
from dflash_adapters.text.grammar import (
    MOST_GRAMMAR_BYTES,
    Grammar,
    GrammarKind,
    GrammarSource,
)
from dflash_adapters.text.grammar_compiler import GrammarCompiler
from dflash_adapters.text.json_grammar import json_rule
from dflash_adapters.text.tokenizer import Tokenizer, load_tokenizer
from dflash_protocol.errors import GrammarError
from support.answer_families import FAMILIES, LOOK, NOW, SIZE, TOOLS, Family
from support.grammars import takes
from support.vocabularies import CONTROL, small

STRICT = {
    **TOOLS,
    "Sky.look": {**TOOLS["Sky.look"], "required": ["up"], "additionalProperties": False},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token for each byte, an end of turn, and another control token."""
    vocabulary = small()
    assert vocabulary.types is not None
    vocabulary.tokens.append("<|im_start|>")
    vocabulary.types.append(CONTROL)
    path = vocabulary.write(tmp_path_factory.mktemp("vocabulary") / "v.gguf")
    with GgufFile.open(path) as file:
        tokenizer = load_tokenizer(file)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def compiled(
    compiler: GrammarCompiler,
    kind: AnswerFormat,
    control_ids: Mapping[str, int] | None = None,
    **rules: Any,
) -> Grammar:
    rules = {"is_required": False, "is_single": False, **rules}
    text = call_grammar(kind, STRICT, control_ids=control_ids or {}, **rules)
    return compiler.compile(GrammarSource(GrammarKind.CALLS, text))


OWN_TESTS = {AnswerFormat.HARMONY, AnswerFormat.MISTRAL}
"""Their parsers know more forms than are enforced."""
ENFORCED = [family for family in FAMILIES if family.kind in ENFORCED_FORMATS - OWN_TESTS]


def test_each_format_that_is_enforced_has_a_family() -> None:
    assert {family.kind for family in ENFORCED} == ENFORCED_FORMATS - OWN_TESTS


@pytest.mark.parametrize("family", ENFORCED, ids=lambda family: family.name)
def test_calls_are_taken_as_the_family_writes_them(
    family: Family, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    one, all_ = family.calls([LOOK]), family.calls([SIZE, LOOK, NOW])
    wrong = family.calls([("Sky.look", {"up": 1})])
    unknown = family.calls([("other", {})])
    words = "I look.\n"
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({"is_required": True}, {one, all_}),
        ({"is_required": True, "is_single": True}, {one}),
        ({"is_single": True}, {one, words, words + one, ""}),
        ({}, {one, all_, words, words + one, words + all_, ""}),
    ]
    for rules, taken in cases:
        grammar = compiled(compiler, family.kind, **rules)
        texts = (one, all_, wrong, unknown, words, words + one, words + all_, words + wrong, "")
        assert {text for text in texts if takes(grammar, tokenizer, text)} == taken


SKY = {"type": "object", "properties": {"sky": {"enum": ["blue"]}}, "required": ["sky"]}
BLUE, RED = '{"sky": "blue"}', '{"sky": "red"}'


def json_of(schema: object, space: str | None = None) -> str:
    return json_rule(GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema), space))


@pytest.mark.parametrize("family", ENFORCED, ids=lambda family: family.name)
def test_content_that_follows_a_schema_comes_instead_of_calls(
    family: Family, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    one, all_ = family.calls([LOOK]), family.calls([SIZE, LOOK, NOW])
    wrong = family.calls([("Sky.look", {"up": 1})])
    texts = (one, all_, BLUE, wrong, RED, "", "I look.", BLUE + one, "I look.\n" + one)
    content = json_of({**SKY, "additionalProperties": False})
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({}, {one, all_, BLUE}),
        ({"is_single": True}, {one, BLUE}),
        ({"is_required": True}, {one, all_}),
    ]
    for rules, taken in cases:
        grammar = compiled(compiler, family.kind, content=content, **rules)
        assert {text for text in texts if takes(grammar, tokenizer, text)} == taken


def test_in_channels_the_last_message_follows_the_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    preamble = thought.replace("analysis", "commentary")
    heads = ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>")
    grammar = compiled(compiler, AnswerFormat.HARMONY, content=json_of(SKY))
    for before in ("", thought):
        assert takes(grammar, tokenizer, before + call)
        for head in heads:
            assert takes(grammar, tokenizer, before + head + BLUE)
            assert not takes(grammar, tokenizer, before + head + RED)
    assert not takes(grammar, tokenizer, preamble + call)  # which would be content
    required = compiled(compiler, AnswerFormat.HARMONY, content=json_of(SKY), is_required=True)
    assert takes(required, tokenizer, preamble + call)
    assert not takes(required, tokenizer, heads[0] + BLUE)


def test_content_is_compiled_as_a_schema_alone_is(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    def grammars(schema: object, space: str | None = None) -> list[Grammar]:
        alone = GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema), space)
        rule = json_of(schema, space)
        return [compiler.compile(alone), compiled(compiler, AnswerFormat.HERMES, content=rule)]

    for grammar in grammars(SKY, ""):
        assert not takes(grammar, tokenizer, BLUE)
        assert takes(grammar, tokenizer, BLUE.replace(" ", ""))
    referred = {"$ref": "#/$defs/sky", "$defs": {"sky": SKY}}
    for schema in (SKY, {"oneOf": [SKY, {"type": "null"}]}, referred, True):
        for grammar in grammars(schema):
            assert takes(grammar, tokenizer, BLUE)
    for text in ("[", "[1]", '{"$ref": "https://example.org"}', "[" * 5000):
        with pytest.raises(GrammarError):
            compiled(
                compiler,
                AnswerFormat.HERMES,
                content=json_rule(GrammarSource(GrammarKind.JSON_SCHEMA, text)),
            )


@pytest.mark.parametrize("ends", ["<|end|>", "<|im_start|>"], ids=["text", "control token"])
def test_messages_in_channels_end_with_a_call(
    compiler: GrammarCompiler, tokenizer: Tokenizer, ends: str
) -> None:
    control_ids = {text: each for text, each, is_control in tokenizer.special if is_control}
    ids = {"<|end|>": control_ids[ends]} if ends in control_ids else {}
    head = "<|channel|>commentary to=functions.Sky.look <|constrain|>json<|message|>"
    call, wrong = f'{head}{{"up": true}}', f'{head}{{"up": 1}}'
    next_message = f"{ends}<|start|>assistant"
    thought = f"<|channel|>analysis<|message|>a < b<{next_message}"
    preamble = f"<|channel|>commentary<|message|>I look.{next_message}"
    final = "<|channel|>final<|message|>It is blue."
    texts = {call, thought + call, preamble + call, thought + preamble + call}
    others = {wrong, thought + wrong, final + next_message + wrong, call + next_message + call}
    for is_required in (True, False):
        grammar = compiled(compiler, AnswerFormat.HARMONY, ids, is_required=is_required)
        taken = texts if is_required else texts | {final, thought + final}
        assert {
            text
            for text in texts | others | {final, thought + final}
            if takes(grammar, tokenizer, text)
        } == taken
        for text in texts:
            parser = answer_parser(AnswerFormat.HARMONY, tools=STRICT)
            [found] = [
                event
                for event in [*parser.push(text.replace(ends, "<|end|>")), *parser.finish()]
                if isinstance(event, ToolCall)
            ]
            assert (found.name, json.loads(found.arguments)) == ("Sky.look", {"up": True})


@pytest.mark.parametrize("has_arguments_token", [False, True])
def test_mistrals_have_one_of_two_forms(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    has_arguments_token: bool,
) -> None:
    control_ids: dict[str, int] = {}
    head = '[TOOL_CALLS][{"name": "Sky.look", "arguments": '
    one, wrong = head + '{"up": true}}', head + '{"up": 1}}'
    more, end, arguments = ', {"name": "now", "arguments": {}}', "]", ""
    if has_arguments_token:
        arguments = "<|im_start|>"  # in its place
        control_ids = {text: each for text, each, is_control in tokenizer.special if is_control}
        control_ids["[ARGS]"] = control_ids[arguments]
        one, wrong = (f'[TOOL_CALLS]Sky.look{arguments}{{"up": {each}}}' for each in ("true", "1"))
        more, end = f"[TOOL_CALLS]now{arguments}{{}}", ""
    texts = {one + end, one + more + end, f"Yes.{one}{end}", wrong + end, "Yes."}
    for is_required in (True, False):
        for is_single in (True, False):
            grammar = compiled(
                compiler,
                AnswerFormat.MISTRAL,
                control_ids=control_ids,
                is_required=is_required,
                is_single=is_single,
            )
            taken = {one + end}
            taken |= set() if is_single else {one + more + end}
            taken |= set() if is_required else {f"Yes.{one}{end}", "Yes."}
            assert {text for text in texts if takes(grammar, tokenizer, text)} == taken
    parser = answer_parser(AnswerFormat.MISTRAL, tools=STRICT)
    text = (one + more + end).replace(arguments or "[ARGS]", "[ARGS]")
    events = [*parser.push(text), *parser.finish()]
    assert [each.name for each in events if isinstance(each, ToolCall)] == ["Sky.look", "now"]


def test_control_tokens_are_named_by_their_ids(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    control_ids = {text: token_id for text, token_id, is_control in tokenizer.special if is_control}
    entry = "<|im_start|>"
    assert entry in control_ids
    hermes = enforced._SHAPES[AnswerFormat.HERMES]
    shape = replace(hermes, entry=entry, between=f"\n{entry}")
    monkeypatch.setattr(enforced, "_SHAPES", {AnswerFormat.HERMES: shape})
    [family] = [each for each in ENFORCED if each.kind == AnswerFormat.HERMES]
    one = family.calls([LOOK]).replace("<tool_call>", entry)
    wrong = family.calls([("Sky.look", {"up": 1})]).replace("<tool_call>", entry)
    for is_required in (True, False):
        grammar = compiled(
            compiler, AnswerFormat.HERMES, control_ids=control_ids, is_required=is_required
        )
        assert takes(grammar, tokenizer, one)
        assert takes(grammar, tokenizer, f"{one}\n{one}")
        assert takes(grammar, tokenizer, f"Yes.{one}") != is_required
        assert takes(grammar, tokenizer, "Yes.") != is_required
        assert not takes(grammar, tokenizer, wrong)


def test_many_tools_and_any_description_can_be_enforced(compiler: GrammarCompiler) -> None:
    tools = {f"f{each}": {"description": "a & b | c: d\n" * 9} for each in range(510)}
    text = call_grammar(
        AnswerFormat.HERMES, tools, is_required=True, is_single=False, control_ids={}
    )
    assert compiler.compile(GrammarSource(GrammarKind.CALLS, text)).matcher().mask().any()


def test_the_schemas_of_all_tools_take_bounded_work_together() -> None:
    """Clients send them, and a server rewrites them while it serves others."""
    costly = {"uniqueItems": True, "items": {"enum": [*range(5)]}}
    text = "x" * (MOST_GRAMMAR_BYTES // 100)
    rules: dict[str, Any] = {"is_required": True, "is_single": False, "control_ids": {}}
    for schema, reason in ((costly, "too large"), ({"const": text}, "bytes")):
        tools = {f"f{each}": {"properties": {"a": schema}} for each in range(200)}
        started_s = time.process_time()
        with pytest.raises(GrammarError, match=reason):
            call_grammar(AnswerFormat.HERMES, tools, **rules)
        assert time.process_time() - started_s < 5.0
