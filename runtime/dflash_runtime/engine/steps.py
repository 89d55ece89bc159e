"""Steps: chunks of an engine's one sequence through all layers, one run after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.gguf.watch import LOOK_S
from dflash_adapters.ops import KvCache
from dflash_protocol.batch import Hidden, Sums
from dflash_protocol.errors import NotFinite, SettingsError
from dflash_protocol.ids import AnyArray, F32Array, F64Array, I32Array, Phase
from dflash_runtime.compute import ComputeBackend, ExpertBank
from dflash_runtime.compute.backend import NOT_FINITE, CapturedStep, MailRoute
from dflash_runtime.compute.model import Model, OnLayer, Step, forward, run_to_end
from dflash_runtime.compute.trees import BranchingCache, Tree, TreeResult
from dflash_runtime.engine.arguments import chunk_bounds
from dflash_runtime.engine.checkpoints import StateCheckpoints
from dflash_runtime.engine.prefix import CachedPrefix
from dflash_runtime.engine.two_batch_overlap import run_in_turns
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime

_NOT_FINITE = (
    # docs: the model's file is damaged, or memory, or a value has become too large; what was
    # written until then is right
    "the model's logits are not finite (NaN or infinity), so that no token follows from them: its "
    "file or this machine's memory may be damaged, or a value has become too large"
)

_HEAD_CHUNK = 512
"""Rows of logits computed at once: each is as long as the vocabulary."""


class Cancelled(Exception):
    """The run was cancelled by its caller."""


class Steps:
    """The one sequence, its key/value cache, and the current run over it: the latest begun.

    `local_banks` hold the experts of this process, by layer id. File, backend and runtime belong to
    the caller.
    Owns: the cache and the captured step, until `end`.
    """

    def __init__(
        self,
        file: GgufFile,
        model: Model[AnyArray, Any],
        cache: KvCache,
        *,
        backend: ComputeBackend,
        runtime: MoeExpertComputeRuntime,
        local_banks: Mapping[int, ExpertBank],
        num_positions: int,
    ) -> None:
        self.num_positions = num_positions
        """The longest sequence, in tokens."""
        self._file = file
        self._poll_file = file.watch.poll
        self._model = model
        self._cache = cache
        self._backend = backend
        self._runtime = runtime
        self._local_banks = local_banks
        self._chunking = backend.chunking
        self._prefix = CachedPrefix(num_positions, invariant_from=self._chunking.invariant_from)
        self._checkpoints = StateCheckpoints(cache)
        self._prefix_scope = ""
        self._experts: dict[tuple[Phase, bool], Any] = {}
        """By phase, and whether they may be offloaded."""
        self._captured = backend.captured_step(model, cache, local_banks, remote=runtime)
        layers = model.spec.moe.layers
        self._num_moe_layers = len(layers)
        self._pairs_of_token = sum(layer.num_experts_used for layer in layers)
        self._num_runs = 0
        self._is_cancelled: Callable[[], bool] | None = None
        self._token_s = math.inf
        """Time of the last token that was computed alone."""

    def try_out(self) -> None:
        """On a device, compile every kernel that the model needs and allocate all memory.

        Raises: DeviceUnavailable, DeviceOutOfMemory among them.
        """
        if self._backend.is_host:
            return
        for size in (1, min(self._chunking.preferred, self.num_positions)):
            phase = _phase_of(size)
            experts = self._backend.moe(self._local_banks, phase, _NoRemoteExperts(self._runtime))
            step = Step.of_chunk(np.zeros(size, np.int32), 0, self._cache, phase)
            hidden = run_to_end(forward(self._model, step, experts))
            for rows in (hidden[-_HEAD_CHUNK:], hidden[-1:]):
                self._backend.to_host(self._model.head(rows))
        if self._captured is not None:
            self._captured.prepare()
        self._backend.take_selections(self._local_banks)  # dropped: of the trial
        if self._captured is not None:
            self._captured.take_selections()
        layers = self._model.spec.moe.layers
        self._backend.offload_prompts(self._file, layers, self._runtime)

    def settle(self) -> None:
        """Add to the counters which experts were chosen in steps that the device ran by itself.

        Steps that were launched ahead and discarded are included. Raises: DeviceUnavailable.
        """
        if self._num_runs < 0:
            return
        for layer_id, counts in self._backend.take_selections(self._local_banks).items():
            self._runtime.add_selections(layer_id, counts)
        if self._captured is not None:
            for (phase, layer_id), counts in self._captured.take_selections().items():
                self._runtime.add_mailed(phase, layer_id, counts)

    def begin(
        self, is_cancelled: Callable[[], bool] | None = None, *, prefix_scope: str = ""
    ) -> int:
        """Begin a run over the one sequence, which ends the one before; returns its number.

        Cached positions of another `prefix_scope` are dropped.
        Raises: SettingsError if the engine is closed; ModelFileError if the file was written to
        since it was opened.
        """
        if self._num_runs < 0:
            raise SettingsError("this engine is closed")
        self._file.require_unwritten()
        self._num_runs += 1
        self._is_cancelled = is_cancelled
        if prefix_scope != self._prefix_scope:
            self._cut(0)
            self._prefix_scope = prefix_scope
        return self._num_runs

    def end(self) -> None:
        """End the run, refuse further ones, release the device's memory. May be called twice."""
        if self._num_runs >= 0:
            self._num_runs = -1
            if self._captured is not None:
                self._captured.close()
            del self._model, self._cache, self._backend, self._local_banks, self._captured
            del self._checkpoints
            self._experts.clear()

    def chunks(
        self, num_tokens: int, chunk: int | Iterable[int] | None = None
    ) -> Iterable[tuple[int, int]]:
        """Bounds (first, last) of successive chunks, as `chunk_bounds` gives them.

        A prompt shorter than the smallest chunk goes token by token, through decoding kernels.
        """
        chunking = self._chunking
        if chunk is None and num_tokens < chunking.smallest:
            chunk = 1
        return chunk_bounds(
            num_tokens,
            chunk,
            chunking.preferred,
            smallest=chunking.smallest,
            largest=chunking.largest,
        )

    def boundary(self, prompt: I32Array, stop_ids: Collection[int]) -> int:
        """Where the last turn of a prompt begins: worth a state checkpoint, as a later prompt may
        differ only from there on. 0 if there is none, or none is needed. Shapes: prompt [T]."""
        if self._model.spec.can_be_cut:
            return 0
        smallest = self._chunking.smallest
        ends = np.flatnonzero(np.isin(prompt, list(stop_ids)))
        place = min(int(ends[-1]) + 1 if ends.size else 0, prompt.size - smallest)
        return place if place >= smallest else 0

    def prompt_chunks(
        self, num_tokens: int, *, boundary: int = 0, first: int = 0
    ) -> Iterable[tuple[int, int]]:
        """Chunks of a prompt from `first` on, as `chunks`; none crosses `boundary`."""
        middle = max(first, boundary)
        for begin, end in ((first, middle), (middle, num_tokens)):
            for chunk_first, chunk_last in self.chunks(end - begin):
                yield begin + chunk_first, begin + chunk_last

    def num_reusable(self, prompt: I32Array, boundary: int = 0) -> int:
        """Length of the prompt's prefix that is in the cache or restorable from a checkpoint.
        Shapes: prompt [T]."""
        chunks = self.prompt_chunks(prompt.size, boundary=boundary)
        ranges = self._prefix.reusable(prompt, chunks, boundary=boundary)
        places = {each[-1] for each in ranges} | {self._prefix.num_cached}
        places = {each for each in places if self._cache.can_resume(each)}
        places |= {*self._checkpoints.positions}
        return max(place for place in (0, *places) if any(place in each for each in ranges))

    def save_state(self, num_positions: int) -> None:
        """Save a checkpoint of the state after the last `forward`, at that many positions, for
        later runs; nothing if the model's cache can be cut anywhere."""
        if not self._model.spec.can_be_cut:
            self._checkpoints.save(num_positions)

    def forward(
        self,
        run: int,
        token_ids: I32Array,
        first_position: int,
        on_layer: OnLayer[AnyArray] | None = None,
    ) -> AnyArray:
        """One chunk of a run through all layers. Shapes: token_ids [T]; result [T, H].

        `first_position` is where the last chunk ended, or 0, or what `num_reusable` returned.
        Raises: SettingsError if another run has taken over the sequence, or the engine is closed;
        Cancelled, before the next layer once the run is cancelled; CheckpointMissing;
        ModelFileError if the file was written to.
        """
        self._require_current(run)
        self._cut(first_position)
        self._checkpoints.restore(first_position)
        self._poll_file()
        phase, started_s = _phase_of(token_ids.size), time.monotonic()
        # A fast token is over before the file would be polled again.
        is_fast = phase is Phase.DECODE and self._token_s < LOOK_S / 4
        step = Step.of_chunk(token_ids, first_position, self._cache, phase)
        before_layer: Callable[[], None] | None = self._check_file
        if is_fast:
            before_layer = None if self._is_cancelled is None else self._check_cancelled
        hidden = self._through_layers(step, before_layer, on_layer)
        if phase is Phase.DECODE:
            self._token_s = time.monotonic() - started_s
        self._prefix.add(first_position, token_ids)
        return hidden

    def verify_captured(
        self, run: int, token_ids: I32Array, tree: Tree, *, features: Collection[int]
    ) -> TreeResult | None:
        """Speculative verification in one captured step: what `forward_tree` computes, the most
        likely token after each draft token, and the hidden states after the layers of `features`.
        It costs a step or two. None if the backend has no captured step for it now.

        Shapes: token_ids [W], W > 0.
        Raises: as `forward`; NotFinite.
        """
        self.check(run)
        if self._captured is None:
            return None
        self._cut(tree.position)
        result = self._captured.verify(token_ids, tree, features)
        if result is not None:
            if not self._captured.counts_itself:
                self._count(Phase.VERIFY, token_ids.size)
            self._require_known(result.next_token_ids)
        return result

    def forward_tree(
        self,
        run: int,
        token_ids: I32Array,
        tree: Tree,
        *,
        on_layer: OnLayer[AnyArray] | None = None,
    ) -> AnyArray:
        """A tree of draft tokens through all layers, as `forward`; the sequence stays as it is.

        Shapes: token_ids [W]; result [W, H].
        Raises: as `forward`.
        """
        self._require_current(run)
        assert isinstance(self._cache, BranchingCache)  # as every backend's
        self._cut(tree.position)
        step = Step.of_tree(token_ids, tree, self._cache)
        experts = self._experts_of(Phase.VERIFY)
        with self._cache.branching(tree):
            return run_to_end(
                forward(
                    self._model,
                    step,
                    experts,
                    before_layer=self._check_file,
                    on_layer=on_layer,
                )
            )

    def accept(self, run: int, token_ids: I32Array, *, tree: Tree, path: I32Array) -> None:
        """Append the draft tokens of a path through the last verified tree to the sequence.

        Shapes: token_ids [W]; path [L].
        Raises: as `forward`.
        """
        self._require_current(run)
        tree.accept(path)
        if self._chunking.invariant_from == 1:  # else as a chunk they would have other bits
            self._prefix.add(tree.position, token_ids[path])

    def _cut(self, first_position: int) -> None:
        """Forget cached positions from this one on, which are about to be overwritten."""
        self._prefix.cut(first_position)
        self._checkpoints.cut(first_position)

    def to_host(self, hidden: AnyArray) -> F32Array:
        """Rows for the host to read, valid until the next layer. Shapes: hidden, result [T, H]."""
        return self._backend.to_host(hidden)

    def head(self, hidden: AnyArray) -> F32Array:
        """Logits, on the host. Shapes: hidden [T, H] of `forward`; result [T, V].

        Raises: NotFinite.
        """
        return self.finite(self._backend.to_host(self._model.head(hidden)))

    def argmax(self, hidden: AnyArray) -> I32Array:
        """The most likely token after each row. Shapes: hidden [T, H] of `forward`; result [T].

        Raises: NotFinite.
        """
        argmax = self._backend.argmax(self._model.head(hidden))
        self._require_known(argmax)
        return argmax

    def finite(self, logits: F32Array) -> F32Array:
        """The logits, checked to be finite. Shapes: [V] or [T, V].

        Raises: NotFinite if one of them is NaN or infinite.
        """
        # For a small vocabulary twice as fast as `.all()`.
        if 0 in np.isfinite(logits).tobytes():
            self.refuse_run()
        return logits

    def refuse_run(self) -> NoReturn:
        """Raise NotFinite, and drop the run's cached positions: they may be damaged, and the next
        prompt with the same prefix would reuse them.
        """
        self._cut(0)
        raise NotFinite(_NOT_FINITE)

    def _require_known(self, token_ids: I32Array) -> None:
        """Raises: NotFinite."""
        if (token_ids == NOT_FINITE).any():
            self.refuse_run()

    def all_logits(self, hidden: AnyArray, out: F32Array) -> None:
        """Logits of many positions. Shapes: hidden [T, H] of `forward`; out [T, V].

        Raises: NotFinite.
        """
        smallest = self._chunking.smallest
        for first, last in chunk_bounds(out.shape[0], None, _HEAD_CHUNK, smallest=smallest):
            out[first:last] = self.head(hidden[first:last])

    def captured(self, run: int) -> CapturedStep | None:
        """The captured step of one token, if the backend has one. It serves the whole rest of this
        run, with `check` and `count` called for every token.

        Raises: as `forward`.
        """
        self._require_current(run)
        return self._captured

    def check(self, run: int) -> None:
        """Raises: as `forward`."""
        self._require_current(run)
        self._check_file()

    def check_last(self) -> None:
        """Check the file before a result is final.

        Raises: ModelFileError if it was written to since the run began.
        """
        self._file.require_unwritten()

    def count(self) -> None:
        """Count one token of a captured step that was not discarded."""
        self._count(Phase.DECODE, 1)

    def _count(self, phase: Phase, num_tokens: int) -> None:
        self._runtime.count_local(
            phase,
            num_tokens=num_tokens,
            num_pairs=num_tokens * self._pairs_of_token,
            num_layers=self._num_moe_layers,
        )

    def _through_layers(
        self,
        step: Step,
        before_layer: Callable[[], None] | None,
        on_layer: OnLayer[AnyArray] | None,
    ) -> AnyArray:
        """A chunk at once, or in two micro-batches (two-batch overlap) if experts are remote.

        Not overlapped if `on_layer` is given, or experts are offloaded to this device.

        Shapes: result [T, H].
        """
        size, overlapped_from = step.token_ids.size, self._chunking.overlapped_from
        is_short = overlapped_from is None or size < overlapped_from
        # Weights that are copied here for a layer serve the whole chunk.
        is_whole = is_short or self._runtime.may_offload_now or on_layer is not None
        if is_whole or not self._runtime.asks_daemons:
            experts = self._experts_of(step.phase)
            return run_to_end(
                forward(self._model, step, experts, before_layer=before_layer, on_layer=on_layer)
            )
        middle = -(-size // 2)
        experts = self._experts_of(step.phase, may_offload=False)
        first, second = (
            forward(self._model, step.part(*part), experts, before_layer=before_layer)
            for part in ((0, middle), (middle, size))
        )
        return self._backend.joined(run_in_turns(first, second, poll=self._runtime.poll))

    def _require_current(self, run: int) -> None:
        if run != self._num_runs:
            raise SettingsError(
                "this engine is closed"
                if self._num_runs < 0
                else "another call to this engine has taken over its one sequence"
            )

    def _experts_of(self, phase: Phase, *, may_offload: bool = True) -> Any:
        """The model's routed experts, local and remote."""
        experts = self._experts.get((phase, may_offload))
        if experts is None:
            experts = self._experts[phase, may_offload] = self._backend.moe(
                self._local_banks, phase, self._runtime, may_offload=may_offload
            )
        return experts

    def _check_cancelled(self) -> None:
        """Raises: Cancelled."""
        if self._is_cancelled is not None and self._is_cancelled():
            raise Cancelled

    def _check_file(self) -> None:
        """Raises: ModelFileError if the file was written to; Cancelled."""
        self._poll_file()
        self._check_cancelled()


def _phase_of(num_tokens: int) -> Phase:
    return Phase.DECODE if num_tokens == 1 else Phase.PREFILL


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
