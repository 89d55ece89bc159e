"""Arguments of attention's kernels; every array that reaches one is checked here."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from dflash_adapters.rope import RopeTable
from dflash_protocol.ids import F32Array
from dflash_runtime.compute.gpu.device.device import DeviceArray, address
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import ArrayChecker, StepRows
from dflash_runtime.compute.gpu.layers.attention_plan import AttentionShape
from dflash_runtime.compute.gpu.layers.kv_rows import KvRows, LayerKvCache
from dflash_runtime.compute.step_order import GRANULE

_ALIGNMENT = 16

LayerCacheArgs = kernel_struct("attention_heads.cuh", "LayerCache")
NewRowsArgs = kernel_struct("attention_heads.cuh", "NewRows")
AttentionMergeArgs = kernel_struct("attention_merge.cu", "AttentionMergeArgs")


def rotation_angles(table: RopeTable, num_positions: int) -> F32Array:
    """{cos, sin} of every pair at every position, scaled. Shapes: result [N, rotated / 2, 2]."""
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * table.inv_freq
    pairs = np.empty((*angles.shape, 2), np.float32)
    pairs[..., 0] = np.cos(angles) * table.scale
    pairs[..., 1] = np.sin(angles) * table.scale
    return pairs


@dataclass(slots=True, eq=False)
class NewRows:
    """Projected queries, keys and values, and their norms and rotation before attention.

    Shapes: queries, keys and values [T, heads * D] float32; angles from rotation_angles, None: no
    rotation; weights [D] float32 or None; query_factors [N] float32, by position.
    """

    queries: DeviceArray
    keys: DeviceArray
    values: DeviceArray
    angles: DeviceArray | None
    scale: float
    query_weight: DeviceArray | None = None
    key_weight: DeviceArray | None = None
    eps: float = 0.0
    query_factors: DeviceArray | None = None


def merge_args(
    arrays: ArrayChecker,
    shape: AttentionShape,
    out: StepRows,
    *,
    num_tokens: int,
    sinks: DeviceArray | None,
) -> ctypes.Structure:
    """Arguments of the kernel that writes results.

    Raises: ValueError for arrays that do not fit.
    """
    args = AttentionMergeArgs(sinks=sinks_address(arrays, shape, sinks))
    if out.values is not None:
        args.values = out_address(shape, out.values, num_tokens)
    if out.quants is not None:
        if shape.kv.value_dim % GRANULE:
            raise ValueError(f"heads of {shape.kv.value_dim} are no whole granules of int8")
        columns = shape.num_heads * shape.kv.value_dim
        args.quants, args.meta = arrays.int8_rows(
            "out.", out.quants, out.meta, rows=num_tokens, columns=columns
        )
    return args


def out_address(shape: AttentionShape, out: DeviceArray, num_tokens: int) -> int:
    """Address of the results. Raises: ValueError if the array does not fit."""
    width = shape.num_heads * shape.kv.value_dim
    if out.dtype != np.float32 or out.shape[0] != num_tokens or out.size != num_tokens * width:
        raise ValueError(
            f"out is {out.dtype} {out.shape}, expected float32 [{num_tokens}, {width}]"
        )
    return address(out)


def scratch_address(scratch: DeviceArray, num_bytes: int) -> int:
    """Its address. Raises: ValueError if it is too small."""
    if scratch.dtype != np.uint8 or scratch.size < num_bytes:
        raise ValueError(
            f"scratch is {scratch.dtype} {scratch.shape}, needed are {num_bytes} bytes"
        )
    return _aligned(scratch, "scratch")


def check_layer(shape: AttentionShape, layer: LayerKvCache, rows: NewRows) -> None:
    """Raises: ValueError for a cache of another kind, or tables of fewer positions than it has."""
    kind = layer.kv, layer.kv_type, layer.window_rows
    if kind != (shape.kv, shape.kv_type, shape.window_rows):
        raise ValueError(f"a cache of {layer.kv_type} {layer.kv}, compiled for {shape}")
    if (rows.angles is None) != (shape.num_rotated == 0):
        raise ValueError(f"angles are {rows.angles}, compiled for {shape}")
    if (rows.query_factors is None) == shape.is_tempered:
        raise ValueError(f"query_factors are {rows.query_factors}, compiled for {shape}")
    for name, table in (("angles", rows.angles), ("query_factors", rows.query_factors)):
        if table is not None and table.shape[0] < layer.capacity:
            raise ValueError(f"{name} of {table.shape[0]} of {layer.capacity} positions")


def sinks_address(arrays: ArrayChecker, shape: AttentionShape, sinks: DeviceArray | None) -> int:
    """Their address. Raises: ValueError if they are missing, or not expected."""
    if (sinks is None) == shape.has_sinks:
        raise ValueError(f"sinks are {sinks}, compiled for {shape}")
    return arrays.optional("sinks", sinks, np.float32, heads=shape.num_heads)


def _aligned(array: DeviceArray, name: str) -> int:
    """Raises: ValueError if the array is not aligned for vector loads."""
    begin = address(array)
    if begin % _ALIGNMENT:
        raise ValueError(f"{name} is not aligned to {_ALIGNMENT} bytes")
    return begin


def layer_cache(layer: LayerKvCache) -> ctypes.Structure:
    """A layer's arrays as arguments of kernels."""

    def scales(rows: KvRows) -> int | None:
        return None if rows.scales is None else address(rows.scales)

    return LayerCacheArgs(
        keys=_aligned(layer.keys.elements, "keys"),
        values=_aligned(layer.values.elements, "values"),
        key_scales=scales(layer.keys),
        value_scales=scales(layer.values),
        num_rows=layer.num_rows,
    )


def attention_rows(
    arrays: ArrayChecker, shape: AttentionShape, rows: NewRows, *, num_tokens: int
) -> ctypes.Structure:
    """Rows of so many tokens as arguments of kernels.

    Raises: ValueError for rows of another shape.
    """

    angles, factors = rows.angles, rows.query_factors
    kv = shape.kv
    widths = {
        "queries": shape.num_heads * kv.key_dim,
        "keys": kv.num_heads * kv.key_dim,
        "values": kv.num_heads * kv.value_dim,
    }
    heads = {
        name: arrays.address(name, getattr(rows, name), np.float32, T=num_tokens, columns=width)
        for name, width in widths.items()
    }
    return NewRowsArgs(
        **heads,
        query_weight=arrays.optional(
            "query_weight", rows.query_weight, np.float32, D=shape.kv.key_dim
        ),
        key_weight=arrays.optional("key_weight", rows.key_weight, np.float32, D=shape.kv.key_dim),
        angles=arrays.optional(
            "angles",
            angles,
            np.float32,
            N=0 if angles is None else angles.shape[0],
            pairs=shape.num_rotated // 2,
            two=2,
        ),
        query_factors=arrays.optional(
            "query_factors", factors, np.float32, N=0 if factors is None else factors.shape[0]
        ),
        query_stride=widths["queries"],
        key_stride=widths["keys"],
        value_stride=widths["values"],
        eps=rows.eps,
        scale=rows.scale,
    )
