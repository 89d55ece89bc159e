"""Routed experts of a decode or verify step, of up to 8 tokens at once; more are taken in parts.

Compiles a kernel when a shape is first met, which must have happened before a step is captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dflash_adapters.routing import RoutingRule
from dflash_runtime.compute.gpu.device.device import DeviceArray, KernelDevice
from dflash_runtime.compute.gpu.launch.decode_arrays import (
    StepRows,
    meta_shape,
    padded_columns,
    step_parts,
)
from dflash_runtime.compute.gpu.launch.decode_experts import (
    Choice,
    DecodeExperts,
    ExpertsShape,
    MailReply,
    experts_shape,
)
from dflash_runtime.compute.gpu.layers.resident import ResidentLayer


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
            layer.layer, choice.topk_ids.shape[0], gives_sums=True, takes_request=takes_request
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
        replies: ctypes.Structure,
    ) -> None:
        """Add the chosen experts of up to MOST_TOKENS, and what peers answer, to the residual."""
        experts, hidden = self._kernels(experts_shape(layer.layer, choice.topk_ids.shape[0]))
        experts.launch_gate_up(layer.experts, choice, rows, hidden)
        experts.launch_down(layer.experts, choice, hidden, residual, replies=replies)

    def _kernels(self, shape: ExpertsShape) -> tuple[DecodeExperts, StepRows]:
        """Kernels, and what is between the two."""
        experts = self._experts.get(shape)
        if experts is None:
            experts = self._experts[shape] = DecodeExperts(self._device, shape)
            self._hidden[shape] = experts.hidden_rows()
        return experts, self._hidden[shape]
