"""Launches of a Gated DeltaNet layer's kernels (no projections), for steps, chunks and trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_adapters.spec import DeltaShape
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import ArrayChecker, StepRows, check_tokens
from dflash_runtime.compute.gpu.layers.branch import Branch
from dflash_runtime.compute.step_order import GRANULE, padded_columns

RING = 16
"""Inputs kept: those of the last positions."""
PLACES = 4
"""States kept: those before the last positions."""
_STEP_WARPS, _CHUNK_WARPS, _CHUNK_ROWS = 16, 4, 8

DeltaStepArgs = kernel_struct("delta_step.cu", "DeltaStepArgs")
DeltaInputsArgs = kernel_struct("delta_chunk.cu", "DeltaInputsArgs")
DeltaScanArgs = kernel_struct("delta_chunk.cu", "DeltaScanArgs")
DeltaFinishArgs = kernel_struct("delta_chunk.cu", "DeltaFinishArgs")
DeltaTreeArgs = kernel_struct("delta_tree.cu", "DeltaTreeArgs")
DeltaAcceptArgs = kernel_struct("delta_tree.cu", "DeltaAcceptArgs")
DeltaKeepArgs = kernel_struct("delta_tree.cu", "DeltaKeepArgs")


@dataclass(frozen=True, slots=True)
class DeltaPlan:
    """Compile-time shape of the kernels."""

    delta: DeltaShape
    num_taps: int

    @property
    def channels(self) -> int:
        return self.delta.num_channels

    @property
    def num_heads(self) -> int:
        """Value heads."""
        return self.delta.num_value_heads

    @property
    def value_channels(self) -> int:
        return self.delta.num_value_heads * self.delta.value_dim

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """Shape of a layer's states; that before position p is in place ``p % PLACES``."""
        return PLACES, self.num_heads, self.delta.value_dim, self.delta.key_dim

    @property
    def ring_shape(self) -> tuple[int, int]:
        return RING, self.channels

    @property
    def has_quants(self) -> bool:
        """Steps write int8 rows too."""
        return self.delta.value_dim % GRANULE == 0 and self.value_channels % 32 == 0

    def step_defines(self, num_warps: int) -> dict[str, int | str]:
        """Defines of kernels with a head per block."""
        padded = padded_columns(self.value_channels) if self.has_quants else 0
        return {**self.defines(), "WARPS": num_warps, "PADDED_COLUMNS": padded}

    def defines(self) -> dict[str, int | str]:
        delta = self.delta
        return {
            "KEY_HEADS": delta.num_key_heads,
            "VALUE_HEADS": delta.num_value_heads,
            "KEY_DIM": delta.key_dim,
            "VALUE_DIM": delta.value_dim,
            "TAPS": self.num_taps,
            "TILED": int(delta.is_tiled),
        }


@dataclass(frozen=True, slots=True, eq=False)
class DeltaArrays:
    """Projected inputs, and the gate.

    Shapes: mixed [T, channels] before the convolution; alpha, beta [T, value heads] logits; gate
    [T, value channels], which an accepted path does without; all float32.
    """

    mixed: DeviceArray
    alpha: DeviceArray
    beta: DeviceArray
    gate: DeviceArray | None


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """A layer's small weights.

    Shapes: taps [channels, taps]; decay, bias [value heads]; norm [value dim]; all float32.
    """

    taps: DeviceArray
    decay: DeviceArray
    bias: DeviceArray
    norm: DeviceArray
    key_eps: float
    norm_eps: float


@dataclass(frozen=True, slots=True, eq=False)
class DeltaState:
    """A layer's state of one sequence; uninitialised memory will do for one that begins at 0.

    Shapes: ring, state as the shape has them, float32.
    """

    ring: DeviceArray
    state: DeviceArray


def _step_warps(device: KernelDevice) -> int:
    """Warps of a block that has a head."""
    return _STEP_WARPS // (device.lanes // 32)


class DeltaStep:
    """A step of 1 to 8 tokens, in one launch that needs no host work."""

    def __init__(self, device: KernelDevice, shape: DeltaPlan, num_tokens: int) -> None:
        check_tokens(num_tokens)
        self.shape, self.num_tokens = shape, num_tokens
        self._device, self._arrays = device, ArrayChecker(device)
        self._warps = _step_warps(device)
        defines = {**shape.step_defines(self._warps), "TOKENS": num_tokens}
        module = device.module("delta_step.cu", defines)
        self._kernel = module.kernel("delta_step", DeltaStepArgs)

    def launch(
        self,
        inputs: DeltaArrays,
        weights: DeltaWeights,
        state: DeltaState,
        *,
        positions: DeviceArray,
        out: StepRows,
    ) -> None:
        """`positions` ascend by one, and are read before the preceding kernel has ended.

        Shapes: positions [T] int32; out has values [T, value channels] or None, and int8 rows of
        as many columns if `has_quants`.
        Raises: ValueError for an array that is missing, or not of this shape, type or device.
        """
        shape, arrays, count = self.shape, self._arrays, self.num_tokens
        args = DeltaStepArgs(
            positions=arrays.address("positions", positions, np.int32, T=count),
            **_input_args(arrays, shape, inputs, count=count),
            **_weight_args(arrays, shape, weights),
            **_state_args(arrays, shape, state),
            **_result_args(arrays, shape, out, count=count),
            **_finish_args(arrays, shape, inputs, weights=weights, count=count),
        )
        block = self._warps * self._device.lanes
        self._device.launch(self._kernel, (shape.num_heads, 1, 1), block, args)


class DeltaChunk:
    """A chunk of any number of tokens, in three launches."""

    def __init__(self, device: KernelDevice, shape: DeltaPlan) -> None:
        self.shape = shape
        self._device, self._arrays = device, ArrayChecker(device)
        defines = {**shape.defines(), "WARPS": _CHUNK_WARPS, "SCAN_ROWS": _CHUNK_ROWS}
        module = device.module("delta_chunk.cu", defines)
        self._inputs = module.kernel("delta_inputs", DeltaInputsArgs)
        self._scan = module.kernel("delta_scan", DeltaScanArgs)
        self._finish = module.kernel("delta_finish", DeltaFinishArgs)

    def launch(
        self,
        inputs: DeltaArrays,
        weights: DeltaWeights,
        state: DeltaState,
        *,
        first_position: DeviceArray,
        out: DeviceArray,
    ) -> None:
        """Shapes: first_position [1] int32; out [T, value channels] float32.

        Raises: ValueError for an array that is missing, or not of this shape, type or device;
        DeviceOutOfMemory.
        """
        shape, arrays, device = self.shape, self._arrays, self._device
        count = inputs.mixed.shape[0]
        mixed = device.empty((count, shape.channels), np.float32)
        rates = device.empty((count, shape.num_heads, 2), np.float32)
        given = _input_args(arrays, shape, inputs, count=count)
        small = _weight_args(arrays, shape, weights)
        kept = _state_args(arrays, shape, state)
        where = arrays.address("first_position", first_position, np.int32, one=1)
        common = {"first_position": where, "num_tokens": count}
        prepared = {
            "mixed": arrays.address("mixed", mixed, np.float32, T=count, channels=shape.channels),
            "rates": arrays.address(
                "rates", rates, np.float32, T=count, heads=shape.num_heads, two=2
            ),
        }
        results = arrays.address("out", out, np.float32, T=count, columns=shape.value_channels)
        block = _CHUNK_WARPS * device.lanes
        num_heads = 2 * shape.delta.num_key_heads + shape.num_heads
        device.launch(
            self._inputs,
            (count * -(-num_heads // _CHUNK_WARPS), 1, 1),
            block,
            DeltaInputsArgs(**common, **given, **small, **prepared, ring=kept["ring"]),
        )
        device.launch(
            self._scan,
            (shape.num_heads, -(-shape.delta.value_dim // (_CHUNK_WARPS * _CHUNK_ROWS)), 1),
            block,
            DeltaScanArgs(**common, **prepared, state=kept["state"], results=results),
        )
        finish = DeltaFinishArgs(
            **common,
            inputs=given["inputs"],
            ring=kept["ring"],
            results=results,
            out=results,
            **_finish_args(arrays, shape, inputs, weights=weights, count=count),
        )
        blocks = count * -(-shape.num_heads // _CHUNK_WARPS)
        device.launch(self._finish, (blocks, 1, 1), block, finish)


class DeltaTree:
    """A tree through a layer: each token continues from its parent's state, as in a step.

    The layer's state is only read until a path is accepted.
    """

    def __init__(self, device: KernelDevice, shape: DeltaPlan) -> None:
        self.shape = shape
        self._device, self._arrays = device, ArrayChecker(device)
        warps = _step_warps(device)
        self._block = warps * device.lanes
        module = device.module("delta_tree.cu", shape.step_defines(warps))
        self._tree = module.kernel("delta_tree", DeltaTreeArgs)
        self._accept = module.kernel("delta_accept", DeltaAcceptArgs)
        self._keep = module.kernel("delta_keep", DeltaKeepArgs)

    def launch(
        self,
        inputs: DeltaArrays,
        weights: DeltaWeights,
        state: DeltaState,
        *,
        branch: Branch,
        out: StepRows,
    ) -> None:
        """`state` is the one before the tree. Arrays are as for DeltaStep.launch, of W tokens.

        Raises: ValueError for an array that is missing, or not of this shape, type or device;
        DeviceOutOfMemory.
        """
        shape, arrays, count = self.shape, self._arrays, branch.num_tokens
        places = (branch.num_places, *shape.state_shape[1:])
        # Its memory may be reused right after the launch, in the order of the same stream.
        kept = None
        if branch.num_places:
            kept = branch.memory(
                ("states", *places), lambda: self._device.empty(places, np.float32)
            )
        args = DeltaTreeArgs(
            **_input_args(arrays, shape, inputs, count=count),
            **_weight_args(arrays, shape, weights),
            **_state_args(arrays, shape, state),
            walk=arrays.address("walk", branch.walk, np.int32, T=count, three=3),
            ancestors=self._ancestors(branch),
            begin=arrays.address("begin", branch.begin, np.int32, one=1),
            kept=arrays.optional(
                "kept",
                kept,
                np.float32,
                **dict(zip(("places", "heads", "rows", "columns"), places, strict=True)),
            ),
            **_result_args(arrays, shape, out, count=count),
            **_finish_args(arrays, shape, inputs, weights=weights, count=count),
            num_tokens=count,
        )
        self._device.launch(self._tree, (shape.num_heads, 1, 1), self._block, args)

    def accept(
        self,
        inputs: DeltaArrays,
        weights: DeltaWeights,
        state: DeltaState,
        *,
        branch: Branch,
        path: DeviceArray,
    ) -> None:
        """Advance the state along a path, whose inputs were given to `launch`.

        Shapes: path [L] int32, at least one.
        Raises: ValueError for an array that is missing, or not of this shape, type or device.
        """
        shape, arrays, (length,) = self.shape, self._arrays, path.shape
        given = _input_args(arrays, shape, inputs, count=branch.num_tokens)
        kept = _state_args(arrays, shape, state)
        where = {
            "path": arrays.address("path", path, np.int32, L=length),
            "begin": arrays.address("begin", branch.begin, np.int32, one=1),
            "ring": kept["ring"],
            "num_tokens": length,
        }
        self._device.launch(
            self._accept,
            (shape.num_heads, 1, 1),
            self._block,
            DeltaAcceptArgs(
                **given,
                **_weight_args(arrays, shape, weights),
                **where,
                ancestors=self._ancestors(branch),
                state=kept["state"],
            ),
        )
        self._device.launch(
            self._keep,
            (min(length, RING), 1, 1),
            self._block,
            DeltaKeepArgs(inputs=given["inputs"], **where),
        )

    def _ancestors(self, branch: Branch) -> int:
        taps = self.shape.num_taps
        return self._arrays.address(
            "ancestors", branch.ancestors(taps), np.int32, T=branch.num_tokens, taps=taps
        )


def _input_args(
    arrays: ArrayChecker, shape: DeltaPlan, inputs: DeltaArrays, *, count: int
) -> dict[str, int]:
    """Addresses by the names of kernels' arguments.

    Raises: ValueError for an array that is missing, or not of this shape, type or device.
    """
    heads = {"T": count, "heads": shape.num_heads}
    return {
        "inputs": arrays.address("mixed", inputs.mixed, np.float32, T=count, C=shape.channels),
        "alpha": arrays.address("alpha", inputs.alpha, np.float32, **heads),
        "beta": arrays.address("beta", inputs.beta, np.float32, **heads),
    }


def _weight_args(arrays: ArrayChecker, shape: DeltaPlan, weights: DeltaWeights) -> dict[str, Any]:
    heads = shape.num_heads
    return {
        "taps": arrays.address(
            "taps", weights.taps, np.float32, channels=shape.channels, taps=shape.num_taps
        ),
        "decay": arrays.address("decay", weights.decay, np.float32, heads=heads),
        "bias": arrays.address("bias", weights.bias, np.float32, heads=heads),
        "key_eps": weights.key_eps,
    }


def _state_args(arrays: ArrayChecker, shape: DeltaPlan, state: DeltaState) -> dict[str, int]:
    places, heads, rows, columns = shape.state_shape
    return {
        "ring": arrays.address("ring", state.ring, np.float32, ring=RING, channels=shape.channels),
        "state": arrays.address(
            "state", state.state, np.float32, places=places, heads=heads, rows=rows, columns=columns
        ),
    }


def _finish_args(
    arrays: ArrayChecker,
    shape: DeltaPlan,
    inputs: DeltaArrays,
    *,
    weights: DeltaWeights,
    count: int,
) -> dict[str, Any]:
    """Gate and norm, which results go through head by head."""
    columns = shape.value_channels
    return {
        "gate": arrays.address("gate", inputs.gate, np.float32, T=count, columns=columns),
        "weight": arrays.address("norm", weights.norm, np.float32, rows=shape.delta.value_dim),
        "norm_eps": weights.norm_eps,
    }


def _result_args(
    arrays: ArrayChecker, shape: DeltaPlan, out: StepRows, *, count: int
) -> dict[str, int]:
    """Addresses of a step's results."""
    columns = shape.value_channels
    found = {"values": arrays.optional("values", out.values, np.float32, T=count, columns=columns)}
    if shape.has_quants:
        found["quants"], found["meta"] = arrays.int8_rows(
            "", out.quants, out.meta, rows=count, columns=columns
        )
    return found
