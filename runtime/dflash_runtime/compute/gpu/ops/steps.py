"""Products and routed experts of a decode or verify step: of up to 8 tokens at once; more, a
tree's, are taken in parts.

Compiles a kernel when a shape is first met, and takes results' memory from buffers that the next
layer uses again; both must have happened before a step is captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import DTypeLike

from dflash_adapters.routing import RoutingRule
from dflash_runtime.compute.gpu.device.buffers import Buffer, Buffers
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.launch.decode_arrays import (
    StepRows,
    meta_shape,
    most_rows,
    step_parts,
)
from dflash_runtime.compute.gpu.launch.decode_experts import (
    Choice,
    DecodeExperts,
    ExpertsShape,
    ExpertsUse,
    MailReply,
    PeersPost,
    experts_shape,
)
from dflash_runtime.compute.gpu.launch.decode_linear import (
    DecodeLinear,
    DecodeRouter,
    LinearInput,
    LinearInputs,
    LinearShape,
    RouterShape,
    is_float_router,
)
from dflash_runtime.compute.gpu.launch.decode_tokens import QuantiseRows, RowChange
from dflash_runtime.compute.gpu.launch.fetch_expert import FetchExpert, FetchTables
from dflash_runtime.compute.gpu.launch.layouts import DeviceMatrix
from dflash_runtime.compute.gpu.launch.row_kernels import ChooseExperts, is_plain
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer
from dflash_runtime.compute.gpu.layers.rows import Input, Norm, Rows
from dflash_runtime.compute.gpu.ops.choice_notes import ChoiceNotes
from dflash_runtime.compute.gpu.ops.kernels import ExpertChoice
from dflash_runtime.compute.slot_pins import NO_PINS
from dflash_runtime.compute.step_order import FLOAT_TYPES, GRANULE, MOST_TOKENS, padded_columns


class StepKernels:
    """Launches of steps. Implements kernels.LayerKernels. One serves a whole model."""

    def __init__(self, device: KernelDevice, notes: ChoiceNotes) -> None:
        self.buffers = Buffers(device)
        self._notes = notes
        self._device = device
        self._linears: dict[LinearShape, DecodeLinear] = {}
        self._quantisers: dict[tuple[int, RowChange], QuantiseRows] = {}
        self._routers: dict[RouterShape, DecodeRouter] = {}
        self._choose = ChooseExperts(device)

    # -- rows -------------------------------------------------------------------------------------

    def rows(self, num_tokens: int, columns: int) -> Rows:
        """New rows, with anything in them."""
        buffer = self._take((num_tokens, columns), np.float32)
        return Rows(buffer.array, of_step=True, buffers=(buffer,))

    def head_rows(self, num_tokens: int, columns: int, *, head_dim: int) -> Rows:
        """As int8 too if granules of these do not cross heads."""
        rows = self.rows(num_tokens, columns)
        if head_dim % GRANULE == 0 and columns % 32 == 0:
            self._add_int8(rows)
        return rows

    def normed(self, rows: Rows, norm: Norm) -> Rows:
        """They are written as int8 too, which nothing reads."""
        written = self._quantised(rows, norm=norm)
        return Rows(written.array, of_step=True, buffers=written.buffers[:1])

    def for_experts(self, x: Input) -> StepRows:
        """Rows as experts read them, that are there already or are written now."""
        if x.normed is None:
            x.normed = self._quantised(x.rows, norm=x.norm)
        elif x.normed.quants is None:
            x.normed = self._quantised(x.normed)
        return x.normed.forms

    def for_host(self, x: Input) -> DeviceArray:
        """Rows as remote owners of experts get them. Shapes: result [T, H] float32."""
        if x.normed is None:
            self.for_experts(x)
        assert x.normed is not None
        return x.normed.array

    def sums(self, num_tokens: int, columns: int) -> Buffer:
        """Memory for float64 sums [T, columns]."""
        return self._take((num_tokens, columns), np.float64)

    def scaled(self, x: Input, factors: ExpertChoice) -> Input:
        self.choose_now(factors)
        self.for_experts(x)
        assert x.normed is not None
        return Input(self._quantised(x.normed, factors=factors.weights))

    # -- products ---------------------------------------------------------------------------------

    def project(self, x: Input, matrices: Sequence[DeviceMatrix]) -> list[Rows]:
        """All in one launch."""
        num_tokens = x.rows.num_tokens
        outs = [self.rows(num_tokens, matrix.rows) for matrix in matrices]
        self._multiply(x, matrices, outs)
        return outs

    def add_product(self, x: Input, matrix: DeviceMatrix, residual: Rows) -> None:
        self._multiply(x, (matrix,), (residual,), adds=True)

    def swiglu_product(self, gate: Rows, up: Rows, matrix: DeviceMatrix) -> Rows:
        out = self.rows(gate.num_tokens, matrix.rows)
        self._multiply(Input(gate), (matrix,), (out,), up=up)
        return out

    def add_swiglu(
        self, gate: Rows, up: Rows, matrix: DeviceMatrix, *, residual: Rows, share: Rows | None
    ) -> None:
        """In one launch."""
        self._multiply(Input(gate), (matrix,), (residual,), adds=True, up=up, gate=share)

    def router_logits(self, x: Input, matrix: DeviceMatrix) -> Rows:
        """`x` has a norm; the normalised rows are written as experts read them."""
        norm, num_tokens = x.norm, x.rows.num_tokens
        assert norm is not None
        logits = self.rows(num_tokens, matrix.rows)
        normed = self.rows(num_tokens, matrix.columns)
        self._add_int8(normed)
        side = normed.forms
        if is_float_router(matrix.tensor_type, matrix.columns):
            for part in step_parts(num_tokens):
                inputs = LinearInputs(x=x.rows.array[part], norm_weight=norm.weight, eps=norm.eps)
                shape = RouterShape(
                    part.stop - part.start, matrix.rows, matrix.columns, matrix.tensor_type
                )
                if shape not in self._routers:
                    self._routers[shape] = DecodeRouter(self._device, shape)
                self._routers[shape].launch(
                    matrix.weights, logits.array[part], inputs, side=side[part]
                )
        else:
            self._multiply(x, (matrix,), (logits,), side=side)
        x.normed = normed
        return logits

    def logits(self, x: Input, matrix: DeviceMatrix) -> Rows:
        """With what each block has found to be the largest."""
        num_tokens = x.rows.num_tokens
        logits = self.rows(num_tokens, matrix.rows)
        partials: list[Buffer] = []
        parts = self.head_parts(num_tokens, matrix)
        for part in parts:
            some = x if len(parts) == 1 else x[part]
            partials.append(self.head(some, matrix, logits.array[part]))
        logits.partials = tuple(each.array for each in partials)
        logits.buffers = (*logits.buffers, *partials)
        return logits

    def head_parts(self, num_tokens: int, matrix: DeviceMatrix) -> list[slice]:
        """Rows that are given to `head` one after the other."""
        return step_parts(num_tokens, self._most_rows((matrix,)) if num_tokens > 1 else 1)

    def head(self, x: Input, matrix: DeviceMatrix, out: DeviceArray) -> Buffer:
        """Logits of one of `head_parts`; returns what each block has found to be the largest.

        Shapes: out [T, V]; result [blocks, T] uint64.
        """
        linear = self._linear(x, (matrix,), has_argmax=True)
        partials = self.buffers.take((linear.num_blocks, x.rows.num_tokens), np.uint64)
        linear.launch(
            [matrix.weights],
            [out],
            _inputs(linear.shape, x),
            partials=partials.array,
        )
        return partials

    # -- the choice of experts --------------------------------------------------------------------

    def choose(self, logits: Rows, rule: RoutingRule, bias: DeviceArray | None) -> ExpertChoice:
        """Left to the kernel that needs it first."""
        shape = (logits.num_tokens, rule.num_experts_used)
        ids, weights = self._take(shape, np.int32), self._take(shape, np.float32)
        choice = ExpertChoice(ids.array, weights.array, rule, logits, bias, buffers=(ids, weights))
        return self._notes.add(choice)

    def choose_now(self, choice: ExpertChoice) -> None:
        """Write ids and weights, unless a kernel has done so."""
        logits, choice.logits = choice.logits, None
        if logits is not None:
            self._choose.launch(
                choice.rule,
                logits.array,
                bias=choice.bias,
                ids=choice.ids,
                weights=choice.weights,
            )

    def left_to_choose(self, choice: ExpertChoice) -> tuple[RoutingRule | None, DeviceArray | None]:
        """Rule and logits [T, E] by which the next kernel that needs the choice is to make it; None
        of either: it is made already, by a kernel of its own if the rule is not plain."""
        if choice.bias is not None or not is_plain(choice.rule):
            self.choose_now(choice)
        logits, choice.logits = choice.logits, None
        return (None, None) if logits is None else (choice.rule, logits.array)

    # -- launches ---------------------------------------------------------------------------------

    def _multiply(
        self,
        x: Input,
        matrices: Sequence[DeviceMatrix],
        outs: Sequence[Rows],
        *,
        adds: bool = False,
        up: Rows | None = None,
        gate: Rows | None = None,
        side: StepRows | None = None,
    ) -> None:
        """`x`, or ``silu(x) * up``, times each matrix, and times the sigmoid of the gate [T, 1]."""
        num_tokens = x.rows.num_tokens
        parts = step_parts(num_tokens, self._most_rows(matrices) if num_tokens > 1 else 1)
        for part in parts:
            some = x if len(parts) == 1 else x[part]
            linear = self._linear(
                some,
                matrices,
                adds=adds,
                is_activated=up is not None,
                is_gated=gate is not None,
                has_side=side is not None,
            )
            linear.launch(
                [matrix.weights for matrix in matrices],
                [out.array[part] for out in outs],
                _inputs(
                    linear.shape,
                    some,
                    up=None if up is None else up.array[part],
                    gate=None if gate is None else gate.array[part],
                ),
                side=None if side is None else side[part],
            )

    def _most_rows(self, matrices: Sequence[DeviceMatrix]) -> int:
        are_floats = {matrix.tensor_type in FLOAT_TYPES for matrix in matrices}
        return most_rows(
            self._device,
            matrices[0].columns,
            as_bytes=False in are_floats,
            as_floats=True in are_floats,
        )

    def _linear(
        self,
        x: Input,
        matrices: Sequence[DeviceMatrix],
        *,
        adds: bool = False,
        is_activated: bool = False,
        is_gated: bool = False,
        has_side: bool = False,
        has_argmax: bool = False,
    ) -> DecodeLinear:
        kinds = tuple((matrix.tensor_type, matrix.rows) for matrix in matrices)
        has_int8 = x.normed is not None and x.normed.quants is not None
        if is_activated:
            mode = LinearInput.SWIGLU
        elif has_int8 and not any(kind in FLOAT_TYPES for kind, _ in kinds):
            mode = LinearInput.QUANTISED
        else:
            mode = LinearInput.PLAIN if x.norm is None else LinearInput.NORM
        shape = LinearShape(
            matrices[0].columns,
            x.rows.num_tokens,
            kinds,
            mode,
            adds=adds,
            is_gated=is_gated,
            has_side=has_side,
            has_argmax=has_argmax,
        )
        if shape not in self._linears:
            self._linears[shape] = DecodeLinear(self._device, shape)
        return self._linears[shape]

    def _quantised(
        self, x: Rows, *, norm: Norm | None = None, factors: DeviceArray | None = None
    ) -> Rows:
        """Rows as int8 too; normalised before that, or times a factor each [T, 1]."""
        if norm is None and factors is None:
            change, out = RowChange.NONE, Rows(x.array, of_step=True, buffers=x.buffers)
        else:
            change = RowChange.FACTORS if norm is None else RowChange.NORM
            out = self.rows(x.num_tokens, x.columns)
        self._add_int8(out)
        key = x.columns, change
        if key not in self._quantisers:
            self._quantisers[key] = QuantiseRows(self._device, columns=x.columns, change=change)
        self._quantisers[key].launch(
            x.array,
            StepRows(out.quants, out.meta, None if change is RowChange.NONE else out.array),
            norm_weight=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            factors=factors,
        )
        return out

    def _add_int8(self, rows: Rows) -> None:
        """Memory for the rows as int8."""
        num_tokens, columns = rows.array.shape
        quants = self._take((num_tokens, padded_columns(columns)), np.int8)
        meta = self._take(meta_shape(num_tokens, columns), np.float32)
        rows.quants, rows.meta = quants.array, meta.array
        rows.buffers = (*rows.buffers, quants, meta)

    def _take(self, shape: tuple[int, ...], dtype: DTypeLike) -> Buffer:
        """A buffer for a step's tokens; for a large tree taken apart, so that only a capture of it
        keeps the memory."""
        if shape[0] <= MOST_TOKENS:
            return self.buffers.take(shape, dtype)
        if self.buffers.is_capturing:
            return self.buffers.take(shape, dtype, apart=True)
        return Buffer(self._device.empty(shape, dtype))


def _inputs(
    shape: LinearShape, x: Input, *, up: DeviceArray | None = None, gate: DeviceArray | None = None
) -> LinearInputs:
    if shape.input is LinearInput.QUANTISED:
        assert x.normed is not None
        return LinearInputs(quants=x.normed.quants, meta=x.normed.meta, gate=gate)
    if x.norm is None:
        return LinearInputs(x=x.rows.array, up=up, gate=gate)
    return LinearInputs(x=x.rows.array, norm_weight=x.norm.weight, eps=x.norm.eps, gate=gate)


class StepExperts:
    """Launches of a step's experts that are on this device.

    Owns: what kernels of gate and up leave for those of down. No other experts of that shape may be
    launched between the two.
    """

    def __init__(self, device: KernelDevice) -> None:
        self._device = device
        self._experts: dict[ExpertsShape, DecodeExperts] = {}
        self._hidden: dict[ExpertsShape, StepRows] = {}
        self._counts = True
        self.cache_slots = 0
        """Experts that steps may keep of a layer besides those that are loaded."""
        self.slot_pins = NO_PINS
        """Which of these do not leave."""

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

    def new_rows(self, num_tokens: int, columns: int) -> StepRows:
        """New uninitialised rows for experts, in arrays of their own."""
        empty = self._device.empty
        return StepRows(
            quants=empty((num_tokens, padded_columns(columns)), np.int8),
            meta=empty(meta_shape(num_tokens, columns), np.float32),
            values=empty((num_tokens, columns), np.float32),
        )

    def run(
        self,
        layer: ResidentLayer,
        choice: Choice,
        rows: StepRows,
        *,
        out: DeviceArray,
        gives_sums: bool,
        rule: RoutingRule | None = None,
    ) -> None:
        """Add the chosen experts, rounded once, to a residual; or write their sums.

        Shapes: out [T, H] float32, or float64 sums. With a `rule` they are chosen first.
        """
        num_tokens = out.shape[0]
        for part in step_parts(num_tokens):
            shape = experts_shape(
                layer.layer, part.stop - part.start, gives_sums=gives_sums, rule=rule
            )
            experts, hidden = self._kernels(shape)
            some = choice[part]
            experts.launch_gate_up(layer.experts, some, rows[part], hidden)
            experts.launch_down(layer.experts, some, hidden, out[part])

    def answer(
        self,
        layer: ResidentLayer,
        asked: StepRows | ctypes.Structure,
        choice: Choice,
        *,
        to: MailReply,
        takes_request: bool,
    ) -> None:
        """Sums of the chosen experts of up to MOST_TOKENS into a mailbox; a request is waited for,
        and says which those are."""
        shape = experts_shape(
            layer.layer,
            choice.topk_ids.shape[0],
            gives_sums=True,
            use=ExpertsUse.TAKES_REQUEST if takes_request else ExpertsUse.ALONE,
        )
        experts, hidden = self._kernels(shape)
        experts.launch_gate_up(layer.experts, choice, asked, hidden)
        experts.launch_down(layer.experts, choice, hidden, to)

    def add_with_replies(
        self,
        layer: ResidentLayer,
        choice: Choice,
        rows: StepRows,
        *,
        residual: DeviceArray,
        rule: RoutingRule | None,
        post: PeersPost,
        replies: ctypes.Structure,
        fetched: tuple[FetchExpert, FetchTables] | None = None,
    ) -> None:
        """Ask peers, and add the chosen experts of up to MOST_TOKENS, and what peers answer, to the
        residual. With a `rule` experts are chosen first. `fetched`: one more may be fetched before
        its pairs are computed, too."""
        num_tokens, use = choice.topk_ids.shape[0], ExpertsUse.ASKS_PEERS
        shape = experts_shape(layer.layer, num_tokens, rule=rule, use=use)
        experts, hidden = self._kernels(shape)
        experts.launch_gate_up(layer.experts, choice, rows, hidden, post=post)
        if fetched is not None:
            kernel, tables = fetched
            kernel.launch(layer.experts, tables, pair_slots=experts.pair_slots)
            fetched_shape = experts_shape(layer.layer, num_tokens, use=ExpertsUse.FETCHED)
            of_one = self._launcher(fetched_shape)
            chosen = Choice(choice.topk_ids, choice.topk_weights, slots=experts.pair_slots)
            of_one.launch_gate_up(layer.experts, chosen, rows, hidden, fetched=tables.decision)
        experts.launch_down(layer.experts, choice, hidden, residual, replies=replies)

    def _kernels(self, shape: ExpertsShape) -> tuple[DecodeExperts, StepRows]:
        """Kernels, and what is between the two."""
        experts = self._launcher(shape)
        if shape not in self._hidden:
            self._hidden[shape] = experts.hidden_rows()
        return experts, self._hidden[shape]

    def _launcher(self, shape: ExpertsShape) -> DecodeExperts:
        if shape not in self._experts:
            self._experts[shape] = DecodeExperts(self._device, shape)
        return self._experts[shape]
