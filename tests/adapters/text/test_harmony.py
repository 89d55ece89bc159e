"""Replies in harmony's channels: what readers see of them, however tokens split the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_adapters.text.harmony import HarmonyDecoder, reply_stream
from dflash_adapters.text.tokenizer import Tokenizer
from support import gguf_builder as raw
from support.compared_tokenizers import Compared, compared, load
from support.vocabularies import CONTROL, boundary, small

MARKERS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
ENDS = ("<|return|>", "<|call|>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    vocabulary = boundary("gpt-4o")
    assert vocabulary.types is not None
    vocabulary.tokens += (*MARKERS, *ENDS)
    vocabulary.types += [CONTROL] * 7
    for name, text in (("bos", "<|endoftext|>"), ("eos", "<|return|>")):
        place = vocabulary.tokens.index(text)
        vocabulary.extra[f"tokenizer.ggml.{name}_token_id"] = raw.scalar(raw.UINT32, place)
    found: list[Compared] = []
    for both in compared(vocabulary, tmp_path_factory.mktemp("harmony")):
        both.check_all_tokens()
        both.check("<|start|>system<|message|>Be brief.<|end|><|start|>assistant<|channel|>final")
        found.append(both)
    return found[0].ours


def shown(tokenizer: Tokenizer, text: str) -> str:
    stream = reply_stream(tokenizer)
    assert isinstance(stream, HarmonyDecoder)
    return "".join(map(stream.push, tokenizer.encode(text)))


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("<|channel|>final<|message|>Hello, 世界!", "Hello, 世界!"),
        (
            "<|channel|>analysis<|message|>The user greets.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Hi.",
            "Hi.",
        ),
        ("<|channel|>analysis<|message|>cut off", ""),
        ("<|channel|>final", ""),
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|end|>"
            "<|start|>assistant<|channel|>final <|constrain|>json<|message|>[1]",
            "[1]",
        ),
        ("<|channel|>final<|message|>a<|end|><|start|>assistant<|message|>b<|return|>", "ab"),
        ("no channels at all", "no channels at all"),
        ("<|channel|>finally<|message|>not this", ""),
        ("<|message|>x", "x"),
    ],
)
def test_a_reply_is_its_final_channel(tokenizer: Tokenizer, reply: str, expected: str) -> None:
    assert shown(tokenizer, reply) == expected


def test_a_character_that_a_hidden_message_cuts_does_not_reach_the_next(
    tokenizer: Tokenizer,
) -> None:
    stream = reply_stream(tokenizer)
    ids = tokenizer.encode("<|channel|>analysis<|message|>é")[:-1]
    ids += tokenizer.encode("<|end|><|start|>assistant<|channel|>final<|message|>é")
    assert "".join(map(stream.push, ids)) == "é"


def test_a_character_that_a_header_cuts_does_not_reach_its_message(tokenizer: Tokenizer) -> None:
    stream = reply_stream(tokenizer)
    ids = tokenizer.encode("<|channel|>final é")[:-1] + tokenizer.encode("<|message|>x")
    assert "".join(map(stream.push, ids)) == "x"


def test_replies_of_other_models_are_without_control_tokens(tmp_path: Path) -> None:
    tokenizer = load(small(), tmp_path)
    stream = reply_stream(tokenizer)
    assert "".join(map(stream.push, tokenizer.encode("hello<|im_end|>"))) == "hello"
