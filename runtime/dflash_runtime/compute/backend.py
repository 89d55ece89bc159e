"""Interface of a compute backend: Ops for the parent's dense layers, and banks of expert FFNs.

A bank holds the experts it was loaded with, numbered by local id, and computes the pairs it is
given; which experts these are is decided in `placement`, and who is asked in `experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.ops import KvCache, KvType, Model, MoeBlock, Ops
from dflash_adapters.quant import TensorType
from dflash_adapters.spec import KvLayer, MoeLayer, MoeSpec, RecurrentLayer
from dflash_protocol.batch import DeviceBatch, Hidden, RoutedBatch, Sums
from dflash_protocol.device_payload import DeviceMover, DeviceSums
from dflash_protocol.ids import AnyArray, F32Array, F64Array, I32Array, I64Array, Phase
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import Segment
from dflash_runtime.compute.mail_trial import MailTrial
from dflash_runtime.compute.trees import Tree, TreeResult

MEMORY_ADVICE = (
    "keep fewer experts there (--local-experts, the others in a --daemon), "
    "or ask for a smaller --context"
)
"""Advice in errors when the parent's device has too little memory."""
DAEMON_MEMORY_ADVICE = (
    "give this daemon fewer experts: the parent more (--local-experts), or another --daemon"
)
"""Advice in errors when a daemon's device has too little memory for the experts asked of it."""


NOT_FINITE = -3
"""Returned in place of a token id: one of its logits is NaN or infinite."""


class ExpertBank(Protocol):
    """The experts of one layer held by one owner, by local id."""

    @property
    def layer(self) -> MoeLayer: ...

    @property
    def num_experts(self) -> int: ...

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        """Add ``weight * FFN(hidden)`` of every pair to the row of its token.

        The float32 bits of one pair's term depend only on its hidden row, its weight, the expert
        and the backend's numeric class, never on what else is in the batch; terms are added in
        float64. Expert ids of the batch are local ids.
        Shapes: batch.hidden [T, H] float32; out [T, H] float64, added to in place.
        """


@runtime_checkable
class DivisibleBank(ExpertBank, Protocol):
    """A bank from which smaller banks can be made that share its memory."""

    def part(self, file: GgufFile, local_expert_ids: I32Array) -> ExpertBank:
        """A bank of some of these experts, in this order; it keeps the whole bank in memory.

        Raises: DeviceOutOfMemory.
        """


@runtime_checkable
class DeviceBank(ExpertBank, Protocol):
    """A bank on a device, which takes rows that are on the device too."""

    def sums_of(self, batch: DeviceBatch) -> DeviceSums:
        """As `accumulate`, from rows on the device into new sums."""


def sums_of(bank: ExpertBank, batch: RoutedBatch) -> Sums:
    """Weighted sums of a batch, on the bank's device if the rows are there. Shapes: [T, H]."""
    if isinstance(batch, DeviceBatch) and isinstance(bank, DeviceBank):
        return bank.sums_of(batch)
    sums = np.zeros(batch.hidden_shape)
    bank.accumulate(batch, sums)
    return sums


def argmax_of(logits: F32Array) -> I32Array:
    """ComputeBackend.argmax for rows on the host. Shapes: logits [T, V]; result [T]."""
    argmax: I32Array = np.argmax(logits, axis=1).astype(np.int32)
    argmax[~np.isfinite(logits).all(axis=1)] = NOT_FINITE
    return argmax


@dataclass(frozen=True, slots=True)
class Chunking:
    """Sizes of the chunks in which a backend computes prompts, in tokens."""

    preferred: int
    """Default size."""
    largest: int | None
    """Upper bound; None: none."""
    invariant_from: int | None
    """In chunks of at least this size a position's bits do not depend on the chunk; None: they
    always do."""

    overlapped_from: int | None = None
    """From this size on a chunk with remote experts is split into two overlapped halves (two-batch
    overlap); None: never."""

    @property
    def smallest(self) -> int:
        """Least size of a chunk of a longer prompt."""
        return self.invariant_from or 1


@dataclass(frozen=True, slots=True, eq=False)
class MailRoute:
    """A daemon whose device answers ours through a mailbox, with no host in between.

    `local_ids`: for each layer id of which it has experts, the local id of every expert it is to
    compute. Shapes: each [E] int32, negative: not computed there.
    """

    name: str
    segment: Segment
    local_ids: Mapping[int, I32Array]
    is_live: Callable[[], bool]
    """Whether its session still lasts."""
    fail: Callable[[str], None]
    """Marks the daemon as lost, with the reason."""


class RemoteExperts(Protocol):
    """Owners of the experts that a device's MoE block does not compute; the block asks them."""

    def local_experts_mask(self, layer_id: int) -> npt.NDArray[np.bool_]:
        """Experts that the block computes itself. Shapes: result [E]."""

    def count_local(
        self, phase: Phase, *, num_tokens: int, num_pairs: int, num_layers: int = 1
    ) -> None:
        """Count tokens all of whose pairs the block has computed, in one layer or more."""

    def count_selections(self, layer_id: int, topk_ids: I32Array) -> None:
        """Count chosen experts where `start` is not called. Shapes: topk_ids [T, K]."""

    @property
    def may_offload(self) -> bool:
        """Whether `to_offload` may ever name an expert."""

    def to_offload(
        self, layer_id: int, topk_ids: I32Array | None, *, expert_s: float
    ) -> npt.NDArray[np.bool_] | None:
        """Remote experts of a chunk that the block should compute with copied weights, because
        that is faster; copying one expert takes `expert_s`. None: none of them.

        Without `topk_ids`: a prediction for a layer that has not been routed yet, from the layer
        before. Shapes: topk_ids [T, K]; result [E], all experts of the owners concerned.
        """

    def start(
        self,
        layer_id: int,
        hidden: Hidden,
        topk_ids: I32Array,
        topk_weights: F32Array,
        *,
        phase: Phase,
        offloaded: npt.NDArray[np.bool_] | None = None,
    ) -> Any:
        """Ask the owners for the remote experts, except those `offloaded` to the block. The result
        must be passed to `finish` or `abandon`; None: nothing remote was chosen.

        Shapes: hidden [T, H]; topk_ids, topk_weights [T, K]; offloaded [E]; ids are global.
        """

    def finish(self, started: Any, out: F64Array | None = None) -> Sums:
        """Wait for the unrounded weighted sums: on the device or host where the rows were; in `out`
        if that is given, for rows on the host. Shapes: result [T, H].

        Raises: DaemonUnavailable if an expert's owner is lost and it has no fallback.
        """

    def abandon(self, started: Any) -> None:
        """Drop work that was started; its result is not used."""

    def mail_routes(self) -> tuple[MailRoute, ...]:
        """Routes to all remote owners, if each is connected and has a mailbox, else none. The same
        objects as before while their sessions last."""

    def count_mailed(
        self,
        routes: Sequence[MailRoute],
        num_steps: int,
        *,
        phase: Phase = Phase.DECODE,
        num_tokens: int = 1,
    ) -> None:
        """Count steps of `num_tokens` that went through mailboxes, apart from other steps."""

    def is_step_to_be_checked(self, routes: Sequence[MailRoute]) -> bool:
        """Whether a step that went through these mailboxes should be recomputed through the host,
        so that a reply can be checked."""

    def note_checked_step(self, elapsed_s: float) -> None:
        """Such a step was recomputed, in this time."""


@dataclass(frozen=True, slots=True)
class DeviceSampling:
    """How a token is sampled from logits; see engine.sampling.SamplingParams."""

    temperature: float
    """Above 0."""
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    min_p: float = 0.0


class DeviceMail(Protocol):
    """A device whose kernels can ask another device's kernels through mailboxes, or answer them."""

    def num_bytes(self, moe: MoeSpec) -> int:
        """Size of a model's mailbox in shared memory."""

    def begin(self, segment: Segment, limit_ms: int, *, in_host: bool = False) -> None:
        """Parent: initialise a mailbox before the daemon is told of it. `limit_ms`: how long a step
        may take; `in_host`: all of it stays in the host's memory."""

    def serve(self, segment: Segment, moe: MoeSpec, banks: Mapping[int, ExpertBank]) -> MailService:
        """Daemon: answer a parent's requests for the experts of `banks`.

        Raises: DeviceUnavailable if our device cannot map the memory.
        """

    @property
    def trial_shape(self) -> RingShape:
        """Shape of the memory for a trial of a mailbox, which needs no model."""

    def try_out(self, segment: Segment, *, seed: int) -> MailTrial:
        """The parent's end of a trial, after `begin`; another process calls `serve_trial`."""

    def serve_trial(self, segment: Segment) -> MailService:
        """The daemon's end of a trial."""


class MailService(Protocol):
    """The daemon's end of one mailbox."""

    def close(self) -> None:
        """Stop answering; the segment is not used afterwards."""


class CapturedStep(Protocol):
    """Decode steps of one sequence as a captured graph, replayed at little cost to the host.

    A step samples the token that the next step computes at the next position, so several can be
    started without waiting for any.
    """

    @property
    def needs_host(self) -> bool:
        """The host asks remote owners during each step: `start` returns when the step has ended."""

    @property
    def counts_itself(self) -> bool:
        """Its RemoteExperts counts all pairs computed; the caller must not."""

    def prepare(self) -> None:
        """Compile and capture everything. Overwrites the cache."""

    def choose_by(self, options: DeviceSampling | None) -> None:
        """How tokens are sampled from the next `begin` on; None, the default: argmax."""

    def expect(self, first_position: int, numbers: F64Array) -> None:
        """Random numbers to sample the tokens of these positions with, before their steps start.

        Shapes: numbers [N] in [0, 1).
        """

    def begin(self, token_id: int, position: int) -> None:
        """Set the token and position of the next step.

        Raises: ContextExceeded.
        """

    def start(self) -> None:
        """Start a step.

        Raises: ContextExceeded if there is no room for it; DaemonUnavailable.
        """

    def token(self, position: int) -> int | None:
        """Wait for the token that a step has sampled for this position.

        None: the caller must sample it from the step's logits, and `begin` again with it.
        NOT_FINITE: its logits are not finite, and steps started after it are void.

        Raises: DeviceUnavailable if the device has failed.
        """

    def logits(self) -> F32Array:
        """Wait for the logits of the step started last. Shapes: result [V]."""

    def verify(
        self, token_ids: I32Array, tree: Tree, features: Collection[int]
    ) -> TreeResult | None:
        """Compute a tree of at least one draft token in one step. The sequence stays as it is until
        a path is accepted. `features`: layers whose hidden states are returned.
        None: the step cannot be captured, for example because the host must ask remote owners.

        Shapes: token_ids [W].
        Raises: ContextExceeded, CheckpointMissing; DeviceUnavailable.
        """

    def take_selections(self) -> dict[tuple[Phase, int], I64Array]:
        """How often experts were chosen since the last call, by phase and layer id, in layers that
        devices ask through mailboxes. Shapes: each [E]."""

    def close(self) -> None:
        """Release graphs and memory."""


class ComputeBackend(Protocol):
    """Dense Ops and expert banks of one device, of the same numeric class."""

    @property
    def name(self) -> str:
        """``reference``, ``cpu``, …"""

    @property
    def numeric_class(self) -> str:
        """Names everything that decides the bits of a result: kernels, their version, the CPU."""

    @property
    def ops(self) -> Ops[AnyArray]: ...

    @property
    def chunking(self) -> Chunking: ...

    @property
    def is_host(self) -> bool:
        """It computes in the host's memory, with experts where their file is mapped.

        Otherwise weights are copied to a device, and kernels are compiled for the model's shapes
        when they are first used.
        """

    @property
    def mover(self) -> DeviceMover | None:
        """Copies rows between a device and shared memory; None if `is_host`."""

    @property
    def mail(self) -> DeviceMail | None:
        """The device's mailboxes, if it has any."""

    @property
    def trial_batches(self) -> tuple[tuple[Phase, int], ...]:
        """Phases and numbers of tokens: when a bank has computed such batches, all its kernels are
        compiled and have run. The first is one token of a decode step."""

    def free_memory_bytes(self) -> int:
        """Free memory for experts, as far as known."""

    def require_room(
        self,
        file: GgufFile,
        experts: Iterable[tuple[MoeLayer, int]],
        *,
        kv_layers: tuple[KvLayer, ...] = (),
        recurrent: tuple[RecurrentLayer, ...] = (),
        num_positions: int = 0,
        kv_type: KvType = KvType.F16,
    ) -> None:
        """Check, before anything is loaded, that so many experts of these layers fit the device;
        with `kv_layers` a whole model, its cache of `num_positions` and its recurrent states.

        Raises: DeviceOutOfMemory with the amounts, and advice.
        """

    def to_host(self, rows: AnyArray) -> F32Array:
        """Rows from Ops as an array of the host. Shapes: rows, result [T, columns]."""

    def argmax(self, logits: AnyArray) -> I32Array:
        """Index of the largest logit of each row, the lowest of equal ones; NOT_FINITE if any of
        the row is not finite. Shapes: logits [T, V]; result [T]."""

    def joined(self, parts: Sequence[AnyArray]) -> AnyArray:
        """Rows from Ops, concatenated. Shapes: parts, result [T, columns]."""

    def moe(
        self, banks: Mapping[int, ExpertBank], phase: Phase, remote: RemoteExperts | None
    ) -> MoeBlock[AnyArray] | None:
        """A MoE block for rows of Ops, with the experts of `banks` by layer id.

        None: all experts are computed through host arrays.
        """

    def captured_step(
        self,
        model: Model[AnyArray],
        cache: KvCache,
        banks: Mapping[int, ExpertBank],
        *,
        remote: RemoteExperts,
    ) -> CapturedStep | None:
        """A captured step of a model whose experts are in `banks` or `remote`; None if the backend
        captures none."""

    def offload_prompts(
        self, file: GgufFile, layers: Iterable[MoeLayer], remote: RemoteExperts
    ) -> None:
        """Prepare to compute remote experts of prompt chunks with weights copied from the file, if
        `remote` may ever ask for that and the device has room.

        Call it last, when everything else has its memory. Without room it logs a warning.
        """

    def take_selections(self, banks: Mapping[int, ExpertBank]) -> dict[int, I64Array]:
        """How often experts were chosen since the last call, by layer id, in layers routed on the
        device. Shapes: each [E]."""

    def load_experts(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> ExpertBank:
        """Load experts; local id = position in `global_expert_ids`. Shapes: [E_local].

        Banks share the loaded weights of the same expert of the same file.
        """

    def drop_experts(self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array) -> None:
        """Free the memory of these experts' loaded weights; no bank of them is used again.

        The mapped file's own pages are left to the caller.
        """

    def warm_up(
        self,
        tensor_types: Iterable[TensorType],
        *,
        kv_type: KvType | None = None,
        is_recurrent: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile every kernel that experts of these types need; with `kv_type` those of a whole
        model, with recurrent layers or without.

        `on_progress(done, total)` is called after each step.
        """

    def idle(self) -> None:
        """Stop spinning: the backend will not be used for a while."""

    def close(self) -> None:
        """End worker threads. The backend must not be used afterwards."""


class BackendName(StrEnum):
    """Backends by name; ``auto`` picks the fastest one that works on this machine."""

    AUTO = "auto"
    REFERENCE = "reference"
    CPU = "cpu"
