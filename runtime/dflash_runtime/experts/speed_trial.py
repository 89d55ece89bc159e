"""Times how fast a backend computes a model's experts, with a few of them, before it has any."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import MoeLayer, MoeSpec
from dflash_protocol.batch import RoutedBatch, group_by_expert
from dflash_protocol.errors import DeviceOutOfMemory
from dflash_protocol.ids import Phase
from dflash_runtime.compute import ComputeBackend, ExpertBank
from dflash_runtime.experts.store import ExpertStore

LIMIT_S = 1.9
"""Longest time of a trial of all kinds, but for what is computed when it is over, and for kernels
that have to be compiled."""

_OWN_LIMIT_S = 0.5
_LOADING_SHARE = 0.4
"""Share of a kind's time in which experts are read from the file."""
_CHUNK_SHARE = 0.3
"""Share of a kind's time that is left to chunks."""
_WORTH_BYTES = 256 << 20
"""Experts of so many bytes are not in any cache when their turn comes again."""
_MOST_BANKS = 16
_MOST_STEPS = 32
_MOST_CHUNKS = 8
_MOST_KINDS = 64


@dataclass(frozen=True, slots=True)
class KindSpeed:
    """How fast experts of one kind of layer are computed; 0: not measured. A device's times are
    without its host, which takes part only where the parent's host asks."""

    one_s: float = 0.0
    """A token of a decode step with one expert of a layer."""
    used_s: float = 0.0
    """The same with as many experts as the model uses."""
    chunk_pairs_per_s: float = 0.0
    """(token, expert) pairs of a whole chunk that chooses all experts of a layer alike."""


def kinds_of(first_of_kind: dict[int, int]) -> tuple[int, ...]:
    """First layers of the kinds that are told of, ascending; see `MoeSpec.first_of_kind`."""
    return tuple(sorted(set(first_of_kind.values()))[:_MOST_KINDS])


def measure_kinds(
    store: ExpertStore,
    backend: ComputeBackend,
    *,
    limit_s: float = LIMIT_S,
    on_progress: Callable[[int, int], None] = lambda num_done, num_total: None,
) -> dict[int, KindSpeed]:
    """Measure each kind by its first layer, those of most layers first, until the time is over.

    Nothing else may load experts meanwhile. What is loaded is dropped again. `on_progress` is
    called often, with kinds done and in total; what it raises ends the trial.
    """
    spec, end_s = store.spec, time.perf_counter() + limit_s
    kinds = kinds_of(spec.first_of_kind)
    num_layers = Counter(spec.first_of_kind.values())
    speeds = dict.fromkeys(kinds, KindSpeed())
    for num_done, kind in enumerate(sorted(kinds, key=lambda kind: (-num_layers[kind], kind))):
        check = partial(on_progress, num_done, len(kinds))
        left_s = end_s - time.perf_counter()
        if left_s <= 0.0:
            break
        layers = [each for each in spec.layers if spec.first_of_kind[each.layer_id] == kind]
        try:
            part_s = left_s / (len(kinds) - num_done)
            speeds[kind] = _speed_of(store, backend, layers, limit_s=part_s, check=check)
        except DeviceOutOfMemory:  # other programs have it; the daemon says how little is left
            continue
    return speeds


def own_step_s(
    backend: ComputeBackend, file: GgufFile, moe: MoeSpec, *, limit_s: float = _OWN_LIMIT_S
) -> float:
    """Seconds of the first layer's experts in a decode step, on the host's own `backend`, measured
    as a daemon measures itself."""
    end_s, first = time.perf_counter() + limit_s, moe.layers[0]
    ids = np.arange(min(first.num_experts_used, first.num_experts), dtype=np.int32)
    layers = [each for each in moe.layers if each.kind == first.kind]
    layers = layers[:: max(1, len(layers) // _MOST_BANKS)][:_MOST_BANKS]
    used = _batch(first, Phase.DECODE, 1, num_experts=ids.size)
    with ExitStack() as undo, _trial_banks() as banks:
        for layer in layers:
            if banks and time.perf_counter() > end_s - limit_s * (1.0 - _LOADING_SHARE):
                break
            banks.append(backend.load_experts(file, layer, ids))
            undo.callback(backend.drop_experts, file, layer, ids)
            banks[-1].accumulate(used, np.zeros(used.hidden.shape))  # reads and compiles
        until_s = time.perf_counter() + limit_s * (1.0 - _LOADING_SHARE)
        (times,) = _timed(banks, (used,), _MOST_STEPS, until_s=until_s, check=lambda: None)
    return median(times)


@contextmanager
def _trial_banks() -> Iterator[list[ExpertBank]]:
    """A list of banks that is cleared at the end, before the experts that they hold are dropped."""
    banks: list[ExpertBank] = []
    try:
        yield banks
    finally:
        banks.clear()


def _speed_of(
    store: ExpertStore,
    backend: ComputeBackend,
    layers: Sequence[MoeLayer],
    *,
    limit_s: float,
    check: Callable[[], None],
) -> KindSpeed:
    """The speed of layers of one kind."""
    started_s = time.perf_counter()
    first = layers[0]
    num_used = min(first.num_experts_used, first.num_experts)
    num_banks = min(_MOST_BANKS, max(2, _WORTH_BYTES // (num_used * first.expert_bytes)))
    with ExitStack() as undo, _trial_banks() as banks:
        for layer in layers[:: max(1, len(layers) // num_banks)][:num_banks]:
            if banks and time.perf_counter() - started_s > _LOADING_SHARE * limit_s:
                break
            check()
            banks.append(undo.enter_context(store.trial_bank(layer, num_used)))
        store.run_kernels(banks[0])
        # Compiling counts for nothing.
        end_s = time.perf_counter() + limit_s * (1.0 - _LOADING_SHARE)
        chunk_s = _CHUNK_SHARE * limit_s
        one = _batch(first, Phase.DECODE, 1, num_experts=1)
        used = _batch(first, Phase.DECODE, 1, num_experts=num_used)
        one_s = backend.device_seconds(banks, one)
        used_s = backend.device_seconds(banks, used)
        if one_s is not None and used_s is not None:
            check()
            whole = _batch(first, Phase.PREFILL, backend.chunking.preferred, num_experts=num_used)
            whole_s = backend.device_seconds(banks[:_MOST_CHUNKS], whole)
            return KindSpeed(one_s, used_s, whole.num_pairs / whole_s if whole_s else 0.0)
        ones, useds = _timed(banks, (one, used), _MOST_STEPS, until_s=end_s - chunk_s, check=check)
        # As many rows of an expert as a chunk has on average.
        num_rows = max(1, backend.chunking.preferred * num_used // first.num_experts)
        chunk = _batch(first, Phase.PREFILL, num_rows, num_experts=num_used)
        (chunks,) = _timed(banks, (chunk,), _MOST_CHUNKS, until_s=end_s, check=check)
    rate = chunk.num_pairs / max(median(chunks), 1e-9)
    return KindSpeed(max(median(ones), 1e-9), max(median(useds), 1e-9), rate)


def _timed(
    banks: Sequence[ExpertBank],
    batches: Sequence[RoutedBatch],
    most: int,
    *,
    until_s: float,
    check: Callable[[], None],
) -> list[list[float]]:
    """Times of each batch, one at least and `most` at most; the banks take turns, and batches have
    different ones, so that weights come from where those of a whole model do."""
    times: list[list[float]] = [[] for _ in batches]
    for num_done in range(most):
        if num_done and time.perf_counter() >= until_s:
            break
        check()
        for place, (batch, found) in enumerate(zip(batches, times, strict=True)):
            bank = banks[(num_done + place * len(banks) // len(batches)) % len(banks)]
            sums = np.zeros(batch.hidden.shape)
            begun_s = time.perf_counter()
            bank.accumulate(batch, sums)
            found.append(time.perf_counter() - begun_s)
    return times


def _batch(layer: MoeLayer, phase: Phase, num_tokens: int, *, num_experts: int) -> RoutedBatch:
    """Random rows; each token has all of the first experts."""
    rows = np.random.default_rng(0).standard_normal((num_tokens, layer.hidden_size), np.float32)
    num_pairs = num_tokens * num_experts
    return group_by_expert(
        rows,
        np.repeat(np.arange(num_tokens, dtype=np.int32), num_experts),
        np.arange(num_pairs, dtype=np.int32) % np.int32(num_experts),
        weights=np.ones(num_pairs, np.float32),
        phase=phase,
    )
