"""Texts that engines are measured with: of planted routing where a file has it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench.planted_routing import Walk

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text.tokenizer import load_tokenizer
from dflash_protocol.errors import ModelFileError
from dflash_runtime import Engine

CONTEXT_OF_DECODE = 448
_LATER = 1152
"""Decode behind this is, on average, where plans predict it: in the middle of 1,000:400."""
LEARNT_TOKENS = 400


@dataclass(frozen=True)
class Texts:
    """What engines are measured with, and other texts, which heat is learnt on."""

    learnt: Sequence[Sequence[int]]
    decode: Sequence[Sequence[int]]
    """Prompts that decode goes on behind."""
    later: Sequence[Sequence[int]]
    """The same, longer."""
    prompts: Mapping[int, Sequence[Sequence[int]]]
    """By their length."""
    request: Sequence[int] = ()
    """The prompt of the planned request."""
    decoded: int = 96
    """Tokens of a sample of decode."""
    written: int = 400
    """Tokens that are written in the request, and behind each prompt of `learnt`."""

    @classmethod
    def of(
        cls,
        walk: Walk,
        *,
        lengths: Sequence[int] = (512, 4096),
        samples: int = 2,
        decodes: int | None = None,
        request: tuple[int, int] | None = (1000, 400),
    ) -> Texts:
        """Stretches of a walk, `samples` of each kind, `decodes` (by default as many) of those that
        decode goes on behind. Those that heat is learnt on overlap no other. Raises: ValueError if
        the walk is too short."""
        step = len(walk.token_ids) // 50
        decodes = samples if decodes is None else decodes
        return cls(
            [walk.stretch(step * number, 2048) for number in (8, 10)],
            [walk.stretch(step * number, CONTEXT_OF_DECODE) for number in range(decodes)],
            [walk.stretch(step * (14 + number), _LATER) for number in range(decodes)],
            {
                length: [walk.stretch(step * (17 + 2 * n), length) for n in range(samples)]
                for length in lengths
            },
            walk.stretch(step * 40, request[0]) if request else (),
            written=request[1] if request else LEARNT_TOKENS,
        )


def walk_of(path: Path) -> Walk:
    """What is read by a model: the walk of a file with planted routing, else the documents of this
    project, else, without a tokenizer, its tokens in any order."""
    with GgufFile.open(path) as file:
        try:
            return Walk.of_file(path)
        except ModelFileError:
            tokenizer = load_tokenizer(file)
            if tokenizer is None:
                return Walk.of(file.tensor("token_embd.weight").num_rows, 0)
    text = "\n".join(each.read_text() for each in _documents())
    return Walk(np.array(tokenizer.encode(text, parse_special=False), np.int32))


def _documents() -> list[Path]:
    root = Path(__file__).parents[1]
    names = "bench/README.md", "*.md", "docs/*.md"
    return [path for name in names for path in sorted(root.glob(name))]


def written_s(engine: Engine, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], float]:
    """A text, and the seconds of each token after its first."""
    times, tokens = [], []
    for token in engine.generate(prompt, num_tokens, ignore_eos=True):
        times.append(time.perf_counter())
        tokens.append(token.token_id)
    return tokens, (times[-1] - times[0]) / (num_tokens - 1)
