"""Vocabularies that are refused, and how that is said."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text.tokenizer import load_tokenizer
from dflash_protocol.errors import ModelFileError, UnsupportedModel
from support import gguf_builder as raw
from support.examples import examples
from support.gguf_builder import GgufBuilder
from support.random_models import byte_characters
from support.vocabularies import (
    CONTROL,
    NORMAL,
    RawVocabulary,
    small,
    small_pieces,
)


def test_a_file_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    for builder in (
        GgufBuilder(),
        GgufBuilder().add("tokenizer.ggml.model", raw.string("none")),
        GgufBuilder().add("tokenizer.ggml.model", raw.string("no_vocab")),
    ):
        with GgufFile.open(builder.write(tmp_path / "m.gguf")) as file:
            assert load_tokenizer(file) is None


@pytest.mark.parametrize(
    ("model", "pre", "words"),
    [
        ("bert", None, " bert "),
        ("gpt2", "deepseek-v3", "pre-tokenizer deepseek-v3 "),
        ("gpt2", "a\nb", "pre-tokenizer a\\nb "),
    ],
)
def test_other_kinds_of_tokenizer_are_unsupported(
    tmp_path: Path, model: str, pre: str | None, words: str
) -> None:
    vocabulary = small()
    vocabulary.model, vocabulary.pre = model, pre
    with (
        GgufFile.open(vocabulary.write(tmp_path / "m.gguf")) as file,
        pytest.raises(UnsupportedModel) as caught,
    ):
        load_tokenizer(file)
    assert words in caught.value.reason


_Change = Callable[[RawVocabulary], None]


def changed(**attributes: Any) -> _Change:
    return lambda vocabulary: vars(vocabulary).update(attributes)


def with_token(text: str | bytes, token_type: int = NORMAL) -> _Change:
    def change(vocabulary: RawVocabulary) -> None:
        assert vocabulary.types is not None
        vocabulary.tokens.append(text)
        vocabulary.types.append(token_type)

    return change


def with_key(key: str, value: bytes) -> _Change:
    return lambda vocabulary: vocabulary.extra.update({f"tokenizer.{key}": value})


def without_a_byte(pieces: RawVocabulary) -> None:
    assert pieces.types is not None
    pieces.tokens[3 + 0x80], pieces.types[3 + 0x80] = "first", NORMAL


CONTRADICTIONS: dict[str, tuple[_Change, str, str]] = {
    "no tokens": (changed(tokens=[]), "tokens", "0 tokens"),
    "a byte without token": (
        lambda vocabulary: vocabulary.tokens.__setitem__(0, "first"),
        "tokens",
        r"\b0x00\b",
    ),
    "the same token twice": (with_token("hel"), "tokens", r"\b257\b.*\b259\b"),
    "an empty token": (with_token(""), "tokens", r"token 259\b.*\b0 bytes"),
    "a very long token": (with_token("x" * 4097), "tokens", r"token 259\b.*\b4097 bytes"),
    "a token not UTF-8": (with_token(b"\xff"), "tokens", r"token 259\b.*UTF-8"),
    "too few types": (changed(types=[NORMAL] * 258), "token_type", r"\b258 types\b.*\b259 tokens"),
    "type zero": (changed(types=[0] * 259), "token_type", r"token 0\b.*type 0\b"),
    "type six": (with_token("<0x0A>", 6), "token_type", r"token 259\b.*type 6\b"),
    "negative type": (changed(types=[-1] * 259), "token_type", "outside"),
    "merge of one": (changed(merges=["he"]), "merges", r"merge 0\b.*\btwo\b"),
    "merge of nothing": (changed(merges=["h "]), "merges", r"merge 0\b.*\btwo\b"),
    "merge not UTF-8": (changed(merges=[b"\xff h"]), "merges", r"merge 0\b.*UTF-8"),
    "unknown left": (changed(merges=["h e", "hx l"]), "merges", r"merge 1\b.* hx\b"),
    "unknown right": (changed(merges=["h ll"]), "merges", r"merge 0\b.* ll\b"),
    "unknown result": (changed(merges=["h x"]), "merges", r"merge 0\b.* hx\b"),
    "a line break in a merge": (changed(merges=["h \n"]), "merges", r"merge 0\b.* \\n"),
    "eos beyond the end": (
        with_key("ggml.eos_token_id", raw.scalar(raw.UINT32, 259)),
        "eos_token_id",
        r"\b259 .*\b0 … 258",
    ),
    "eot negative": (
        with_key("ggml.eot_token_id", raw.scalar(raw.INT32, -1)),
        "eot_token_id",
        r"-1 .*\b0 … ",
    ),
    "adds a token it has not": (
        with_key("ggml.add_bos_token", raw.scalar(raw.BOOL, 1)),
        "add_bos_token",
        r"\bbos\b",
    ),
    "template not UTF-8": (
        with_key("chat_template", raw.string(b"\xff")),
        "chat_template",
        "UTF-8",
    ),
}


PIECE_CONTRADICTIONS: dict[str, tuple[_Change, str, str]] = {
    "no tokens": (changed(tokens=[]), "tokens", "0 tokens"),
    "a byte without piece": (without_a_byte, "tokens", r"\b0x80\b"),
    "the same piece twice": (with_token("<s>"), "tokens", r"\b1\b.*\b260\b"),
    "an empty piece": (with_token(""), "tokens", r"token 260\b.*\b0 bytes"),
    "a byte spelled otherwise": (
        with_token("<0x0a>", 6),
        "token_type",
        r"token 260\b.*\bbyte\b.*<0x0a>",
    ),
    "a byte over two lines": (with_token("\n", 6), "token_type", r"\bbyte\b.*\\n"),
    "type zero": (changed(types=[0] * 260), "token_type", r"token 0\b.*type 0\b"),
    "type seven": (with_token("x", 7), "token_type", r"token 260\b.*type 7\b"),
    "type of 32 bits": (
        with_token("x", 2**31 - 1),
        "token_type",
        r"token 260\b.*type 2147483647\b",
    ),
    "negative type": (changed(types=[-1] * 260), "token_type", "outside"),
    "too many types": (changed(types=[NORMAL] * 261), "token_type", r"\b261 types\b.*\b260 tokens"),
    "too few scores": (changed(scores=[0.0] * 259), "scores", r"\b259 scores\b.*\b260 tokens"),
    "too many scores": (changed(scores=[0.0] * 261), "scores", r"\b261 scores\b.*\b260 tokens"),
    "a score that is none": (changed(scores=[float("nan")] * 260), "scores", "finite"),
    "an endless score": (changed(scores=[float("inf")] * 260), "scores", "finite"),
    "a space prefix of another type": (
        with_key("ggml.add_space_prefix", raw.scalar(raw.UINT32, 1)),
        "add_space_prefix",
        r"\bbool\b",
    ),
    "eos beyond the end": (
        with_key("ggml.eos_token_id", raw.scalar(raw.UINT32, 260)),
        "eos_token_id",
        r"\b260 .*\b0 … 259",
    ),
    "fim_pad beyond the end": (
        with_key("ggml.fim_pad_token_id", raw.scalar(raw.UINT32, 2**32 - 1)),
        "fim_pad_token_id",
        r"\b4294967295 .*\b0 … 259",
    ),
}


@pytest.mark.parametrize(
    ("make", "case", "contradictions"),
    [
        *((small, case, CONTRADICTIONS) for case in CONTRADICTIONS),
        *((small_pieces, case, PIECE_CONTRADICTIONS) for case in PIECE_CONTRADICTIONS),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(
    tmp_path: Path,
    make: Callable[[], RawVocabulary],
    case: str,
    contradictions: dict[str, tuple[_Change, str, str]],
) -> None:
    change, key, reason = contradictions[case]
    vocabulary = make()
    change(vocabulary)
    with (
        GgufFile.open(vocabulary.write(tmp_path / "m.gguf")) as file,
        pytest.raises(ModelFileError) as caught,
    ):
        load_tokenizer(file)
    assert caught.value.field is not None
    assert caught.value.field.removeprefix("tokenizer.").removeprefix("ggml.") == key
    assert re.search(reason, caught.value.reason)
    assert "\n" not in str(caught.value)
    with GgufFile.open(make().write(tmp_path / "m.gguf")) as file:
        assert load_tokenizer(file) is not None


def test_a_flood_of_special_tokens_is_refused(tmp_path: Path) -> None:
    vocabulary = small_pieces()
    assert vocabulary.types is not None
    count = 1 << 16
    vocabulary.tokens += [f"<{index}>" for index in range(count)]
    vocabulary.types += [CONTROL] * count
    vocabulary.scores = None
    with (
        GgufFile.open(vocabulary.write(tmp_path / "m.gguf")) as file,
        pytest.raises(ModelFileError, match=r"token_type\b.* 65539 .* 65536\b"),
    ):
        load_tokenizer(file)


def test_a_vocabulary_without_merges_key_is_refused(tmp_path: Path) -> None:
    builder = GgufBuilder().add("tokenizer.ggml.model", raw.string("gpt2"))
    builder.add("tokenizer.ggml.pre", raw.string("qwen2"))
    builder.add("tokenizer.ggml.tokens", raw.strings(list(byte_characters())))
    with (
        GgufFile.open(builder.write(tmp_path / "m.gguf")) as file,
        pytest.raises(ModelFileError, match=r"merges\b.*missing"),
    ):
        load_tokenizer(file)


# Any damage.


@pytest.fixture(scope="module", params=[small, small_pieces])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make: Callable[[], RawVocabulary] = request.param
    return make().write(tmp_path_factory.mktemp("damage") / "sound.gguf")


@examples(300)
@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=8)), max_size=3))
def test_a_damaged_vocabulary_is_refused_or_works(
    sound: Path, damage: list[tuple[int, bytes]]
) -> None:
    data = bytearray(sound.read_bytes())
    for place, replacement in damage:
        start = place % (len(data) - len(replacement))
        data[start : start + len(replacement)] = replacement
    path = sound.with_name("damaged.gguf")
    path.write_bytes(data)
    try:
        with GgufFile.open(path) as file:
            tokenizer = load_tokenizer(file)
    except ModelFileError:
        return
    if tokenizer is not None:
        for text in ("hello a\U0001f680 <|im_end|></s>", "<s>" * 9):
            ids = tokenizer.encode(text, add_special=True)
            assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)
            assert isinstance(tokenizer.decode(ids), str)
