"""The bench of grammars: what it reads out of sources, what it draws, and how it judges answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.random_schemas import COMMON, META, random_schemas
from bench.structured_answers import Answer, Tally, Validator, Writer
from bench.structured_cases import MissingModule, optional_module, scanned_cases
from bench.structured_output import DEMO, random_tables
from bench.structured_speed import large_tokenizer, schema_of, speed_tables

from bench import structured_output
from dflash_adapters.text.grammar import GrammarKind, GrammarSource
from dflash_adapters.text.grammar_compiler import GrammarCompiler
from dflash_protocol.errors import GrammarError
from dflash_runtime import Engine

CPP = r'''
static void test_grammar(const std::string & test_desc) {
    test(test_desc + ". Grammar: ");
}
static void test_all() {
    // Two cases
    test_schema(
        "a \"number\"",
        // Schema
        R"""({"type": "number"})""",
        // Passing strings
        {
            "1",  // one
            "a\\n" "\n",
        },
        {}
    );
    test_grammar(
        "ids",
        R"""(root ::= <[10]> "x")""",
        {
            token(10) + "x",
        },
        // Failing strings
        {
            "x",
            "",
        }
    );
    const std::string simple_str = R"""(root ::= root "a")""";
    assert(test_build_grammar_fails(simple_str));
}
'''


@pytest.fixture(scope="module")
def writer() -> Iterator[Writer]:
    with Engine.open(DEMO, context=512, threads=1) as engine:
        yield Writer(engine)


def source(kind: GrammarKind, text: str) -> GrammarSource:
    return GrammarSource(kind, text)


def test_cases_are_scanned_out_of_cpp() -> None:
    number, ids, refused = scanned_cases(CPP)
    assert (number.about, number.is_schema) == ('a "number"', True)
    assert number.grammar == '{"type": "number"}'
    assert number.texts == (["1", "a\\n\n"], [])
    assert (ids.is_schema, ids.texts) == (False, (["<[10]>x"], ["x", ""]))
    assert (refused.grammar, refused.texts) == ('root ::= root "a"', None)


@pytest.mark.parametrize(
    ("text", "can_be_written"),
    [("1", True), ("12", True), ("", False), ("1x", False), ("x", False)],
)
def test_a_text_can_be_written_if_the_grammar_matches_all_of_it(
    writer: Writer, text: str, can_be_written: bool
) -> None:
    for kind, written in ((GrammarKind.REGEX, "[0-9]+"), (GrammarKind.GBNF, "root ::= [0-9]+")):
        assert writer.could_write(writer.compiled(source(kind, written)), text) == can_be_written


def test_an_answer_is_complete_or_not(writer: Writer) -> None:
    grammar = writer.schema({"const": [1, "a"]})
    answer = writer.answer(grammar, 1, temperature=1.5)
    assert (answer.text.replace(" ", "").replace("\n", ""), answer.end) == ('[1,"a"]', "stop")
    grammar = writer.compiled(source(GrammarKind.REGEX, "x{1000}"))
    assert writer.answer(grammar, 1, temperature=1.5).end == "length"
    with pytest.raises(GrammarError):
        writer.schema({"type": "no such type"})


def test_missing_modules_are_told_in_one_line() -> None:
    with pytest.raises(MissingModule, match=r"^there is no module [^\n]*pip install [^\n]*$"):
        optional_module("no_such_module_of_dflash")


def test_nothing_asked_for_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["structured_output"])
    with pytest.raises(SystemExit):
        structured_output.main()
    assert "nothing to measure" in capsys.readouterr().err


def test_answers_are_tallied() -> None:
    pytest.importorskip("jsonschema")
    schema = {"type": "number", "multipleOf": 0.01}
    validator, tally = Validator(schema, draft="draft7"), Tally()
    for text in ("0.07", "0.29", "1", "0.005", '"a"', "["):
        tally.schemas += 1
        tally.add(Answer(text, "stop"), schema, validator)
    tally.add(Answer("0.07", "length"), schema, validator)
    assert (tally.valid, len(tally.wrong), tally.ends["length"]) == (3, 3, 1)
    tally.refuse(GrammarError('Unsatisfiable schema: "a" is 3'), {"const": 1}, validator)
    assert tally.unsatisfiable == 1
    assert "is an instance" in tally.wrong[-1]


def test_formats_are_checked_beside() -> None:
    pytest.importorskip("jsonschema")
    validator = Validator({"type": "string", "format": "date"}, draft="draft2020-12")
    assert validator.why_not('"x"') == ""
    assert not validator.has_formats('"x"')
    assert validator.has_formats('"2026-02-28"')


@pytest.mark.parametrize("kind", [COMMON, META])
def test_random_schemas_are_the_same_again(kind: str) -> None:
    pytest.importorskip("hypothesis_jsonschema")
    found = random_schemas(kind, 6, 3)
    assert 0 < len(found) <= 6
    assert found == random_schemas(kind, 6, 3)


def test_random_schemas_are_answered(writer: Writer) -> None:
    pytest.importorskip("hypothesis_jsonschema")
    text = random_tables(writer, argparse.Namespace(random=4, seed=1, show=5))
    assert text.startswith("Random schemas")
    assert f"| {COMMON}" in text


def test_a_made_up_vocabulary_serves_grammars() -> None:
    with large_tokenizer(2_000) as tokenizer:
        pieces = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size - 1)}
        assert len(pieces) == tokenizer.vocab_size - 1
        compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
        schema = schema_of(10_000)
        assert 10_000 <= len(schema) < 12_000
        allowed = compiler.compile(source(GrammarKind.JSON_SCHEMA, schema)).matcher().allowed()
    assert 0 < allowed.sum() < 100


def test_speed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.structured_speed.LARGE_VOCABULARY", 3_000)
    monkeypatch.setattr("bench.structured_speed._FIRST_TOKENS", 1)
    monkeypatch.setattr("bench.structured_speed._MASKED_TEXTS", 1)
    monkeypatch.setattr("bench.structured_speed._MASKED_TOKENS", 8)
    with Engine.open(DEMO, context=512, threads=1) as engine:
        text = speed_tables(engine, rounds=1, num_tokens=8)
    assert "NOT THE SAME" not in text
    assert text.count(" 8, 8 |") == 6  # three grammars, two temperatures


def test_a_model_that_is_none_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(sys, "argv", ["structured_output", "--gbnf", "--model", str(path)])
    with pytest.raises(SystemExit, match=r"^error: [^\n]*$"):
        structured_output.main()
