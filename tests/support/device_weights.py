"""Random weights in the device layout and activations as int8, with their values in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_adapters.quant import TensorType, dequantise
from dflash_protocol.ids import AnyArray, F32Array, F64Array, U8Array
from dflash_runtime.compute.gpu.launch.decode_arrays import meta_shape
from dflash_runtime.compute.step_order import GRANULE, padded_columns
from support.block_scales import SCALE_OFFSETS
from support.device_layout import repack


@dataclass(frozen=True)
class Weights:
    """Rows of one type. Shapes: native and packed [rows, bytes]; values [rows, columns]."""

    native: U8Array
    packed: U8Array
    values: F64Array


def random_weights(
    rng: np.random.Generator, tensor_type: TensorType, rows: int, columns: int
) -> Weights:
    """Blocks of random bytes with scales of about a tenth."""
    if tensor_type in (TensorType.F32, TensorType.F16, TensorType.BF16):
        native = _stored_floats(rng.standard_normal((rows, columns)), tensor_type)
    else:
        layout = tensor_type.layout
        num_blocks = rows * columns // layout.block_elements
        blocks = rng.integers(0, 256, (num_blocks, layout.block_bytes), np.uint8)
        for offset in SCALE_OFFSETS.get(tensor_type, ()):
            scales = (rng.standard_normal((num_blocks, 1)) * 0.1).astype(np.float16)
            blocks[:, offset : offset + 2] = scales.view(np.uint8)
        if tensor_type is TensorType.MXFP4:
            blocks[:, 0] = rng.integers(118, 126, num_blocks)
        native = blocks.reshape(rows, -1)
    return as_weights(native, tensor_type, columns)


def as_weights(native: U8Array, tensor_type: TensorType, columns: int) -> Weights:
    """The same for given rows in the file's format."""
    rows = native.shape[0]
    values = dequantise(native.reshape(-1), tensor_type, (rows, columns))
    packed = repack(tensor_type, native.reshape(-1), rows=rows, columns=columns)
    return Weights(native, packed, values.astype(np.float64))


def _stored_floats(values: F64Array, tensor_type: TensorType) -> U8Array:
    floats = values.astype(np.float32)
    if tensor_type is TensorType.F16:
        return floats.astype(np.float16).view(np.uint8)
    if tensor_type is TensorType.BF16:
        return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return floats.view(np.uint8)


@dataclass(frozen=True)
class Int8Rows:
    """Shapes: quants [rows, padded_columns]; meta `meta_shape`; values [rows, columns]."""

    quants: AnyArray
    meta: F32Array
    values: F64Array


def as_int8_rows(x: F32Array) -> Int8Rows:
    """Quantise rows as the kernels do; padding is arbitrary, as kernels need not write it."""
    rows, columns = x.shape
    used = -(-columns // GRANULE)
    wide = np.zeros((rows, used * GRANULE), np.float32)
    wide[:, :columns] = x
    granules = wide.reshape(rows, used, GRANULE)
    largest = np.abs(granules).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    bytes_of = np.rint(granules * inverse).astype(np.int8)
    scale = largest / np.float32(127)
    quants = np.full((rows, padded_columns(columns)), -1, np.int8)
    quants[:, : used * GRANULE] = bytes_of.reshape(rows, -1)
    meta = np.full(meta_shape(rows, columns), np.nan, np.float32)
    meta[:, :used, 0] = scale[..., 0]
    meta[:, :used, 1] = scale[..., 0] * bytes_of.sum(axis=-1, dtype=np.int32).astype(np.float32)
    return Int8Rows(quants, meta, int8_values(quants, meta, columns))


def int8_values(quants: AnyArray, meta: AnyArray, columns: int) -> F64Array:
    """The values of int8 rows."""
    granules = quants.reshape(quants.shape[0], -1, GRANULE).astype(np.float64)
    with np.errstate(invalid="ignore"):
        values = granules * meta[:, :, :1].astype(np.float64)
    return values.reshape(quants.shape[0], -1)[:, :columns]
