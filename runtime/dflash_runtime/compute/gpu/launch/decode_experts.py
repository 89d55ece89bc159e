"""Launches of ``experts_decode.cu``: the routed experts of a decode step of 1 to 8 tokens.

The chosen experts and their slots are read or computed on the device; the host does not know them.
Pairs of experts that are not resident are left out of the result.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import ceil

import numpy as np

from dflash_adapters.quant import TensorType
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.device.kernel_structs import kernel_struct
from dflash_runtime.compute.gpu.launch.decode_arrays import (
    ArrayChecker,
    check_shared_bytes,
    given,
    int8_rows,
    meta_shape,
    padded_columns,
    staged_bytes,
)
from dflash_runtime.compute.gpu.launch.decode_experts_shape import (
    EXPERTS_FILE,
    ExpertsShape,
    ExpertsTuning,
    default_tuning,
    experts_defines,
)
from dflash_runtime.compute.gpu.launch.layouts import row_bytes
from dflash_runtime.compute.gpu.launch.mailbox_args import MOST_PEERS

Projection = kernel_struct("experts_decode.cu", "Projection")
Choices = kernel_struct("choices.cuh", "Choices")
GateUpArgs = kernel_struct("experts_decode.cu", "GateUpArgs", MOST_PEERS=MOST_PEERS)
DownArgs = kernel_struct("experts_decode.cu", "DownArgs", MOST_PEERS=MOST_PEERS)


@dataclass(frozen=True, slots=True)
class MailReply:
    """Device addresses of a mailbox's reply lines for the sums, and of the mailbox's state."""

    lines: int
    state: int


@dataclass(frozen=True, slots=True)
class ProjectionArrays:
    """One projection of the experts in S slots; biases and scales are of all experts.

    Shapes: weights [S * rows] rows in the device's layout, uint8; bias [E, rows] float32;
    scale [E] float32.
    """

    weights: DeviceArray
    bias: DeviceArray | None = None
    scale: DeviceArray | None = None


@dataclass(frozen=True, slots=True)
class ResidentExperts:
    """The experts of a layer that are on the device.

    Shapes: slot_of_expert [E] int32, -1 for an expert that is not resident.
    """

    gate: ProjectionArrays
    up: ProjectionArrays
    down: ProjectionArrays
    slot_of_expert: DeviceArray
    activation_limit: float = float("inf")
    activation_alpha: float = 1.0
    up_offset: float = 0.0
    """These three: see spec.MoeLayer and its Activation."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen experts; or, with a rule in the shape, logits, from which these are written.

    `selections`: counts that the choice is added to, once. `slots`: the experts' slots, if known.
    Shapes: topk_ids [T, K] int32, negative for none; topk_weights [T, K] float32; logits [T, E];
    selections [E] uint32; slots [T, K] int32, negative for experts that are not resident.
    """

    topk_ids: DeviceArray
    topk_weights: DeviceArray
    logits: DeviceArray | None = None
    selections: DeviceArray | None = None
    slots: DeviceArray | None = None

    def __getitem__(self, tokens: slice) -> Choice:
        """The choice of some of the tokens, in place."""
        logits = None if self.logits is None else self.logits[tokens]
        slots = None if self.slots is None else self.slots[tokens]
        return Choice(
            self.topk_ids[tokens],
            self.topk_weights[tokens],
            logits,
            selections=self.selections,
            slots=slots,
        )


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of activations in the forms that the weights' types need; the others may be None.

    Shapes: quants [rows, padded_columns] int8; meta `meta_shape` float32; values [rows, columns]
    float32.
    """

    quants: DeviceArray | None = None
    meta: DeviceArray | None = None
    values: DeviceArray | None = None

    def __getitem__(self, tokens: slice) -> StepRows:
        """Some of the rows, in place."""
        forms = (self.quants, self.meta, self.values)
        return StepRows(*(None if form is None else form[tokens] for form in forms))


class DecodeExperts:
    """Launches both kernels, gate and up, then down, for one shape."""

    def __init__(
        self, device: KernelDevice, shape: ExpertsShape, tuning: ExpertsTuning | None = None
    ) -> None:
        """Raises: ValueError if the rows of a token's pairs do not fit a block's shared memory."""
        self.shape = shape
        self.tuning = default_tuning(shape, device) if tuning is None else tuning
        self._device = device
        self._arrays = ArrayChecker(device)
        self._pair_slots = device.empty((shape.num_tokens, shape.num_experts_used), np.int32)
        self._gate_up_bytes = check_shared_bytes(
            device,
            staged_bytes(
                1, shape.hidden_size, as_bytes=shape.x_as_bytes, as_floats=shape.x_as_floats
            ),
            f"a row of {shape.hidden_size}",
        )
        self._down_bytes = check_shared_bytes(
            device,
            staged_bytes(
                shape.num_experts_used,
                shape.ffn_size,
                as_bytes=not shape.h_as_floats,
                as_floats=shape.h_as_floats,
            ),
            f"{shape.num_experts_used} rows of {shape.ffn_size}",
        )
        module = device.module(EXPERTS_FILE, experts_defines(shape, self.tuning))
        self._gate_up = module.kernel("experts_gate_up", GateUpArgs)
        self._down = module.kernel("experts_down", DownArgs)

    def hidden_rows(self) -> StepRows:
        """New arrays for the results of gate and up."""
        pairs, ffn_size, empty = self.shape.num_pairs, self.shape.ffn_size, self._device.empty
        if self.shape.h_as_floats:
            return StepRows(values=empty((pairs, ffn_size), np.float32))
        return StepRows(
            quants=empty((pairs, padded_columns(ffn_size)), np.int8),
            meta=empty(meta_shape(pairs, ffn_size), np.float32),
        )

    def launch_gate_up(
        self,
        experts: ResidentExperts,
        choice: Choice,
        x: StepRows | ctypes.Structure,
        hidden: StepRows,
    ) -> None:
        """``hidden[pair] = activation(gate x, up x)``; zero for experts that are not resident.

        With a mailbox's request instead of rows, the pairs that it asks for are written to the
        choice.
        Shapes: x rows T of H; hidden `hidden_rows`.
        Raises: ValueError for an array that is missing, or not of this shape, type or device.
        """
        shape, tuning = self.shape, self.tuning
        args = GateUpArgs(
            gate=self._projection("gate", experts.gate, shape.gate_type),
            up=self._projection("up", experts.up, shape.up_type),
            choices=self._choices(experts, choice, "gate", "up"),
            form=(experts.activation_limit, experts.activation_alpha, experts.up_offset),
        )
        if isinstance(x, StepRows) == shape.takes_request:
            raise ValueError("rows or a request, for which this was not compiled")
        if isinstance(x, StepRows):
            self._set_rows(args, x)
        else:
            args.request = x
        args.h_quants, args.h_meta, args.h = self._hidden(hidden)
        tile = tuning.gate_up_warps * (self._device.lanes // tuning.gate_up_team)
        num_tiles = ceil(shape.ffn_size / (tile * tuning.gate_up_rows))
        self._device.launch(
            self._gate_up,
            (shape.num_pairs * num_tiles, 1, 1),
            tuning.gate_up_warps * self._device.lanes,
            args,
            shared_bytes=self._gate_up_bytes,
        )

    def _set_rows(self, args: ctypes.Structure, x: StepRows) -> None:
        shape, arrays = self.shape, self._arrays
        tokens, columns = shape.num_tokens, shape.hidden_size
        if shape.x_as_bytes:
            args.quants, args.meta = int8_rows(
                arrays, "x.", quants=x.quants, meta=x.meta, rows=tokens, columns=columns
            )
        if shape.x_as_floats:
            args.x = arrays.address(
                "x.values", given("x.values", x.values), np.float32, T=tokens, H=columns
            )

    def launch_down(
        self,
        experts: ResidentExperts,
        choice: Choice,
        hidden: StepRows,
        out: DeviceArray | MailReply,
        *,
        replies: ctypes.Structure | None = None,
    ) -> None:
        """Add each token's terms, rounded once, to `out`; or write their float64 sums there, or to
        a mailbox.

        Call it after `launch_gate_up` of the same object and choice. With a residual, the peers'
        `replies` are added to the sums before these are rounded.
        Shapes: out [T, H] float32, or float64 if the shape gives sums.
        Raises: ValueError for an array that is missing, or not of this shape, type or device.
        """
        shape, tuning = self.shape, self.tuning
        args = DownArgs(
            down=self._projection("down", experts.down, shape.down_type),
            choices=self._choices(experts, choice, "down"),
        )
        args.h_quants, args.h_meta, args.h = self._hidden(hidden)
        dtype = np.float64 if shape.gives_sums else np.float32
        sizes = {"T": shape.num_tokens, "H": shape.hidden_size}
        if replies is not None:
            args.replies = replies
        if isinstance(out, MailReply):
            if not shape.gives_sums:
                raise ValueError("a mailbox takes sums, for which this was not compiled")
            args.reply, args.mail = out.lines, out.state
        elif shape.gives_sums:
            args.sums = self._arrays.address("out", out, dtype, **sizes)
        else:
            args.residual = self._arrays.address("out", out, dtype, **sizes)
        self._device.launch(
            self._down,
            (shape.num_tokens * ceil(shape.hidden_size / tuning.down_tile), 1, 1),
            tuning.down_warps * self._device.lanes,
            args,
            shared_bytes=self._down_bytes,
        )

    def _rows_and_columns(self, name: str) -> tuple[int, int]:
        hidden_size, ffn_size = self.shape.hidden_size, self.shape.ffn_size
        return (hidden_size, ffn_size) if name == "down" else (ffn_size, hidden_size)

    def _num_slots(self, experts: ResidentExperts, *names: str) -> int:
        """Number of slots, the same in all of these projections."""
        fewest = []
        for name in names:
            rows, columns = self._rows_and_columns(name)
            kind: TensorType = getattr(self.shape, f"{name}_type")
            weights: DeviceArray = getattr(experts, name).weights
            fewest.append(weights.nbytes // (rows * row_bytes(kind, columns)))
        return min(fewest)

    def _projection(self, name: str, of: ProjectionArrays, kind: TensorType) -> ctypes.Structure:
        rows, columns = self._rows_and_columns(name)
        num_slots = of.weights.nbytes // (rows * row_bytes(kind, columns))
        if not self.shape.has_vectors and not (of.bias is None and of.scale is None):
            raise ValueError(f"{name} has a bias or scale, for which this was not compiled")
        arrays, num_experts = self._arrays, self.shape.num_experts
        return Projection(
            weights=arrays.weights(name, of.weights, kind, rows=num_slots * rows, columns=columns),
            bias=arrays.optional(f"{name}.bias", of.bias, np.float32, E=num_experts, rows=rows),
            scale=arrays.optional(f"{name}.scale", of.scale, np.float32, E=num_experts),
        )

    def _choices(self, experts: ResidentExperts, choice: Choice, *names: str) -> ctypes.Structure:
        shape, arrays = self.shape, self._arrays
        tokens, num_experts = shape.num_tokens, shape.num_experts
        sizes = {"T": tokens, "K": shape.num_experts_used}
        slots = self._pair_slots if choice.slots is None else choice.slots
        choices = Choices(
            slot_of_expert=0
            if choice.slots is not None
            else arrays.address("slot_of_expert", experts.slot_of_expert, np.int32, E=num_experts),
            topk_ids=arrays.address("topk_ids", choice.topk_ids, np.int32, **sizes),
            topk_weights=arrays.address("topk_weights", choice.topk_weights, np.float32, **sizes),
            pair_slots=arrays.address("slots", slots, np.int32, **sizes),
            selections=arrays.optional("selections", choice.selections, np.uint32, E=num_experts),
            num_slots=self._num_slots(experts, *names),
        )
        if choice.slots is not None and (shape.rule or shape.takes_request):
            raise ValueError("slots are given of what is not chosen yet")
        if shape.rule is not None:
            logits = given("logits", choice.logits)
            choices.logits = arrays.address("logits", logits, np.float32, T=tokens, E=num_experts)
        return choices

    def _hidden(self, hidden: StepRows) -> tuple[int, int, int]:
        pairs, columns = self.shape.num_pairs, self.shape.ffn_size
        if self.shape.h_as_floats:
            values = given("hidden.values", hidden.values)
            return (
                0,
                0,
                self._arrays.address("hidden.values", values, np.float32, P=pairs, F=columns),
            )
        quants, meta = int8_rows(
            self._arrays,
            "hidden.",
            quants=hidden.quants,
            meta=hidden.meta,
            rows=pairs,
            columns=columns,
        )
        return quants, meta, 0
