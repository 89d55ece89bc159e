"""What is shown of an answer while it is written: whole characters, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text.answers import (
    AnswerEvent,
    AnswerFormat,
    AnswerParser,
    Content,
    answer_parser,
)
from dflash_adapters.text.tokenizer import Tokenizer, load_tokenizer
from dflash_runtime.engine.answer_text import Delta, TextAssembler, TextRules, joined_events
from dflash_runtime.engine.engine import GeneratedToken
from support.compared_tokenizers import load
from support.vocabularies import CONTROL, small


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token for each byte, and "he", "hel" and a control token."""
    with GgufFile.open(small().write(tmp_path_factory.mktemp("v") / "v.gguf")) as file:
        tokenizer = load_tokenizer(file)
    assert tokenizer is not None
    return tokenizer


def assembled(
    tokenizer: Tokenizer, token_ids: Sequence[int], stops: Sequence[str] = ()
) -> tuple[list[Delta], TextAssembler]:
    assembler = TextAssembler(tokenizer, TextRules(tuple(stops)))
    deltas = []
    for token_id in token_ids:
        deltas.append(assembler.push(GeneratedToken(token_id, "")))
        if assembler.is_stopped:
            break
    deltas.append(assembler.finish())
    return [delta for delta in deltas if delta is not None], assembler


def shown(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def until_stop(text: str, stops: Sequence[str]) -> str:
    """By the definition: the stop string that is whole first ends the text before it."""
    for length in range(len(text) + 1):
        ends = [stop for stop in stops if text[:length].endswith(stop)]
        if ends:
            return text[: length - max(map(len, ends))]
    return text


def test_characters_come_whole_though_each_byte_is_a_token(tokenizer: Tokenizer) -> None:
    text = "né 😀 日本"
    deltas, _ = assembled(tokenizer, byte_tokens(text))
    assert shown(deltas) == text
    assert [delta.text for delta in deltas if delta.text] == list(text)


def byte_tokens(text: str) -> list[int]:
    """One token for each byte."""
    by_bytes = {BYTES[i]: i for i in range(256)}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


BYTES: dict[int, bytes] = {}


@pytest.fixture(scope="module", autouse=True)
def known_bytes(tokenizer: Tokenizer) -> None:
    BYTES.update({i: tokenizer.token_bytes(i) for i in range(256)})


def test_a_character_that_is_cut_off_at_the_end_is_dropped(tokenizer: Tokenizer) -> None:
    deltas, _ = assembled(tokenizer, byte_tokens("ab😀")[:-1])
    assert shown(deltas) == "ab"
    assert sum(len(delta.tokens) for delta in deltas) == 5


def test_bytes_that_are_no_text_are_replaced_and_end_nothing(tokenizer: Tokenizer) -> None:
    tokens = [*byte_tokens("a"), next(i for i, b in BYTES.items() if b == b"\xff")]
    assert shown(assembled(tokenizer, [*tokens, *byte_tokens("b")])[0]) == "a�b"


def test_control_tokens_are_not_shown(tokenizer: Tokenizer) -> None:
    assert shown(assembled(tokenizer, [*byte_tokens("a"), 258, *byte_tokens("b")])[0]) == "ab"


def test_a_stop_string_across_tokens_is_never_shown(tokenizer: Tokenizer) -> None:
    deltas, assembler = assembled(tokenizer, byte_tokens("one\n\ntwo"), ["\n\nt", "zzz"])
    assert (shown(deltas), assembler.is_stopped) == ("one", True)
    assert sum(len(delta.tokens) for delta in deltas) == 3


def test_what_only_began_like_a_stop_string_is_shown(tokenizer: Tokenizer) -> None:
    deltas, assembler = assembled(tokenizer, byte_tokens("a\n\nb\n"), ["\n\nt"])
    assert (shown(deltas), assembler.is_stopped) == ("a\n\nb\n", False)


def test_a_token_that_is_cut_by_a_stop_string_counts(tokenizer: Tokenizer) -> None:
    hel = 257
    deltas, assembler = assembled(tokenizer, [hel, hel], ["lh"])
    assert (shown(deltas), assembler.is_stopped) == ("he", True)
    assert [token.token_id for delta in deltas for token in delta.tokens] == [hel]


def test_of_a_chat_in_channels_the_final_one_is_text(tmp_path: Path) -> None:
    markers = ["<|start|>", "<|channel|>", "<|message|>"]
    vocabulary = small()
    assert vocabulary.types is not None
    vocabulary.tokens += markers
    vocabulary.types += [CONTROL] * len(markers)
    tokenizer = load(vocabulary, tmp_path)
    reply = "<|channel|>analysis<|message|>hm<|start|>a<|channel|>final<|message|>hello"
    ids = tokenizer.encode(reply)
    for is_chat, text in ((True, "he"), (False, reply.removesuffix("llo"))):
        assembler = TextAssembler(tokenizer, TextRules(("llo",), is_chat=is_chat))
        deltas = [assembler.push(GeneratedToken(token_id, "")) for token_id in ids]
        assert shown([delta for delta in deltas if delta is not None]) == text
        assert assembler.is_stopped
        assert sum(len(delta.tokens) for delta in deltas if delta is not None) == len(ids) - 2


@given(data=st.data())
def test_text_stops_and_tokens_agree_with_the_definition(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    alphabet = st.sampled_from("abé😀")
    text = data.draw(st.text(alphabet, max_size=30))
    stops = data.draw(st.lists(st.text(alphabet, min_size=1, max_size=5), max_size=3))
    deltas, assembler = assembled(tokenizer, byte_tokens(text), stops)
    expected = until_stop(text, stops)
    assert shown(deltas) == expected
    assert assembler.is_stopped == (expected != text or any(text.endswith(s) for s in stops))
    # A token comes with the delta in which its text ends.
    num_bytes = sum(len(BYTES[token.token_id]) for delta in deltas for token in delta.tokens)
    assert num_bytes == len(expected.encode())
    offsets = [offset for delta in deltas for offset in delta.offsets]
    assert offsets == sorted(offsets)
    assert not offsets or offsets[-1] < max(1, len(expected))


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a STOP"}}\n</tool_call>'
PARTS = st.sampled_from(
    ["<think>", "</think>", CALL, "<tool_call>", "a", "ab", " ", "\n", "STOP", "ST", "OP", "é", "<"]
)


def hermes() -> AnswerParser:
    return answer_parser(AnswerFormat.HERMES, tools={"look": {}})


@given(st.lists(PARTS, max_size=12), st.lists(st.sampled_from(["STOP", "\n\n", "ba", "é "])))
def test_of_an_answer_that_is_divided_the_content_has_stop_strings(
    tokenizer: Tokenizer, parts: list[str], stops: list[str]
) -> None:
    text = "".join(parts)
    parser = hermes()
    expected: list[AnswerEvent] = []
    for event in joined_events([*parser.push(text), *parser.finish()]):
        if not isinstance(event, Content):
            expected.append(event)
            continue
        before = until_stop(event.text, stops)
        expected += [Content(before)] if before else []
        if before != event.text or any(before.endswith(stop) for stop in stops):
            break
    rules = TextRules(tuple(stops), is_chat=True, shown=(), parser=hermes)
    assembler = TextAssembler(tokenizer, rules)
    deltas, tokens = [], byte_tokens(text)
    for token_id in tokens:
        deltas.append(assembler.push(GeneratedToken(token_id, "")))
        if assembler.is_stopped:
            break
    deltas.append(assembler.finish())
    found = [delta for delta in deltas if delta is not None]
    assert joined_events(event for delta in found for event in delta.events) == expected
    num_tokens = sum(len(delta.tokens) for delta in found)
    if not assembler.is_stopped:
        assert num_tokens == len(tokens)
    else:  # all before the stop string, and none of it
        taken = text.encode()[:num_tokens].decode()
        assert text[len(taken) :].startswith(assembler.stop or "?")
        assert taken.rstrip().endswith(before.rstrip())


def test_a_stop_string_that_is_certain_only_at_the_end_ends_the_answer_there(
    tokenizer: Tokenizer,
) -> None:
    rules = TextRules(("STOP",), is_chat=True, shown=(), parser=hermes)
    assembler = TextAssembler(tokenizer, rules)
    begun = CALL[:-13]  # it may be a call until the end
    for token_id in byte_tokens(begun):
        assembler.push(GeneratedToken(token_id, ""))
        assert not assembler.is_stopped
    last = assembler.finish()
    assert assembler.stop == "STOP"
    assert last is not None
    assert last.text == begun.partition("STOP")[0]
    assert len(last.tokens) == len(last.text)


def test_reasoning_that_is_no_part_of_an_answer_is_left_out(tokenizer: Tokenizer) -> None:
    rules = TextRules(("h",), is_chat=True, shown=(), parser=hermes, has_reasoning=False)
    assembler = TextAssembler(tokenizer, rules)
    text = "<think>hm</think>yes"
    pushed = [assembler.push(GeneratedToken(each, "")) for each in byte_tokens(text)]
    deltas = [delta for delta in [*pushed, assembler.finish()] if delta is not None]
    assert [event for delta in deltas for event in delta.events] == [
        Content(character) for character in "yes"
    ]
    assert sum(len(delta.tokens) for delta in deltas) == len(text)
