"""Vocabularies as stored in a file, valid or not.

Does not import the packages under test.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import gguf

from support import gguf_builder as raw
from support.gguf_builder import GgufBuilder
from support.random_models import byte_characters

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (int(t) for t in gguf.TokenType)


@dataclass
class RawVocabulary:
    """The metadata of a vocabulary; tests change single fields."""

    tokens: list[str | bytes]
    types: list[int] | None
    merges: list[str | bytes] = field(default_factory=list)
    model: str = "gpt2"
    pre: str | None = "qwen2"
    scores: list[float] | None = None
    extra: dict[str, bytes] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        builder = GgufBuilder().add("tokenizer.ggml.model", raw.string(self.model))
        if self.pre is not None:
            builder.add("tokenizer.ggml.pre", raw.string(self.pre))
        builder.add("tokenizer.ggml.tokens", raw.strings(self.tokens))
        if self.types is not None:
            builder.add("tokenizer.ggml.token_type", raw.array(raw.INT32, self.types))
        if self.scores is not None:
            builder.add("tokenizer.ggml.scores", raw.array(raw.FLOAT32, self.scores))
        if self.model == "gpt2":
            builder.add("tokenizer.ggml.merges", raw.strings(self.merges))
        for key, value in self.extra.items():
            builder.add(key, value)
        return builder.write(path)


def small(**extra: bytes) -> RawVocabulary:
    """256 bytes, two merges, and an end-of-turn token, the last."""
    tokens: list[str | bytes] = [*byte_characters(), "he", "hel", "<|im_end|>"]
    return RawVocabulary(
        tokens,
        [NORMAL] * 258 + [CONTROL],
        ["h e", "he l"],
        extra={f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    )


def small_pieces() -> RawVocabulary:
    """Scored pieces: the usual three special tokens, 256 bytes, and an ``a``, the last."""
    return RawVocabulary(
        ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"],
        [UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256), NORMAL],
        model="llama",
        pre="default",
        scores=[0.0] * 260,
    )


SPECIAL = {
    "<|endoftext|>": CONTROL,
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    # As converters write them; the first is user-defined although it is a marker.
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
"""Special tokens of every kind, some of them part of others."""


def boundary(pre: str) -> RawVocabulary:
    """A vocabulary whose merges cross every possible word boundary: ids show where words end.

    Any two neighbouring bytes of two characters merge, in an order unlike that of the text, and
    some pairs of pairs do. It also has some words that no merges make.
    """
    alphabet = byte_characters()
    ascii_bytes, last, first = alphabet[:0x80], alphabet[0x80:0xC0], alphabet[0xC2:0xF5]
    pairs = list(product((*ascii_bytes, *last), (*ascii_bytes, *first)))
    pairs.remove(("k", ">"))  # a special token
    rng = random.Random(pre)
    rng.shuffle(pairs)
    ascii_pairs = ["".join(pair) for pair in product(ascii_bytes, ascii_bytes)]
    pairs += [(rng.choice(ascii_pairs), rng.choice(ascii_pairs)) for _ in range(3000)]
    whole = ["\u0120the", "HELLO", "'ll", "1234", "\u0120\u0120\u0120\u0120\u0120\u0120", "!!!!!"]
    normal = list(dict.fromkeys([*alphabet, *("".join(pair) for pair in pairs), *whole]))
    merges = [" ".join(pair) for pair in dict.fromkeys(pairs)]
    return _with_special(RawVocabulary([*normal], [NORMAL] * len(normal), [*merges], pre=pre))


def scored(seed: int, *, corpus: list[str]) -> RawVocabulary:
    """Pieces made by joining random neighbours in the corpus, and one for each byte. Many scores
    are equal, so that ties and the order of merges matter."""
    rng = random.Random(seed)
    lines = [list(line.replace(" ", "\u2581")) for line in corpus]
    pieces = dict.fromkeys(character for line in lines for character in line)
    for _ in range(3000):
        line = rng.choice(lines)
        place = rng.randrange(len(line) - 1)
        piece = line[place] + line[place + 1]
        pieces[piece] = None
        if rng.random() < 0.5 and len(piece) < 12:
            line[place : place + 2] = [piece]
    # Runs of one character, which merge in many ways.
    pieces |= dict.fromkeys("\u2581" * n for n in (2, 3, 4, 5, 8)) | dict.fromkeys(("aa", "aaa"))
    del pieces["a"]
    normal = list(pieces)
    rng.shuffle(normal)
    vocabulary = small_pieces()
    assert vocabulary.types is not None
    assert vocabulary.scores is not None
    vocabulary.tokens += normal
    vocabulary.types += [NORMAL] * len(normal)
    vocabulary.scores += [-float(rng.randrange(40)) for _ in normal]
    special = {text: kind for text, kind in SPECIAL.items() if text != "<unk>"}
    vocabulary.scores += [0.0] * len(special)
    return _with_special(vocabulary, special)


def _with_special(vocabulary: RawVocabulary, special: dict[str, int] = SPECIAL) -> RawVocabulary:
    assert vocabulary.types is not None
    vocabulary.tokens += special
    vocabulary.types += special.values()
    return vocabulary
