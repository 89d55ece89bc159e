"""Where words end in each kind of byte-level vocabulary: where llama.cpp ends them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from dflash_adapters.text import byte_level as tokenizer_byte_level
from dflash_adapters.text.words import DIALECTS
from support import gguf_builder as raw
from support.compared_tokenizers import Compared, compared
from support.texts import random_text, random_texts
from support.vocabularies import SPECIAL, boundary

# One name for each way of finding words; what others stand for is what one of these does.
NAMES = ("qwen2", "qwen35", "laguna", "llama-bpe", "glm4", "llama4", "olmo", "default")


@pytest.fixture(scope="module", params=NAMES)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compared]:
    vocabulary = boundary(request.param)
    ids = {text: token_id for token_id, text in enumerate(vocabulary.tokens)}
    for name, text in (("bos", "<|endoftext|>"), ("eos", "<|im_end|>")):
        key = f"tokenizer.ggml.{name}_token_id"
        vocabulary.extra[key] = raw.scalar(raw.UINT32, ids[text])
    yield from compared(vocabulary, tmp_path_factory.mktemp("words"))


def around(character: str) -> str:
    """A text in which it stands by letters, numbers, spaces and itself."""
    return f"e{character}e{character}{character}1{character}{character}1 {character}\n"


def test_every_name_is_compared_or_means_what_one_that_is_does() -> None:
    compared_ones = [DIALECTS[name] for name in NAMES]
    assert all(dialect in compared_ones for dialect in DIALECTS.values())
    assert len({*compared_ones}) == len(NAMES)


@pytest.mark.parametrize("seed_and_count", random_texts(100))
def test_ids_are_llama_cpps_for_random_texts(
    both: Compared, seed_and_count: tuple[int, int]
) -> None:
    seed, count = seed_and_count
    rng = random.Random(seed)
    for _ in range(count):
        both.check(random_text(rng, [*SPECIAL]))


def test_words_end_where_llama_cpp_ends_them(both: Compared) -> None:
    characters = [*map(chr, range(1, 0x800)), *map(chr, range(0x800, 0x1F000, 111))]
    characters += "\u200b\u200d\u2028\u2029\u202f\u205f\u3000\ufeff\ufe0f\u1c89\U00010d40\U0010ffff"
    _check_around(both, characters)


@pytest.mark.slow
@pytest.mark.parametrize(
    "codes",
    [
        *(range(1, 1 << 16), range(1 << 16, 2 << 16), range(14 << 16, 15 << 16)),
        range(2 << 16, 4 << 16, 11),  # ideographs and nothing else
    ],
    ids=["plane 0", "plane 1", "plane 14", "planes 2 and 3"],
)
def test_words_end_where_llama_cpp_ends_them_for_every_character(
    both: Compared, codes: range
) -> None:
    _check_around(both, [*map(chr, codes)])


def test_long_texts_have_the_ids_that_llama_cpp_gives_them(
    both: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They go to the library in pieces, here in many: with places to cut them at, and without.
    monkeypatch.setattr(tokenizer_byte_level, "_PIECE", 100)
    rng = random.Random(1)
    both.check(" ".join(random_text(rng, []) for _ in range(400)))
    both.check("漢1" * 10_000)
    monkeypatch.setattr(tokenizer_byte_level, "_MAX_PIECE", 200)
    assert both.ours.encode("漢1" * 101) == 2 * both.ours.encode("漢1" * 50) + both.ours.encode(
        "漢1"
    )


def test_what_begins_and_ends_a_text_is_llama_cpps(both: Compared) -> None:
    for text in ("", "Hello", "<|im_start|>a"):
        expected = both.theirs.tokenize(text, add_special=True)
        assert both.ours.encode(text, add_special=True) == expected


@pytest.mark.wide(1)
@pytest.mark.parametrize("character", ["a", " ", "éA"])
def test_a_text_of_one_character_takes_linear_time(both: Compared, character: str) -> None:
    text = character * (100_000 // len(character))
    start = time.process_time()
    assert both.ours.decode(both.ours.encode(text)) == text
    assert time.process_time() - start < 2.0


@pytest.mark.slow
@pytest.mark.parametrize("character", [" ", " \n"])
def test_a_run_that_is_longer_than_the_library_can_match_is_cut(
    both: Compared, character: str
) -> None:
    text = character * (12_000_000 // len(character))
    assert both.ours.decode(both.ours.encode(text)) == text


def _check_around(both: Compared, characters: list[str]) -> None:
    known = [c for c in characters if not "\ud800" <= c < "\ue000"]
    assert known
    for start in range(0, len(known), 64):
        both.check("".join(around(c) for c in known[start : start + 64]))
