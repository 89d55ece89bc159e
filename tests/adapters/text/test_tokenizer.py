"""The tokenizer: llama.cpp's ids, texts that come back, and files that contradict themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as TrainedTokenizer
from tokenizers import models, pre_tokenizers, trainers

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text.tokenizer import load_tokenizer
from support import gguf_builder as raw
from support.compared_tokenizers import Compared, compared, load
from support.examples import examples
from support.random_models import byte_characters, write_sparse_30b
from support.texts import CORPUS
from support.vocabularies import (
    NORMAL,
    SPECIAL,
    UNUSED,
    RawVocabulary,
    small,
)

TEXTS = [
    "",
    " ",
    "\n",
    "Hello world",
    "Hello, y'all! How are you 😁 ?",
    "don't DON'T I'm i'M we'Ll they'VE he'd 'tis it'\u017f ''s",
    "  leading and   inner    runs\t\ttabs \n\n\n newlines\r\n\r\n  \n end  ",
    "a\u3000b\u00a0c\u2003d\u2028e\u0085f\u200bg\x0bh\x0ci\x1cj",
    "1 12 123 1234567890 ١٢٣ ½ Ⅷ ²³ 3.14 1,000",
    "a1b2c3 4d 5 e6",
    "!!! ??? ... --- === ,;: (x) [y] {z} \"q\" 'r' `s` ~~ a.b.c / \\ |",
    "camelCaseWords snake_case_words kebab-case-words",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n",
    "Ünïcödé Ελληνικά Русский עברית العربية हिन्दी ไทย 日本語 한국어 中文",
    "e\u0301 n\u0303 \u0301lone \u0e33 क\u094d\u0937",
    "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 \U0001f9d1\U0001f3ff‍\U0001f4bb",
    "\ufeffbom \ufffd replacement \x00 nul \x7f del",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nok<|im_end|>",
    "<think><think></think>k></think>k><tool_call>\n<tool_call><tool_call>\r",
    "<|im_start<|im_end|>|> <|im_start|><|im_start|>  <|endoftext|>",
    "<|fim_prefix|>x<|file_sep|>y<unk>[PAD1]<unk>",
    "<|im_end|>" * 50,
    "x" * 3000,
    " " * 3000,
    "\n" * 1000 + "a" + " \n" * 500,
    "ab" * 1000 + "é" * 1000 + "1" * 1000,
]


def trained_vocabulary() -> RawVocabulary:
    """A vocabulary trained on the corpus, with the special tokens after it."""
    trained = TrainedTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=byte_characters(), show_progress=False
    )
    trained.train_from_iterator(CORPUS * 8, trainer)
    model = json.loads(trained.to_str())["model"]
    normal = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(merge) for merge in model["merges"]]
    ids = {text: len(normal) + index for index, text in enumerate(SPECIAL)}
    return RawVocabulary(
        [*normal, *SPECIAL],
        [NORMAL] * len(normal) + list(SPECIAL.values()),
        list(merges),
        extra={
            "tokenizer.ggml.eos_token_id": raw.scalar(raw.UINT32, ids["<|im_end|>"]),
            "tokenizer.ggml.bos_token_id": raw.scalar(raw.UINT32, ids["<|endoftext|>"]),
            "tokenizer.ggml.padding_token_id": raw.scalar(raw.UINT32, ids["[PAD1]"]),
            "tokenizer.ggml.add_bos_token": raw.scalar(raw.BOOL, 0),
            "tokenizer.chat_template": raw.string("{{ messages }}"),
        },
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compared]:
    yield from compared(trained_vocabulary(), tmp_path_factory.mktemp("trained"))


# The oracle.


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_ids_are_llama_cpps(trained: Compared, text: str) -> None:
    trained.check(text)


def test_the_texts_use_merges_and_every_special_token(trained: Compared) -> None:
    used = {token_id for text in TEXTS for token_id in trained.ours.encode(text)}
    special = {trained.ours.encode(t)[0] for t, kind in SPECIAL.items() if kind != UNUSED}
    assert len(special) == len(SPECIAL) - 2
    assert special - {trained.ours.encode("k>")[0]} <= used
    assert len(used) > 200
    assert sum(len(trained.ours.token_bytes(token_id)) > 2 for token_id in used) >= 20


_any = st.characters(codec="utf-8")
_words = st.sampled_from([*SPECIAL, *"\n\r\t  '", "'s", "'LL", " the", "don't", "12", "\r\n", "<|"])


@examples(300)
@given(st.lists(_words | _any | st.text(_any, max_size=8), max_size=30).map("".join))
def test_ids_are_llama_cpps_for_any_text(trained: Compared, text: str) -> None:
    trained.check(text)
    ids = trained.ours.encode(text)
    assert trained.ours.fewest_tokens(text) <= len(ids)
    assert "".join(trained.ours.decoded(ids)) == trained.ours.decode(ids)


def test_what_every_token_stands_for_is_llama_cpps(trained: Compared) -> None:
    trained.check_all_tokens()
    assert {trained.ours.decode([i]) for i in trained.ours.stop_ids} == {
        *("<|im_end|>", "<|endoftext|>", "<|file_sep|>")
    }


# Decoding.


@given(st.lists(st.integers(0, 511), max_size=40))
def test_a_stream_gives_what_decode_gives(trained: Compared, numbers: list[int]) -> None:
    # Half of them special tokens or words, half of them bytes.
    token_ids = [n if n < 256 else trained.ours.vocab_size - 1 - n % 256 for n in numbers]
    for keep_special in (True, False):
        stream = trained.ours.stream(keep_special=keep_special)
        pieces = [stream.push(token_id) for token_id in token_ids]
        whole = "".join(pieces) + stream.flush()
        assert whole == trained.ours.decode(token_ids, keep_special=keep_special)
        assert stream.flush() == ""


def test_a_stream_holds_back_a_character_until_it_is_whole(tmp_path: Path) -> None:
    tokenizer = load(small(), tmp_path)
    stream = tokenizer.stream()
    assert [stream.push(byte) for byte in "a€b".encode()] == ["a", "", "", "€", "b"]
    assert stream.flush() == ""


def test_a_stream_replaces_invalid_bytes_as_soon_as_that_is_certain(tmp_path: Path) -> None:
    stream = load(small(), tmp_path).stream()
    assert stream.push(0xFF) == "\ufffd"
    assert stream.push(0xE2) == ""
    assert stream.push(ord("x")) == "\ufffdx"
    assert stream.push(0xE2) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(ord("y")) == "y"


def test_control_tokens_can_be_left_out_of_the_text(trained: Compared) -> None:
    ids = trained.ours.encode("<|im_start|>a<think>b<unk><|im_end|>")
    assert trained.ours.decode(ids) == "<|im_start|>a<think>b<unk><|im_end|>"
    assert trained.ours.decode(ids, keep_special=False) == "a<think>b"


def test_a_token_that_does_not_exist_is_the_callers_mistake(tmp_path: Path) -> None:
    tokenizer = load(small(), tmp_path)
    for token_id in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=r"token .* of 259"):
            tokenizer.token_bytes(token_id)
        with pytest.raises(ValueError, match=r"token .* of 259"):
            tokenizer.decode([0, token_id])


def test_a_normal_token_outside_the_byte_alphabet_is_plain_text(tmp_path: Path) -> None:
    vocabulary = small()
    vocabulary.tokens.append("你 好")
    assert vocabulary.types is not None
    vocabulary.types.append(NORMAL)
    assert load(vocabulary, tmp_path).token_bytes(259) == "你 好".encode()


# Encoding.


def test_lone_surrogates_count_as_replacement_characters(tmp_path: Path) -> None:
    tokenizer = load(small(), tmp_path)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "😀"


def test_special_tokens_are_added_only_when_asked(tmp_path: Path) -> None:
    true = raw.scalar(raw.BOOL, 1)
    vocabulary = small(
        add_bos_token=true,
        add_eos_token=true,
        bos_token_id=raw.scalar(raw.UINT32, 65),
        eos_token_id=raw.scalar(raw.UINT32, 66),
    )
    tokenizer = load(vocabulary, tmp_path)
    assert tokenizer.encode("x") == [ord("x")]
    assert tokenizer.encode("x", add_special=True) == [65, ord("x"), 66]
    assert load(small(), tmp_path).encode("x", add_special=True) == [ord("x")]


def test_what_the_file_says_of_its_special_tokens_is_kept(
    trained: Compared, tmp_path: Path
) -> None:
    assert trained.ours.bos_text == "<|endoftext|>"
    assert trained.ours.eos_text == "<|im_end|>"
    assert trained.ours.chat_template == "{{ messages }}"
    assert not trained.ours.adds_bos
    plain = load(
        small(eot_token_id=raw.scalar(raw.UINT32, 3), eom_token_id=raw.scalar(raw.INT32, 4)),
        tmp_path,
    )
    assert (plain.bos_id, plain.eos_id, plain.bos_text, plain.eos_text) == (None, None, "", "")
    assert plain.stop_ids == {3, 4, 258}
    assert plain.chat_template is None


def test_types_may_be_missing(tmp_path: Path) -> None:
    vocabulary = small()
    vocabulary.types = None
    tokenizer = load(vocabulary, tmp_path)
    assert tokenizer.encode("hello<|im_end|>") == [257, ord("l"), ord("o"), 258]


def test_a_merge_that_occurs_twice_keeps_its_first_rank(tmp_path: Path) -> None:
    vocabulary = small()
    vocabulary.tokens += ["el"]
    assert vocabulary.types is not None
    vocabulary.types += [NORMAL]
    vocabulary.merges = ["h e", "e l", "he l", "h e"]
    for both in compared(vocabulary, tmp_path):
        assert both.ours.encode("hel") == [257]
        both.check("hel")


# Cost.


def test_a_vocabulary_of_152k_loads_in_a_few_seconds(tmp_path: Path) -> None:
    with GgufFile.open(write_sparse_30b(tmp_path / "30b.gguf")) as file:
        start = time.process_time()
        tokenizer = load_tokenizer(file)
        assert time.process_time() - start < 4.0
        assert tokenizer is not None
        assert tokenizer.vocab_size == 151_936


def test_a_long_text_can_be_left_while_special_tokens_are_looked_for(trained: Compared) -> None:
    parts = trained.ours.encoded("a b<|im_end|>" * 10_000)
    assert [next(parts) for _ in range(len(SPECIAL) - 2)] == [[]] * (len(SPECIAL) - 2)
    assert sum(map(len, parts)) == len(trained.ours.encode("a b<|im_end|>")) * 10_000


def test_long_texts_without_a_break_take_linear_time(trained: Compared) -> None:
    start = time.process_time()
    for text in ("a" * 100_000, " " * 100_000, "\n" * 100_000, "!" * 100_000, " \n" * 50_000):
        assert trained.ours.decode(trained.ours.encode(text)) == text
    assert time.process_time() - start < 3.0


def test_the_library_is_imported_only_when_a_tokenizer_is_loaded() -> None:
    code = (
        "import sys, dflash_adapters.text.tokenizer; "
        "print(*({'tokenizers', 'gguf'} & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "\n"
