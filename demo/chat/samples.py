"""Answers as tokens, packed into rows for training."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo.chat.talks import talks
from demo.chat.template import answer_text, prompt_of

NO_LOSS = -100
"""The target of positions whose next token is not the assistant's."""
_UNTHINKING_SHARE = 0.15


@dataclass(frozen=True)
class Sample:
    """Tokens of a prompt and its answer; `n_prompt` of them are not learned."""

    tokens: list[int]
    n_prompt: int


def samples(n_talks: int, tokenizer: Tokenizer, *, seed: int) -> list[Sample]:
    """All answers of that many talks of training."""
    rng = random.Random(seed)
    prompts: list[str] = []
    answers: list[str] = []
    for talk in islice(talks(seed), n_talks):
        for asked in talk.asked():
            thinks = rng.random() >= _UNTHINKING_SHARE
            prompts.append(prompt_of(asked, thinks=thinks))
            answers.append(answer_text(asked.answer, thinks=thinks))
    found: list[Sample] = []
    for at in range(0, len(prompts), 1024):
        some = [
            [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]
            for texts in (prompts[at : at + 1024], answers[at : at + 1024])
        ]
        found += [
            Sample(prompt + answer, len(prompt)) for prompt, answer in zip(*some, strict=True)
        ]
    return found


Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def batches(
    made: list[Sample], length: int, per_batch: int, *, pad: int, seed: int
) -> Iterator[Rows]:
    """Endless batches of tokens and targets, each (per_batch, length).

    Samples stand whole in rows, one after the other, in a new order each time; targets are the next
    tokens of answers.
    """
    rng = np.random.default_rng(seed)
    usable = [each for each in made if len(each.tokens) <= length]
    if not usable:
        raise ValueError(f"no answer fits into {length} tokens")
    while True:
        rows = _packed((usable[i] for i in rng.permutation(len(usable))), length, pad)
        while len(chunk := [*islice(rows, per_batch)]) == per_batch:
            yield np.stack([row for row, _ in chunk]), np.stack([each for _, each in chunk])


def _packed(made: Iterable[Sample], length: int, pad: int) -> Iterator[Rows]:
    row, target, at = _empty(length, pad)
    for each in made:
        n = len(each.tokens)
        if at + n > length:
            yield row, target
            row, target, at = _empty(length, pad)
        row[at : at + n] = each.tokens
        target[at + each.n_prompt - 1 : at + n - 1] = each.tokens[each.n_prompt :]
        at += n
    yield row, target


def _empty(length: int, pad: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
    return np.full(length, pad, np.int64), np.full(length, NO_LOSS, np.int64), 0
