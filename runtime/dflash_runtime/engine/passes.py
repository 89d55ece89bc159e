"""Passes of a model over the engine's one cache: chunks, at once or overlapped, and trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.batch import Hidden, Sums
from dflash_protocol.ids import AnyArray, F32Array, F64Array, I32Array, I64Array, Phase
from dflash_runtime.compute import ComputeBackend, ExpertBank
from dflash_runtime.compute.backend import CapturedStep, MailRoute
from dflash_runtime.compute.kv_cache import KvCache
from dflash_runtime.compute.model import Model, OnLayer, Step, forward, run_to_end
from dflash_runtime.compute.trees import Tree
from dflash_runtime.engine.two_batch_overlap import run_in_turns
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime

HEAD_CHUNK = 512
"""Rows of logits computed at once: each is as long as the vocabulary."""

BeforeLayer = Callable[[], None] | None
"""May raise to end a pass."""


def phase_of(num_tokens: int) -> Phase:
    """The phase of a chunk."""
    return Phase.DECODE if num_tokens == 1 else Phase.PREFILL


class Passes:
    """Drives passes, with the model's routed experts: those of `local_banks`, by layer id, and all
    others from `runtime`.

    Used by the thread that runs the model. All of it belongs to the caller.
    """

    def __init__(
        self,
        model: Model[AnyArray, Any],
        cache: KvCache,
        *,
        backend: ComputeBackend,
        runtime: MoeExpertComputeRuntime,
        local_banks: Mapping[int, ExpertBank],
    ) -> None:
        self.model, self.cache = model, cache
        self._backend, self._runtime, self._local_banks = backend, runtime, local_banks
        self._experts: dict[tuple[Phase, bool], Any] = {}
        """By phase, and whether they may be offloaded."""

    def captured_step(self) -> CapturedStep | None:
        """A captured step of this model and cache, if the backend has one."""
        return self._backend.captured_step(
            self.model, self.cache, self._local_banks, remote=self._runtime
        )

    def chunk(
        self, step: Step, before_layer: BeforeLayer, on_layer: OnLayer[AnyArray] | None
    ) -> AnyArray:
        """A chunk at once, or in two micro-batches (two-batch overlap) if experts are remote.

        Not overlapped if `on_layer` is given, or experts are offloaded to this device.
        Shapes: result [T, H].
        """
        size, overlapped_from = step.token_ids.size, self._backend.chunking.overlapped_from
        is_short = overlapped_from is None or size < overlapped_from
        # Weights that are copied here for a layer serve the whole chunk.
        is_whole = is_short or self._runtime.may_offload_now or on_layer is not None
        if is_whole or not self._runtime.asks_daemons:
            return self._run(step, before_layer, on_layer)
        middle = -(-size // 2)
        experts = self._experts_of(step.phase, may_offload=False)
        first, second = (
            forward(self.model, step.part(*part), experts, before_layer=before_layer)
            for part in ((0, middle), (middle, size))
        )
        return self._backend.joined(run_in_turns(first, second, poll=self._runtime.poll))

    def tree(
        self,
        token_ids: I32Array,
        tree: Tree,
        *,
        before_layer: BeforeLayer,
        on_layer: OnLayer[AnyArray] | None,
    ) -> AnyArray:
        """Draft tokens; the cache stays as it is. Shapes: token_ids [W]; result [W, H]."""
        step = Step.of_tree(token_ids, tree, self.cache)
        with self.cache.branching(tree):
            return self._run(step, before_layer, on_layer)

    def _run(
        self, step: Step, before_layer: BeforeLayer, on_layer: OnLayer[AnyArray] | None
    ) -> AnyArray:
        experts = self._experts_of(step.phase)
        return run_to_end(
            forward(self.model, step, experts, before_layer=before_layer, on_layer=on_layer)
        )

    def _experts_of(self, phase: Phase, *, may_offload: bool = True) -> Any:
        """The model's routed experts, local and remote."""
        experts = self._experts.get((phase, may_offload))
        if experts is None:
            experts = self._experts[phase, may_offload] = self._backend.moe(
                self._local_banks, phase, self._runtime, may_offload=may_offload
            )
        return experts

    def logits(self, rows: AnyArray) -> F32Array:
        """Logits on the host, unchecked. Shapes: rows [T, H]; result [T, V]."""
        return self._backend.to_host(self.model.head(rows))

    def argmax(self, rows: AnyArray) -> I32Array:
        """The most likely token after each row, or NOT_FINITE. Shapes: rows [T, H]; result [T]."""
        return self._backend.argmax(self.model.head(rows))

    def to_host(self, rows: AnyArray) -> F32Array:
        """Rows for the host to read, valid until the next layer. Shapes: both [T, H]."""
        return self._backend.to_host(rows)

    def try_out(self, file: GgufFile, captured: CapturedStep | None, num_positions: int) -> None:
        """On a device, compile every kernel that the model needs and allocate all memory.

        Raises: DeviceUnavailable, DeviceOutOfMemory among them.
        """
        backend = self._backend
        if backend.is_host:
            return
        for size in (1, min(backend.chunking.preferred, num_positions)):
            phase = phase_of(size)
            experts = backend.moe(self._local_banks, phase, _NoRemoteExperts(self._runtime))
            step = Step.of_chunk(np.zeros(size, np.int32), 0, self.cache, phase)
            hidden = run_to_end(forward(self.model, step, experts))
            for rows in (hidden[-HEAD_CHUNK:], hidden[-1:]):
                self.logits(rows)
        if captured is not None:
            captured.prepare()
        self.take_selections()  # dropped: of the trial
        if captured is not None:
            captured.take_selections()
        backend.offload_prompts(file, self.model.spec.moe.layers, self._runtime)

    def take_selections(self) -> dict[int, I64Array]:
        """See ComputeBackend.take_selections."""
        return self._backend.take_selections(self._local_banks)


class _NoRemoteExperts:
    """Implements backend.RemoteExperts for a trial: remote sums are zero, nothing is counted."""

    def __init__(self, runtime: MoeExpertComputeRuntime) -> None:
        self.local_experts_mask = runtime.local_experts_mask

    def count_local(
        self, phase: Phase, *, num_tokens: int, num_pairs: int, num_layers: int = 1
    ) -> None:
        """Nothing."""

    def count_selections(self, layer_id: int, topk_ids: I32Array) -> None:
        """Nothing."""

    may_offload = False

    def to_offload(self, layer_id: int, topk_ids: I32Array | None, *, expert_s: float) -> None:
        """None."""

    def begin(
        self,
        layer_id: int,
        hidden: Hidden,
        *choice: AnyArray,
        phase: Phase,
        offloaded: AnyArray | None = None,
    ) -> Sums:
        return hidden.new_sums()

    def finish(self, ticket: Any, out: F64Array | None = None) -> Sums:
        sums: Sums = ticket
        return sums

    def poll(self) -> None:
        """Nothing."""

    def abandon(self, ticket: Any) -> None:
        """Nothing."""

    def mail_routes(self) -> tuple[MailRoute, ...]:
        return ()

    def count_mailed(
        self,
        routes: Sequence[MailRoute],
        num_steps: int,
        *,
        phase: Phase = Phase.DECODE,
        num_tokens: int = 1,
    ) -> None:
        """Nothing."""

    def is_step_to_be_checked(self, routes: Sequence[MailRoute]) -> bool:
        return False

    def note_checked_step(self, elapsed_s: float) -> None:
        """Nothing."""
