"""FFNs: dense ones, routed ones, and routed ones whose inputs are scaled.

In a step the router writes the normalised rows as int8 too, which experts read, and activations
are computed by the product with the down matrix.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from dflash_adapters.layers import Ffn, Gate, InputScaledFfn, RoutedFfn, VectorTensor
from dflash_runtime.compute.gpu.launch.row_kernels import ColumnsOf
from dflash_runtime.compute.gpu.layers.rows import Input, Rows
from dflash_runtime.compute.gpu.model.linear import LayerWeights, project
from dflash_runtime.compute.gpu.ops.kernels import ExpertChoice, LayerKernels, RoutedRows
from dflash_runtime.compute.model import Pausable


class DeviceExperts(Protocol):
    """Computes a model's routed experts, wherever they are."""

    def __call__(self, layer_id: int, routed: RoutedRows, residual: Rows) -> Pausable[None]:
        """Add a layer's experts to the residual. In a chunk it pauses exactly once.

        Raises: DaemonUnavailable if a remote expert's owner is lost and it has no fallback.
        """


class DenseFfn:
    """``down(silu(gate(x)) * up(x))``: a layer, or an expert that every token uses."""

    def __init__(self, ffn: Ffn, weights: LayerWeights) -> None:
        self._ops = weights.ops
        linears = (ffn.gate, ffn.up) if ffn.share is None else (ffn.gate, ffn.up, ffn.share)
        self._inputs = [weights.projection(each) for each in linears]
        self._down = weights.projection(ffn.down)

    def begin(self, kernels: LayerKernels, h: Input) -> list[Rows]:
        """What `end` needs; `h` need not stay as it is."""
        return project(kernels, h, self._inputs)

    def end(self, kernels: LayerKernels, begun: list[Rows], residual: Rows) -> None:
        """Add the result to the residual."""
        gate, up, *shares = begun
        share = shares[0] if shares else None
        down = self._down
        if down.is_plain:
            kernels.add_swiglu(gate, up, down.matrix, residual=residual, share=share)
            return
        product = kernels.swiglu_product(gate, up, down.matrix)
        down.finish(product)
        array = product.array
        if share is not None:
            whole = ColumnsOf.whole(share.array)
            self._ops.elementwise.gated(array, whole, Gate.SIGMOID, array)
        self._ops.elementwise.add_rows(residual.array, array, residual.array)


class DenseFfnLayer:
    """A layer's FFN without routed experts. Immutable."""

    def __init__(self, ffn: Ffn, norm: VectorTensor, weights: LayerWeights) -> None:
        self._ops, self._norm = weights.ops, weights.norm(norm)
        self._ffn = DenseFfn(ffn, weights)

    def run(self, x: Rows, experts: DeviceExperts) -> Pausable[None]:
        """Add the FFN's result to the residual. Shapes: x [T, H]."""
        kernels = self._ops.kernels_for(x)
        self._ffn.end(kernels, self._ffn.begin(kernels, Input(x, self._norm)), x)
        yield from ()


class RoutedFfnLayer:
    """Experts that a router chooses for each token, and a shared expert if there is one.

    Immutable but for `following`.
    """

    following: RoutedFfnLayer | None = None
    """That of the next layer, if it is of this kind."""

    def __init__(
        self, ffn: RoutedFfn, norm: VectorTensor, layer_id: int, *, weights: LayerWeights
    ) -> None:
        self._ops, self._norm, self._layer_id = weights.ops, weights.norm(norm), layer_id
        self._router, self._rule = weights.projection(ffn.router), ffn.rule
        self._bias = None if ffn.bias is None else weights.weights.vectors[ffn.bias]
        self._shared = None if ffn.shared is None else DenseFfn(ffn.shared, weights)

    def run(self, x: Rows, experts: DeviceExperts) -> Pausable[None]:
        """Add the experts' sums to the residual. Shapes: x [T, H]."""
        kernels, h = self._ops.kernels_for(x), Input(x, self._norm)
        choice = kernels.choose(self._logits(kernels, h), self._rule, self._bias)
        following = self.following
        predict = None if following is None else partial(following.predict, x)
        routed = RoutedRows(h, choice, predict)
        begun = None if self._shared is None else self._shared.begin(kernels, h)
        yield from experts(self._layer_id, routed, x)
        if self._shared is not None and begun is not None:
            self._shared.end(kernels, begun, x)

    def predict(self, x: Rows) -> ExpertChoice:
        """What this layer would choose if the layer before it, whose experts are yet to be added to
        a chunk's residual, and its own mixer added nothing. Shapes: x [T, H]."""
        chunks = self._ops.chunks
        return chunks.predicted(self._logits(chunks, Input(x, self._norm)), self._rule, self._bias)

    def _logits(self, kernels: LayerKernels, h: Input) -> Rows:
        logits = kernels.router_logits(h, self._router.matrix)
        self._router.finish(logits)
        return logits


class InputScaledFfnLayer:
    """One expert, whose input is multiplied by the sigmoid of its logit, and a shared expert.

    Immutable.
    """

    def __init__(
        self, ffn: InputScaledFfn, norm: VectorTensor, layer_id: int, *, weights: LayerWeights
    ) -> None:
        self._ops, self._norm, self._layer_id = weights.ops, weights.norm(norm), layer_id
        self._router = weights.projection(ffn.router)
        self._choice, self._input_scale = ffn.choice, ffn.input_scale
        self._shared = DenseFfn(ffn.shared, weights)

    def run(self, x: Rows, experts: DeviceExperts) -> Pausable[None]:
        """Add the expert and the shared one to the residual. Shapes: x [T, H]."""
        kernels, h = self._ops.kernels_for(x), Input(x, self._norm)
        logits = kernels.router_logits(h, self._router.matrix)
        self._router.finish(logits)
        choice = kernels.choose(logits, self._choice, None)
        scales = kernels.choose(logits, self._input_scale, None)
        begun = self._shared.begin(kernels, h)
        yield from experts(self._layer_id, RoutedRows(kernels.scaled(h, scales), choice), x)
        self._shared.end(kernels, begun, x)
