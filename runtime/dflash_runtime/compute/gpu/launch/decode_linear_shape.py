"""Compile-time shape and tuning of ``linear_decode.cu``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import ceil

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.gpu.device.device import KernelDevice
from dflash_runtime.compute.gpu.launch.decode_arrays import (
    check_columns,
    check_tokens,
    team_lanes,
    units_of,
)
from dflash_runtime.compute.gpu.launch.layouts import FLOAT_TYPES, num_units

LINEAR_FILE = "linear_decode.cu"
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
    team = team_lanes(num_units(shape.columns), lanes)
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


def linear_defines(shape: LinearShape, tuning: LinearTuning) -> dict[str, int | str]:
    """Defines of the kernel file."""
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
