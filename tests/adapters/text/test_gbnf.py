"""GBNF means what it does in llama.cpp."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text.gbnf import gbnf_to_lark
from dflash_adapters.text.grammar import GrammarKind, GrammarSource
from dflash_adapters.text.grammar_compiler import GrammarCompiler
from dflash_adapters.text.tokenizer import Tokenizer, load_tokenizer
from dflash_protocol.errors import GrammarError
from support.examples import examples
from support.grammars import takes

DEMO = Path(__file__).parents[3] / "demo" / "dflash-demo.gguf"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with GgufFile.open(DEMO) as file:
        tokenizer = load_tokenizer(file)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "\\u00e9" "\\x41\\U0001F600\\"\\\\\\n"', ['éA😀"\\\n'], ["e"]),
        ('root ::= Foo foo\nFoo ::= "a"\nfoo ::= "b"', ["ab"], ["aa", "bb"]),
        ('root ::= a-b a_b start\na-b ::= "1"\na_b ::= "2"\nstart ::= "3"', ["123"], ["113"]),
        ('root ::= ("x"*)*', ["", "xx"], ["y"]),
        ('root ::= (("x"?)+ "y"){2}', ["yy", "xyxxy"], ["y", "yyy"]),
        ('root ::= a\na ::= ("x"*)* b\nb ::= "y"**', ["xxyy", ""], ["yx"]),
        ("root ::= . .", ["a\n", "éa"], ["a", "abc"]),
        ("root ::= [a&&b~~/^]", [*"ab&/~^"], [*"c-.0"]),
        ("root ::= [\\u00e9-\\u00ff\\]\\[-]", ["é", "ÿ", "]", "[", "-"], ["è", "a", "^"]),
        ("root ::= [^^a\\n] [^]", ["bé", "-\n"], ["^a", "aa", "\na"]),
        ("root ::= [a-]", ["a", "-"], ["b"]),
        ('root ::= "a"{0} "b"{0,2} "c"{1,}"d"{2}', ["cdd", "bbccdd"], ["acdd", "bbbcdd", "cd"]),
        ('root ::= "a" | | "b" # or nothing\n\n# end', ["a", "", "b"], ["ab"]),
        ('root ::= (\n  "a" |\n "b"\n) "c"\r\nx ::= "y"', ["ac", "bc"], ["c", "a"]),
        ('root ::= x\nx ::= "a"\nx ::= "b"', ["b"], ["a"]),
        ('root ::= e\ne ::= e "+" e | [0-9]', ["1", "1+2+3"], ["+", "1+"]),
        ('root ::= "a|b:" "/" "\x7f"', ["a|b:/\x7f"], ["a"]),
        ('root ::= "#" #"x"\n', ["#"], ["#x"]),
    ],
)
def test_texts_follow_a_grammar(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, good: list[str], bad: list[str]
) -> None:
    known = compiler.compile(GrammarSource(GrammarKind.GBNF, grammar))
    assert [text for text in good + bad if takes(known, tokenizer, text)] == good


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        'x ::= "a"',
        "root ::= other",
        'root ::= "a',
        "root ::= [a",
        "root ::= []",
        "root ::= [z-a]",
        'root ::= "\\q"',
        'root ::= "\\u12"',
        'root ::= "\\ud800"',
        'root ::= "\\U00110000"',
        'root ::= "a"{3,2}',
        'root ::= * "a"',
        'root ::= "a"' + "*" * 11,
        'root ::= ("a"',
        'root ::= "a")',
        'root ::= "a" ::= "b"',
        'root = "a"',
        "root",
        "root ::= " + "(" * 101 + '"a"' + ")" * 101,
        "root ::= " + "(" * 200_000,
    ],
    ids=lambda each: each[:30],
)
def test_what_is_no_grammar_is_refused(grammar: str) -> None:
    with pytest.raises(GrammarError) as caught:
        gbnf_to_lark(grammar)
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


PIECES = st.sampled_from(
    [
        *'()|.*+?"[]-^\\#\n\r :=',
        "root",
        "::=",
        "root ::= ",
        "a",
        '"b"',
        "[c]",
        "{2}",
        "{1,",
        "\\u00",
    ]
)


@examples(300)
@given(st.lists(PIECES, max_size=40).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(GrammarError):
        assert re.match(r"%llguidance \{\}\n(start|[rR]_\d+): ", gbnf_to_lark(text))


@pytest.mark.parametrize(
    "text",
    [
        "root ::= " + '"a" | ' * 40_000,
        "root ::= " + "a " * 100_000 + '\na ::= "x"',
        "root ::= a0\n" + "\n".join(f"a{each} ::= a{each + 1}" for each in range(10_000)),
        "root ::= [" + "a" * 200_000 + "]",
        "root ::= " + '"' * 200_001,
        "root ::= " + "{" * 200_000,
        'root ::= "a"' + "*" * 200_000,
    ],
    ids=lambda each: each[:20],
)
def test_no_text_takes_long(text: str) -> None:
    started_s = time.process_time()
    with contextlib.suppress(GrammarError):
        gbnf_to_lark(text)
    assert time.process_time() - started_s < 3.0
