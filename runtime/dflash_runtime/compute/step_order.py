"""The order in which a decode step's products are added: the same on GPUs and processors.

So the bits of an expert's result in a step do not depend on which of them computes it. A row of
activations is quantised in granules. A row of weights is multiplied in units of 64 values, and
`sum_lanes` lanes add up the units that are theirs; how is written in
``cpu/weights/repacked/step_kernels.py`` and ``gpu/kernels/dense/products.cuh``.
"""

from __future__ import annotations

from dflash_adapters.quant import TensorType

MOST_TOKENS = 8
"""Most tokens that a step's kernels take at once."""

GRANULE = 16
"""Elements of a row of int8 activations that share a scale."""

UNIT_VALUES = 64
"""Values of a quantised row in a unit."""

MOST_SUM_LANES = 32
"""Most lanes that share a row: those of a warp of the narrowest device."""


FLOAT_TYPES = frozenset({TensorType.F32, TensorType.F16, TensorType.BF16})


def padded_columns(columns: int) -> int:
    """Elements of a row of int8 activations in devices and requests, padding included."""
    return -(-columns // 256) * 256


def float_unit(tensor_type: TensorType) -> int:
    """Values of a row of floats in a unit of 16 bytes; 8 for types that GPUs do not multiply."""
    return 4 if tensor_type is TensorType.F32 else 8


def units_of(tensor_type: TensorType, columns: int) -> int:
    """Units of a row: 64 quantised weights, or 16 bytes of floats."""
    return -(-columns // (float_unit(tensor_type) if tensor_type in FLOAT_TYPES else UNIT_VALUES))


def sum_lanes(num_units: int, most: int = MOST_SUM_LANES) -> int:
    """Lanes that share a row: as many as possible with few of them idle at its end.

    It decides the order of a row's sum, so it depends only on the row.
    """
    lanes = 1
    while lanes * 2 <= most:
        lanes *= 2
    while lanes > 1 and 8 * -(-num_units // lanes) * lanes > 9 * num_units:
        lanes //= 2
    return lanes


def expert_sum_lanes(
    gate: TensorType, up: TensorType, down: TensorType, *, hidden_size: int, ffn_size: int
) -> tuple[int, int]:
    """`sum_lanes` of an expert's gate and up, which are multiplied together, and of down."""
    gate_up = min(sum_lanes(units_of(each, hidden_size)) for each in (gate, up))
    return gate_up, sum_lanes(units_of(down, ffn_size))
