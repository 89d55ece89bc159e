"""Launches of the small kernels of a decode step: embed, argmax, quantise; repack."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from dflash_adapters.quant import TensorType
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, Grid, Kernel, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import (
    ArrayChecker,
    StepRows,
    check_columns,
    check_tokens,
)
from dflash_runtime.compute.gpu.launch.layouts import row_bytes

_THREADS = 256


class RowChange(IntEnum):
    """Operation on a row before it is quantised; numbered as in staging.cuh."""

    NORM = 0
    NONE = 1
    FACTORS = 4


EmbedArgs = kernel_struct("embed.cu", "EmbedArgs")
ArgmaxLogitsArgs = kernel_struct("argmax_logits.cu", "ArgmaxLogitsArgs")
QuantiseRowsArgs = kernel_struct("quantise_rows.cu", "QuantiseRowsArgs")
RepackArgs = kernel_struct("repack.cu", "RepackArgs")


def check_token_ids(token_ids: I32Array, vocab_size: int) -> None:
    """Raises: ValueError if an id is outside the vocabulary. Shapes: token_ids [T]."""
    if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
        raise ValueError(f"token ids must lie within 0..{vocab_size - 1}")


class Embed:
    """Gathers rows of a table by token ids on the device."""

    def __init__(
        self, device: KernelDevice, tensor_type: TensorType, *, rows: int, columns: int
    ) -> None:
        """Raises: ValueError for a type without layout, or rows of no whole blocks."""
        check_columns(columns, (tensor_type,))
        self._device, self._arrays = device, ArrayChecker(device)
        self._type, self._rows, self._columns = tensor_type, rows, columns
        self._threads = 2 * device.lanes
        sizes = {"ROWS": rows, "COLUMNS": columns}
        defines = {"TYPE": int(tensor_type), **sizes, "THREADS": self._threads}
        self._kernel = device.module("embed.cu", defines).kernel("embed", EmbedArgs)

    def launch(self, table: DeviceArray, token_ids: DeviceArray, out: DeviceArray) -> None:
        """``out[t] = table[token_ids[t]]``; NaN for an id outside the table.

        Begins when the kernel before it, which may have chosen the tokens, has ended.

        Shapes: table [V] rows in the device's layout, uint8; token_ids [T] int32; out [T, H].
        Raises: ValueError for an array that is not of this shape, type or device.
        """
        (num_tokens,) = token_ids.shape
        args = EmbedArgs(
            table=self._arrays.weights(
                "table", table, self._type, rows=self._rows, columns=self._columns
            ),
            token_ids=self._arrays.address("token_ids", token_ids, np.int32, T=num_tokens),
            out=self._arrays.address("out", out, np.float32, T=num_tokens, H=self._columns),
        )
        self._device.launch(
            self._kernel,
            (num_tokens, 1, 1),
            self._threads,
            args,
            overlaps_previous=False,
        )


class ArgmaxLogits:
    """Argmax of each row of logits, from the partials of a head (DecodeLinear with argmax)."""

    def __init__(self, device: KernelDevice, *, num_tokens: int, advances: bool) -> None:
        """`advances`: positions are incremented."""
        check_tokens(num_tokens)
        self._device, self._arrays, self._num_tokens = device, ArrayChecker(device), num_tokens
        self._warps = _THREADS // device.lanes
        defines = {"TOKENS": num_tokens, "ADVANCE": int(advances), "WARPS": self._warps}
        self._kernel = device.module("argmax_logits.cu", defines).kernel(
            "argmax_logits", ArgmaxLogitsArgs
        )

    def launch(
        self,
        partials: DeviceArray,
        token_ids: DeviceArray,
        positions: DeviceArray,
        *,
        history: DeviceArray | None = None,
    ) -> None:
        """``token_ids[t]`` of the largest logit, the lowest of equals; NOT_FINITE if any is not.

        `history`, if given, gets each token at its position, one after its row's. Where positions
        advance, NOT_FINITE is written to `history` only, and `token_ids` gets some valid token, as
        the next step reads it.
        Shapes: partials [blocks, T] uint64; token_ids, positions [T] int32; history [N] int32.
        Raises: ValueError for an array that is not of this shape, type or device.
        """
        arrays, tokens, num_partials = self._arrays, self._num_tokens, partials.shape[0]
        capacity = 0 if history is None else history.size
        args = ArgmaxLogitsArgs(
            partials=arrays.address("partials", partials, np.uint64, blocks=num_partials, T=tokens),
            num_partials=num_partials,
            capacity=capacity,
            token_ids=arrays.address("token_ids", token_ids, np.int32, T=tokens),
            positions=arrays.address("positions", positions, np.int32, T=tokens),
            history=arrays.optional("history", history, np.int32, N=capacity),
        )
        self._device.launch(self._kernel, (1, 1, 1), self._warps * self._device.lanes, args)


class QuantiseRows:
    """Quantises rows of activations to int8, normalised first, or multiplied by a factor each."""

    def __init__(self, device: KernelDevice, *, columns: int, change: RowChange) -> None:
        """Raises: ValueError for columns that are no multiple of 32."""
        if columns <= 0 or columns % 32:
            raise ValueError(f"{columns} columns are not a multiple of 32")
        self._device, self._arrays = device, ArrayChecker(device)
        self._columns, self._change = columns, change
        self._warps = _THREADS // device.lanes
        defines = {"COLUMNS": columns, "INPUT": int(change), "WARPS": self._warps}
        module = device.module("quantise_rows.cu", defines)
        self._kernel = module.kernel("quantise_rows", QuantiseRowsArgs)

    def launch(
        self,
        x: DeviceArray,
        out: StepRows,
        *,
        norm_weight: DeviceArray | None = None,
        eps: float = 0.0,
        factors: DeviceArray | None = None,
    ) -> None:
        """Quantise each row, and write what was quantised, if `out` has values.

        Shapes: x [rows, H] float32; norm_weight [H] float32; factors [rows, 1] float32.
        Raises: ValueError for an array that is missing, or not of this shape, type or device.
        """
        arrays, columns, (num_rows, _) = self._arrays, self._columns, x.shape
        for name, array, change in (
            ("norm_weight", norm_weight, RowChange.NORM),
            ("factors", factors, RowChange.FACTORS),
        ):
            if (array is not None) != (self._change is change):
                raise ValueError(f"{name} is {array}, compiled for {self._change.name}")
        args = QuantiseRowsArgs(
            x=arrays.address("x", x, np.float32, T=num_rows, H=columns),
            norm_weight=arrays.optional("norm_weight", norm_weight, np.float32, H=columns),
            factors=arrays.optional("factors", factors, np.float32, T=num_rows, one=1),
            eps=eps,
        )
        args.out.values = arrays.optional("values", out.values, np.float32, T=num_rows, H=columns)
        args.out.quants, args.out.meta = arrays.int8_rows(
            "", out.quants, out.meta, rows=num_rows, columns=columns
        )
        block = self._warps * self._device.lanes
        self._device.launch(self._kernel, (num_rows, 1, 1), block, args)


class Repack:
    """Repacks rows of a file, already on the device, to the device's layout."""

    def __init__(self, device: KernelDevice, tensor_type: TensorType, *, columns: int) -> None:
        """Raises: ValueError for a type without layout, or rows of no whole blocks."""
        self._row_bytes = row_bytes(tensor_type, columns)
        self._native_bytes = tensor_type.row_bytes(columns)
        self._device, self._arrays = device, ArrayChecker(device)
        defines = {"TYPE": int(tensor_type), "COLUMNS": columns, "THREADS": _THREADS}
        self._kernel: Kernel = device.module("repack.cu", defines).kernel("repack", RepackArgs)

    def launch(self, native: DeviceArray, out: DeviceArray) -> None:
        """Shapes: native [rows * the file's row bytes], out [rows * row_bytes], uint8.

        Raises: ValueError for an array that is not of this shape, type or device.
        """
        num_rows = native.size // self._native_bytes
        num_pieces = num_rows * self._row_bytes // 16
        args = RepackArgs(
            native=self._arrays.address(
                "native", native, np.uint8, bytes=num_rows * self._native_bytes
            ),
            out=self._arrays.address("out", out, np.uint8, bytes=num_rows * self._row_bytes),
            num_pieces=num_pieces,
        )
        num_blocks = min(-(-num_pieces // _THREADS), 32 * self._device.num_multiprocessors)
        if num_blocks:
            grid: Grid = (num_blocks, 1, 1)
            # Kernels that may have begun behind it read its result through the L1 cache, which must
            # not hold what an earlier one has read there.
            self._device.launch(self._kernel, grid, _THREADS, args, overlaps_previous=False)
