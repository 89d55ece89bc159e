"""Loads experts, only the byte ranges of those that are owned, and warms them up.

`load_banks` serves a parent, for its own experts and the fallback's; an `ExpertStore` a daemon, for
the placements of all its parents.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.quant import TensorType
from dflash_adapters.spec import MoeLayer, MoeSpec
from dflash_protocol.batch import RoutedBatch, group_by_expert
from dflash_protocol.ids import F64Array, I32Array, Phase
from dflash_protocol.placement import OwnedExperts
from dflash_runtime.compute import ComputeBackend, ExpertBank
from dflash_runtime.compute.backend import (
    ExpertMemory,
    LoadsResizable,
    LoadsShared,
    SharedBank,
)
from dflash_runtime.compute.expert_arena import ExpertArena
from dflash_runtime.compute.host import ONE_TOKEN
from dflash_runtime.compute.thread_trial import OnePass
from dflash_runtime.experts.brought import SharedArenas, SharedRoom, with_reads

LoadProgress = Callable[[int, int], None]
"""Called with layers done and layers in total."""

TrialBatches: TypeAlias = tuple[tuple[Phase, int], ...]
"""Pairs of phase and number of tokens."""

BankKind: TypeAlias = tuple[object, ...]
"""What a bank's rate depends on: banks of one kind run the same kernels on the same shapes."""


def expert_tensor_types(spec: MoeSpec) -> frozenset[TensorType]:
    """Every type that an expert projection of the model is stored in."""
    return frozenset(
        projection.tensor_type for layer in spec.layers for projection in layer.projections
    )


def every_expert(spec: MoeSpec) -> OwnedExperts:
    """All experts of the model under their global ids."""
    return OwnedExperts.from_lists(
        {layer.layer_id: range(layer.num_experts) for layer in spec.layers}
    )


def load_banks(
    backend: ComputeBackend,
    file: GgufFile,
    spec: MoeSpec,
    *,
    owned: OwnedExperts,
    read_now: bool,
    is_brought: bool = False,
    is_resizable: bool = False,
    parent_class: str = "",
) -> dict[int, ExpertBank]:
    """Make a bank for each layer in which experts are owned, as for a parent of this numeric class
    (`ComputeBackend.bank_beside`).

    `read_now` reads the owned byte ranges, and no others, into memory; otherwise they are read on
    first use, as suits a fallback that is rarely needed. Such banks raise ModelFileError if the
    file was modified meanwhile. `is_brought`: see `ComputeBackend.bring_experts`, which is called
    with these banks; nothing is read now. `is_resizable`: they may have more or fewer experts
    later, if the backend has such banks.
    """
    load = backend.load_experts
    if is_resizable and isinstance(backend, LoadsResizable):
        load = backend.load_resizable
    banks: dict[int, ExpertBank] = {}
    with backend.loading():
        for layer_id, global_expert_ids in sorted(owned.by_layer.items()):
            layer = spec.by_layer_id[layer_id]
            if read_now and not is_brought:
                _read_experts(file, layer, global_expert_ids, touch=backend.is_host)
            loaded = load(file, layer, global_expert_ids)
            bank = backend.bank_beside(parent_class, loaded)
            banks[layer_id] = bank if read_now else _WatchedBank(bank, file)
    return banks


def measure_pairs_per_second(
    banks: Iterable[ExpertBank],
    known: dict[BankKind, float] | None = None,
    *,
    batches: TrialBatches = ONE_TOKEN,
) -> float:
    """Run every kind of bank once; return the (token, expert) pairs a second of the slowest.

    This also ensures that every kernel is compiled and has run before a daemon reports that it is
    ready: `batches` are the backend's `trial_batches`. Rates of kinds in `known` are taken from
    there, and new ones are added to it.
    """
    rates = {} if known is None else known
    kinds = set()
    for bank in banks:
        kind = _kind_of(bank)
        kinds.add(kind)
        if kind not in rates:
            rates[kind] = _measured(bank, batches)
    return min((rates[kind] for kind in kinds), default=1e9)


def trial_pass(banks: Mapping[int, ExpertBank]) -> OnePass:
    """A decode step of these banks alone, to time threads with: each computes one token."""

    def one_pass(*, before: Callable[[], None], after: Callable[[], None]) -> None:
        for bank in banks.values():
            batch = _trial_batch(bank, Phase.DECODE, 1)
            sums = np.zeros(batch.hidden.shape)
            before()
            bank.accumulate(batch, sums)
            after()

    return one_pass


class _WatchedBank:
    """Implements ExpertBank with another bank, whose file may have changed before it is used."""

    def __init__(self, bank: ExpertBank, file: GgufFile) -> None:
        self.layer = bank.layer
        self.num_experts = bank.num_experts
        self._bank = bank
        self._file = file

    def accumulate(self, batch: RoutedBatch, out: F64Array) -> None:
        self._file.watch.poll()
        self._bank.accumulate(batch, out)


def _kind_of(bank: ExpertBank) -> BankKind:
    return (min(bank.layer.num_experts_used, bank.num_experts), *bank.layer.kind)


def _measured(bank: ExpertBank, batches: TrialBatches) -> float:
    """Pairs a second of the first batch, after all batches have been computed once."""
    for phase, num_tokens in reversed(batches):
        batch = _trial_batch(bank, phase, num_tokens)
        out = np.zeros(batch.hidden.shape)
        bank.accumulate(batch, out)
    started_s = time.perf_counter()
    bank.accumulate(batch, out)
    return batch.num_pairs / max(time.perf_counter() - started_s, 1e-7)


def _tried(bank: ExpertBank) -> int:
    """Compute a token of a decode step; returns its pairs."""
    batch = _trial_batch(bank, Phase.DECODE, 1)
    bank.accumulate(batch, np.zeros(batch.hidden.shape))
    return batch.num_pairs


def _trial_batch(bank: ExpertBank, phase: Phase, num_tokens: int) -> RoutedBatch:
    """A batch whose tokens use the experts in turn."""
    layer = bank.layer
    num_used = min(layer.num_experts_used, bank.num_experts)
    tokens = np.repeat(np.arange(num_tokens, dtype=np.int32), num_used)
    chosen = np.arange(num_tokens * num_used, dtype=np.int32) % np.int32(bank.num_experts)
    return group_by_expert(
        np.ones((num_tokens, layer.hidden_size), np.float32),
        tokens,
        chosen,
        weights=np.ones(chosen.size, np.float32),
        phase=phase,
    )


def _read_experts(
    file: GgufFile, layer: MoeLayer, global_expert_ids: I32Array, *, touch: bool = True
) -> None:
    """Announce the ranges to the kernel (madvise), then touch each page, unless what copies them to
    a device does."""
    ranges = _byte_ranges(layer, global_expert_ids)
    for each in ranges:
        file.advise_willneed(*each)
    for each in ranges if touch else ():
        file.region(*each)[::4096].max()


def _byte_ranges(layer: MoeLayer, global_expert_ids: I32Array) -> list[tuple[int, int, int]]:
    """(shard, offset, bytes) of every part of these experts."""
    return [
        (*part.place_of(int(global_expert_id)), part.num_bytes)
        for part in layer.parts
        for global_expert_id in global_expert_ids
    ]


@dataclass(slots=True, eq=False)
class HeldPlacement:
    """One placement's banks by layer id; made by `ExpertStore.hold`.

    ``num_*`` count experts: those that were already loaded, those loaded for this placement, and
    those dropped because no placement used them any more. `arena`: where its experts come to from
    the disk, as not all placements' fit into memory; they are not counted as loaded.
    """

    owned: OwnedExperts
    banks: Mapping[int, ExpertBank]
    pairs_per_second: float
    num_kept: int
    num_loaded: int
    num_dropped: int
    num_users: int = 0
    arena: ExpertArena | None = None


class ExpertStore:
    """The experts of one model for any number of placements, each expert loaded once.

    A placement is kept while it has users, and then until another one is loaded, so that a
    returning user finds it loaded. Experts that only unused placements need are dropped before
    loading another one. A placement whose experts do not fit into `room`, beside those of all that
    are in use, has an arena. One thread at a time may call `hold`, `balance` or `close`; other
    threads may call `release` meanwhile.
    """

    def __init__(
        self,
        backend: ComputeBackend,
        file: GgufFile,
        spec: MoeSpec,
        *,
        room: SharedRoom | None = None,
    ) -> None:
        self._backend = backend
        self._shared = None if room is None else SharedArenas(backend, file, spec, room=room)
        self._file = file
        self.spec = spec
        self._placements: dict[str, HeldPlacement] = {}
        self._kept: HeldPlacement | None = None
        self._lock = threading.Lock()
        """Guards the placements and their user counts; never held while loading."""
        self._loaded: dict[int, set[int]] = {}
        self._rates: dict[BankKind, float] = {}

    @property
    def num_experts(self) -> int:
        """Number of loaded experts."""
        return sum(map(len, self._loaded.values()))

    def held_bytes(self, expert_bytes: Mapping[int, int]) -> int:
        """Bytes of all experts in memory; `expert_bytes` has those of one, by layer id."""
        loaded = self._loaded.copy()  # another thread may be loading
        num_bytes = sum(len(ids) * expert_bytes[layer_id] for layer_id, ids in loaded.items())
        return num_bytes + sum(each.num_bytes - each.empty_bytes for each in self.arenas())

    def allowed(self, memory: ExpertMemory) -> ExpertMemory:
        """What of the backend's memory is still for experts here."""
        most_bytes = None if self._shared is None else self._shared.room.most_bytes
        if most_bytes is None:
            return memory
        left_bytes = max(0, most_bytes - self.held_bytes(memory.expert_bytes))
        return replace(memory, free_bytes=min(memory.free_bytes, left_bytes))

    def arenas(self) -> list[ExpertArena]:
        """Of all placements."""
        with self._lock:
            held = list(self._placements.values())
        return [each.arena for each in held if each.arena is not None]

    @contextmanager
    def trial_bank(self, layer: MoeLayer, num_experts: int) -> Iterator[ExpertBank]:
        """A bank of a layer's first experts; those that no placement needs are dropped at the end,
        after which the bank may not be used.

        Not while another thread is in `hold`.
        """
        ids = np.arange(num_experts, dtype=np.int32)
        loaded = self._loaded.get(layer.layer_id, set())
        new = np.array([each for each in ids.tolist() if each not in loaded], np.int32)
        try:
            _read_experts(self._file, layer, new)
            yield self._backend.load_experts(self._file, layer, ids)
        finally:
            self._drop(layer, new)

    def run_kernels(self, bank: ExpertBank) -> None:
        """Compile and run every kernel of a bank, unless one of its kind was run before."""
        measure_pairs_per_second([bank], self._rates, batches=self._backend.trial_batches)

    def holds(self, owned: OwnedExperts) -> bool:
        """Whether `hold` would load nothing for this placement."""
        return owned.fingerprint in self._placements

    @property
    def is_kept(self) -> bool:
        """Whether a placement is kept for good."""
        return self._kept is not None

    def keep(self, held: HeldPlacement) -> None:
        """Keep a held placement for good; a placement within it takes no more memory."""
        self._kept = held

    def hold(
        self,
        owned: OwnedExperts,
        on_progress: LoadProgress = lambda num_done, num_total: None,
    ) -> HeldPlacement:
        """Return a placement's banks, loading what is missing; give it back with `release`.

        Device memory of a dropped placement is freed before anything is loaded. If loading fails,
        dropped experts stay dropped, and loaded ones are kept until another placement is loaded.
        """
        with self._lock:
            held = self._placements.get(owned.fingerprint)
            if held is not None:
                held.num_users += 1
                return held
        reused, in_use = self._reusable(owned), self._forget_unused()
        arena_bytes = None if self._shared is None else self._shared.bytes_beside(owned, in_use)
        is_brought = arena_bytes is not None
        shared: dict[int, SharedBank] = {}
        if is_brought:
            reused = {}
        else:
            shared = _to_share(owned, in_use, but=reused)
        num_before = self.num_experts
        needed = [each.owned for each in in_use if each.arena is None]
        num_dropped = self._drop_all_but(needed if is_brought else [*needed, owned])
        num_kept = sum(
            len(self._loaded.get(layer_id, set()).intersection(ids.tolist()))
            for layer_id, ids in owned.by_layer.items()
        )
        by_layer_id = self.spec.by_layer_id
        self._backend.require_room(
            self._file,
            [
                (by_layer_id[layer_id], _num_new(ids, shared.get(layer_id)))
                for layer_id, ids in owned.by_layer.items()
                if layer_id not in reused
            ],
        )
        banks = self._load(owned, reused, on_progress, shared=shared, is_brought=is_brought)
        with ExitStack() as undo:
            arena = None
            if self._shared is not None and arena_bytes is not None:
                arena = self._shared.bring(banks, arena_bytes, in_use)
            if arena is not None:
                undo.callback(arena.close)
            held = HeldPlacement(
                owned,
                banks,
                self._pairs_per_second(banks, arena),
                num_kept=num_kept,
                num_loaded=self.num_experts - (num_before - num_dropped),
                num_dropped=num_dropped,
                num_users=1,
                arena=arena,
            )
            undo.pop_all()
        with self._lock:
            self._placements[owned.fingerprint] = held
        return held

    def release(self, held: HeldPlacement) -> None:
        """Remove one user of the placement."""
        with self._lock:
            held.num_users -= 1

    def give_back(self) -> None:
        """Drop what no placement in use needs, and return its memory to the device's driver."""
        in_use = self._forget_unused()
        self._drop_all_but([each.owned for each in in_use if each.arena is None])
        for held in in_use:
            for bank in held.banks.values():
                if isinstance(bank, SharedBank):
                    bank.trim()

    def balance(self) -> None:
        """Once placements have come into use, or are used no more, have the arenas of those in use
        share the memory; the others keep what a layer needs. May wait for a batch."""
        with self._lock:
            held = list(self._placements.values())
        if self._shared is not None:
            self._shared.balance(held)

    def close(self) -> None:
        """End arenas. Banks may be computing still, but are not used again."""
        for arena in self.arenas():
            arena.warn()
            arena.close()

    def _pairs_per_second(
        self, banks: Mapping[int, ExpertBank], arena: ExpertArena | None
    ) -> float:
        batches = self._backend.trial_batches
        found = measure_pairs_per_second(banks.values(), self._rates, batches=batches)
        return found if arena is None else with_reads(arena, found, banks, trial=_tried)

    def _forget_unused(self) -> list[HeldPlacement]:
        """End placements that are not in use; returns the others."""
        with self._lock:
            dropped = [each.arena for each in self._placements.values() if not each.num_users]
            self._placements = {
                name: each for name, each in self._placements.items() if each.num_users
            }
            in_use = list(self._placements.values())
        for arena in dropped:
            if arena is not None:
                arena.close()
        return in_use

    def _reusable(self, owned: OwnedExperts) -> dict[int, ExpertBank]:
        """Loaded banks that have exactly the wanted local ids, by layer id."""
        return {
            layer_id: bank
            for held in self._placements.values()
            if held.arena is None
            for layer_id, bank in held.banks.items()
            if np.array_equal(held.owned.by_layer[layer_id], owned.by_layer.get(layer_id, ()))
        }

    def _load(
        self,
        owned: OwnedExperts,
        reused: Mapping[int, ExpertBank],
        on_progress: LoadProgress,
        *,
        shared: Mapping[int, SharedBank],
        is_brought: bool,
    ) -> dict[int, ExpertBank]:
        """A bank for each layer, reusing loaded ones, or the memory of `shared` ones.
        `is_brought`: nothing is read now."""
        backend, banks = self._backend, dict[int, ExpertBank]()
        load = backend.load_shared if isinstance(backend, LoadsShared) else backend.load_experts
        with backend.loading():
            for num_done, (layer_id, ids) in enumerate(sorted(owned.by_layer.items())):
                on_progress(num_done, len(owned.by_layer))
                bank = reused.get(layer_id)
                if bank is None:
                    layer = self.spec.by_layer_id[layer_id]
                    loaded = self._loaded.get(layer_id, set())
                    new = np.array([each for each in ids.tolist() if each not in loaded], np.int32)
                    if not is_brought:
                        _read_experts(self._file, layer, new, touch=backend.is_host)
                    other = shared.get(layer_id)
                    if other is None:
                        bank = load(self._file, layer, ids)
                    else:
                        bank = other.sibling(self._file, ids)
                    if not is_brought:
                        self._loaded[layer_id] = loaded.union(new.tolist())
                banks[layer_id] = bank
        on_progress(len(owned.by_layer), len(owned.by_layer))
        return banks

    def _drop_all_but(self, needed: Iterable[OwnedExperts]) -> int:
        """Free all experts that none of these placements needs; returns their number."""
        keep: dict[int, set[int]] = {}
        for owned in needed:
            for layer_id, ids in owned.by_layer.items():
                keep.setdefault(layer_id, set()).update(ids.tolist())
        num_dropped = 0
        for layer_id, loaded in self._loaded.items():
            unused = np.array(sorted(loaded - keep.get(layer_id, set())), np.int32)
            if unused.size:
                self._drop(self.spec.by_layer_id[layer_id], unused)
                loaded.difference_update(unused.tolist())
                num_dropped += unused.size
        return num_dropped

    def _drop(self, layer: MoeLayer, global_expert_ids: I32Array) -> None:
        """Free what the backend and the kernel hold for these experts."""
        self._backend.drop_experts(self._file, layer, global_expert_ids)
        for each in _byte_ranges(layer, global_expert_ids):
            self._file.advise_dontneed(*each)


def _to_share(
    owned: OwnedExperts, in_use: Iterable[HeldPlacement], *, but: Collection[int]
) -> dict[int, SharedBank]:
    """Banks whose memory new ones can share, by layer id; for each layer, the one that lacks
    least."""
    found: dict[int, tuple[int, SharedBank]] = {}
    for held in in_use:
        for layer_id, bank in held.banks.items():
            ids = owned.by_layer.get(layer_id)
            if ids is None or layer_id in but or not isinstance(bank, SharedBank):
                continue
            num_missing = bank.num_missing(ids)
            if num_missing is not None and num_missing < found.get(layer_id, (ids.size + 1,))[0]:
                found[layer_id] = num_missing, bank
    return {layer_id: bank for layer_id, (_, bank) in found.items()}


def _num_new(ids: I32Array, shared: SharedBank | None) -> int:
    """How many of these are to be loaded."""
    num_missing = None if shared is None else shared.num_missing(ids)
    return int(ids.size) if num_missing is None else num_missing
