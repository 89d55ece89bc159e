"""Launches of ``linear_decode.cu`` and ``router.cu``: matrices times a step's 1 to 8 rows.

A shape is what a kernel is compiled for, a tuning how its work is cut on a device. `launch` only
checks arrays and fills in a struct.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import ceil

import numpy as np

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import (
    ArrayChecker,
    StepRows,
    check_columns,
    check_shared_bytes,
    check_tokens,
    staged_bytes,
)
from dflash_runtime.compute.gpu.launch.layouts import num_units
from dflash_runtime.compute.step_order import FLOAT_TYPES, sum_lanes, units_of

LinearDecodeArgs = kernel_struct("linear_decode.cu", "LinearDecodeArgs")
RouterArgs = kernel_struct("router.cu", "RouterArgs")

_ROUTER_STEP = 32
"""A router's columns are a multiple of it."""
_MOST_ROUTER_THREADS = 256
_MOST_SEGMENTS = 4


class LinearInput(IntEnum):
    """Form of a kernel's input rows; values as in staging.cuh."""

    NORM = 0
    """Float32 rows that each block normalises."""
    PLAIN = 1
    """Float32 rows."""
    QUANTISED = 2
    """Int8 rows with their scales."""
    SWIGLU = 3
    """Float32 rows of gate and up, from which each block computes SwiGLU."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Compile-time shape of a kernel. ``matrices``: type and rows of each, up to four."""

    columns: int
    num_tokens: int
    matrices: tuple[tuple[TensorType, int], ...]
    input: LinearInput
    adds: bool = False
    """The products are added to `out`, a residual."""
    is_gated: bool = False
    """The products are multiplied by the sigmoid of each token's gate first."""
    has_side: bool = False
    """The input rows are written too, for experts."""
    has_argmax: bool = False
    """The only matrix is a head: each block writes the argmax of its rows."""

    def __post_init__(self) -> None:
        check_tokens(self.num_tokens)
        if not 1 <= len(self.matrices) <= _MOST_SEGMENTS:
            raise ValueError(f"{len(self.matrices)} matrices, 1 to {_MOST_SEGMENTS} go at once")
        if any(rows < 1 for _, rows in self.matrices):
            raise ValueError(f"a matrix without rows: {self.matrices}")
        check_columns(self.columns, self.tensor_types)
        if self.input is LinearInput.QUANTISED and (self.has_floats or self.has_side):
            raise ValueError("int8 rows go with quantised weights alone, and have no side outputs")
        if self.has_side and self.columns % 32:
            raise ValueError(f"int8 side outputs of {self.columns} columns, not a multiple of 32")
        if self.has_argmax and len(self.matrices) != 1:
            raise ValueError("a head is the only matrix")

    @property
    def tensor_types(self) -> tuple[TensorType, ...]:
        return tuple(kind for kind, _ in self.matrices)

    @property
    def has_floats(self) -> bool:
        return any(kind in FLOAT_TYPES for kind in self.tensor_types)

    @property
    def has_bytes(self) -> bool:
        return any(kind not in FLOAT_TYPES for kind in self.tensor_types)


@dataclass(frozen=True, slots=True)
class LinearTuning:
    """Team of lanes and grid on a device; bits for quantised rows depend on `team` only."""

    warps: int
    team: int
    row_warps: int
    team_rows: int
    most_deep: int
    min_blocks: int
    most_blocks: int
    """Most blocks of a grid; with more tiles a block computes several."""


def default_tuning(shape: LinearShape, device: KernelDevice) -> LinearTuning:
    """One wave of blocks where each normalises or has many rows; a block a row where there are few.
    It does not depend on T.
    """
    lanes, num_multiprocessors = device.lanes, device.num_multiprocessors
    team = sum_lanes(num_units(shape.columns), lanes)
    rows = sum(count for _, count in shape.matrices)
    most_threads = 512 if lanes == 64 else 640
    if not shape.has_bytes and rows <= 4 * num_multiprocessors:
        warps = max(1, 256 // lanes)
        deepest = max(units_of(kind, shape.columns) for kind in shape.tensor_types)
        while warps > 1 and deepest < warps * lanes:
            warps //= 2
        return LinearTuning(
            warps=warps,
            team=lanes,
            row_warps=warps,
            team_rows=1,
            most_deep=4,
            min_blocks=1,
            most_blocks=1 << 30,
        )
    team_rows = 1 if num_units(shape.columns) >= 2 * team else 2
    rows_a_warp = team_rows * (lanes // team)
    is_long = rows > 64 * num_multiprocessors
    warps = 256 // lanes
    blocks_each = 2  # a multiprocessor's
    if not is_long:
        warps = ceil(rows / (rows_a_warp * num_multiprocessors))
        warps = min(max(warps, 128 // lanes), most_threads // lanes)
        # Half of a large block is quicker through the barriers of a norm.
        blocks_each = 2 if shape.input is LinearInput.NORM and warps * lanes >= 512 else 1
        warps = ceil(warps / blocks_each)
    return LinearTuning(
        warps=warps,
        team=team,
        row_warps=1,
        team_rows=team_rows,
        most_deep=4 // team_rows,
        min_blocks=blocks_each if lanes == 32 else 1,
        most_blocks=blocks_each * num_multiprocessors if is_long else 1 << 30,
    )


def _linear_defines(shape: LinearShape, tuning: LinearTuning) -> dict[str, int | str]:
    padded = (*shape.matrices, *[shape.matrices[0]] * (_MOST_SEGMENTS - len(shape.matrices)))
    return {
        "SEGMENTS": len(shape.matrices),
        **{f"TYPE{index}": int(kind) for index, (kind, _) in enumerate(padded)},
        **{f"ROWS{index}": rows for index, (_, rows) in enumerate(padded)},
        "COLUMNS": shape.columns,
        "TOKENS": shape.num_tokens,
        "INPUT": int(shape.input),
        "ADD": int(shape.adds),
        "GATED": int(shape.is_gated),
        "SIDE": int(shape.has_side),
        "ARGMAX": int(shape.has_argmax),
        "WARPS": tuning.warps,
        "TEAM": tuning.team,
        "ROW_WARPS": tuning.row_warps,
        "TEAM_ROWS": tuning.team_rows,
        "MOST_DEEP": tuning.most_deep,
        "MIN_BLOCKS": tuning.min_blocks,
    }


def tile_rows(tensor_type: TensorType, tuning: LinearTuning, lanes: int) -> int:
    """Rows of a matrix that one block computes at once."""
    if tuning.row_warps > 1:
        teams = tuning.warps // tuning.row_warps
    else:
        team = lanes if tensor_type in FLOAT_TYPES else tuning.team
        teams = tuning.warps * (lanes // team)
    return teams * tuning.team_rows


@dataclass(frozen=True, slots=True)
class LinearInputs:
    """Rows to multiply: `x`, with `norm_weight` and `eps` for NORM, with `up` for SWIGLU; or
    `quants` and `meta`. `gate`, if the shape is gated.

    Shapes: x, up [T, H] float32; norm_weight [H] float32; quants [T, padded_columns] int8;
    meta `meta_shape` float32; gate [T, 1] float32.
    """

    x: DeviceArray | None = None
    norm_weight: DeviceArray | None = None
    eps: float = 0.0
    quants: DeviceArray | None = None
    meta: DeviceArray | None = None
    up: DeviceArray | None = None
    gate: DeviceArray | None = None


class DecodeLinear:
    """Launches the kernel for one shape."""

    def __init__(
        self, device: KernelDevice, shape: LinearShape, tuning: LinearTuning | None = None
    ) -> None:
        """Raises: ValueError if the rows of activations do not fit a block's shared memory."""
        tuning = default_tuning(shape, device) if tuning is None else tuning
        self.shape = shape
        self.tuning = tuning
        self._device = device
        self._arrays = ArrayChecker(device)
        self._shared_bytes = check_shared_bytes(
            device,
            staged_bytes(
                shape.num_tokens,
                shape.columns,
                as_bytes=shape.has_bytes,
                as_floats=shape.has_floats,
            ),
            f"{shape.num_tokens} rows of {shape.columns}",
        )
        num_tiles = sum(
            ceil(rows / tile_rows(kind, tuning, device.lanes)) for kind, rows in shape.matrices
        )
        self.num_blocks = min(num_tiles, tuning.most_blocks)
        """Blocks that compute rows; each writes partials."""
        module = device.module("linear_decode.cu", _linear_defines(shape, tuning))
        self._kernel = module.kernel("linear_decode", LinearDecodeArgs)

    def launch(
        self,
        weights: Sequence[DeviceArray],
        out: Sequence[DeviceArray],
        inputs: LinearInputs,
        *,
        side: StepRows | None = None,
        partials: DeviceArray | None = None,
    ) -> None:
        """``out[i] = rows @ weights[i].T``, or added to it; further results as the shape has them.

        Shapes: weights[i] rows in the device's layout, uint8; out[i] [T, rows] float32; side [T,
        H]; partials [num_blocks, T] uint64.
        Raises: ValueError for an array that is missing, or not of this shape, type or device.
        """
        shape = self.shape
        if not len(weights) == len(out) == len(shape.matrices):
            raise ValueError(
                f"{len(weights)} weights and {len(out)} outputs of {len(shape.matrices)}"
            )
        args = LinearDecodeArgs(eps=inputs.eps)
        for index, (kind, rows) in enumerate(shape.matrices):
            args.weights[index] = self._arrays.weights(
                f"weights[{index}]", weights[index], kind, rows=rows, columns=shape.columns
            )
            args.out[index] = self._arrays.address(
                f"out[{index}]", out[index], np.float32, T=shape.num_tokens, rows=rows
            )
        self._fill_inputs(args, inputs)
        if shape.has_side and side is not None:
            self._arrays.set_forms(
                args.side, "side_", side, rows=shape.num_tokens, columns=shape.columns
            )
        if shape.has_argmax:
            args.partials = self._arrays.address(
                "partials", partials, np.uint64, blocks=self.num_blocks, T=shape.num_tokens
            )
        self._device.launch(
            self._kernel,
            (self.num_blocks + shape.has_side, 1, 1),
            self.tuning.warps * self._device.lanes,
            args,
            shared_bytes=self._shared_bytes,
        )

    def _fill_inputs(self, args: ctypes.Structure, inputs: LinearInputs) -> None:
        shape, arrays = self.shape, self._arrays
        tokens, columns = shape.num_tokens, shape.columns
        if shape.is_gated:
            args.gate = arrays.address("gate", inputs.gate, np.float32, T=tokens, one=1)
        if shape.input is LinearInput.QUANTISED:
            args.quants, args.meta = arrays.int8_rows(
                "", inputs.quants, inputs.meta, rows=tokens, columns=columns
            )
            return
        args.x = arrays.address("x", inputs.x, np.float32, T=tokens, H=columns)
        if shape.input is LinearInput.NORM:
            args.norm_weight = arrays.address(
                "norm_weight", inputs.norm_weight, np.float32, H=columns
            )
        elif shape.input is LinearInput.SWIGLU:
            args.up = arrays.address("up", inputs.up, np.float32, T=tokens, H=columns)


@dataclass(frozen=True, slots=True)
class RouterShape:
    """Compile-time shape of the kernel."""

    num_tokens: int
    num_experts: int
    columns: int
    tensor_type: TensorType

    def __post_init__(self) -> None:
        check_tokens(self.num_tokens)
        if not is_float_router(self.tensor_type, self.columns):
            raise ValueError(f"a router of {self.columns} columns of {self.tensor_type.name}")


def is_float_router(tensor_type: TensorType, columns: int) -> bool:
    """Whether the kernel supports this matrix; others are multiplied by linear_decode.cu."""
    return tensor_type in FLOAT_TYPES and columns > 0 and columns % _ROUTER_STEP == 0


class DecodeRouter:
    """Launches the kernel for one shape."""

    def __init__(self, device: KernelDevice, shape: RouterShape) -> None:
        self.shape = shape
        self._device, self._arrays = device, ArrayChecker(device)
        # A block's sums need several warps, each of which has something to do.
        self._threads = device.lanes
        units = units_of(shape.tensor_type, shape.columns)
        while 2 * self._threads <= min(units, _MOST_ROUTER_THREADS):
            self._threads *= 2
        defines = {
            "TYPE": int(shape.tensor_type),
            "EXPERTS": shape.num_experts,
            "COLUMNS": shape.columns,
            "TOKENS": shape.num_tokens,
            "THREADS": self._threads,
        }
        module = device.module("router.cu", defines)
        self._kernel = module.kernel("router", RouterArgs)

    def launch(
        self,
        weights: DeviceArray,
        logits: DeviceArray,
        inputs: LinearInputs,
        *,
        side: StepRows | None = None,
    ) -> None:
        """``logits = normalised rows @ weights.T``; the rows are written to `side` too.

        Shapes: weights [E] rows in the device's layout, uint8; logits [T, E] float32.
        Raises: ValueError for an array that is missing, or not of this shape, type or device.
        """
        shape, arrays = self.shape, self._arrays
        tokens, experts, columns = shape.num_tokens, shape.num_experts, shape.columns
        args = RouterArgs(
            weights=arrays.weights(
                "weights", weights, shape.tensor_type, rows=experts, columns=columns
            ),
            norm_weight=arrays.address("norm_weight", inputs.norm_weight, np.float32, H=columns),
            x=arrays.address("x", inputs.x, np.float32, T=tokens, H=columns),
            logits=arrays.address("logits", logits, np.float32, T=tokens, E=experts),
            eps=inputs.eps,
        )
        if side is not None:
            arrays.set_forms(args.side, "side_", side, rows=tokens, columns=columns)
        self._device.launch(self._kernel, (experts + 1, 1, 1), self._threads, args)
