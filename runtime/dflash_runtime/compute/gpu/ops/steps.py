"""Products and experts of a decode or verify step: of up to 8 tokens at once; more, a tree's, are
taken in parts.

Compiles a kernel when a shape is first met, and takes results' memory from buffers that the next
layer uses again; both must have happened before a step is captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from dflash_adapters.ops import RoutingRule
from dflash_protocol.ids import I32Array
from dflash_runtime.compute.gpu.device.buffers import Buffer, Buffers, array_of
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.launch.decode_arrays import (
    GRANULE,
    MOST_TOKENS,
    meta_shape,
    padded_columns,
    step_parts,
)
from dflash_runtime.compute.gpu.launch.decode_experts import Choice, DecodeExperts, MailReply
from dflash_runtime.compute.gpu.launch.decode_experts import StepRows as ExpertRows
from dflash_runtime.compute.gpu.launch.decode_experts_shape import ExpertsShape, experts_shape
from dflash_runtime.compute.gpu.launch.decode_linear import (
    DecodeLinear,
    LinearInputs,
    LinearOutputs,
)
from dflash_runtime.compute.gpu.launch.decode_linear_shape import LinearInput, LinearShape
from dflash_runtime.compute.gpu.launch.decode_router import (
    DecodeRouter,
    RouterShape,
    is_float_router,
)
from dflash_runtime.compute.gpu.launch.decode_tokens import ArgmaxLogits, QuantiseRows, RowChange
from dflash_runtime.compute.gpu.launch.layouts import FLOAT_TYPES
from dflash_runtime.compute.gpu.launch.mailbox_args import MailReplies, MailRequest
from dflash_runtime.compute.gpu.launch.row_kernels import ChooseExperts, is_plain
from dflash_runtime.compute.gpu.launch.sample_tokens import ChooseTokens, SampleInputs
from dflash_runtime.compute.gpu.layers.matrix import DeviceMatrix
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.values import (
    Activated,
    Choosing,
    Chosen,
    ExpertInputs,
    ExpertSums,
    F32Rows,
    Normed,
    Product,
    Sides,
)

Factor: TypeAlias = Normed | F32Rows | Activated
"""What is multiplied by matrices."""


class StepOps:
    """Launches of steps. One serves a whole model."""

    def __init__(self, device: KernelDevice) -> None:
        self.buffers = Buffers(device)
        self._device = device
        self._linears: dict[LinearShape, DecodeLinear] = {}
        self._experts: dict[ExpertsShape, DecodeExperts] = {}
        self._hidden: dict[ExpertsShape, ExpertRows] = {}
        self._quantisers: dict[tuple[int, RowChange], QuantiseRows] = {}
        self._routers: dict[RouterShape, DecodeRouter] = {}
        self._choose = ChooseExperts(device)
        self._choose_tokens = ChooseTokens(device)
        self._argmax: dict[int, tuple[ArgmaxLogits, DeviceArray]] = {}
        self._counts = True

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """A context in which choices are not counted."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def counted_in(self, selections: DeviceArray | None) -> DeviceArray | None:
        """`selections`, or None while choices are not counted. Shapes: [E] uint32."""
        return selections if self._counts else None

    def rows(self, num_tokens: int, columns: int) -> F32Rows:
        """New rows, with anything in them."""
        buffer = self._take((num_tokens, columns), np.float32)
        return F32Rows(buffer.array, (buffer,), of_step=True)

    def attended_rows(self, num_tokens: int, columns: int, *, head_dim: int) -> F32Rows:
        """New rows of heads, as int8 too if granules of these do not cross heads."""
        rows = self.rows(num_tokens, columns)
        if head_dim % GRANULE == 0 and columns % 32 == 0:
            rows.sides = self._new_sides(num_tokens, columns, has_values=False)
        return rows

    def project(self, x: Factor, matrices: Sequence[DeviceMatrix]) -> list[F32Rows]:
        """``x @ matrix.T`` of each, in one launch."""
        num_tokens = x.num_tokens
        outs = [self.rows(num_tokens, matrix.rows) for matrix in matrices]
        self._multiply(x, matrices, outs, adds=False)
        return outs

    def add_product(
        self, x: Factor, matrix: DeviceMatrix, residual: F32Rows, *, gate: F32Rows | None = None
    ) -> None:
        """``residual += x @ matrix.T``, times the sigmoid of each token's gate if there is one."""
        self._multiply(x, (matrix,), (residual,), adds=True, gate=gate)
        residual.version += 1

    def route(
        self, router: Product | F32Rows, rule: RoutingRule, bias: DeviceArray | None = None
    ) -> tuple[Chosen, Chosen]:
        """Logits, from which experts are chosen later; rows are written as experts read them."""
        if isinstance(router, Product) and router.rows is None:
            router.rows = self._router_logits(router)
        logits = router if isinstance(router, F32Rows) else router.rows
        assert logits is not None
        shape = (logits.num_tokens, rule.num_experts_used)
        ids = self._take(shape, np.int32)
        weights = self._take(shape, np.float32)
        choosing = Choosing(logits, rule, ids, weights, bias)
        return Chosen(ids, choosing), Chosen(weights, choosing)

    def _router_logits(self, product: Product) -> F32Rows:
        x, matrix = product.x, product.matrix
        num_tokens = x.num_tokens
        logits = self.rows(num_tokens, matrix.rows)
        sides = self._new_sides(num_tokens, matrix.columns) if isinstance(x, Normed) else None
        outputs = LinearOutputs(
            side_values=None if sides is None else array_of(sides.values),
            side_quants=None if sides is None else array_of(sides.quants),
            side_meta=None if sides is None else array_of(sides.meta),
        )
        if isinstance(x, Normed) and is_float_router(matrix.tensor_type, matrix.columns):
            x.require_unchanged()
            for part in step_parts(num_tokens):
                inputs = LinearInputs(x=x.rows.array[part], norm_weight=x.weight, eps=x.eps)
                self._router(matrix, part.stop - part.start).launch(
                    matrix.weights, logits.array[part], inputs, outputs=outputs.sides_of(part)
                )
        else:
            self._multiply(x, (matrix,), (logits,), adds=False, outputs=outputs)
        if isinstance(x, Normed):
            x.sides = sides
        return logits

    def _router(self, matrix: DeviceMatrix, num_tokens: int) -> DecodeRouter:
        router = RouterShape(num_tokens, matrix.rows, matrix.columns, matrix.tensor_type)
        if router not in self._routers:
            self._routers[router] = DecodeRouter(self._device, router)
        return self._routers[router]

    def choose(self, chosen: Chosen) -> None:
        """Write ids and weights now, unless a kernel has done so."""
        choosing = chosen.choosing
        if choosing is None or choosing.is_done:
            return
        choosing.is_done = True
        self._choose.launch(
            choosing.rule,
            choosing.logits.array,
            bias=choosing.bias,
            ids=choosing.ids.array,
            weights=choosing.weights.array,
        )

    def scaled(self, x: Normed, factors: Chosen) -> F32Rows:
        """Normalised rows times a factor each, as experts read them. Shapes: factors [T, 1]."""
        self.choose(factors)
        normed = self._sides(x).values
        assert normed is not None
        sides = self._quantised(normed.array, factors=factors.array)
        assert sides.values is not None
        return F32Rows(sides.values.array, (sides.values,), sides=sides, of_step=True)

    def left_to_choose(self, chosen: Chosen) -> tuple[RoutingRule | None, DeviceArray | None]:
        """Rule and logits [T, E] by which the next kernel that needs the choice is to make it; None
        of either: it is made already, by a kernel of its own if the rule is not plain."""
        choosing = chosen.choosing
        if choosing is not None and (choosing.bias is not None or not is_plain(choosing.rule)):
            self.choose(chosen)
        if choosing is None or choosing.is_done:
            return None, None
        choosing.is_done = True
        return choosing.rule, choosing.logits.array

    def add_experts(self, sums: ExpertSums, residual: F32Rows) -> None:
        """Add a layer's experts, all of which are here, to the residual."""
        assert sums.layer is not None
        choice = Choice(
            sums.topk_ids.array,
            sums.topk_weights.array,
            selections=self.counted_in(sums.layer.selections),
        )
        rule, logits = self.left_to_choose(sums.topk_ids)
        choice = replace(choice, logits=logits)
        self._run_experts(
            sums.layer, choice, self._sides(sums.x), residual.array, gives_sums=False, rule=rule
        )
        residual.version += 1

    def local_sums(self, sums: ExpertSums) -> Buffer:
        """Sums of those experts that are here. Shapes: result [T, H] float64."""
        assert sums.layer is not None
        choice = Choice(sums.topk_ids.array, sums.topk_weights.array)
        here = self._take(sums.shape, np.float64)
        self._run_experts(sums.layer, choice, self._sides(sums.x), here.array, gives_sums=True)
        return here

    def answer(
        self,
        layer: ResidentLayer,
        asked: ExpertRows | MailRequest,
        choice: Choice,
        *,
        to: MailReply,
    ) -> None:
        """Sums of the chosen experts of up to MOST_TOKENS into a mailbox; a request is waited for,
        and says which those are."""
        takes, num_tokens = isinstance(asked, MailRequest), choice.topk_ids.shape[0]
        shape = experts_shape(layer.layer, num_tokens, gives_sums=True, takes_request=takes)
        experts, hidden = self._experts_of(shape)
        experts.launch_gate_up(layer.decode, choice, asked, hidden)
        experts.launch_down(layer.decode, choice, hidden, to)

    def begin_experts(self, layer: ResidentLayer, choice: Choice, rows: ExpertRows) -> None:
        """The first half of the chosen experts of up to MOST_TOKENS, of which no others may run
        before `end_experts`."""
        experts, hidden = self._experts_of(experts_shape(layer.layer, choice.topk_ids.shape[0]))
        experts.launch_gate_up(layer.decode, choice, rows, hidden)

    def end_experts(
        self, layer: ResidentLayer, choice: Choice, residual: F32Rows, *, replies: MailReplies
    ) -> None:
        """Add them and what peers answer to the residual."""
        experts, hidden = self._experts_of(experts_shape(layer.layer, residual.num_tokens))
        experts.launch_down(layer.decode, choice, hidden, residual.array, replies=replies)

    def rows_of(self, x: ExpertInputs) -> ExpertRows:
        """Rows as experts read them."""
        return _expert_rows(self._sides(x))

    def new_rows(self, num_tokens: int, columns: int) -> ExpertRows:
        """New uninitialised rows for experts, in arrays of their own."""
        empty = self._device.empty
        return ExpertRows(
            quants=empty((num_tokens, padded_columns(columns)), np.int8),
            meta=empty(meta_shape(num_tokens, columns), np.float32),
            values=empty((num_tokens, columns), np.float32),
        )

    def sums_of(self, layer: ResidentLayer, x: F32Rows, choice: Choice) -> DeviceArray:
        """Weighted sums of the chosen experts of rows that are normalised already.

        Shapes: result [T, H] float64, to be read before its buffer is reused.
        """
        here = self.buffers.take((x.num_tokens, x.columns), np.float64)
        self._run_experts(layer, choice, self._sides(x), here.array, gives_sums=True)
        return here.array

    def _run_experts(
        self,
        layer: ResidentLayer,
        choice: Choice,
        sides: Sides,
        out: DeviceArray,
        *,
        gives_sums: bool,
        rule: RoutingRule | None = None,
    ) -> None:
        for part in step_parts(out.shape[0]):
            size = part.stop - part.start
            shape = experts_shape(layer.layer, size, gives_sums=gives_sums, rule=rule)
            experts, hidden = self._experts_of(shape)
            some = choice[part]
            experts.launch_gate_up(layer.decode, some, _expert_rows(sides[part]), hidden)
            experts.launch_down(layer.decode, some, hidden, out[part])

    def _experts_of(self, shape: ExpertsShape) -> tuple[DecodeExperts, ExpertRows]:
        """Kernels, and what is between the two."""
        experts = self._experts.get(shape)
        if experts is None:
            experts = self._experts[shape] = DecodeExperts(self._device, shape)
            self._hidden[shape] = experts.hidden_rows()
        return experts, self._hidden[shape]

    def pick(
        self,
        product: Product,
        token_ids: DeviceArray,
        positions: DeviceArray,
        *,
        history: DeviceArray,
        sampling: SampleInputs | None = None,
    ) -> F32Rows:
        """Logits; the most likely token into `token_ids` and `history`, positions one further.

        With `sampling` the token of one row is sampled.
        """
        logits, partials = self._logits(product.x, product.matrix)
        self._choose_tokens.launch(
            logits.array,
            partials.array,
            sampling,
            token_ids=token_ids,
            positions=positions,
            history=history,
        )
        return logits

    def argmax(self, product: Product) -> I32Array:
        """The most likely token of each row, once it is known. Shapes: result [T]."""
        token_ids = self._device.empty((product.x.num_tokens,), np.int32)
        self.pick_likeliest(product, token_ids)
        argmax: I32Array = self._device.download(token_ids)
        return argmax

    def pick_likeliest(self, product: Product, token_ids: DeviceArray) -> None:
        """The most likely token of each row. Shapes: token_ids [T] int32."""
        x = product.x
        for part in step_parts(x.num_tokens):
            size = part.stop - part.start
            if size not in self._argmax:
                argmax = ArgmaxLogits(self._device, num_tokens=size, advances=False)
                self._argmax[size] = argmax, self._device.zeros((size,), np.int32)
            argmax, positions = self._argmax[size]
            _, partials = self._logits(x[part], product.matrix)
            argmax.launch(partials.array, token_ids[part], positions)

    def _logits(self, x: Factor, matrix: DeviceMatrix) -> tuple[F32Rows, Buffer]:
        """Up to MOST_TOKENS rows of logits, and what each block has found to be the largest."""
        logits = self.rows(x.num_tokens, matrix.rows)
        linear = self._linear(x, (matrix,), adds=False, has_argmax=True)
        partials = self.buffers.take((linear.num_blocks, x.num_tokens), np.uint64)
        linear.launch(
            [matrix.weights],
            [logits.array],
            self._inputs(linear.shape, x),
            outputs=LinearOutputs(partials=partials.array),
        )
        return logits, partials

    def normed_rows(self, x: ExpertInputs) -> F32Rows:
        """The rows themselves, normalised if they are to be."""
        if isinstance(x, F32Rows):
            return x
        sides = self._sides(x)
        assert sides.values is not None
        return F32Rows(sides.values.array, (sides.values,), of_step=True)

    def _multiply(
        self,
        x: Factor,
        matrices: Sequence[DeviceMatrix],
        outs: Sequence[F32Rows],
        *,
        adds: bool,
        outputs: LinearOutputs | None = None,
        gate: F32Rows | None = None,
    ) -> None:
        if isinstance(x, Normed):
            x.require_unchanged()
        for part in step_parts(x.num_tokens):
            some = x if x.num_tokens <= MOST_TOKENS else x[part]
            linear = self._linear(
                some, matrices, adds=adds, is_gated=gate is not None, has_side=outputs is not None
            )
            linear.launch(
                [matrix.weights for matrix in matrices],
                [out.array[part] for out in outs],
                self._inputs(linear.shape, some, None if gate is None else gate[part]),
                outputs=None if outputs is None else outputs.sides_of(part),
            )

    def _linear(
        self,
        x: Factor,
        matrices: Sequence[DeviceMatrix],
        *,
        adds: bool,
        is_gated: bool = False,
        has_argmax: bool = False,
        has_side: bool = False,
    ) -> DecodeLinear:
        kinds = tuple((matrix.tensor_type, matrix.rows) for matrix in matrices)
        mode = LinearInput.PLAIN
        if isinstance(x, Normed):
            x.require_unchanged()
            mode = LinearInput.NORM
        if isinstance(x, Activated):
            mode = LinearInput.SWIGLU
        if x.sides is not None and not any(kind in FLOAT_TYPES for kind, _ in kinds):
            mode = LinearInput.QUANTISED
        shape = LinearShape(
            matrices[0].columns,
            x.num_tokens,
            kinds,
            mode,
            adds=adds,
            is_gated=is_gated,
            has_side=has_side and isinstance(x, Normed),
            has_argmax=has_argmax,
        )
        if shape not in self._linears:
            self._linears[shape] = DecodeLinear(self._device, shape)
        return self._linears[shape]

    def _inputs(self, shape: LinearShape, x: Factor, gate: F32Rows | None = None) -> LinearInputs:
        opening = None if gate is None else gate.array
        if isinstance(x, Activated):
            return LinearInputs(x=x.gate.array, up=x.up.array, gate=opening)
        if shape.input is LinearInput.QUANTISED:
            assert x.sides is not None
            quants, meta = array_of(x.sides.quants), array_of(x.sides.meta)
            return LinearInputs(quants=quants, meta=meta, gate=opening)
        if isinstance(x, F32Rows):
            return LinearInputs(x=x.array, gate=opening)
        return LinearInputs(x=x.rows.array, norm_weight=x.weight, eps=x.eps, gate=opening)

    def _sides(self, x: ExpertInputs) -> Sides:
        """Rows as experts read them, that are there already or are written now."""
        if isinstance(x, F32Rows):
            if x.sides is None or x.sides.values is None:
                x.sides = self._quantised(x.array)
                x.sides.values = Buffer(x.array)
            return x.sides
        if x.sides is None:
            x.require_unchanged()
            x.sides = self._quantised(x.rows.array, norm_weight=x.weight, eps=x.eps)
        return x.sides

    def _quantised(
        self,
        x: DeviceArray,
        *,
        norm_weight: DeviceArray | None = None,
        eps: float = 0.0,
        factors: DeviceArray | None = None,
    ) -> Sides:
        """Rows as int8; normalised before that, or times a factor each, and then as floats too."""
        change = RowChange.NONE
        if norm_weight is not None:
            change = RowChange.NORM
        elif factors is not None:
            change = RowChange.FACTORS
        sides = self._new_sides(*x.shape, has_values=change is not RowChange.NONE)
        assert sides.quants is not None
        assert sides.meta is not None
        key = x.shape[1], change
        if key not in self._quantisers:
            self._quantisers[key] = QuantiseRows(self._device, columns=key[0], change=change)
        self._quantisers[key].launch(
            x,
            sides.quants.array,
            sides.meta.array,
            norm_weight=norm_weight,
            eps=eps,
            factors=factors,
            values=array_of(sides.values),
        )
        return sides

    def _take(self, shape: tuple[int, ...], dtype: DTypeLike) -> Buffer:
        """A buffer for a step's tokens; for a large tree taken apart, so that only a capture of it
        keeps the memory."""
        if shape[0] <= MOST_TOKENS:
            return self.buffers.take(shape, dtype)
        if self.buffers.is_capturing:
            return self.buffers.take(shape, dtype, apart=True)
        return Buffer(self._device.empty(shape, dtype))

    def _new_sides(self, num_tokens: int, columns: int, *, has_values: bool = True) -> Sides:
        take = self._take
        return Sides(
            values=take((num_tokens, columns), np.float32) if has_values else None,
            quants=take((num_tokens, padded_columns(columns)), np.int8),
            meta=take(meta_shape(num_tokens, columns), np.float32),
        )


def _expert_rows(sides: Sides) -> ExpertRows:
    return ExpertRows(
        quants=array_of(sides.quants), meta=array_of(sides.meta), values=array_of(sides.values)
    )
