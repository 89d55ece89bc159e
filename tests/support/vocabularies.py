"""Vocabularies as they stand in a file, sound or not.

Knows nothing of the packages under test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import gguf

from support import gguf_builder as raw
from support.gguf_builder import GgufBuilder
from support.random_models import byte_characters

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = (int(t) for t in list(gguf.TokenType)[:5])


@dataclass
class RawVocabulary:
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


def small(**extra: bytes) -> RawVocabulary:
    """256 bytes, two merges, and an end-of-turn token, the last."""
    tokens: list[str | bytes] = [*byte_characters(), "he", "hel", "<|im_end|>"]
    return RawVocabulary(
        tokens,
        [NORMAL] * 258 + [CONTROL],
        ["h e", "he l"],
        extra={f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    )
