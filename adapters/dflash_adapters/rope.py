"""Rotary position embedding with linear and YaRN context scaling, and attention temperature.

Descriptions on the host, which backends convert for their kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from dflash_protocol.ids import F32Array, F64Array, I32Array


class RopePairing(StrEnum):
    """Which two values of a head are rotated as a pair."""

    HALF_SPLIT = "half_split"
    """(x[p], x[p + n/2]), "NEOX"."""
    INTERLEAVED = "interleaved"
    """(x[2p], x[2p+1]), "NORM"."""


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """Angle per position and pair: ``position * inv_freq[p]``; cos and sin are scaled by `scale`.

    Shapes: inv_freq [num_rotated / 2] float64. Dimensions from num_rotated on pass unchanged.
    """

    pairing: RopePairing
    num_rotated: int
    inv_freq: F64Array
    scale: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Parameters of YaRN; the betas' defaults are those that llama.cpp always uses.

    cos and sin are scaled by ``1 + 0.1 ln(factor)``.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


def rope_table(
    pairing: RopePairing,
    num_rotated: int,
    freq_base: float,
    *,
    scaling: float | YarnScaling = 1.0,
    factors: F32Array | None = None,
) -> RopeTable:
    """Frequencies of every pair. A number as `scaling` divides them all.

    `factors`, as of llama 3, divide the angles of each pair in addition.
    Shapes: factors [num_rotated / 2].
    Source: Su et al. 2021 (arXiv 2104.09864); Peng et al. 2023 (arXiv 2309.00071) for YaRN.
    """
    pair = np.arange(num_rotated // 2, dtype=np.float64)
    inv_freq = freq_base ** (-2.0 * pair / num_rotated)
    if factors is not None:
        inv_freq = inv_freq / factors.astype(np.float64)
    if not isinstance(scaling, YarnScaling):
        return RopeTable(pairing, num_rotated, inv_freq / scaling, 1.0)
    yarn = scaling

    def correction_dim(beta: float) -> float:
        turns = yarn.original_context / (2.0 * math.pi * beta)
        return num_rotated * math.log(turns) / (2.0 * math.log(freq_base))

    low = max(0.0, math.floor(correction_dim(yarn.beta_fast)))
    high = min(num_rotated - 1.0, math.ceil(correction_dim(yarn.beta_slow)))
    ramp = 1.0 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
    scaled = inv_freq / yarn.factor * (1.0 - ramp) + inv_freq * ramp
    return RopeTable(pairing, num_rotated, scaled, 1.0 + 0.1 * math.log(yarn.factor))


@dataclass(frozen=True, slots=True)
class AttentionTemperature:
    """Queries are multiplied by ``1 + slope * ln(floor((position + 1) / period) + 1)``.

    Source: Nakanishi 2025 (arXiv 2501.19399).
    """

    period: int
    slope: float

    def factors(self, positions: I32Array) -> F32Array:
        """Shapes: positions, result [T]."""
        periods = np.floor((positions.astype(np.float64) + 1.0) / self.period)
        factors: F32Array = (1.0 + self.slope * np.log(periods + 1.0)).astype(np.float32)
        return factors
