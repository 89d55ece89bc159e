"""What a layer launches: the same products, by the kernels of steps or by those of chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dflash_adapters.routing import RoutingRule
from dflash_runtime.compute.gpu.device.buffers import Buffer
from dflash_runtime.compute.gpu.device.device import DeviceArray
from dflash_runtime.compute.gpu.launch.layouts import DeviceMatrix
from dflash_runtime.compute.gpu.layers.rows import Input, Norm, Rows


@dataclass(slots=True, eq=False)
class ExpertChoice:
    """A layer's chosen experts; or the logits by which the first kernel that needs them chooses.

    Shapes: ids [T, K] int32, weights [T, K] float32; logits [T, E]; bias [E].
    """

    ids: DeviceArray
    weights: DeviceArray
    rule: RoutingRule
    logits: Rows | None = None
    """What `rule` chooses by; None once ids and weights are written."""
    bias: DeviceArray | None = None
    """Of experts, used for the choice only."""
    buffers: tuple[Buffer, ...] = ()


@dataclass(slots=True, eq=False)
class RoutedRows:
    """A layer's rows as its routed experts get them, and the experts chosen for each."""

    x: Input
    choice: ExpertChoice
    predict: Callable[[], ExpertChoice] | None = None
    """Launches what predicts the next layer's choice, of a chunk. To be called before the residual
    changes."""


class LayerKernels(Protocol):
    """Products of a layer. Implemented by steps.StepKernels, for up to 8 tokens and trees, and by
    chunks.ChunkKernels, for the larger chunks of prompts.

    Norms and activations are computed by the kernels of products where these can do that.
    """

    def rows(self, num_tokens: int, columns: int) -> Rows:
        """New rows, with anything in them."""

    def head_rows(self, num_tokens: int, columns: int, *, head_dim: int) -> Rows:
        """New rows for heads, as int8 too if the product after them can read these."""

    def normed(self, rows: Rows, norm: Norm) -> Rows:
        """Normalised rows, as rows of their own."""

    def project(self, x: Input, matrices: Sequence[DeviceMatrix]) -> list[Rows]:
        """``x @ matrix.T`` of each, in as few launches as possible."""

    def add_product(self, x: Input, matrix: DeviceMatrix, residual: Rows) -> None:
        """``residual += x @ matrix.T``."""

    def swiglu_product(self, gate: Rows, up: Rows, matrix: DeviceMatrix) -> Rows:
        """``(silu(gate) * up) @ matrix.T``; `up` may be overwritten."""

    def add_swiglu(
        self, gate: Rows, up: Rows, matrix: DeviceMatrix, *, residual: Rows, share: Rows | None
    ) -> None:
        """The same added to a residual, times the sigmoid of each token's `share` [T, 1]."""

    def router_logits(self, x: Input, matrix: DeviceMatrix) -> Rows:
        """``x @ matrix.T``; in a step the rows are written as experts read them, too."""

    def choose(self, logits: Rows, rule: RoutingRule, bias: DeviceArray | None) -> ExpertChoice:
        """Experts for each row, now or by the kernel that needs them first."""

    def scaled(self, x: Input, factors: ExpertChoice) -> Input:
        """Rows times a factor each, the weight of a single expert, for experts."""

    def logits(self, x: Input, matrix: DeviceMatrix) -> Rows:
        """``x @ matrix.T`` of a head."""
