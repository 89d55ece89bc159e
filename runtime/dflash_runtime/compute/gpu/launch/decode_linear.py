"""Launches of ``linear_decode.cu``: matrices times the 1 to 8 rows of a decode step.

Each class is one compiled kernel with its grid; `launch` only checks arrays and fills a struct.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import (
    ArrayChecker,
    check_shared_bytes,
    given,
    int8_rows,
    staged_bytes,
)
from dflash_runtime.compute.gpu.launch.decode_linear_shape import (
    LINEAR_FILE,
    LinearInput,
    LinearShape,
    LinearTuning,
    default_tuning,
    linear_defines,
    tile_rows,
)

LinearDecodeArgs = kernel_struct("linear_decode.cu", "LinearDecodeArgs")


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


@dataclass(frozen=True, slots=True)
class LinearOutputs:
    """Further results besides `out`, as far as the shape has them.

    Shapes: side_values [T, H] float32, side_quants and side_meta as LinearInputs' (each may be
    left out); partials [num_blocks, T] uint64.
    """

    side_values: DeviceArray | None = None
    side_quants: DeviceArray | None = None
    side_meta: DeviceArray | None = None
    partials: DeviceArray | None = None

    def sides_of(self, tokens: slice) -> LinearOutputs:
        """The outputs of some of the tokens, in place."""
        sides = (self.side_values, self.side_quants, self.side_meta)
        return LinearOutputs(*(None if side is None else side[tokens] for side in sides))


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
        module = device.module(LINEAR_FILE, linear_defines(shape, tuning))
        self._kernel = module.kernel("linear_decode", LinearDecodeArgs)

    def launch(
        self,
        weights: Sequence[DeviceArray],
        out: Sequence[DeviceArray],
        inputs: LinearInputs,
        *,
        outputs: LinearOutputs | None = None,
    ) -> None:
        """``out[i] = rows @ weights[i].T``, or added to it.

        Shapes: weights[i] rows in the device's layout, uint8; out[i] [T, rows] float32.
        Raises: ValueError for an array that is missing, or not of this shape, type or device.
        """
        shape, outputs = self.shape, outputs or LinearOutputs()
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
        self._fill_outputs(args, outputs)
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
            args.gate = arrays.address(
                "gate", given("gate", inputs.gate), np.float32, T=tokens, one=1
            )
        if shape.input is LinearInput.QUANTISED:
            args.quants, args.meta = int8_rows(
                arrays, "", quants=inputs.quants, meta=inputs.meta, rows=tokens, columns=columns
            )
            return
        args.x = arrays.address("x", given("x", inputs.x), np.float32, T=tokens, H=columns)
        if shape.input is LinearInput.NORM:
            weight = given("norm_weight", inputs.norm_weight)
            args.norm_weight = arrays.address("norm_weight", weight, np.float32, H=columns)
        elif shape.input is LinearInput.SWIGLU:
            args.up = arrays.address("up", given("up", inputs.up), np.float32, T=tokens, H=columns)

    def _fill_outputs(self, args: ctypes.Structure, outputs: LinearOutputs) -> None:
        shape, arrays, tokens = self.shape, self._arrays, self.shape.num_tokens
        if shape.has_side:
            args.side.values = arrays.optional(
                "side_values", outputs.side_values, np.float32, T=tokens, H=shape.columns
            )
            if outputs.side_quants is not None:
                args.side.quants, args.side.meta = int8_rows(
                    arrays,
                    "side_",
                    quants=outputs.side_quants,
                    meta=outputs.side_meta,
                    rows=tokens,
                    columns=shape.columns,
                )
        if shape.has_argmax:
            partials = given("partials", outputs.partials)
            args.partials = arrays.address(
                "partials", partials, np.uint64, blocks=self.num_blocks, T=tokens
            )
