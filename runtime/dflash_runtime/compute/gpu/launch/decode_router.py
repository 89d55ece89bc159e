"""Launches of ``router.cu``: router logits of 1 to 8 rows, and the rows for experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import (
    ArrayChecker,
    check_tokens,
    given,
    int8_rows,
    units_of,
)
from dflash_runtime.compute.gpu.launch.decode_linear import LinearInputs, LinearOutputs
from dflash_runtime.compute.gpu.launch.layouts import FLOAT_TYPES

_COLUMNS_STEP = 32
_MOST_THREADS = 256

RouterArgs = kernel_struct("router.cu", "RouterArgs")


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
    return tensor_type in FLOAT_TYPES and columns > 0 and columns % _COLUMNS_STEP == 0


class DecodeRouter:
    """Launches the kernel for one shape."""

    def __init__(self, device: KernelDevice, shape: RouterShape) -> None:
        self.shape = shape
        self._device, self._arrays = device, ArrayChecker(device)
        # A block's sums need several warps, each of which has something to do.
        self._threads = device.lanes
        units = units_of(shape.tensor_type, shape.columns)
        while 2 * self._threads <= min(units, _MOST_THREADS):
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
        outputs: LinearOutputs | None = None,
    ) -> None:
        """``logits = normalised rows @ weights.T``; the rows go where `outputs` has sides.

        Shapes: weights [E] rows in the device's layout, uint8; logits [T, E] float32.
        Raises: ValueError for an array that is missing, or not of this shape, type or device.
        """
        shape, arrays = self.shape, self._arrays
        tokens, experts, columns = shape.num_tokens, shape.num_experts, shape.columns
        outputs = outputs or LinearOutputs()
        args = RouterArgs(
            weights=arrays.weights(
                "weights", weights, shape.tensor_type, rows=experts, columns=columns
            ),
            norm_weight=arrays.address(
                "norm_weight", given("norm_weight", inputs.norm_weight), np.float32, H=columns
            ),
            x=arrays.address("x", given("x", inputs.x), np.float32, T=tokens, H=columns),
            logits=arrays.address("logits", logits, np.float32, T=tokens, E=experts),
            eps=inputs.eps,
        )
        args.side.values = arrays.optional(
            "side_values", outputs.side_values, np.float32, T=tokens, H=columns
        )
        if outputs.side_quants is not None:
            args.side.quants, args.side.meta = int8_rows(
                arrays,
                "side_",
                quants=outputs.side_quants,
                meta=outputs.side_meta,
                rows=tokens,
                columns=columns,
            )
        self._device.launch(self._kernel, (experts + 1, 1, 1), self._threads, args)
