"""What a compute backend offers: Ops for the parent's dense work, and expert FFNs.

Knows nothing of placement or processes: a bank holds the experts it was told to hold, numbered by
local id, and computes the pairs it is given.
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
"""What to do where a parent's device has too little memory."""
DAEMON_MEMORY_ADVICE = (
    "give this daemon fewer experts: the parent more (--local-experts), or another --daemon"
)
"""What to do where a daemon's device has too little memory for what a parent asks of it."""


NOT_FINITE = -3
"""In place of a token: some logit that it would follow from is NaN or infinite."""


class ExpertBank(Protocol):
    """The experts of one layer that one owner holds, by local id."""

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
    """A bank for which memory was taken that a part of it can use as well."""

    def part(self, file: GgufFile, local_expert_ids: I32Array) -> ExpertBank:
        """Some of its experts, in this order, as a bank of their own, which keeps all in memory.

        Raises: DeviceOutOfMemory.
        """


@runtime_checkable
class DeviceBank(ExpertBank, Protocol):
    """A bank on a device, where rows may lie already."""

    def sums_of(self, batch: DeviceBatch) -> DeviceSums:
        """As `accumulate`, of rows that a device has, to sums that begin as zero."""


def sums_of(bank: ExpertBank, batch: RoutedBatch) -> Sums:
    """What a bank computes of a batch: on its device if the rows are there. Shapes: [T, H]."""
    if isinstance(batch, DeviceBatch) and isinstance(bank, DeviceBank):
        return bank.sums_of(batch)
    sums = np.zeros(batch.hidden_shape)
    bank.accumulate(batch, sums)
    return sums


def argmax_of(logits: F32Array) -> I32Array:
    """As ComputeBackend.most likely, of rows on the host. Shapes: logits [T, V]; result [T]."""
    argmax: I32Array = np.argmax(logits, axis=1).astype(np.int32)
    argmax[~np.isfinite(logits).all(axis=1)] = NOT_FINITE
    return argmax


@dataclass(frozen=True, slots=True)
class Chunking:
    """How prompts are cut for a backend."""

    preferred: int
    """Tokens computed at once, if nothing else is asked for."""
    largest: int | None
    """More cannot be; None: any number can."""
    invariant_from: int | None
    """A position has the same bits in whatever chunk of at least so many tokens it is computed;
    None: they depend on the chunk."""

    overlapped_from: int | None = None
    """A chunk of at least so many tokens, while others compute experts of it, goes through the
    layers as two halves, one behind the other; None: never."""

    @property
    def smallest(self) -> int:
        """No chunk of a longer prompt should have fewer tokens."""
        return self.invariant_from or 1


@dataclass(frozen=True, slots=True, eq=False)
class MailRoute:
    """A daemon whose device answers ours through a mailbox, with no host in between.

    `local_ids`: by layer id of layers that it has experts of, its names for those that it is to
    compute. Shapes: each [E] int32, negative: not its.
    """

    name: str
    segment: Segment
    local_ids: Mapping[int, I32Array]
    is_live: Callable[[], bool]
    """Whether it can still be used: its session lasts."""
    fail: Callable[[str], None]
    """To be told why it cannot."""


class RemoteExperts(Protocol):
    """The owners of what a device's own MoE block does not compute, asked by that block."""

    def local_experts_mask(self, layer_id: int) -> npt.NDArray[np.bool_]:
        """Which experts the block is to compute. Shapes: result [E]."""

    def count_local(
        self, phase: Phase, *, num_tokens: int, num_pairs: int, num_layers: int = 1
    ) -> None:
        """The block computes all pairs of so many tokens, in one layer or more."""

    def count_selections(self, layer_id: int, topk_ids: I32Array) -> None:
        """What was chosen, if the host knows it and nothing is started. Shapes: topk_ids [T, K]."""

    @property
    def may_offload(self) -> bool:
        """Whether `to_offload` may ever name an expert."""

    def to_offload(
        self, layer_id: int, topk_ids: I32Array | None, *, expert_s: float
    ) -> npt.NDArray[np.bool_] | None:
        """Whose experts of a chunk the block is to compute with weights that are copied for it,
        since that is quicker: bringing one expert takes `expert_s`. None: nobody's.

        Without `topk_ids`: what is to be expected of a layer whose choice is not known yet, after
        the last one. Shapes: topk_ids [T, K]; result [E], all experts of these owners.
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
        """Begin what the block does not compute: to be finished, or abandoned. It computes the
        experts that are `offloaded`; None if nothing is left then.

        Shapes: hidden [T, H]; topk_ids, topk_weights [T, K]; offloaded [E]; ids are global.
        """

    def finish(self, started: Any, out: F64Array | None = None) -> Sums:
        """Wait for it. Shapes: result [T, H]: weighted sums, not rounded, where the rows were; in
        `out` if that is given, for rows of the host.

        Raises: DaemonUnavailable if nobody can compute it.
        """

    def abandon(self, started: Any) -> None:
        """Nobody will finish it."""

    def mail_routes(self) -> tuple[MailRoute, ...]:
        """To all owners of what the block does not compute, if each is there and has a mailbox.
        The same ones as before while their sessions last."""

    def count_mailed(
        self,
        routes: Sequence[MailRoute],
        num_steps: int,
        *,
        phase: Phase = Phase.DECODE,
        num_tokens: int = 1,
    ) -> None:
        """Steps of so many tokens have gone through mailboxes; their pairs are told apart."""

    def is_step_to_be_checked(self, routes: Sequence[MailRoute]) -> bool:
        """Whether a step that has gone through these mailboxes is to be computed with the host's
        help, so that a reply can be checked."""

    def note_checked_step(self, elapsed_s: float) -> None:
        """That has been done, and took so long."""


@dataclass(frozen=True, slots=True)
class DeviceSampling:
    """How a token is drawn from logits, as engine.sampling.SamplingParams has it."""

    temperature: float
    """Above 0."""
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    min_p: float = 0.0


class DeviceMail(Protocol):
    """A device whose kernels can ask those of another, or answer them."""

    def num_bytes(self, moe: MoeSpec) -> int:
        """Of a model's mailbox in shared memory."""

    def begin(self, segment: Segment, limit_ms: int, *, in_host: bool = False) -> None:
        """What a daemon is to know before it is told of a mailbox: how long a step may take; and,
        for us, whether all of it is to stay in the host's memory."""

    def serve(self, segment: Segment, moe: MoeSpec, banks: Mapping[int, ExpertBank]) -> MailService:
        """Answer a parent, as the daemon whose experts these are.

        Raises: DeviceUnavailable if our device does not see the memory.
        """

    @property
    def trial_shape(self) -> RingShape:
        """Of memory for a trial of a mailbox, without any model."""

    def try_out(self, segment: Segment, *, seed: int) -> MailTrial:
        """A trial with a process that does the other thing; `begin` must have been called."""

    def serve_trial(self, segment: Segment) -> MailService:
        """Answer a trial in another process."""


class MailService(Protocol):
    """The daemon's end of one mailbox."""

    def close(self) -> None:
        """What is asked now is not answered any more; the segment is used no longer."""


class CapturedStep(Protocol):
    """Decode steps of one sequence that cost the host next to nothing.

    A step chooses the token that is the next step's at the next position: several can be started
    without waiting for any.
    """

    @property
    def needs_host(self) -> bool:
        """The host asks others for their share in each step: it has ended when it was started."""

    @property
    def counts_itself(self) -> bool:
        """What others and this device have computed is counted by whom it asks."""

    def prepare(self) -> None:
        """Have everything compiled and captured; nothing in the cache may be wanted any more."""

    def choose_by(self, options: DeviceSampling | None) -> None:
        """From the next `begin` on tokens are drawn so; None, as at first: the most likely ones."""

    def expect(self, first_position: int, numbers: F64Array) -> None:
        """What tokens of these positions are drawn with, before a step that does is started.

        Shapes: numbers [N], from 0 to below 1.
        """

    def begin(self, token_id: int, position: int) -> None:
        """The next step computes this token at this position.

        Raises: ContextExceeded.
        """

    def start(self) -> None:
        """Start a step.

        Raises: ContextExceeded if there is no room for it; DaemonUnavailable.
        """

    def token(self, position: int) -> int | None:
        """The token that a step has chosen for this position, once it has.

        None: the caller is to draw it from the step's logits, and to begin anew with it.
        NOT_FINITE: its logits are not, and nothing that was started after it is of any use.

        Raises: DeviceUnavailable if the device has failed.
        """

    def logits(self) -> F32Array:
        """Of the step that was started last, once it is done. Shapes: result [V]."""

    def verify(
        self, token_ids: I32Array, tree: Tree, features: Collection[int]
    ) -> TreeResult | None:
        """A tree's tokens through all layers, as a step of all of them: at least one. The sequence
        stays as it is, and a path may be accepted. `features` are layers whose results are wanted.
        None: this is not captured, as others must be asked by the host, for one.

        Shapes: token_ids [W].
        Raises: ContextExceeded, CheckpointMissing; DeviceUnavailable.
        """

    def take_selections(self) -> dict[tuple[Phase, int], I64Array]:
        """How often experts were chosen since the last call, by phase and layer id, in layers that
        others have a share of without any host. Shapes: each [E]."""

    def close(self) -> None:
        """Give back what it holds."""


class ComputeBackend(Protocol):
    """One device's way to compute: dense Ops and expert banks of the same numeric class."""

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

        Otherwise all that it computes with is copied to a device, and kernels are compiled for the
        model's shapes, when it is first tried.
        """

    @property
    def mover(self) -> DeviceMover | None:
        """What brings its rows into memory that is shared with others, if it does not lie in the
        host's memory."""

    @property
    def mail(self) -> DeviceMail | None:
        """Its part in mailboxes, if it has a device for them."""

    @property
    def trial_batches(self) -> tuple[tuple[Phase, int], ...]:
        """Phases and numbers of tokens: when a bank has computed such batches, all its kernels are
        compiled and have run. The first is one token of a decode step."""

    def free_memory_bytes(self) -> int:
        """Of the memory that its experts take, as far as can be said."""

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
        """Look, before anything is loaded, whether so many experts of these layers fit a device;
        and with `kv_layers` a whole model with a cache of that many positions, and the states of
        its recurrent layers.

        Raises: DeviceOutOfMemory with the amounts, and what to do.
        """

    def to_host(self, rows: AnyArray) -> F32Array:
        """Rows that Ops gave, where the host can read them. Shapes: rows, result [T, columns]."""

    def argmax(self, logits: AnyArray) -> I32Array:
        """Of each row of logits that Ops gave, which is largest; of equal ones the first; and
        NOT_FINITE for a row that is not. Shapes: logits [T, V]; result [T]."""

    def joined(self, parts: Sequence[AnyArray]) -> AnyArray:
        """Rows that Ops gave, one after the other. Shapes: parts [T, columns]; result alike."""

    def moe(
        self, banks: Mapping[int, ExpertBank], phase: Phase, remote: RemoteExperts | None
    ) -> MoeBlock[AnyArray] | None:
        """A model's routed experts, by layer id those of `banks`, on rows as Ops has them.

        None if the host computes all experts, with rows as they are.
        """

    def captured_step(
        self,
        model: Model[AnyArray],
        cache: KvCache,
        banks: Mapping[int, ExpertBank],
        *,
        remote: RemoteExperts,
    ) -> CapturedStep | None:
        """A step of a model whose experts are in `banks` or `remote`, as with `moe`; None if
        there is nothing to record."""

    def offload_prompts(
        self, file: GgufFile, layers: Iterable[MoeLayer], remote: RemoteExperts
    ) -> None:
        """Be ready to compute experts of chunks that others own, with weights that are copied from
        the file, if `remote` may ever want that and there is room for it on the device.

        To be called last: everything else has its memory. Without room it is said, and not done.
        """

    def take_selections(self, banks: Mapping[int, ExpertBank]) -> dict[int, I64Array]:
        """How often experts were chosen since the last call, by layer id, in those layers whose
        choice the host does not see. Shapes: each [E]."""

    def load_experts(
        self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array
    ) -> ExpertBank:
        """Make the given experts ready; local id = position in `global_expert_ids`. [E_local]

        Banks share what they have made of the same expert of the same file.
        """

    def drop_experts(self, file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array) -> None:
        """Give back the memory of what was made of these experts; no bank of them is used again.

        The file's own bytes are the caller's business.
        """

    def warm_up(
        self,
        tensor_types: Iterable[TensorType],
        *,
        kv_type: KvType | None = None,
        is_recurrent: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Have every kernel ready that experts of these types need; with `kv_type` a whole model,
        with recurrent layers or without.

        `on_progress` is called with the number of steps that are done, and of all.
        """

    def idle(self) -> None:
        """Nothing will be asked of this backend for a while: others may have the cores."""

    def close(self) -> None:
        """End worker threads. The backend must not be used afterwards."""


class BackendName(StrEnum):
    """Backends that can be asked for by name; ``auto`` picks the fastest that works here."""

    AUTO = "auto"
    REFERENCE = "reference"
    CPU = "cpu"
