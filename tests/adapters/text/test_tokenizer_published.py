"""Vocabularies of published models, which llama.cpp's source has for its own tests.

They are no part of this repository: `bench.build_peer` unpacks that source.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.machine import BUILD

from support.compared_tokenizers import Compared, load_file
from support.llama_tokenizer import LlamaTokenizer
from support.texts import random_text, random_texts

QUICK = ("gpt-2", "llama-spm")
NAMES = (*QUICK, "qwen2", "qwen35", "llama-bpe", "baichuan")
UNNAMED = ("gpt-neox", "aquila")  # files that do not say which pre-tokenizer they mean


def each(*names: str) -> list[object]:
    return [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in names]


SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "<|eot_id|>"]


def vocabulary(name: str) -> Path:
    """Skips the test where there is none."""
    found = [*(BUILD / "peer" / "source").glob(f"*/vendor/llama.cpp/models/ggml-vocab-{name}.gguf")]
    if not found:
        pytest.skip("the source of llama.cpp is not unpacked: python -m bench.build_peer")
    return found[0]


@pytest.fixture(scope="module", params=each(*NAMES, *UNNAMED))
def both(request: pytest.FixtureRequest) -> Iterator[Compared]:
    path = vocabulary(request.param)
    with LlamaTokenizer(path) as theirs:
        yield Compared(load_file(path), theirs)


@pytest.mark.parametrize("seed_and_count", random_texts(100))
def test_ids_are_llama_cpps(both: Compared, seed_and_count: tuple[int, int]) -> None:
    seed, count = seed_and_count
    rng = random.Random(seed)
    for _ in range(count):
        both.check(random_text(rng, SPECIAL))


def test_4096_tokens_take_milliseconds(both: Compared) -> None:
    text = Path(__file__).read_text() * 8
    start = time.process_time()
    assert len(both.ours.encode(text)) > 4096
    assert time.process_time() - start < 0.2


@pytest.mark.parametrize("name", each(*(n for n in NAMES if n != "baichuan")))
def test_ids_are_those_of_the_models_own_tokenizers(name: str) -> None:
    path = vocabulary(name)
    tokenizer = load_file(path)
    texts = path.with_name(path.name + ".inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = path.with_name(path.name + ".out").read_text().splitlines()
    expected = [[int(token_id) for token_id in line.split()] for line in lines]
    assert len(expected) > 30
    for text, ids in zip(texts, expected, strict=False):
        assert tokenizer.encode(text, parse_special=False) == ids
