"""Trees of draft tokens on a GPU, emulated here: a token has the bits that it has when a sequence
is decoded token by token, wherever experts are, and an accepted path counts as if there had been
nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.models import llama4
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import MoeSpec
from dflash_protocol.ids import AnyArray, F32Array, I32Array, Phase
from dflash_runtime.compute import sliding_window
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.run.captured_trees import CapturedTrees
from dflash_runtime.compute.kv_cache import KvType
from dflash_runtime.engine.verifying import Verified, Verifier
from dflash_runtime.placement.split import LOCAL_OWNER
from support.emulated_gpu import TINY
from support.gpu_devices import EMULATED_AND_GPU, opened_device
from support.gpu_models import SHAPES
from support.gpu_splits import Layers, Split
from support.random_gguf import write_model
from support.random_models import write_qwen3moe
from support.trees import way_to, ways_to_leaves

NewDevice = Callable[[contextlib.ExitStack], KernelDevice]
Opened = Callable[[Mapping[str, Layers]], Split]

PROMPT = np.random.default_rng(1).integers(0, TINY.vocab_size, 12).astype(np.int32)
CONTEXT = 40


@pytest.fixture
def undo() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(params=EMULATED_AND_GPU)
def new_device(request: pytest.FixtureRequest) -> NewDevice:
    return lambda undo: undo.enter_context(opened_device(request.param))


def experts_of(path: Path) -> MoeSpec:
    with GgufFile.open(path) as file:
        return read_spec(file).moe


def splits_of(moe: MoeSpec) -> dict[str, dict[str, Layers]]:
    """All experts here, every other one here, none here."""

    def some(first: int, step: int) -> Layers:
        return {layer.layer_id: range(first, layer.num_experts, step) for layer in moe.layers}

    return {
        "all": {LOCAL_OWNER: some(0, 1)},
        "half": {LOCAL_OWNER: some(0, 2), "gpu1": some(1, 2)},
        "none": {"gpu1": some(0, 1)},
    }


def ids_of(count: int, *, seed: int) -> I32Array:
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, count).astype(np.int32)


class Sequences:
    """What a model says of tokens that are decoded one by one."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.layers = 0, split.spec.num_layers - 1
        self._known: dict[bytes, list[tuple[dict[int, F32Array], F32Array]]] = {}

    def after(self, ids: I32Array, num_before: int) -> list[tuple[dict[int, F32Array], F32Array]]:
        """Features [H] and logits [V] of all tokens behind the first ones.

        Of those the prompt is a chunk.
        """
        known = self._known.get(ids.tobytes())
        if known is None:
            known = self._known[ids.tobytes()] = self._decoded(ids)
        return known[num_before - PROMPT.size :]

    def _decoded(self, ids: I32Array) -> list[tuple[dict[int, F32Array], F32Array]]:
        steps, split, found = self.split.steps, self.split, []
        run, last = steps.begin(), PROMPT.size
        split.spoil()
        steps.forward(run, ids[:last], 0)
        features: dict[int, F32Array] = {}

        def on_layer(layer_id: int, hidden: AnyArray) -> None:
            if layer_id in self.layers:
                features[layer_id] = steps.to_host(hidden)[0].copy()

        for position in range(last, ids.size):
            hidden = steps.forward(run, ids[position : position + 1], position, on_layer)
            found.append((features.copy(), steps.head(hidden)[0]))
        return found

    def check(self, got: Verified, nodes: Sequence[int], before: I32Array, way: I32Array) -> None:
        """What is said of nodes is what is said of the last tokens of a sequence, `way`."""
        rows = self.after(np.concatenate([before, way]), before.size)
        for node, (features, logits) in zip(nodes, rows, strict=True):
            assert np.isfinite(logits).all()
            for layer_id, expected in features.items():
                np.testing.assert_array_equal(got.features[layer_id][node], expected)
            assert got.next_token_ids[node] == logits.argmax()


def check_tree(
    split: Split, sequences: Sequences, parents: list[int], more_parents: list[int]
) -> None:
    """Every path is a sequence; the deepest one is accepted, and gone on from with another tree."""
    tokens, layers = ids_of(len(parents), seed=len(parents)), sequences.layers
    verifier = Verifier(split.steps, split.spec, PROMPT)
    split.spoil()
    verifier.prefill(())
    split.spoil()
    got = verifier.verify(tokens, parents, layers)
    path = max((way_to(parents, node) for node in range(len(parents))), key=len)
    verifier.accept(path)
    split.spoil()
    more = ids_of(len(more_parents), seed=9)
    again = verifier.verify(more, more_parents, layers)
    verifier.accept([])
    for way in ways_to_leaves(parents):
        sequences.check(got, way, PROMPT, tokens[way])
    accepted = np.concatenate([PROMPT, tokens[path]])
    for way in ways_to_leaves(more_parents):
        sequences.check(again, way, accepted, more[way])


def check_splits(
    opened: Opened, moe: MoeSpec, names: Sequence[str], *, parents: list[int], more: list[int]
) -> None:
    splits = splits_of(moe)
    sequences = Sequences(opened(splits["all"]))
    for name in names:
        split = opened(splits[name])
        check_tree(split, sequences, parents, more)
        num_asked = 2 * len(moe.layers)  # of each tree, once a layer
        if name == "all":
            assert split.runtime.hits.remote == 0
            continue
        requests = split.runtime.stats()["gpu1"].phases[Phase.VERIFY].requests
        assert requests == num_asked if name == "none" else 0 < requests <= num_asked


def test_tokens_of_a_tree_have_the_bits_of_a_sequence(
    new_device: NewDevice, undo: contextlib.ExitStack, tmp_path: Path
) -> None:
    path = write_qwen3moe(tmp_path / "m.gguf", TINY, seed=4, tensor_type="Q8_0")

    def opened(owners: Mapping[str, Layers]) -> Split:
        ids = np.zeros(CONTEXT, np.int32)
        return Split(undo, path, owners, ids=ids, chunks=[], new_device=new_device)

    # More than kernels take at once, and beyond a tile of keys.
    parents = [-1, 0, 0, 1, -1, 3, 2, 5, 7]
    check_splits(opened, experts_of(path), ("all", "half", "none"), parents=parents, more=[-1])


@pytest.mark.parametrize(
    "splits", [("half",), pytest.param(("all", "none"), marks=pytest.mark.slow)], ids="-".join
)
@pytest.mark.parametrize(
    "name", ["qwen35moe", "laguna", "gpt_oss", pytest.param("llama4", marks=pytest.mark.slow)]
)
def test_recurrent_layers_and_windows(
    monkeypatch: pytest.MonkeyPatch,
    new_device: NewDevice,
    undo: contextlib.ExitStack,
    tmp_path: Path,
    name: str,
    splits: tuple[str, ...],
) -> None:
    """Those with sliding windows, which the second tree goes over the end of."""
    monkeypatch.setattr(llama4, "_CHUNK", 7)
    monkeypatch.setattr(sliding_window, "WINDOW_CHUNK", 10)
    monkeypatch.setattr(sliding_window, "_ROW_UNIT", 8)
    path = write_model(tmp_path / "m.gguf", SHAPES[name], seed=2)

    def opened(owners: Mapping[str, Layers]) -> Split:
        split = Split(
            undo,
            path,
            owners,
            ids=np.zeros(2 * CONTEXT, np.int32),
            chunks=[],
            new_device=new_device,
            kv_type=KvType.F32,
        )
        rings_of = split.steps._cache.windows  # type: ignore[attr-defined]
        assert any(ring.is_window for ring in rings_of) == (name != "qwen35moe")
        return split

    parents = [-1, 0, 0, 1, 2, -1]
    check_splits(opened, experts_of(path), splits, parents=parents, more=[-1, 0, 0])


@pytest.mark.parametrize(
    "name", ["qwen3moe", "qwen35moe", pytest.param("laguna", marks=pytest.mark.slow)]
)
def test_a_recorded_pass_is_that_of_every_tree_of_its_kind(
    monkeypatch: pytest.MonkeyPatch,
    new_device: NewDevice,
    undo: contextlib.ExitStack,
    tmp_path: Path,
    name: str,
) -> None:
    """One after the other, of which paths are accepted; and one of another kind in between."""
    shape = TINY if name == "qwen3moe" else SHAPES[name]
    path = write_model(tmp_path / "m.gguf", shape, seed=2, tensor_type="Q8_0")
    monkeypatch.setattr(sliding_window, "WINDOW_CHUNK", 10)
    monkeypatch.setattr(sliding_window, "_ROW_UNIT", 8)
    captured = CapturedTrees._captured
    kinds: list[object] = []

    def counted(trees: CapturedTrees, key: Any, *args: Any) -> Any:
        kinds.append(key.kind)
        return captured(trees, key, *args)

    monkeypatch.setattr(CapturedTrees, "_captured", counted)
    owners = splits_of(experts_of(path))["all"]

    def opened() -> Split:
        return Split(
            undo,
            path,
            owners,
            ids=np.zeros(2 * CONTEXT, np.int32),
            chunks=[],
            new_device=new_device,
            kv_type=KvType.F32,
        )

    sequences, split = Sequences(opened()), opened()
    verifier = Verifier(split.steps, split.spec, PROMPT)
    verifier.prefill(())
    before = PROMPT
    trees = [[-1, 0, 0, 1], [-1, 0, 1, 1], [-1, 0], [-1, 0, 1, 0]]
    for number, parents in enumerate(trees):
        tokens = ids_of(len(parents), seed=20 + number)
        split.spoil()
        got = verifier.verify(tokens, parents, sequences.layers)
        for way in ways_to_leaves(parents):
            sequences.check(got, way, before, tokens[way])
        way = ways_to_leaves(parents)[-1]
        verifier.accept(way)
        before = np.concatenate([before, tokens[way]])
    # Of states one is kept where a tree branches, which the third one does not.
    assert len(kinds) == len(set(kinds)) == 2
    counted_here = split.runtime.stats()[LOCAL_OWNER].phases[Phase.VERIFY]
    assert counted_here.tokens == 14 * len(split.spec.moe.layers)
