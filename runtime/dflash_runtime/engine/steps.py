"""Steps: chunks of an engine's one sequence through all layers, one run after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeAlias

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import MoeLayer
from dflash_protocol.errors import DflashError, NotFinite
from dflash_protocol.ids import AnyArray, F32Array, I32Array, Phase
from dflash_protocol.placement import Placement
from dflash_runtime.compute import ComputeBackend, ExpertBank
from dflash_runtime.compute.backend import (
    NOT_FINITE,
    CapturedStep,
    ExpertStage,
    ResizableBank,
)
from dflash_runtime.compute.expert_arena import ExpertArena
from dflash_runtime.compute.kv_cache import KvCache
from dflash_runtime.compute.model import Model, OnLayer, Step, forward, run_to_end
from dflash_runtime.compute.room import HEAD_ROWS
from dflash_runtime.compute.slot_stats import SlotStats
from dflash_runtime.compute.trees import Tree, TreeResult
from dflash_runtime.engine.absent_owners import AbsentOwners
from dflash_runtime.engine.arguments import chunk_bounds
from dflash_runtime.engine.heat_keeper import HeatKeeper
from dflash_runtime.engine.reuse import SequenceReuse
from dflash_runtime.engine.run_guard import RunGuard
from dflash_runtime.engine.tracing import ExpertTracer
from dflash_runtime.engine.two_batch_overlap import run_in_turns
from dflash_runtime.experts.replacing import NotUndone, Prepared
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.interrupts import uninterrupted
from dflash_runtime.placement.heat import Heat

_NOT_FINITE = (
    # docs: the model's file is damaged, or memory, or a value has become too large; what was
    # written until then is right
    "the model's logits are not finite (NaN or infinity), so that no token follows from them: its "
    "file or this machine's memory may be damaged, or a value has become too large"
)

_BeforeLayer: TypeAlias = Callable[[], None] | None
"""May raise to end a pass."""


class Steps:
    """The one sequence, its key/value cache, and the current run over it: the latest begun.

    `local_banks` hold the experts of this process, by layer id. File, backend, runtime and `heat`
    belong to the caller.
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
        heat: HeatKeeper,
        tracer: ExpertTracer | None = None,
    ) -> None:
        self.num_positions = num_positions
        """The longest sequence, in tokens."""
        self.heat = heat
        self._tracer = tracer
        self.reuse = SequenceReuse(
            cache,
            num_positions,
            invariant_from=backend.chunking.invariant_from,
            can_be_cut=model.spec.can_be_cut,
            num_other_class=lambda: runtime.hits.other_class,
        )
        self._model, self._cache = model, cache
        self._backend, self._runtime, self._local_banks = backend, runtime, local_banks
        self._experts: dict[tuple[Phase, bool], Any] = {}
        """The model's routed experts, by phase and whether they may be offloaded."""
        self._guard = RunGuard(file)
        self._captured = backend.captured_step(
            model,
            cache,
            local_banks,
            remote=runtime,
            check=self._guard.check,
            keeps_choices=tracer is not None,
        )

    @property
    def cache_bytes(self) -> int:
        """Memory of keys, values and states when they are full."""
        return self._cache.nbytes

    def try_out(self, arena: ExpertArena | None = None) -> None:
        """On a device, compile every kernel that the model needs and allocate all memory. `arena`:
        where experts come to from the disk.

        Raises: DeviceUnavailable, DeviceOutOfMemory among them.
        """
        backend, banks, captured = self._backend, self._local_banks, self._captured
        if backend.is_host:
            return
        for size in (1, min(backend.chunking.preferred, self.num_positions)):
            phase = _phase_of(size)
            experts = backend.moe(banks, phase, AbsentOwners(self._runtime.local_experts_mask))
            step = Step.of_chunk(np.zeros(size, np.int32), 0, self._cache, phase)
            hidden = run_to_end(forward(self._model, step, experts))
            for rows in (hidden[-HEAD_ROWS:], hidden[-1:]):
                backend.to_host(self._model.head(rows))
        if captured is not None:
            captured.prepare()
        backend.take_selections(banks)
        layers = self._model.spec.moe.layers
        backend.offload_prompts(self._guard.file, layers, self._runtime, arena=arena)

    def settle(self) -> None:
        """Add to the counters which experts were chosen in steps that the device ran by itself, and
        all counts to the heat, if that is due.

        Steps that were launched ahead and discarded are included. Raises: DeviceUnavailable.
        """
        if self._guard.is_closed:
            return
        for (phase, layer_id), counts in self._backend.take_selections(self._local_banks).items():
            self._runtime.add_selections(phase, layer_id, counts)
        if self._captured is not None:
            for (phase, layer_id), mailed in self._captured.take_selections().items():
                self._runtime.add_mailed(phase, layer_id, mailed)
        if self.heat.is_due:
            self.heat.update(self._runtime)

    def heat_now(self) -> Heat:
        """A copy of the heat, with all counts in it. Raises: as `settle`."""
        self.settle()
        self.heat.update(self._runtime)
        return self.heat.copy()

    def new_stage(self, layers: Sequence[MoeLayer], most: int) -> ExpertStage | None:
        """See ComputeBackend.new_stage."""
        return self._backend.new_stage(self._guard.file, layers, most)

    @property
    def device_name(self) -> str:
        """What its maker calls the device."""
        return self._backend.device_name

    @property
    def placement(self) -> Placement:
        """The owner of each expert."""
        return self._runtime.placement

    def prepare(self, placement: Placement) -> Prepared:
        """Have daemons load what they miss for another placement, beside what they have. To be
        withdrawn unless `replace` is called with it.

        Raises: ValueError if it cannot be used; DaemonUnavailable; SettingsError if the engine is
        closed; ModelFileError if the file was written to.
        """
        self._guard.require_usable()
        return self._runtime.prepare(placement)

    def keeps_classes(self, placement: Placement) -> bool:
        """Whether experts may move to their places in it within a run."""
        return self._runtime.keeps_classes(placement)

    def decodes_alike(self, placement: Placement) -> bool:
        """Whether steps have the same bits with another placement: then owners of this process may
        exchange experts between two of them."""
        return self._runtime.decodes_alike(placement)

    def resizable_banks(self) -> dict[int, tuple[ResizableBank, ResizableBank]]:
        """By layer id the banks of the device and of the processor, where experts may go from one
        to the other."""
        away = self.processor_banks
        return {
            layer_id: (bank, other)
            for layer_id, bank in self._local_banks.items()
            if isinstance(bank, ResizableBank)
            and isinstance(other := away.get(layer_id), ResizableBank)
        }

    @property
    def processor_banks(self) -> Mapping[int, ExpertBank]:
        """By layer id, experts that the processor beside the parent's device has."""
        return {} if self._backend.is_host else self._runtime.own_banks

    def memory_said(self) -> dict[str, tuple[int, int]]:
        """See MoeExpertComputeRuntime.memory_said."""
        return self._runtime.memory_said()

    def num_local_experts(self) -> dict[int, int]:
        """By layer id, experts on the device."""
        return {layer_id: bank.num_experts for layer_id, bank in self._local_banks.items()}

    def device_memory(self) -> tuple[int, int] | None:
        """See ComputeBackend.device_memory."""
        return self._backend.device_memory()

    @property
    def asks_by_mailbox(self) -> bool:
        """Whether a device asks daemons: a run in which they get other experts goes on through the
        host."""
        return bool(self._runtime.mail_routes())

    def replace(
        self, prepared: Prepared, stage: ExpertStage | None = None, *, ends_run: bool = True
    ) -> None:
        """Use another placement between two runs, once daemons have what they miss; or, where
        `keeps_classes`, between two steps. Owners of this process have other experts, as many of
        each layer. The next run reuses no cached positions if other classes compute them now.
        `stage` may have weights of some. If it fails, the old placement stays in use; if not even
        that can be, all further runs fail.

        Raises: SettingsError if the engine is closed; ModelFileError if the file was written to;
        DflashError if a daemon cannot have what it misses; DeviceUnavailable.
        """
        guard, captured = self._guard, self._captured
        try:
            if ends_run:
                guard.begin(None)
            guard.require_usable()
            prepared.wait()
            with uninterrupted():
                self.settle()
                if captured is not None:
                    captured.wait()
                    if prepared.is_of_daemons:
                        guard.num_interrupted += 1
                        captured.leave_owners()
                before = self._runtime.placement
                try:
                    self._replace(prepared, stage)
                finally:  # also if daemons fail to take over, after experts here have changed
                    if captured is not None and self._runtime.placement is not before:
                        captured.follow_owners()
        finally:
            prepared.withdraw()

    @property
    def slots(self) -> SlotStats | None:
        """See CapturedStep.slots; as of the last `settle`."""
        if self._guard.is_closed or self._captured is None:
            return None
        return self._captured.slots

    @property
    def num_interrupted(self) -> int:
        """How often captured steps that were started ahead have been dropped."""
        return self._guard.num_interrupted

    def _replace(self, prepared: Prepared, stage: ExpertStage | None) -> None:
        guard, runtime = self._guard, self._runtime

        def follow() -> None:
            self._backend.follow_owners(prepared.placement.experts_per_layer, runtime)

        try:
            runtime.replace(guard.file, prepared, follow=follow, stage=stage)
        except NotUndone as error:
            guard.refuse(error)
            raise
        except BaseException:
            try:
                follow()  # the old placement, which is in use again
            except DflashError as error:
                guard.refuse(error)
                raise
            raise

    def begin(
        self, is_cancelled: Callable[[], bool] | None = None, *, prefix_scope: str = ""
    ) -> int:
        """Begin a run over the one sequence, which ends the one before; returns its number.

        Cached positions of another `prefix_scope`, or another class map, are dropped.
        Raises: SettingsError if the engine is closed; ModelFileError if the file was written to
        since it was opened.
        """
        run = self._guard.begin(is_cancelled)
        self.reuse.enter(prefix_scope, self._runtime.class_map.digest)
        return run

    def end(self) -> None:
        """End the run, refuse further ones, release the device's memory. May be called twice."""
        if not self._guard.is_closed:
            self._guard.close()
            if self._tracer is not None:
                with suppress(DflashError):  # a device that has failed
                    self._tracer.write_steps()
                self._tracer.close()
            if self._captured is not None:
                self._captured.close()
            del self._backend, self._model, self._cache, self._local_banks
            del self._experts, self._captured, self.reuse

    def chunks(
        self, num_tokens: int, chunk: int | Iterable[int] | None = None, *, grouped: bool = False
    ) -> Iterable[tuple[int, int]]:
        """Bounds (first, last) of successive chunks, as `chunk_bounds` gives them.

        A prompt shorter than the smallest chunk goes token by token, through decoding kernels.
        With `grouped`, chunks that `forward` cuts up itself, if it has an advantage of that.
        """
        chunking = self._backend.chunking
        if chunk is None and num_tokens < chunking.smallest:
            chunk = 1
        preferred = chunking.preferred
        if grouped and self._groups_chunks:
            preferred = max(preferred, chunking.grouped)
        return chunk_bounds(
            num_tokens,
            chunk,
            preferred,
            smallest=chunking.smallest,
            largest=chunking.largest,
        )

    def prompt_chunks(
        self, num_tokens: int, *, boundary: int = 0, first: int = 0, grouped: bool = True
    ) -> Iterable[tuple[int, int]]:
        """Chunks of a prompt from `first` on, as `chunks`; none crosses `boundary`."""
        middle = max(first, boundary)
        for begin, end in ((first, middle), (middle, num_tokens)):
            for chunk_first, chunk_last in self.chunks(end - begin, grouped=grouped):
                yield begin + chunk_first, begin + chunk_last

    def num_reusable(self, prompt: I32Array, boundary: int = 0) -> int:
        """Length of the prompt's prefix that is in the cache or restorable from a checkpoint.
        Shapes: prompt [T]."""
        chunks = self.prompt_chunks(prompt.size, boundary=boundary)
        return self.reuse.num_reusable(prompt, chunks, boundary=boundary)

    def forward(
        self,
        run: int,
        token_ids: I32Array,
        first_position: int,
        on_layer: OnLayer[AnyArray] | None = None,
    ) -> AnyArray:
        """One chunk of a run through all layers, or a group of chunks (see `chunks`), of which the
        last one's rows are the result. Shapes: token_ids [T]; result [T, H].

        `first_position` is where the last chunk ended, or 0, or what `num_reusable` returned.
        Raises: SettingsError if another run has taken over the sequence, or the engine is closed;
        Cancelled, before the next layer once the run is cancelled; CheckpointMissing;
        ModelFileError if the file was written to.
        """
        guard = self._guard
        guard.require_current(run)
        if self.heat.is_due:
            self.settle()
        self.reuse.go_to(first_position)
        guard.poll_file()
        phase, started_s = _phase_of(token_ids.size), time.monotonic()
        step = Step.of_chunk(token_ids, first_position, self._cache, phase)
        hidden = self._chunk(step, guard.before_layer(phase), on_layer)
        if phase is Phase.DECODE:
            guard.note_token(time.monotonic() - started_s)
        self.reuse.add(first_position, token_ids)
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
        self.reuse.cut(tree.position)
        result = self._captured.verify(token_ids, tree, features)
        if result is not None:
            if not self._captured.counts_itself:
                self._count(Phase.VERIFY, token_ids.size)
            if self._tracer is not None:
                choices = self._captured.tree_choices(token_ids.size)
                self._tracer.add(Phase.VERIFY, choices)
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
        self._guard.require_current(run)
        self.reuse.cut(tree.position)
        step = Step.of_tree(token_ids, tree, self._cache)
        return self._run(step, self._guard.check, on_layer)

    def appended(self, run: int, token_ids: I32Array, position: int) -> bool:
        """Compute some tokens of the sequence whose logits are not needed, in one captured step;
        False if there is none for so many now. Shapes: token_ids [W], W > 0.

        Raises: as `verify_captured`.
        """
        tree = Tree(np.arange(-1, token_ids.size - 1, dtype=np.int32), position)
        if self.verify_captured(run, token_ids, tree, features=()) is None:
            return False
        self.accept(run, token_ids, tree=tree, path=np.arange(token_ids.size, dtype=np.int32))
        return True

    def accept(self, run: int, token_ids: I32Array, *, tree: Tree, path: I32Array) -> None:
        """Append the draft tokens of a path through the last verified tree to the sequence.

        Shapes: token_ids [W]; path [L].
        Raises: as `forward`.
        """
        self._guard.require_current(run)
        tree.accept(path)
        if self._backend.chunking.invariant_from == 1:  # else as a chunk they would have other bits
            self.reuse.add(tree.position, token_ids[path])

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
        self.reuse.cut(0)
        raise NotFinite(_NOT_FINITE)

    def _require_known(self, token_ids: I32Array) -> None:
        """Raises: NotFinite."""
        if (token_ids == NOT_FINITE).any():
            self.refuse_run()

    def all_logits(self, hidden: AnyArray, out: F32Array) -> None:
        """Logits of many positions. Shapes: hidden [T, H] of `forward`; out [T, V].

        Raises: NotFinite.
        """
        for first, rows in self.row_logits(hidden, out.shape[0]):
            out[first : first + rows.shape[0]] = rows

    def row_logits(self, hidden: AnyArray, num_rows: int) -> Iterator[tuple[int, F32Array]]:
        """Logits of many positions, some at a time, each with the first row that they are of;
        valid until the next. Shapes: hidden [T, H] of `forward`; logits [N, V].

        Raises: NotFinite.
        """
        smallest = self._backend.chunking.smallest
        for first, last in chunk_bounds(num_rows, None, HEAD_ROWS, smallest=smallest):
            yield first, self.head(hidden[first:last])

    def captured(self, run: int) -> CapturedStep | None:
        """The captured step of one token, if the backend has one. It serves the whole rest of this
        run, with `check` and `note_captured` called for every token.

        Raises: as `forward`.
        """
        self._guard.require_current(run)
        return self._captured

    def check(self, run: int) -> None:
        """Raises: as `forward`."""
        self._guard.require_current(run)
        self._guard.check()
        if self.heat.is_due:
            self.settle()

    def check_last(self) -> None:
        """Check the file before a result is final.

        Raises: ModelFileError if it was written to since the run began.
        """
        self._guard.file.require_unwritten()

    def note_captured(self, token_id: int, position: int) -> None:
        """Note a captured step that was not discarded: of this token, at this position."""
        assert self._captured is not None
        if not self._captured.counts_itself:
            self._count(Phase.DECODE, 1)
        if self._tracer is not None:
            self._tracer.note_step(self._captured, position)
        if self._backend.chunking.invariant_from == 1:
            self.reuse.add(position, np.array([token_id], np.int32))

    def _count(self, phase: Phase, num_tokens: int) -> None:
        self._runtime.count_local(
            phase,
            num_tokens=num_tokens,
            num_pairs=num_tokens * self._model.spec.moe.num_used_total,
            num_layers=len(self._model.spec.moe.layers),
        )

    @property
    def _groups_chunks(self) -> bool:
        """Whether chunks of a group go through each layer one after the other. Daemons' replies
        would be awaited for all of them at once."""
        runtime, is_host = self._runtime, self._backend.is_host
        may_be = self._backend.chunking.grouped > 0 and (is_host or runtime.may_offload_now)
        return may_be and not runtime.asks_daemons and self._tracer is None

    def _group(self, step: Step, before_layer: _BeforeLayer) -> AnyArray:
        """More tokens than a chunk may have, layer by layer: the rows of the last chunk."""
        chunking, size = self._backend.chunking, step.token_ids.size
        bounds = chunk_bounds(size, None, chunking.preferred, smallest=chunking.smallest)
        passes = [
            forward(
                self._model,
                step.part(first, last),
                self._experts_of(step.phase),
                before_layer=before_layer,
            )
            for first, last in bounds
        ]
        return run_in_turns(*passes, poll=self._runtime.poll)[-1]

    def _chunk(
        self, step: Step, before_layer: _BeforeLayer, on_layer: OnLayer[AnyArray] | None
    ) -> AnyArray:
        """A chunk at once, or in two micro-batches (two-batch overlap) if experts are remote; or a
        group of chunks.

        Not overlapped if `on_layer` is given, choices are traced, or experts are offloaded to this
        device.
        Shapes: result [T, H].
        """
        chunking, size = self._backend.chunking, step.token_ids.size
        largest, overlapped_from = chunking.largest, chunking.overlapped_from
        if largest is None and self._groups_chunks and on_layer is None:
            largest = chunking.preferred
        if largest is not None and size > largest:
            assert on_layer is None
            return self._group(step, before_layer)
        is_short = overlapped_from is None or size < overlapped_from or self._tracer is not None
        # Weights that are copied here for a layer serve the whole chunk.
        is_whole = is_short or self._runtime.may_offload_now or on_layer is not None
        if is_whole or not self._runtime.asks_daemons:
            return self._run(step, before_layer, on_layer)
        middle = -(-size // 2)
        experts = self._experts_of(step.phase, may_offload=False)
        first, second = (
            forward(self._model, step.part(*part), experts, before_layer=before_layer)
            for part in ((0, middle), (middle, size))
        )
        return self._backend.joined(run_in_turns(first, second, poll=self._runtime.poll))

    def _run(
        self, step: Step, before_layer: _BeforeLayer, on_layer: OnLayer[AnyArray] | None
    ) -> AnyArray:
        experts, tracer = self._experts_of(step.phase), self._tracer
        passed = partial(forward, self._model, step, before_layer=before_layer, on_layer=on_layer)
        if tracer is None:
            return run_to_end(passed(experts))
        tracer.write_steps()  # before their places are used again
        with self._backend.noted_choices(experts) as (noting, noted):
            rows = run_to_end(passed(noting))
            tracer.add(step.phase, noted())
        return rows

    def _experts_of(self, phase: Phase, *, may_offload: bool = True) -> Any:
        key = phase, may_offload
        experts = self._experts.get(key)
        if experts is None:
            experts = self._experts[key] = self._backend.moe(
                self._local_banks,
                phase,
                self._runtime,
                may_offload=may_offload,
            )
        return experts


def _phase_of(num_tokens: int) -> Phase:
    """The phase of a chunk."""
    return Phase.DECODE if num_tokens == 1 else Phase.PREFILL
