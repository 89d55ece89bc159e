"""Temperature of attention: factors of queries that depend on their position.

Knows nothing of arrays on devices: a backend turns a temperature into whatever its kernel wants.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_protocol.ids import F32Array, I32Array


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
