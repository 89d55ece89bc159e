"""The inputs of a gated delta rule, as passed to ops.Ops.delta_rule."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflash_adapters.spec import DeltaShape
from dflash_protocol.ids import F32Array, I32Array


@dataclass(frozen=True, slots=True, eq=False)
class DeltaInputs:
    """Shapes: mixed [T, channels]; alpha, beta [T, heads]; a, dt_bias [heads]."""

    mixed: F32Array
    alpha: F32Array
    beta: F32Array
    shape: DeltaShape
    a: F32Array
    dt_bias: F32Array
    eps: float

    def __post_init__(self) -> None:
        num_tokens, heads = self.mixed.shape[0], self.shape.num_value_heads
        shapes = [self.mixed.shape, self.alpha.shape, self.beta.shape]
        shapes += [self.a.shape, self.dt_bias.shape]
        logits, vector = (num_tokens, heads), (heads,)
        if shapes != [(num_tokens, self.shape.num_channels), logits, logits, vector, vector]:
            raise ValueError(f"{shapes} do not fit {self.shape}")

    @property
    def num_tokens(self) -> int:
        return int(self.mixed.shape[0])

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """Shape of the result."""
        return self.num_tokens, self.shape.num_value_heads, self.shape.value_dim

    def of(self, tokens: I32Array) -> DeltaInputs:
        """The inputs of some tokens. Shapes: tokens [T]."""
        return replace(
            self, mixed=self.mixed[tokens], alpha=self.alpha[tokens], beta=self.beta[tokens]
        )
