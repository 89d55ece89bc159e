"""An engine whose parent computes on a GPU, emulated here: what it says does not depend on how its
steps are run, and a close gives everything back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_protocol.errors import (
    ContextExceeded,
    DeviceOutOfMemory,
    SettingsError,
    UnsupportedModel,
)
from dflash_protocol.ids import Phase
from dflash_protocol.settings import load_settings
from dflash_runtime import Engine
from dflash_runtime.compute.gpu.backend import CupyBackend
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.run import captured_trees
from dflash_runtime.compute.gpu.run.captured_step import GraphStep
from dflash_runtime.compute.gpu.run.captured_trees import CapturedTrees
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import MAX_CHUNK, TINY, EmulatedGpus
from support.random_models import Qwen3MoeShape, write_qwen3moe

CONTEXT = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return write_qwen3moe(path, TINY, seed=4, tensor_type="Q8_0")


def prompt_of(size: int, seed: int = 1) -> list[int]:
    random = np.random.default_rng(seed)
    return [int(i) for i in random.integers(0, TINY.vocab_size, size)]


def opened(path: Path, **options: Any) -> Engine:
    return Engine.open(path, device="cuda:0", **{"context": CONTEXT, **options})


def generated(engine: Engine, prompt: Sequence[int], num_tokens: int, **options: Any) -> list[int]:
    options = {"ignore_eos": True, **options}
    return [token.token_id for token in engine.generate(prompt, num_tokens, **options)]


def test_recorded_steps_say_what_steps_one_by_one_say(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 5},
        {"top_logprobs": TINY.vocab_size},  # shows every bit of the logits
    ]

    def everything(engine: Engine) -> list[object]:
        return [
            [
                (token.token_id, token.logprobs)
                for token in engine.generate(prompt_of(20), 6, ignore_eos=True, **wish)
            ]
            for wish in wishes
        ]

    with opened(model) as engine:
        captured = everything(engine)
        decoded = engine.stats().owners["local"].phases[Phase.DECODE].pairs
        assert decoded == 3 * 5 * TINY.num_layers * TINY.num_experts_used
        hits = engine.stats().hits
        assert hits.layers == hits.layers_hot_only > 0
        assert hits.hot == engine.stats().owners["local"].pairs
        assert hits.remote == hits.cold == 0
    monkeypatch.setattr(CupyBackend, "captured_step", lambda *_, **__: None)
    with opened(model) as engine:
        assert everything(engine) == captured
        assert engine.stats().owners["local"].phases[Phase.DECODE].pairs == decoded


def test_what_was_chosen_is_counted_where_it_is_chosen(tmp_path: Path, gpus: EmulatedGpus) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4)
    ids = prompt_of(40)
    with Engine.open(path, backend="reference", context=CONTEXT) as engine:
        engine.logits(ids)
        expected = engine.stats().selections
    with opened(path) as engine:
        assert not any(map(any, engine.stats().selections.values()))  # nothing of its trial
        engine.logits(ids)
        assert engine.stats().selections == expected
        generated(engine, ids[:10], 4)
        num_tokens = len(ids) + 10 + 3
        for counts in engine.stats().selections.values():
            assert sum(counts) == num_tokens * TINY.num_experts_used
        heat = engine.heat()
        for layer in heat.layers:
            assert heat.num_tokens(Phase.PREFILL, layer.layer_id) == len(ids) + 10
            assert heat.num_tokens(Phase.DECODE, layer.layer_id) == 3
        asked = iter([False] * 8 + [True] * 99)
        generated(engine, ids[:2], 9, is_cancelled=lambda: next(asked))
        for counts in engine.stats().selections.values():
            assert num_tokens + 2 <= sum(counts) / TINY.num_experts_used <= num_tokens + 10


def test_a_generation_ends_where_it_is_to(model: Path, gpus: EmulatedGpus) -> None:
    with opened(model, context=32) as engine:
        prompt = prompt_of(20)
        long = generated(engine, prompt, 100)
        assert len(long) == 32 - 20 + 1
        assert engine.last_generation.finish_reason == "context"
        for num_tokens in (1, 2, 7):
            assert generated(engine, prompt, num_tokens) == long[:num_tokens]
            assert engine.last_generation.finish_reason == "length"
        got: list[int] = []
        for token in engine.generate(
            prompt, 50, ignore_eos=True, is_cancelled=lambda: len(got) >= 4
        ):
            got.append(token.token_id)
        assert got == long[:4]
        assert engine.last_generation.finish_reason == "cancelled"
        # Discarded steps do not disturb later ones.
        assert generated(engine, prompt, 10, reuse_prefix=True) == long[:10]
        assert generated(engine, [*prompt, *long[:5]], 1) == generated(
            engine, [*prompt, *long[:5]], 1, reuse_prefix=True
        )


def test_a_run_that_another_has_taken_over_is_refused(model: Path, gpus: EmulatedGpus) -> None:
    with opened(model) as engine:
        tokens = engine.generate(prompt_of(12), 9, ignore_eos=True)
        next(tokens), next(tokens)
        expected = generated(engine, prompt_of(15, seed=2), 5)
        with pytest.raises(SettingsError, match="another call"):
            next(tokens)
        assert generated(engine, prompt_of(15, seed=2), 5) == expected
        tokens = engine.generate(prompt_of(12), 9, ignore_eos=True)
        next(tokens), next(tokens)
    assert gpus.opened[0].num_bytes == 0  # even while a generation is still referenced
    with pytest.raises(SettingsError, match="closed"):
        next(tokens)
    engine.close()


def test_rejected_drafts_do_not_show_in_what_is_accepted(model: Path, gpus: EmulatedGpus) -> None:
    prompt, wrong, parents = prompt_of(12), prompt_of(9, seed=3), [-1, 0, 0, 2]
    with opened(model) as engine:
        expected = generated(engine, prompt, 11)
        begun = engine.prefill(prompt, feature_layers=[0])
        assert begun.features[0].shape == (12, engine.spec.hidden_size)
        written = begun.next_token_ids.tolist()
        while len(written) < 9:
            # A wrong one, and the next ones as they will come: sometimes one of them.
            right = expected[len(written)], expected[len(written) + 1]
            last = wrong[1] if len(written) % 2 else right[1]
            drafts = [written[-1], wrong[0], right[0], last]
            argmax = engine.verify(drafts, parents).next_token_ids.tolist()
            path = [0] if drafts[1] != argmax[0] else [0, 1]
            if drafts[2] == argmax[0]:
                path = [0, 2, 3] if drafts[3] == argmax[2] else [0, 2]
            engine.accept(path)
            written += [argmax[node] for node in path]
        assert written == expected[: len(written)]
        # Another call begins anew, and finds nothing of the drafts.
        assert generated(engine, prompt, 11, reuse_prefix=True) == expected
        with pytest.raises(SettingsError, match="another call"):
            engine.verify([1], [-1])


def test_what_a_tree_needs_is_given_back(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where trees are not captured, as others have experts; all are here, so that it is said."""
    monkeypatch.setattr(GraphStep, "verify", lambda *_: None)
    chain = list(range(-1, 8))
    with opened(model) as engine:
        engine.prefill(prompt_of(12))
        layer = engine.spec.kv_layers[0]
        rows_bytes = 4 * layer.num_heads * (layer.key_dim + layer.value_dim) * TINY.num_layers
        engine.verify(prompt_of(9), chain)  # takes what all others use again
        engine.accept([0])
        before = gpus.used_bytes()
        for path in ([], [0, 1]):
            engine.verify(prompt_of(9), chain)
            assert gpus.used_bytes() - before >= 9 * rows_bytes // 2  # keys and values are halves
            engine.accept(path)
            assert gpus.used_bytes() == before
        # One that fails halfway, for want of memory too, has changed nothing.
        expected = engine.verify([1, 2, 3, 4], [-1, 0, 0, 1], feature_layers=[1])
        empty, num_left = gpus.opened[0].empty, 10

        def full(shape: Any, dtype: Any) -> DeviceArray:
            nonlocal num_left
            num_left -= 1
            if not num_left:
                raise DeviceOutOfMemory("cuda:0", num_bytes=9, free_bytes=1, total_bytes=10)
            return empty(shape, dtype)

        monkeypatch.setattr(gpus.opened[0], "empty", full)
        with pytest.raises(DeviceOutOfMemory):
            engine.verify(prompt_of(9), chain)
        with pytest.raises(SettingsError, match="accept"):
            engine.accept([0])
        found = engine.verify([1, 2, 3, 4], [-1, 0, 0, 1], feature_layers=[1])
        assert (found.features[1] == expected.features[1]).all()
        # What the context has no room for is refused as well.
        with pytest.raises(ContextExceeded):
            engine.verify([1] * 34, range(-1, 33))
    assert gpus.used_bytes() == 0


def test_what_recorded_trees_need_is_kept_for_some_kinds_of_them(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_trees, "_MOST_TOKENS_KEPT", 40)
    with opened(model) as engine:
        engine.prefill(prompt_of(12))

        def used_after(size: int) -> int:
            engine.verify(prompt_of(size), range(-1, size - 1))
            engine.accept([])
            return gpus.used_bytes()

        for size in (2, 6, 16, 20):
            assert used_after(size) == used_after(size)
        # What is kept of 20 tokens depends on no others, that were there and had to go.
        used = []
        for sizes in ((30,), (25, 33, 34, 22, 30)):
            for size in sizes:
                used_after(size)
            used.append(used_after(20))
        assert used[0] == used[1]
        # One that fails halfway, for want of memory too, has changed nothing.
        tree = [1, 2, 3, 4], [-1, 0, 0, 1]
        expected = engine.verify(*tree, feature_layers=[1])
        empty = gpus.opened[0].empty

        def full(shape: Any, dtype: Any) -> DeviceArray:
            raise DeviceOutOfMemory("cuda:0", num_bytes=9, free_bytes=1, total_bytes=10)

        monkeypatch.setattr(gpus.opened[0], "empty", full)
        with pytest.raises(DeviceOutOfMemory):
            engine.verify(*tree, feature_layers=[0])
        with pytest.raises(SettingsError, match="accept"):
            engine.accept([0])
        monkeypatch.setattr(gpus.opened[0], "empty", empty)
        for layers in ([1], [0, 1]):
            found = engine.verify(*tree, feature_layers=layers)
            assert (found.features[1] == expected.features[1]).all()
        with pytest.raises(ContextExceeded):
            engine.verify([1] * 40, range(-1, 39))
    assert gpus.used_bytes() == 0


def test_a_tree_that_cannot_be_recorded_for_want_of_memory_is_computed(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise DeviceOutOfMemory("cuda:0", num_bytes=9, free_bytes=1, total_bytes=10)

    with opened(model) as engine:
        engine.prefill(prompt_of(12))
        tree = [1, 2, 3, 4], [-1, 0, 0, 1]
        expected = engine.verify(*tree, feature_layers=[1])
        monkeypatch.setattr(CapturedTrees, "_captured", fails)
        for layers in ([0], [1]):
            found = engine.verify(*tree, feature_layers=layers)
            assert (found.next_token_ids == expected.next_token_ids).all()
        assert (found.features[1] == expected.features[1]).all()


def test_a_cached_prefix_does_not_show_in_the_bits(model: Path, gpus: EmulatedGpus) -> None:
    wishes: dict[str, Any] = {"ignore_eos": True, "top_logprobs": TINY.vocab_size}
    with opened(model) as engine:
        for size in (5, 9, 21, 30):
            prompt = prompt_of(size)
            longer = [*prompt, *prompt_of(11, seed=3)]
            cold = [list(engine.generate(each, 2, **wishes)) for each in (prompt, longer)]
            reused = []
            for each, expected in zip((prompt, longer, longer), (*cold, cold[1]), strict=True):
                assert list(engine.generate(each, 2, reuse_prefix=True, **wishes)) == expected
                reused.append(engine.last_generation.num_reused_tokens)
            # Steps and chunks have other kernels: what a step computed stands for no chunk's.
            assert reused[1] == (size if size >= 9 else 0)
            assert reused[2] == len(longer) - 9


def test_logits_do_not_depend_on_how_a_prompt_is_cut(model: Path, gpus: EmulatedGpus) -> None:
    with opened(model) as engine:
        whole = engine.logits(prompt_of(40))
        for chunk in ([13, 9, 9], [9], [1 << 20]):
            assert (engine.logits(prompt_of(40), chunk)[:36] == whole[:36]).all()
    with Engine.open(model, backend="reference", context=CONTEXT) as engine:
        expected = engine.logits(prompt_of(40))
    assert np.abs(whole - expected).max() < 0.02 * np.abs(expected).max()


def test_what_others_should_have_computed_the_cpu_does(
    model: Path, gpus: EmulatedGpus, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt_of(24)
    with opened(model) as engine:
        expected = engine.logits(ids, [20, 1])
    absent = f"ipc://{run_dir}/absent"
    options: dict[str, Any] = {"connect": [absent], "tolerates_absent": True, "threads": 1}
    options["settings"] = replace(load_settings(), connect_timeout_ms=100)
    with opened(model, local_experts=3, **options) as engine:
        logits = engine.logits(ids, [20, 1])
        stats = copy.deepcopy(engine.stats())
        captured = generated(engine, ids, 4, temperature=1.0, seed=3)
        assert generated(engine, ids, 4) != captured
        decoded = engine.stats().hits
    with monkeypatch.context() as patched:
        patched.setattr(CupyBackend, "captured_step", lambda *_, **__: None)
        with opened(model, local_experts=3, **options) as engine:
            engine.logits(ids, [20, 1])
            assert generated(engine, ids, 4, temperature=1.0, seed=3) == captured
            generated(engine, ids, 4)
            assert engine.stats().hits == decoded
    assert np.abs(logits - expected).max() < 0.02 * np.abs(expected).max()
    chosen = len(ids) * TINY.num_layers * TINY.num_experts_used
    assert stats.owners["local"].pairs == stats.hits.hot
    assert stats.owners["fallback"].pairs == stats.hits.cold
    assert 0 < stats.hits.cold < stats.hits.hot + stats.hits.cold == chosen
    assert sum(map(sum, stats.selections.values())) == chosen
    assert sum(sum(counts[:3]) for counts in stats.selections.values()) == stats.hits.hot
    classes = [event for event in stats.events if event.kind == "numeric_class_differs"]
    assert [event.owner for event in classes] == ["fallback"]
    assert gpus.opened[1].num_bytes == 0


def test_a_device_is_given_back_and_a_failed_load_leaves_nothing(
    model: Path, gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = []
    for _ in range(2):
        with opened(model) as engine:
            generated(engine, prompt_of(12), 2)
            needed.append(gpus.opened[-1].num_bytes)
        assert gpus.opened[-1].num_bytes == 0
    assert needed[0] == needed[1] > 0
    gpus.free_bytes = 12345
    with pytest.raises(DeviceOutOfMemory, match=r"GiB experts.*--local-experts") as lacking:
        opened(model)
    assert lacking.value.free_bytes == 12345
    gpus.free_bytes = 1 << 40
    empty, num_calls = EmulatedDevice.empty, 0

    def failing(self: EmulatedDevice, shape: Any, dtype: Any) -> DeviceArray:
        nonlocal num_calls
        num_calls -= 1
        if num_calls == 0:
            raise DeviceOutOfMemory("host:0", num_bytes=1, free_bytes=2, total_bytes=3)
        return empty(self, shape, dtype)

    monkeypatch.setattr(EmulatedDevice, "empty", failing)
    for last_call in (1, 5, 25, 60):  # of loading, and of trying
        num_calls = last_call
        with pytest.raises(DeviceOutOfMemory, match="--local-experts") as caught:
            opened(model)
        assert len(str(caught.value).splitlines()) == 1
        del caught
        assert gpus.opened[-1].num_bytes == 0


def test_a_model_that_kernels_cannot_read_is_refused(tmp_path: Path, gpus: EmulatedGpus) -> None:
    shape = Qwen3MoeShape("odd", hidden_size=52)
    path = write_qwen3moe(tmp_path / "odd.gguf", shape, seed=1)
    with pytest.raises(UnsupportedModel, match=r"\b52\b.*device cpu"):
        Engine.open(path, device="cuda:0")
    assert MAX_CHUNK < CONTEXT  # or else chunks were never cut above
