"""What is in the cache is not computed again, and that does not show in the bits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_protocol.ids import I32Array
from dflash_runtime import Engine
from dflash_runtime.compute.cpu import CpuBackend
from dflash_runtime.compute.reference import ReferenceBackend
from dflash_runtime.engine.arguments import chunk_bounds
from dflash_runtime.engine.reuse import SequenceReuse
from support.logprobs import bits_of
from support.random_models import BLOCK_32_SHAPE, write_qwen3moe

CHUNK = 8


def ids(*token_ids: int) -> I32Array:
    return np.array(token_ids, np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, BLOCK_32_SHAPE, seed=4, tensor_type="Q8_0")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_reuse_does_not_show_in_the_bits(
    model: Path, backend: str, kv_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (CpuBackend, ReferenceBackend):
        monkeypatch.setattr(kind, "chunking", replace(kind.chunking, preferred=CHUNK))
    random = np.random.default_rng(1)
    base = [int(i) for i in random.integers(0, BLOCK_32_SHAPE.vocab_size, 60)]
    with (
        Engine.open(model, backend=backend, kv_type=kv_type) as engine,
        Engine.open(model, backend=backend, kv_type=kv_type) as other,
    ):
        first = bits_of(engine, base[:40], reuse=True)
        conversation = [*base[:40], *(token[0] for token in first), *base[40:45]]
        num_reused = []
        for prompt in (
            conversation,  # what was written is in the cache too
            conversation,  # the very same
            base[:20],  # shorter than what is there
            [*base[:20], *base[50:]],
            [*base[:13], 7, *base[14:30]],
            base[:1],
            [*base[:40], 3, 4],
        ):
            assert bits_of(engine, prompt, reuse=True) == bits_of(other, prompt, reuse=False)
            num_reused.append(engine.last_generation.num_reused_tokens)
            assert engine.last_generation.num_prompt_tokens == len(prompt)
        assert other.last_generation.num_reused_tokens == 0
    expected = {
        "cpu": [45, len(conversation) - 1, 19, 20, 13, 0, 1],
        "reference": [40, 48, 16, 16, 8, 0, 0],
    }
    assert num_reused == expected[backend]


def test_what_was_computed_for_one_scope_is_not_reused_in_another(model: Path) -> None:
    prompt = list(range(40))
    with Engine.open(model, backend="cpu") as engine:

        def num_reused(scope: str = "") -> int:
            for _ in engine.generate(
                prompt, 2, ignore_eos=True, reuse_prefix=True, prefix_scope=scope
            ):
                pass
            return engine.last_generation.num_reused_tokens

        assert [num_reused("a") for _ in range(2)] == [0, 39]
        # Nor is it there again once the first one comes back.
        assert [num_reused(scope) for scope in "bbaab"] == [0, 39, 0, 39, 0]
        assert [num_reused() for _ in range(2)] == [0, 39]
        engine.logits(prompt)
        assert num_reused("a") == 0
        engine.logits(prompt)
        assert num_reused() == 39


def test_a_run_that_was_cancelled_within_a_chunk_leaves_nothing_wrong(model: Path) -> None:
    prompt = list(range(50))
    with Engine.open(model, backend="reference") as engine:
        expected = bits_of(engine, prompt, reuse=False)
        calls = itertools.count()
        cancelled = engine.generate(
            [*prompt[:30], *prompt[:20]], 5, is_cancelled=lambda: next(calls) == 2
        )
        assert list(cancelled) == []
        assert engine.last_generation.finish_reason == "cancelled"
        assert next(calls) == 3  # layers: it is asked no more
        assert bits_of(engine, prompt, reuse=True) == expected
        assert engine.last_generation.num_reused_tokens == 0


def test_a_cancelled_generation_ends_within_a_token(model: Path) -> None:
    with Engine.open(model, backend="reference") as engine:
        wanted = 4
        got: list[int] = []
        for token in engine.generate(
            [1, 2], 50, ignore_eos=True, is_cancelled=lambda: len(got) >= wanted
        ):
            got.append(token.token_id)
        assert len(got) == wanted
        assert engine.last_generation.finish_reason == "cancelled"
        assert len(bits_of(engine, [1, 2], reuse=True)) == 6


def test_log_probabilities_are_those_of_the_logits(model: Path) -> None:
    with Engine.open(model, backend="reference") as engine:
        logits = engine.logits([5, 6, 7])[-1].astype(np.float64)
        (token,) = engine.generate([5, 6, 7], 1, ignore_eos=True, top_logprobs=3)
    assert token.logprobs is not None
    expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    assert token.logprobs.logprob == pytest.approx(expected[token.token_id], abs=1e-6)
    order = np.argsort(-logits, kind="stable")[:3]
    assert [token_id for token_id, _ in token.logprobs.top] == order.tolist()
    assert [lp for _, lp in token.logprobs.top] == pytest.approx(expected[order].tolist())


def cached_prefix(num_positions: int, *, invariant_from: int | None) -> SequenceReuse:
    """Of a cache that can be cut anywhere, and is not used."""
    cache: Any = None
    return SequenceReuse(cache, num_positions, invariant_from=invariant_from, can_be_cut=True)


@given(data=st.data(), invariant_from=st.sampled_from([None, 1, 3]))
def test_what_is_kept_is_what_would_be_computed_again(
    data: st.DataObject, invariant_from: int | None
) -> None:
    prefix = cached_prefix(64, invariant_from=invariant_from)
    computed: dict[int, tuple[int, tuple[int, int]]] = {}  # position: token, its chunk
    for _ in range(data.draw(st.integers(1, 6))):
        size = data.draw(st.integers(1, 40))
        prompt = np.array(data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)))
        wanted = list(chunk_bounds(size, None, CHUNK))
        boundary = data.draw(st.sampled_from([0, *(last for _, last in wanted[:-1])]))
        ranges = prefix.reusable(prompt.astype(np.int32), wanted, boundary=boundary)
        assert ranges[0][0] == 0
        reused = data.draw(st.sampled_from([place for each in ranges for place in each]))
        assert 0 <= reused < size
        chunk_of = {p: bounds for bounds in wanted for p in range(*bounds)}
        for position in range(reused):
            token, bounds = computed[position]
            assert token == prompt[position]
            if invariant_from is None:
                assert bounds == chunk_of[position]
            else:
                assert bounds[1] - bounds[0] >= invariant_from
        if invariant_from is not None and reused:
            assert (boundary if reused < boundary else size) - reused >= invariant_from
        for first, last in chunk_bounds(size - reused, None, CHUNK):
            first, last = reused + first, reused + last
            prefix.cut(first)
            computed = {p: each for p, each in computed.items() if p < first}
            if data.draw(st.integers(0, 9)) == 0:
                break  # it failed
            prefix.add(first, prompt[first:last].astype(np.int32))
            computed |= {p: (int(prompt[p]), (first, last)) for p in range(first, last)}
    assert prefix.num_cached <= len(computed)


def test_nothing_is_known_of_a_run_once_another_class_has_computed_some_of_it() -> None:
    cache: Any = None
    counted = [0]
    prefix = SequenceReuse(
        cache, 64, invariant_from=1, can_be_cut=True, num_other_class=lambda: counted[0]
    )
    for _ in range(2):
        prefix.enter("", "map")
        prefix.cut(3)
        prefix.add(prefix.num_cached, np.arange(prefix.num_cached, 9, dtype=np.int32))
        assert prefix.num_cached == 9
        counted[0] += 1
        prefix.cut(5)
        prefix.add(5, ids(5, 6, 7))
        prefix.add(8, ids(8))
        assert prefix.num_cached == 5


def test_tokens_one_by_one_do_not_make_it_grow() -> None:
    prefix = cached_prefix(1000, invariant_from=1)
    for position in range(1000):
        prefix.cut(position)
        prefix.add(position, ids(position))
    assert prefix.num_cached == 1000
    assert len(prefix._bounds) == 1
    assert prefix.reusable(np.arange(1000, dtype=np.int32), [])[-1][-1] == 999


@given(
    num_tokens=st.integers(0, 300),
    smallest=st.integers(1, 9),
    default=st.integers(18, 40),
    chunk=st.none() | st.lists(st.integers(1, 100), min_size=1),
)
def test_chunks_cover_all_and_none_is_too_small_or_too_large(
    num_tokens: int, smallest: int, default: int, chunk: list[int] | None
) -> None:
    bounds = list(chunk_bounds(num_tokens, chunk, default, smallest=smallest, largest=default))
    assert [position for each in bounds for position in range(*each)] == list(range(num_tokens))
    sizes = [last - first for first, last in bounds]
    assert all(0 < size <= default for size in sizes)
    if chunk is None:
        assert all(size >= min(smallest, num_tokens) for size in sizes)
