"""The tokenizer: the ids of llama.cpp, texts that come back, and files that contradict themselves."""

from __future__ import annotations

import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as TrainedTokenizer
from tokenizers import models, pre_tokenizers, trainers

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.tokenizer import DIALECTS, Tokenizer, load_tokenizer
from dflash_protocol.errors import ModelFileError, UnsupportedModel
from support import gguf_builder as raw
from support.gguf_builder import GgufBuilder
from support.llama_tokenizer import LlamaTokenizer
from support.random_models import byte_characters, write_sparse_30b

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = (int(t) for t in list(gguf.TokenType)[:5])

CORPUS = [
    "The quick brown fox jumps over the lazy dog; don't tell him, he'll know it's you've 1234.",
    "def tokenize(text: str) -> list[int]:\n    return [ord(c) for c in text]\n\n\n",
    "Größe, naïve café, façade. Привет, мир! Это проверка. 你好，世界。今天天气很好。こんにちは世界",
    "1 22 333 4444 55555 3.14159 0x7fff 10^-3 ½ ٣٤ 五  \t\t tabs\r\nand   many    spaces     ",
    "😀😃 👩‍👩‍👧 flags 🇩🇪🇫🇷 e\u0301 combining \u200b zero\u00a0width \ufeff",
] * 4

SPECIAL = {
    "<|endoftext|>": CONTROL,
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    # As converters write them: the first as user-defined although it is a marker.
    "<|fim_prefix|>": USER_DEFINED,
    "<|file_sep|>": USER_DEFINED,
    "<think>": USER_DEFINED,
    "</think>": USER_DEFINED,
    "<tool_call>": USER_DEFINED,
    "<tool_call>\n": USER_DEFINED,
    "k>": USER_DEFINED,
    "<unk>": UNKNOWN,
    "[PAD1]": UNUSED,
    "[PAD2]": UNUSED,
}

TEXTS = [
    "",
    " ",
    "\n",
    "Hello world",
    "Hello, y'all! How are you 😁 ?",
    "don't DON'T I'm i'M we'Ll they'VE he'd 'tis it'ſ ''s",
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


@dataclass
class Vocabulary:
    """What goes into a file; each test changes what it is about."""

    tokens: list[str | bytes]
    types: list[int] | None
    merges: list[str | bytes]
    model: str = "gpt2"
    pre: str | None = "qwen2"
    extra: dict[str, bytes] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        builder = GgufBuilder().add("tokenizer.ggml.model", raw.string(self.model))
        if self.pre is not None:
            builder.add("tokenizer.ggml.pre", raw.string(self.pre))
        builder.add("tokenizer.ggml.tokens", raw.strings(self.tokens))
        if self.types is not None:
            builder.add("tokenizer.ggml.token_type", raw.array(raw.INT32, self.types))
        builder.add("tokenizer.ggml.merges", raw.strings(self.merges))
        for key, value in self.extra.items():
            builder.add(key, value)
        return builder.write(path)


def small(**extra: bytes) -> Vocabulary:
    """256 bytes, two merges, and an end-of-turn token, the last."""
    tokens: list[str | bytes] = [*byte_characters(), "he", "hel", "<|im_end|>"]
    return Vocabulary(
        tokens,
        [NORMAL] * 258 + [CONTROL],
        ["h e", "he l"],
        extra={f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    )


def trained_vocabulary() -> Vocabulary:
    """A vocabulary trained on the corpus, with the special tokens after it."""
    trained = TrainedTokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=byte_characters(), show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    by_id = {token_id: text for text, token_id in trained.get_vocab().items()}
    normal = [by_id[token_id] for token_id in range(len(by_id))]
    # A merge makes exactly one token, so a token's own split tells the merge that made it.
    merges = [" ".join(_parts(trained, token)) for token in normal if len(token) > 1]
    first_special = len(normal)
    ids = {text: first_special + index for index, text in enumerate(SPECIAL)}
    return Vocabulary(
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


def _parts(trained: TrainedTokenizer, token: str) -> Sequence[str]:
    for left, right in _merges_of(trained):
        if left + right == token:
            return left, right
    raise AssertionError(token)


def _merges_of(trained: TrainedTokenizer) -> list[tuple[str, str]]:
    import json

    return [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
