"""Gated DeltaNet on a device, steps and chunks, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from dflash_adapters.spec import DeltaShape
from dflash_protocol.ids import F32Array, F64Array
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.launch.decode_arrays import StepRows, meta_shape
from dflash_runtime.compute.gpu.layers.branch import Branch
from dflash_runtime.compute.gpu.layers.delta import (
    RING,
    DeltaArrays,
    DeltaChunk,
    DeltaPlan,
    DeltaState,
    DeltaStep,
    DeltaTree,
    DeltaWeights,
)
from dflash_runtime.compute.step_order import padded_columns
from dflash_runtime.compute.trees import Tree
from support.emulated_device import EmulatedDevice
from support.trees import way_to

SHAPES = {
    "tiled": DeltaPlan(DeltaShape(2, 4, 32, 48), num_taps=4),
    "grouped, uneven": DeltaPlan(DeltaShape(2, 6, 40, 20, is_tiled=False), num_taps=3),
    "even": DeltaPlan(DeltaShape(3, 3, 16, 16), num_taps=4),
}
EPS = 1e-6


@dataclass
class Layer:
    """Random weights and inputs of a sequence."""

    shape: DeltaPlan
    mixed: F32Array
    alpha: F32Array
    beta: F32Array
    gate: F32Array
    taps: F32Array
    decay: F32Array
    bias: F32Array
    norm: F32Array


def random_layer(shape: DeltaPlan, num_tokens: int) -> Layer:
    rng = np.random.default_rng(7)

    def normal(*sizes: int) -> F32Array:
        return rng.standard_normal(sizes).astype(np.float32)

    heads = shape.num_heads
    return Layer(
        shape,
        mixed=normal(num_tokens, shape.channels),
        alpha=normal(num_tokens, heads),
        beta=normal(num_tokens, heads),
        gate=normal(num_tokens, shape.value_channels),
        taps=normal(shape.channels, shape.num_taps),
        decay=-np.exp(normal(heads)),
        bias=normal(heads),
        norm=normal(shape.delta.value_dim),
    )


def expected(layer: Layer) -> F64Array:
    """Of the whole sequence, from the formulas. Shapes: result [T, value channels]."""
    shape = layer.shape
    wide = {name: getattr(layer, name).astype(np.float64) for name in ("mixed", "alpha", "beta")}
    mixed = np.concatenate([np.zeros((shape.num_taps - 1, shape.channels)), wide["mixed"]])
    num_tokens, heads = layer.alpha.shape
    taps = layer.taps.astype(np.float64)
    mixed = np.stack(
        [mixed[tap : tap + num_tokens] * taps[:, tap] for tap in range(shape.num_taps)]
    )
    mixed = mixed.sum(axis=0)
    mixed = mixed / (1 + np.exp(-mixed))
    keys = shape.delta.num_key_heads * shape.delta.key_dim
    q, k = (
        part.reshape(num_tokens, shape.delta.num_key_heads, shape.delta.key_dim)
        for part in (mixed[:, :keys], mixed[:, keys : 2 * keys])
    )
    q, k = (x / np.sqrt(np.square(x).sum(-1, keepdims=True) + EPS) for x in (q, k))
    q = q / np.sqrt(shape.delta.key_dim)
    v = mixed[:, 2 * keys :].reshape(num_tokens, heads, shape.delta.value_dim)
    kept = np.exp(layer.decay * np.logaddexp(0, wide["alpha"] + layer.bias))
    written = 1 / (1 + np.exp(-wide["beta"]))
    out = np.empty(v.shape)
    for head in range(heads):
        group = heads // shape.delta.num_key_heads
        key_head = head % shape.delta.num_key_heads if shape.delta.is_tiled else head // group
        state = np.zeros((shape.delta.value_dim, shape.delta.key_dim))
        for token in range(num_tokens):
            state *= kept[token, head]
            key = k[token, key_head]
            change = written[token, head] * (v[token, head] - state @ key)
            state += np.outer(change, key)
            out[token, head] = state @ q[token, key_head]
    out /= np.sqrt(np.square(out).mean(-1, keepdims=True) + EPS)
    gate = layer.gate.astype(np.float64).reshape(v.shape)
    out *= layer.norm * gate / (1 + np.exp(-gate))
    return out.reshape(num_tokens, -1)


class Sequence:
    """A layer on a device, fed piece by piece."""

    def __init__(self, device: EmulatedDevice, layer: Layer) -> None:
        self.device, self.layer, self.shape = device, layer, layer.shape
        self.weights = DeltaWeights(
            taps=device.upload(layer.taps),
            decay=device.upload(layer.decay),
            bias=device.upload(layer.bias),
            norm=device.upload(layer.norm),
            key_eps=EPS,
            norm_eps=EPS,
        )
        self.state = DeltaState(
            device.empty(self.shape.ring_shape, np.float32),
            device.empty(self.shape.state_shape, np.float32),
        )

    def inputs(self, tokens: slice | list[int]) -> DeltaArrays:
        upload, layer = self.device.upload, self.layer
        return DeltaArrays(
            upload(layer.mixed[tokens]),
            upload(layer.alpha[tokens]),
            upload(layer.beta[tokens]),
            upload(layer.gate[tokens]),
        )

    def step(self, first: int, count: int, *, tokens: list[int] | None = None) -> F32Array:
        """Of the tokens at these positions, or others in their place."""
        out = self.new_rows(count)
        DeltaStep(self.device, self.shape, count).launch(
            self.inputs(slice(first, first + count) if tokens is None else tokens),
            self.weights,
            self.state,
            positions=self.device.upload(np.arange(first, first + count, dtype=np.int32)),
            out=out,
        )
        return self.found(out)

    def tree(self, tree: Tree, tokens: list[int]) -> tuple[F32Array, Callable[[list[int]], None]]:
        """Of the tokens of a tree, and what has a path of them count."""
        delta, branch = DeltaTree(self.device, self.shape), Branch(self.device, tree)
        inputs, out = self.inputs(tokens), self.new_rows(len(tokens))
        delta.launch(inputs, self.weights, self.state, branch=branch, out=out)

        def accept(path: list[int]) -> None:  # into whatever the state is by then
            on_device = self.device.upload(np.array(path, np.int32))
            delta.accept(inputs, self.weights, self.state, branch=branch, path=on_device)

        return self.found(out), accept

    def copied(self, state: DeltaState) -> DeltaState:
        def copy(array: DeviceArray) -> DeviceArray:
            return self.device.upload(self.device.download(array))

        return DeltaState(copy(state.ring), copy(state.state))

    def new_rows(self, count: int) -> StepRows:
        columns, empty = self.shape.value_channels, self.device.empty
        out = StepRows(values=empty((count, columns), np.float32))
        if not self.shape.has_quants:
            return out
        quants = empty((count, padded_columns(columns)), np.int8)
        return replace(out, quants=quants, meta=empty(meta_shape(count, columns), np.float32))

    def found(self, out: StepRows) -> F32Array:
        """As floats, which the int8 rows are near to."""
        assert out.values is not None
        found: F32Array = self.device.download(out.values)
        if out.quants is not None and out.meta is not None:
            columns = self.shape.value_channels
            scales = self.device.download(out.meta)[:, : columns // 16, 0].repeat(16, axis=1)
            restored = self.device.download(out.quants)[:, :columns] * scales
            assert (np.abs(restored - found) <= 0.51 * scales).all()
        return found

    def chunk(self, first: int, count: int) -> F32Array:
        out = self.device.empty((count, self.shape.value_channels), np.float32)
        DeltaChunk(self.device, self.shape).launch(
            self.inputs(slice(first, first + count)),
            self.weights,
            self.state,
            first_position=self.device.upload(np.array([first], np.int32)),
            out=out,
        )
        copy: F32Array = self.device.download(out)
        return copy


@pytest.fixture(params=[(32, False), (64, True)], ids=str)
def device(request: pytest.FixtureRequest) -> EmulatedDevice:
    lanes, runs_backward = request.param
    return EmulatedDevice(lanes=lanes, runs_backward=runs_backward)


@pytest.mark.parametrize("name", SHAPES)
def test_chunks_and_steps_of_any_size_follow_each_other(device: EmulatedDevice, name: str) -> None:
    layer = random_layer(SHAPES[name], 34)
    wanted = expected(layer)
    sequence = Sequence(device, layer)
    for _ in range(2):  # the second time over what the first has left
        first, found = 0, []
        for count, is_chunk in ((1, True), (18, True), (1, False), (3, False), (1, False)):
            found.append((sequence.chunk if is_chunk else sequence.step)(first, count))
            first += count
        found += [sequence.chunk(first, 2), sequence.step(first + 2, 8)]
        np.testing.assert_allclose(np.concatenate(found), wanted, rtol=2e-4, atol=2e-5)


def test_a_step_too_much_spoils_nothing(device: EmulatedDevice) -> None:
    layer = random_layer(SHAPES["tiled"], 9)
    sequence = Sequence(device, layer)
    sequence.chunk(0, 6)
    once = sequence.step(6, 1)
    again = sequence.step(6, 1)
    np.testing.assert_array_equal(once, again)
    sequence.step(7, 1)
    np.testing.assert_array_equal(sequence.step(7, 1), sequence.step(7, 1))
    wanted = expected(layer)
    np.testing.assert_allclose(sequence.step(8, 1), wanted[8:], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("device", "name", "begin"),
    [
        pytest.param((32, False), "tiled", 18, id="tiled"),
        pytest.param((64, True), "grouped, uneven", 1, id="uneven"),
        pytest.param((32, False), "even", 3, id="even"),
    ],
    indirect=["device"],
)
def test_tokens_of_a_tree_go_on_from_their_parents(
    device: EmulatedDevice, name: str, begin: int
) -> None:
    """They have the bits of steps, and so has what comes after the path that is accepted."""
    parents = [-1, 0, 0, 2, 2, -1, 4]
    layer = random_layer(SHAPES[name], begin + len(parents) + 3)
    tree = Tree(np.array(parents, np.int32), begin)
    sequence, steps = Sequence(device, layer), Sequence(device, layer)
    for each in (sequence, steps):
        each.chunk(0, begin)
    found, accept = sequence.tree(tree, [begin + node for node in range(len(parents))])
    states = {-1: steps.state}
    for node, parent in enumerate(parents):
        steps.state = states[node] = steps.copied(states[parent])
        (expected,) = steps.step(begin + int(tree.depths[node]), 1, tokens=[begin + node])
        np.testing.assert_array_equal(found[node], expected)
    before, rest = sequence.state, [begin + len(parents) + i for i in range(3)]
    for last in (6, 5, 1):  # paths of 4, 1 and 2 tokens
        sequence.state, steps.state = sequence.copied(before), steps.copied(states[last])
        path = way_to(parents, last)
        accept(path)
        end = begin + len(path)
        np.testing.assert_array_equal(
            sequence.step(end, 3, tokens=rest), steps.step(end, 3, tokens=rest)
        )


@pytest.mark.parametrize("device", [(32, False)], indirect=True)
def test_a_long_path_fills_the_ring(device: EmulatedDevice) -> None:
    """More tokens than it has room for."""
    parents = list(range(-1, RING + 1))
    layer = random_layer(SHAPES["even"], 5 + len(parents) + 3)
    sequence, steps = Sequence(device, layer), Sequence(device, layer)
    for each in (sequence, steps):
        each.chunk(0, 5)
    tree = Tree(np.array(parents, np.int32), 5)
    found, accept = sequence.tree(tree, [5 + node for node in range(len(parents))])
    accept(list(range(len(parents))))
    for first in range(5, 5 + len(parents), 3):
        np.testing.assert_array_equal(found[first - 5 : first - 2], steps.step(first, 3))
    end = 5 + len(parents)
    np.testing.assert_array_equal(sequence.step(end, 3), steps.step(end, 3))


def test_arrays_that_do_not_fit_are_refused(device: EmulatedDevice) -> None:
    layer = random_layer(SHAPES["tiled"], 2)
    sequence = Sequence(device, layer)
    weights = sequence.weights
    sequence.weights = replace(weights, norm=device.empty(1, np.float32))
    for run in (sequence.step, sequence.chunk):
        with pytest.raises(ValueError, match=r"\bnorm\b.* float32"):
            run(0, 2)
    sequence.weights = weights
    sequence.state = replace(sequence.state, ring=device.empty((4, 2), np.float32))
    with pytest.raises(ValueError, match=r"\bring\b.* float32"):
        sequence.step(0, 1)
