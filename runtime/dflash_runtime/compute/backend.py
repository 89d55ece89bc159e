"""What a compute backend offers: models for the parent, and expert FFNs.

Independent of placement and processes: a bank holds the experts it was loaded with, numbered by
local id, and computes the (token, expert, weight) pairs it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.layers import Description
from dflash_adapters.quant import TensorType
from dflash_adapters.spec import ModelSpec, MoeLayer, MoeSpec
from dflash_protocol.batch import Hidden, HostSums, RoutedBatch, Sums
from dflash_protocol.device_payload import DeviceMover
from dflash_protocol.ids import AnyArray, F32Array, F64Array, I32Array, I64Array, Phase, U8Array
from dflash_protocol.ring.compiled_experts import CompiledExperts
from dflash_protocol.ring.layout import RingShape
from dflash_protocol.ring.segment import MailTerms, Segment
from dflash_runtime.compute.asking import AskedOwners
from dflash_runtime.compute.expert_arena import ArenaOptions, ExpertArena
from dflash_runtime.compute.kv_cache import KvCache, KvType
from dflash_runtime.compute.mail_trial import MailTrial
from dflash_runtime.compute.model import Model
from dflash_runtime.compute.slot_stats import MailedCounts, SlotStats
from dflash_runtime.compute.thread_trial import OnePass
from dflash_runtime.compute.trees import Tree, TreeResult

MEMORY_ADVICE = (
    "keep fewer experts there (--local-experts, the others in a --daemon), "
    "or ask for a smaller --context"
)
"""Advice in errors when the parent's device has too little memory."""
DAEMON_MEMORY_ADVICE = (
    "give this daemon fewer experts: the parent more (--local-experts), or another --daemon"
)
"""Advice in errors when a daemon's device has too little memory for what a parent asks of it."""

NOT_FINITE = -3
"""Returned instead of a token id when a logit of its row is NaN or infinite."""


class ExpertBank(Protocol):
    """One owner's experts of one layer, indexed by local id."""

    @property
    def layer(self) -> MoeLayer: ...

    @property
    def num_experts(self) -> int: ...

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        """Add ``weight * FFN(hidden)`` of every pair to its token's row.

        The float32 bits of one pair's term depend only on its hidden row, its weight, the expert
        and the backend's numeric class, never on the rest of the batch; terms are added in float64.
        Expert ids in the batch are local ids.
        Shapes: batch.hidden [T, H] float32; out [T, H] float64, added to in place.
        """


class ExpertStage(Protocol):
    """Memory of a device for experts that are about to take slots there; it is filled while the
    device computes.

    States: empty; from `begin` on being filled, then filled; empty again after `clear`. Used by one
    thread. Owns: the memory, and what copies to it, until closed.
    """

    @property
    def num_slots(self) -> int:
        """How many experts it has room for."""

    @property
    def is_filled(self) -> bool:
        """Whether all copies have ended, well or not."""

    def begin(self, experts: Sequence[tuple[MoeLayer, int]]) -> None:
        """Start to copy experts, by layer and global id, in place of those before.

        Raises: ModelFileError if the file was written to; DeviceUnavailable.
        """

    def wait(self) -> None:
        """Wait for the copies. Raises: ModelFileError, DeviceUnavailable if they have failed."""

    def clear(self) -> None:
        """Cancel what is being copied, and forget what is here."""

    def close(self) -> None:
        """Release everything. Idempotent."""


@runtime_checkable
class LoadsResizable(Protocol):
    """A backend whose banks can have more or fewer experts later."""

    def load_resizable(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> ResizableBank:
        """As ComputeBackend.load_experts."""


@runtime_checkable
class ReplaceableBank(ExpertBank, Protocol):
    """A bank that can take other experts in place of some of its own."""

    def replace(
        self,
        file: GgufFile,
        local_expert_ids: I32Array,
        global_expert_ids: I32Array,
        *,
        stage: ExpertStage | None = None,
    ) -> None:
        """From now on these local ids are those experts. Nothing may be computing; what was
        recorded with this bank stays valid. A `stage` of the bank's device, filled, has the weights
        of some.

        Shapes: both [N]. Raises: DeviceUnavailable.
        """


@runtime_checkable
class ResizableBank(ReplaceableBank, Protocol):
    """A bank that can have more or fewer experts, of a parent: see `load_resizable`."""

    @property
    def most_experts(self) -> int:
        """Raising its number beyond fails."""

    def held_bytes(self, num_experts: int) -> int:
        """What so many of its experts take of the device memory that fewer would give back."""

    def resize(self, file: GgufFile, global_expert_ids: I32Array) -> None:
        """From now on it has these experts, under these local ids: positions in the list. Nothing
        may be computing; what was recorded with this bank stays valid. If it fails, some of its
        experts are lost until it is called again.

        Shapes: [N]. Raises: ValueError for too many; DeviceUnavailable, DeviceOutOfMemory among
        them.
        """


@runtime_checkable
class LoadsShared(Protocol):
    """A backend whose banks of a layer can share memory."""

    def load_shared(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> SharedBank:
        """As ComputeBackend.load_experts."""


@runtime_checkable
class SharedBank(ExpertBank, Protocol):
    """A bank of a daemon, whose memory other banks of the layer can share: see `load_shared`. It
    has room for as many experts, of all these banks, as were loaded first. Any thread may call it
    while batches are computed."""

    def num_missing(self, global_expert_ids: I32Array) -> int | None:
        """How many of these experts no bank of its memory has; None: there is no room for them.

        Shapes: [N].
        """

    def sibling(self, file: GgufFile, global_expert_ids: I32Array) -> SharedBank:
        """Return a bank of these experts, in this order; what is missing is loaded beside what is
        there.

        Shapes: [N]. Raises: DeviceOutOfMemory, DeviceUnavailable.
        """

    def trim(self) -> None:
        """Give back to the driver the memory that none of these banks needs any more. What was
        recorded with them stays valid. Raises: DeviceUnavailable.
        """


@runtime_checkable
class DeviceBank(ExpertBank, Protocol):
    """A bank on a device, for batches whose rows may already be there."""

    def sums_of(self, batch: RoutedBatch) -> Sums:
        """Compute the weighted sums of a batch whose rows are on a device."""


def sums_of(bank: ExpertBank, batch: RoutedBatch) -> Sums:
    """Compute a batch's weighted sums, on the bank's device if the rows are there.

    Shapes: result [T, H].
    """
    if batch.rows.is_on_device and isinstance(bank, DeviceBank):
        return bank.sums_of(batch)
    sums = np.zeros(batch.rows.shape)
    bank.accumulate(batch, sums)
    return HostSums(sums)


def argmax_of(logits: F32Array) -> I32Array:
    """Argmax of each row on the host, NOT_FINITE for a row with a NaN or an infinity.

    Shapes: logits [T, V]; result [T].
    """
    argmax: I32Array = np.argmax(logits, axis=1).astype(np.int32)
    argmax[~np.isfinite(logits).all(axis=1)] = NOT_FINITE
    return argmax


@dataclass(frozen=True, slots=True)
class Chunking:
    """How a backend wants prompts cut into chunks."""

    preferred: int
    """Tokens per chunk by default."""
    largest: int | None
    """Most tokens per chunk; None: no limit."""
    invariant_from: int | None
    """A position has the same bits in any chunk of at least this many tokens; None: bits depend on
    the chunk."""

    overlapped_from: int | None = None
    """Chunks of at least this many tokens use two-batch overlap when remote owners compute some of
    their experts; None: never."""
    grouped: int = 0
    """Where weights of experts are copied, or read from the disk, for prompts: tokens that go
    through a layer, in chunks, before the next one. 0: a chunk goes through all layers before the
    next chunk."""

    @property
    def smallest(self) -> int:
        """Fewest tokens that a chunk of a longer prompt should have."""
        return self.invariant_from or 1


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """Memory for experts where a backend keeps them."""

    free_bytes: int
    """Free now, less what computing experts needs."""
    total_bytes: int
    """All of it; 0 if neither is known."""
    expert_bytes: Mapping[int, int]
    """Of one expert, by layer id."""


@dataclass(frozen=True, slots=True, eq=False)
class MailRoute:
    """An owner that answers our device through a mailbox, with no host code of ours in between: a
    daemon's device or processor, or this process's processor.

    `owner_index`: its index among all owners.
    `local_ids`: by layer id of the layers that it has experts of, its local ids of the experts it
    is to compute. Shapes: each [E] int32; negative: not computed by it.
    """

    name: str
    owner_index: int
    segment: Segment | None
    """Shared with the daemon; None: this process's processor."""
    local_ids: Mapping[int, I32Array]
    is_live: Callable[[], bool]
    """Whether the route can still be used: its session lasts."""
    fail: Callable[[str], None]
    """Reports why the route cannot be used any more."""

    @property
    def is_by_processor(self) -> bool:
        """Whether a processor answers, ours or a daemon's."""
        terms = None if self.segment is None else self.segment.mail_terms
        return self.segment is None or (terms is not None and terms.by_processor)


class RemoteExperts(Protocol):
    """The owners of experts that a device's MoE block does not compute; the block calls them."""

    def local_experts_mask(self, layer_id: int) -> npt.NDArray[np.bool_]:
        """Experts that the block is to compute. Shapes: result [E]."""

    def count_local(
        self, phase: Phase, *, num_tokens: int, num_pairs: int, num_layers: int = 1
    ) -> None:
        """Count tokens whose pairs the block computes itself, in `num_layers` layers."""

    def count_selections(self, phase: Phase, layer_id: int, topk_ids: I32Array) -> None:
        """Count routed experts known to the host when no owner is asked. Shapes: topk_ids [T,
        K]."""

    @property
    def may_offload(self) -> bool:
        """Whether `to_offload` can ever return an expert."""

    def to_offload(self, layer_id: int, num_tokens: int) -> npt.NDArray[np.bool_] | None:
        """Remote experts of a chunk of so many tokens that the block is to compute with weights
        copied to its device; None: no experts. Not to be written to: while nothing changes it is
        the same array. Shapes: result [E], all experts of these owners.
        """

    def never_offload(self) -> None:
        """`to_offload` returns no experts from now on: the device cannot copy their weights."""

    def begin(
        self,
        layer_id: int,
        hidden: Hidden | None,
        topk_ids: I32Array,
        topk_weights: F32Array,
        *,
        phase: Phase,
        offloaded: npt.NDArray[np.bool_] | None = None,
        counts: I64Array | None = None,
        mailed: frozenset[int] = frozenset(),
    ) -> Any:
        """Ask the owners of what the block does not compute; returns a ticket, to be finished or
        abandoned once. The block computes the `offloaded` experts itself; None if nothing is left.
        `hidden` may be None if these are all remote ones.
        It asks the owners of the indices `mailed` itself: their pairs are only counted.

        Shapes: hidden [T, H]; topk_ids, topk_weights [T, K]; offloaded [E]; ids are global; counts
        [E], of how many tokens each expert was chosen, with `offloaded`.
        """

    def finish(self, ticket: Any, out: F64Array | None = None) -> Sums:
        """Wait for the weighted sums. Shapes: result [T, H], not rounded, in the memory that the
        rows were in; written to `out` if given, for rows on the host.

        Raises: DaemonUnavailable if no owner can compute them.
        """

    def poll(self) -> None:
        """Advance all that was begun, without waiting."""

    def abandon(self, ticket: Any) -> None:
        """Drop a ticket, which must not be finished afterwards."""


class MailedExperts(RemoteExperts, AskedOwners, Protocol):
    """Owners that captured steps may ask through mailboxes, or from compiled code."""

    @property
    def own_banks(self) -> Mapping[int, ExpertBank]:
        """The experts of `own_index`, by layer id: in this process, and in the host's memory."""

    def mail_routes(self) -> tuple[MailRoute, ...]:
        """Routes to the owners that have a mailbox now; the host asks the others. None if one that
        is lost has replicas: the host asks for these. The same objects as before while their
        sessions last."""

    def count_mailed(
        self,
        routes: Sequence[MailRoute],
        num_steps: int,
        *,
        phase: Phase = Phase.DECODE,
        num_tokens: int = 1,
        but: Collection[int] = (),
    ) -> None:
        """Count steps of `num_tokens` tokens that went through mailboxes, without their pairs.
        `but`: ids of layers without that, which are counted elsewhere."""

    def is_step_to_be_checked(self, routes: Sequence[MailRoute]) -> bool:
        """Whether a step that went through these mailboxes is to be recomputed with the host's
        help, so that a reply can be checked."""

    def note_checked_step(self, elapsed_s: float) -> None:
        """Record that a step was checked, and how long that took."""


@dataclass(frozen=True, slots=True)
class DeviceSampling:
    """Sampling parameters on a device, as in engine.sampling.SamplingParams."""

    temperature: float
    """Above 0."""
    top_k: int = 0
    """0: no limit."""
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class LogitChanges:
    """Changes of a step's logits before a token is chosen: each is divided by its divisor if it is
    above zero, else by the divisor's reciprocal, and the offset is taken off, all in float32; what
    would be infinite is the largest number.

    Shapes: token_ids [N] int32, no token twice; divisors, offsets [N] float32.
    """

    token_ids: I32Array
    divisors: F32Array
    offsets: F32Array


class MailAnswering(Protocol):
    """A daemon's device, or its processor, that can answer kernels of a parent's device."""

    def num_bytes(self, moe: MoeSpec) -> int:
        """Size of a model's mailbox in shared memory."""

    def serve(
        self,
        segment: Segment,
        moe: MoeSpec,
        banks: Mapping[int, ExpertBank],
        *,
        check: Callable[[], object],
    ) -> MailService | None:
        """Answer a parent's requests for the experts in `banks`, on the daemon's side; None if
        these cannot be asked for so. `check` raises an error, as the mailbox then does, if the
        model's file was written to; it is called before steps that read it.

        Raises: DeviceUnavailable if our device cannot map the memory.
        """


class DeviceMail(MailAnswering, Protocol):
    """A device whose kernels can send requests to those that answer, or answer them."""

    def begin(self, segment: Segment, terms: MailTerms) -> None:
        """Write what a daemon must know before it is told of the mailbox, and keep the terms."""

    @property
    def trial_shape(self) -> RingShape:
        """Shape of the memory for a mailbox trial, which needs no model."""

    def try_out(self, segment: Segment, *, seed: int) -> MailTrial:
        """The asking side of a trial whose answering side is another process; `begin` must have
        been called."""

    def serve_trial(self, segment: Segment) -> MailService:
        """The answering side of a trial."""


class MailService(Protocol):
    """The daemon's end of one mailbox."""

    def close(self) -> None:
        """Stop answering, pending requests included; the segment is not used afterwards."""


class CapturedStep(Protocol):
    """Decode steps of one sequence, captured once and replayed at next to no cost for the host.

    Each step chooses the token that is the next step's input at the next position, so several can
    be started without waiting for any.
    """

    @property
    def most_ahead(self) -> int:
        """Steps that are worth starting before the token of the one before them is read; their
        results are discarded when that is a stop token."""

    @property
    def samples_by_rules(self) -> bool:
        """Whether the device samples as `rule` says; the host does, from logits, if not."""

    @property
    def counts_itself(self) -> bool:
        """Whether the owners that a step asks count their work and this device's."""

    def prepare(self) -> None:
        """Compile and capture everything, and count nothing of it; overwrites the cache."""

    def choose_by(self, options: DeviceSampling | None, *, is_ruled: bool = False) -> None:
        """Sample tokens with these parameters from the next `begin` on; None, the default: greedy.
        `is_ruled`: as `rule` says."""

    def rule(self, mask: U8Array | None, changes: LogitChanges | None) -> None:
        """Which tokens the step started last may sample, None: all, and how its logits change
        first. Of steps by rules each ends with this, and the next is started after it. If the
        device samples, `logits` are the changed ones, and the least number for tokens that may not
        come.

        Shapes: mask [B], a bit for each token, the lowest first; tokens past it may not come.
        """

    def expect(self, first_position: int, numbers: F64Array) -> None:
        """Set the random numbers that tokens of these positions are sampled with, before the steps
        that use them are started.

        Shapes: numbers [N], in [0, 1).
        """

    def begin(self, token_id: int, position: int) -> None:
        """Set the token and position that the next step computes.

        Raises: ContextExceeded.
        """

    def start(self) -> None:
        """Start a step.

        Raises: ContextExceeded if the cache has no room for it; DaemonUnavailable.
        """

    def token(self, position: int) -> int | None:
        """Wait for the token that a step has sampled for this position.

        None: the caller must sample it from the step's logits and call `begin` with it. NOT_FINITE:
        its logits are not finite, and steps started after it are useless.

        Raises: DeviceUnavailable if the device has failed.
        """

    def logits(self) -> F32Array:
        """Logits of the step started last; waits for it. Shapes: result [V]."""

    def verify(
        self, token_ids: I32Array, tree: Tree, features: Collection[int]
    ) -> TreeResult | None:
        """Compute a tree's tokens through all layers, in one step. The sequence is unchanged; a
        path may be accepted afterwards. `features`: layers whose outputs are returned. None: there
        is no such captured step, for example as the host must ask remote owners.

        Shapes: token_ids [W], W >= 1.
        Raises: ContextExceeded, CheckpointMissing; DeviceUnavailable.
        """

    @property
    def most_choices(self) -> int:
        """Steps whose choices are kept; 0: it was not captured to keep them."""

    def choices(self, first_position: int, num_tokens: int) -> I32Array:
        """Global expert ids that the tokens of the last steps chose, layer after layer: up to
        `most_choices` of them, not counting steps that were started ahead. Shapes: result [T, K of
        all layers]."""

    def tree_choices(self, num_tokens: int) -> I32Array:
        """The same of the last tree that `verify` computed."""

    @property
    def slots(self) -> SlotStats | None:
        """What steps have done with slots, as of the last `take_selections`; None without any."""

    def take_selections(self) -> dict[tuple[Phase, int], MailedCounts]:
        """What was chosen since the last call, by phase and layer id, in layers that remote owners
        share without the host."""

    def wait(self) -> None:
        """Wait until no step is running. Raises: DeviceUnavailable."""

    def leave_owners(self) -> None:
        """Sessions with owners in other processes are about to end: close what goes through them.
        Steps that were started ahead are dropped: `begin` the next one."""

    def follow_owners(self) -> None:
        """Experts have moved between the owners: use them where they are from the next step on. No
        step may be running."""

    def close(self) -> None:
        """Free what it holds."""


class ComputeBackend(Protocol):
    """One device: models and expert banks of the same numeric class."""

    @property
    def name(self) -> str:
        """``reference``, ``cpu``, …"""

    @property
    def numeric_class(self) -> str:
        """Names everything that decides a result's bits: kernels, their version, the processor.
        See protocol.numeric_class."""

    def class_beside(self, parent_class: str) -> str:
        """The numeric class of a `bank_beside` such a parent."""

    def bank_beside(self, parent_class: str, bank: ExpertBank) -> ExpertBank:
        """A bank as it serves a parent of this numeric class: in step order if the parent is, where
        there are kernels for it."""

    @property
    def chunking(self) -> Chunking: ...

    @property
    def is_host(self) -> bool:
        """Whether it computes in host memory, with experts where their file is mapped.

        Otherwise weights are copied to a device, and kernels are compiled for the model's shapes on
        first use.
        """

    @property
    def mover(self) -> DeviceMover | None:
        """Copies its rows to and from memory shared with daemons; None if rows are in host
        memory."""

    @property
    def mail(self) -> DeviceMail | None:
        """Its side of mailboxes; None without a device for them."""

    @property
    def answering(self) -> MailAnswering | None:
        """What answers in a daemon's mailboxes; None if nothing can."""

    @property
    def trial_batches(self) -> tuple[tuple[Phase, int], ...]:
        """(phase, number of tokens) of batches that together compile and run all kernels of a bank.
        The first is one token of a decode step."""

    @property
    def device_name(self) -> str:
        """What its maker calls the processor or GPU."""

    @property
    def num_threads(self) -> int:
        """Threads of the host that compute prompts; those of a device's caller are one."""

    def device_memory(self) -> tuple[int, int] | None:
        """What is free of the device's memory, and how much of that is to stay free for others, in
        bytes. None on the host, and for memory that is shared with it. Raises: DeviceUnavailable.
        """

    def free_memory_bytes(self) -> int | None:
        """Free memory where its experts lie; None if unknown."""

    def expert_memory(self, file: GgufFile, layers: Iterable[MoeLayer]) -> ExpertMemory:
        """Memory for experts of these layers. Raises: UnsupportedModel, DeviceUnavailable."""

    def require_room(
        self,
        file: GgufFile,
        experts: Iterable[tuple[MoeLayer, int]],
        *,
        num_positions: int = 0,
        kv_type: KvType = KvType.F16,
        num_daemons: int = 0,
    ) -> None:
        """Check, before anything is loaded, that this many experts of these layers fit the device;
        with `num_positions` a whole model, of which that many positions can be cached, and which
        asks `num_daemons` for the layers' other experts.

        Raises: DeviceOutOfMemory with the amounts and advice.
        """

    def to_host(self, rows: AnyArray) -> F32Array:
        """Copy a model's rows to where the host can read them. Shapes: both [T, columns]."""

    def argmax(self, logits: AnyArray) -> I32Array:
        """Argmax of each row of logits, the first of equal ones; NOT_FINITE for a row with a NaN or
        an infinity. Shapes: logits [T, V]; result [T]."""

    def joined(self, parts: Sequence[AnyArray]) -> AnyArray:
        """Concatenate rows. Shapes: parts [T_i, columns]; result [sum of T_i, columns]."""

    def load_model(self, file: GgufFile, description: Description) -> Model[AnyArray, Any]:
        """A model with its dense weights here; experts are left to their owners.

        Raises: as loading.model_spec and loading.load_weights; DeviceOutOfMemory.
        """

    def new_cache(self, spec: ModelSpec, num_positions: int, kv_type: KvType) -> KvCache:
        """An empty cache of a model's sequence. Raises: SettingsError, DeviceOutOfMemory."""

    def moe(
        self,
        banks: Mapping[int, ExpertBank],
        phase: Phase,
        remote: RemoteExperts,
        *,
        may_offload: bool = True,
    ) -> Any:
        """The routed experts that this backend's models call in a phase: those in `banks`, by layer
        id, and all others from `remote`. Without `may_offload` none are offloaded."""

    def noted_choices(
        self, experts: Any
    ) -> AbstractContextManager[tuple[Any, Callable[[], I32Array]]]:
        """A context for one pass through all layers: what to give it as its routed experts instead
        of `moe`'s, and a function for its end that returns the global expert ids that its tokens
        chose, layer after layer. Shapes: result [T, K of all layers]."""

    def captured_step(
        self,
        model: Model[AnyArray, Any],
        cache: KvCache,
        banks: Mapping[int, ExpertBank],
        *,
        remote: MailedExperts,
        check: Callable[[], None],
        keeps_choices: bool = False,
    ) -> CapturedStep | None:
        """A captured step of a model whose experts are in `banks` or `remote`, as for `moe`; None
        if the backend captures none. On the host `check` is called within long steps; what it
        raises ends them. `keeps_choices`, on the host: CapturedStep.choices is wanted."""

    def offload_prompts(
        self,
        file: GgufFile,
        layers: Iterable[MoeLayer],
        remote: RemoteExperts,
        *,
        arena: ExpertArena | None = None,
    ) -> None:
        """Prepare to compute remote experts of prompt chunks with weights copied from the file, if
        `remote` can ever want that and the device has room. `arena`: where some of them may lie; it
        ends this when it is closed.

        To be called last, when everything else has its memory. Without room it logs that and does
        nothing.
        """

    def follow_owners(self, layer_ids: Iterable[int], remote: RemoteExperts) -> None:
        """Experts of these layers have moved between the owners: what was prepared to compute
        remote experts of prompts follows, or nothing has changed if that fails.

        Raises: DeviceUnavailable.
        """

    def new_stage(
        self, file: GgufFile, layers: Sequence[MoeLayer], most: int
    ) -> ExpertStage | None:
        """Memory for up to `most` experts that move to the device at a time; None if it has no
        memory of its own, or too little: then experts stay where they are."""

    def take_selections(self, banks: Mapping[int, ExpertBank]) -> dict[tuple[Phase, int], I64Array]:
        """How often each expert was routed to since the last call, by phase and layer id, in layers
        whose routing the host does not see; verified drafts count as decode. Shapes: each [E]."""

    def load_experts(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> ExpertBank:
        """Load the given experts; local id = position in `global_expert_ids`. [E_local]

        Banks share what they load of the same expert of the same file.
        """

    def bring_experts(
        self,
        file: GgufFile,
        banks: Mapping[int, ExpertBank],
        options: ArenaOptions,
    ) -> ExpertArena | None:
        """Keep as many experts of these banks in memory as there is room for, and read the others
        from the disk when they are used; None if that is not for this backend. Call it before the
        banks are used, or steps captured.

        Raises: OSError where the file cannot be read so; ValueError for too little memory.
        """

    def loading(self) -> AbstractContextManager[None]:
        """A context for `load_experts` of many layers, or `load_model`; what these alone need is
        given back behind it."""

    def drop_experts(self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array) -> None:
        """Free memory loaded for these experts; no bank with any of them may be used again.

        Unmapping the file is up to the caller.
        """

    def compile_banks(
        self, banks: Mapping[int, ExpertBank], *, max_tokens: int, max_experts_used: int
    ) -> CompiledExperts | None:
        """What compiled code needs to compute small batches with these banks, by layer id; None if
        the backend has no such code. Batches have at most `max_tokens` tokens, and
        `max_experts_used` pairs for each."""

    def warm_up(
        self,
        tensor_types: Iterable[TensorType],
        *,
        kv_type: KvType | None = None,
        is_recurrent: bool = False,
        asks_daemons: bool = False,
        beside_device: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile every kernel that experts of these types need; with `kv_type` those of a whole
        model, with or without recurrent layers, which perhaps asks daemons for experts; with
        `beside_device` also what steps and prompts of a device need that asks for the experts.

        `on_progress` is called with the number of steps done, and of all.
        """

    def choose_threads(
        self, file: GgufFile, one_pass: OnePass | None, *, beside_device: bool = False
    ) -> None:
        """Choose the number of threads for decode steps over this file's weights: the one found
        before on this machine, else, with `one_pass`, the fastest. `beside_device`: the steps are a
        device's, see `cores.most_beside_device`. Takes thread_trial.LIMIT_S at most, and never
        fails. Nothing else may use the backend meanwhile."""

    def device_seconds(self, banks: Sequence[ExpertBank], batch: RoutedBatch) -> float | None:
        """Seconds that a device takes for a batch in one of these banks, from rows to sums that are
        both there: what a mailbox or another device waits for. A decode step has one token with the
        first experts. None if the host computes.

        The banks are of layers that are alike. Raises: DeviceUnavailable.
        """

    def spin_for(self, spin_s: float) -> None:
        """From now on threads without work poll for so long before they sleep, or until `idle`, as
        no other process needs their cores."""

    def idle(self) -> None:
        """No work is coming for a while: let other processes have the cores."""

    def close(self) -> None:
        """End worker threads. The backend must not be used afterwards."""


class BackendName(StrEnum):
    """Backends by name; ``auto`` picks the fastest that works on this machine."""

    AUTO = "auto"
    REFERENCE = "reference"
    CPU = "cpu"
