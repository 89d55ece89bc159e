"""DRY against its definition, token by token; and the texts across which nothing is repeated."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text.tokenizer import Tokenizer, load_tokenizer
from dflash_protocol.errors import SettingsError
from dflash_runtime.engine.breakers import DEFAULT_BREAKERS, BreakerCompiler, Breakers
from dflash_runtime.engine.demo_model import demo_model_path
from dflash_runtime.engine.dry import Dry, DryTable
from dflash_runtime.engine.penalties import Penalties, PenaltyTable
from support.examples import examples

VOCABULARY = 6


def table(dry: Dry, tokens: list[int]) -> DryTable:
    return DryTable(dry, np.array(tokens, np.int32), vocab_size=VOCABULARY)


def plain_limit(tokens: list[int], breakers: Breakers) -> int:
    """How many tokens are after the last breaker."""
    for place in range(len(tokens) - 1, -1, -1):
        tails = breakers.tails.get(tokens[place], frozenset())
        after = tokens[place + 1 :]
        fitting = [len(tail) for tail in tails if after[: len(tail)] == list(tail)]
        if fitting:
            return len(after) - max(fitting)
    return len(tokens)


def plain_penalties(dry: Dry, tokens: list[int]) -> dict[int, float]:
    """From the definition: for every place, how many tokens before it are the last ones."""
    tokens = tokens[len(tokens) - min(len(tokens), dry.window or len(tokens)) :]
    limit = plain_limit(tokens, dry.breakers)
    longest: dict[int, int] = {}
    for place in range(1, len(tokens)):
        length = 0
        while length < place and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        length = min(length, limit)
        if length >= dry.allowed_length:
            longest[tokens[place]] = max(length, longest.get(tokens[place], 0))
    if len(tokens) <= dry.allowed_length or limit < dry.allowed_length:
        return {}
    return {
        token_id: dry.multiplier * dry.base ** (length - dry.allowed_length)
        for token_id, length in longest.items()
        if () not in dry.breakers.tails.get(token_id, ())
    }


TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)
TAILS = st.frozensets(
    st.lists(st.integers(0, VOCABULARY - 1), max_size=3).map(tuple), min_size=1, max_size=3
)


@examples(200)
@given(
    st.builds(
        Dry,
        multiplier=st.just(0.5),
        base=st.sampled_from([1.0, 1.75]),
        allowed_length=st.integers(0, 3),
        window=st.sampled_from([None, 1, 2, 7, 30]),
        breakers=st.dictionaries(st.integers(0, 1), TAILS, max_size=2).map(Breakers),
    ),
    TOKENS,
    st.lists(st.integers(0, 3), max_size=90),
)
def test_what_goes_on_with_a_repetition_is_penalised(
    dry: Dry, prompt: list[int], written: list[int]
) -> None:
    found, tokens = table(dry, prompt), list(prompt)
    assert found.penalties() == pytest.approx(plain_penalties(dry, tokens))
    for token_id in written:
        found.accept(token_id)
        tokens.append(token_id)
        assert found.penalties() == pytest.approx(plain_penalties(dry, tokens))
    assert found.penalties() == table(dry, tokens).penalties()


def test_penalties_come_and_go() -> None:
    dry = Dry(multiplier=1.0, base=2.0)
    # 1 2 3 stood before, and 4 followed.
    assert table(dry, [1, 2, 3, 4, 5, 1, 2, 3]).penalties() == {4: 2.0}
    changes = PenaltyTable(
        Penalties(dry=dry), np.array([1, 2, 3, 4, 5, 1, 2, 3], np.int32), vocab_size=VOCABULARY
    )
    assert dict(zip(changes.changes.token_ids, changes.changes.offsets, strict=True)) == {4: 2.0}
    changes.accept(0)
    assert not changes.changes.offsets.any()


def test_long_repetitions_take_no_longer_and_stay_finite() -> None:
    dry = Dry(multiplier=100.0, base=100.0)
    started_s = time.perf_counter()
    found = DryTable(dry, np.ones(100_000, np.int32), vocab_size=VOCABULARY)
    for _ in range(3):
        found.accept(1)
        assert math.isfinite(np.float32(found.penalties()[1]))
    assert time.perf_counter() - started_s < 5


@pytest.mark.parametrize(
    "fields",
    [
        {"multiplier": -1.0}, {"multiplier": math.nan}, {"multiplier": True}, {"base": 0.5},
        {"base": 101.0}, {"allowed_length": -1}, {"window": -1},
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_out_of_range_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match="dry_"):
        Dry(**{"multiplier": 1.0, **fields})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with GgufFile.open(Path(demo_model_path())) as file:
        found = load_tokenizer(file)
    assert found is not None
    return found


def test_breakers_are_found_in_tokens_and_across_them(tokenizer: Tokenizer) -> None:
    compiler = BreakerCompiler(tokenizer)
    words = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    for text in (*DEFAULT_BREAKERS, "the end", "ß", "\n\n"):
        tails = compiler.compile((text,)).tails
        for token_id, word in enumerate(words):
            data = text.encode()
            expected: set[tuple[int, ...]] = {()} if data in word else set()
            for length in range(1, len(text)) if not expected else ():
                if word.endswith(text[:length].encode()):
                    rest = tokenizer.encode(text[length:], parse_special=False)
                    expected.add(tuple(rest[:20]))
            assert tails.get(token_id, frozenset()) == expected
    assert compiler.compile() is compiler.compile(DEFAULT_BREAKERS)
    for texts in (("",), ("x" * 41,), ("x",) * 65, ("x" * 40,) * 13):
        with pytest.raises(SettingsError, match="dry_sequence_breakers"):
            compiler.compile(texts)
