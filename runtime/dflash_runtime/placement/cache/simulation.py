"""Replays a trace through cache policies: how many selections each finds, and how many experts it
brings.

Misses of a token are brought after its hits were looked up, one after the other. The first tenth of
the trace fills the cache, and counts what the static set is chosen by: figures are of the rest.
Slots of steps are beside a static set, and have a rule of their own: see step_slots.py. So has
the processor's arena, which has one pool for all layers: see adaptive.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from dflash_protocol.ids import F32Array, F64Array, I32Array, I64Array, U8Array
from dflash_runtime.compute import step_slots as slots_of_steps
from dflash_runtime.compute.half_lives import HALF_LIVES
from dflash_runtime.placement.cache import adaptive, step_slots
from dflash_runtime.placement.cache import policies as p
from dflash_runtime.placement.cache.adaptive import AUTO
from dflash_runtime.placement.cache.traces import ExpertTrace, TraceLayer

BELADY = "belady"
"""The bound: what is used again the latest leaves, or is not kept at all. No policy can know that.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
"""

STEPS = "steps"
"""Slots of steps, beside the static set."""

WARM_UP = 10
"""The first of so many parts of a trace fills the caches."""

HALF_LIFE = 32.0
"""Tokens after which a use counts half, for LFU: a compromise between traces, see
docs/worklog.md."""


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What one policy did after the warm-up.

    Shapes: hits, brought [L] selections and experts; num_selections [L]; num_missing [L, K + 1]:
    tokens by how many of their K experts of the layer were not found; step_slots [L]: slots that
    steps have; None: what is brought is not read by steps.
    """

    hits: I64Array
    brought: I64Array
    num_selections: I64Array
    brought_bytes: int
    num_missing: I64Array
    step_slots: I64Array | None = None

    @property
    def hit_share(self) -> float:
        return float(self.hits.sum() / max(1, self.num_selections.sum()))

    @property
    def hot_share(self) -> float:
        """Layers of tokens whose experts were all there."""
        return float(self.num_missing[:, 0].sum() / max(1, self.num_missing.sum()))


def replayed(
    trace: ExpertTrace,
    num_slots: Sequence[int],
    *,
    half_life: float | None = None,
    margin: float = 0.0,
    cache_slots: int = slots_of_steps.SLOTS,
) -> dict[str, Replay]:
    """Each policy's replay by name, and Belady's; with `cache_slots` also that of so many slots of
    steps a layer, if `has_room_for_steps`. `num_slots`: experts that each layer has room for; at
    least as many as a token uses of it. `half_life`, in tokens (None: each policy's own), and
    `margin`, in uses of the present token, are those of LFU and of steps.

    Raises: ValueError if there are fewer.
    """
    functions = _functions()
    warm = trace.num_tokens // WARM_UP
    has_steps = has_room_for_steps(trace.header.layers, num_slots, cache_slots)
    lfu_rates = np.array([2.0 ** (1.0 / (half_life or HALF_LIFE)), margin])
    decay = 0.5 ** (1.0 / (half_life or slots_of_steps.HALF_LIFE))
    step_rates = np.array([decay, margin], np.float32)
    found: dict[str, list[_LayerFigures]] = {name: [] for name in (*p.POLICIES, AUTO)}
    misses = np.zeros((trace.num_tokens, len(HALF_LIVES)))
    for (layer, ids), slots in zip(trace.by_layer(), num_slots, strict=True):
        if slots < min(layer.num_experts_used, layer.num_experts):
            raise ValueError(
                f"layer {layer.layer_id}: {slots} slots, a token uses {layer.num_experts_used}"
            )
        ids = np.ascontiguousarray(ids)
        hits = np.zeros(ids.shape, np.uint8)
        brought = np.zeros(ids.shape, np.uint8)
        counts = np.bincount(ids[:warm].ravel(), minlength=layer.num_experts)
        hottest = np.argsort(-counts, kind="stable")
        for policy, name in enumerate(p.POLICIES):
            state = _State(layer.num_experts)
            if policy == p.STATIC:
                state.place[hottest[:slots]] = p.PROTECTED
            sizes = policy, min(slots, layer.num_experts), lfu_rates
            functions.replay(ids, *sizes, *state.arrays, hits, brought)
            found[name].append(_figures(hits[warm:], brought[warm:], layer.expert_bytes))
        for kind, of_kind in enumerate(HALF_LIVES):
            rates = np.array([2.0 ** (1.0 / of_kind), 0.0])
            state = _State(layer.num_experts)
            functions.replay(
                ids, p.LFU, min(slots, layer.num_experts), rates, *state.arrays, hits, brought
            )
            misses[:, kind] += (hits == 0).sum(axis=1)
        if has_steps:
            num_static = slots - num_beside(layer, slots, cache_slots)
            beside = StepState(layer.num_experts, hottest[:num_static], cache_slots)
            functions.replay_steps(ids, trace.phases, step_rates, *beside.arrays, hits, brought)
            found.setdefault(STEPS, []).append(
                _figures(hits[warm:], brought[warm:], layer.expert_bytes)
            )
        following = np.empty(ids.shape, np.int32)
        functions.next_uses(ids, np.full(layer.num_experts, ids.shape[0], np.int32), following)
        there = np.zeros(layer.num_experts, np.uint8)
        functions.belady(ids, following, min(slots, layer.num_experts), there, hits, brought)
        found.setdefault(BELADY, []).append(
            _figures(hits[warm:], brought[warm:], layer.expert_bytes)
        )
    deciding = np.zeros(trace.num_tokens, np.int64)
    functions.decide(misses, deciding)
    of_pool = _pool_hits(functions, trace, deciding, num_slots)
    for layer, of_layer in zip(trace.header.layers, of_pool, strict=True):
        brought = 1 - of_layer  # a processor uses what is there
        found[AUTO].append(_figures(of_layer[warm:], brought[warm:], layer.expert_bytes))
    sizes_of = [(trace.num_tokens - warm) * x.num_experts_used for x in trace.header.layers]
    replays = {name: _joined(layers, sizes_of) for name, layers in found.items()}
    if has_steps:
        pairs = zip(trace.header.layers, num_slots, strict=True)
        each = [max(0, num_beside(*pair, cache_slots) - 1) for pair in pairs]
        replays[STEPS] = replace(replays[STEPS], step_slots=np.array(each, np.int64))
    return replays


def _pool_hits(
    functions: _Functions, trace: ExpertTrace, deciding: I64Array, num_slots: Sequence[int]
) -> list[U8Array]:
    """Of each layer, which selections one pool of all slots has. Shapes: [N, K]."""
    layers = trace.header.layers
    columns = np.cumsum([0, *(each.num_experts_used for each in layers)])
    sizes = [each.num_experts for each in layers]
    experts = np.cumsum([0, *sizes])
    ids = np.concatenate(
        [of_layer + first for (_, of_layer), first in zip(trace.by_layer(), experts, strict=False)],
        axis=1,
    ).astype(np.int32)
    hits, most = np.zeros(ids.shape, np.uint8), sum(num_slots)
    functions.replay_pool(
        ids,
        columns.astype(np.int64),
        np.repeat(np.arange(len(layers)), sizes),
        deciding,
        np.full(experts[-1], -1, np.int64),
        np.full(min(most, experts[-1]), -1, np.int64),
        np.zeros(experts[-1], np.int64),
        np.full((len(HALF_LIVES), experts[-1]), -np.inf),
        hits,
    )
    return [np.ascontiguousarray(each) for each in np.split(hits, columns[1:-1], axis=1)]


def has_room_for_steps(
    layers: Sequence[TraceLayer], num_slots: Sequence[int], cache_slots: int
) -> bool:
    """Whether every layer that is not there as a whole has room for slots of steps, and for an
    expert that lives there."""
    return cache_slots > 0 and all(
        num_beside(layer, slots, cache_slots) < slots
        for layer, slots in zip(layers, num_slots, strict=True)
    )


def num_beside(layer: TraceLayer, num_slots: int, cache_slots: int) -> int:
    """Of a layer's slots, those in which no expert lives; see `slots_beside` in gpu/room.py."""
    return cache_slots + 1 if num_slots < layer.num_experts else 0


class _State:
    """A layer's arrays, as policies take them; an empty cache, nothing pinned."""

    def __init__(self, num_experts: int) -> None:
        self.place: U8Array = np.full(num_experts, p.ABSENT, np.uint8)
        self.arrays: tuple[U8Array, I64Array, F64Array, U8Array] = (
            self.place,
            np.full(num_experts, -1, np.int64),
            np.zeros(num_experts),
            np.zeros(num_experts, np.uint8),
        )


class StepState:
    """A layer's arrays, as `step_slots.replay_steps` takes them: nothing was used, or is kept."""

    def __init__(self, num_experts: int, static: I64Array, num_slots: int) -> None:
        """Shapes: static [S] experts that live there."""
        self.place: U8Array = np.full(num_experts, p.ABSENT, np.uint8)
        self.place[static] = p.PROTECTED
        self.slots: I32Array = np.full(num_slots, -1, np.int32)
        self.scores: F32Array = np.zeros(num_experts, np.float32)

    @property
    def arrays(self) -> tuple[U8Array, I32Array, F32Array]:
        return self.place, self.slots, self.scores


class _LayerFigures(NamedTuple):
    """What a policy did in one layer; see Replay."""

    hits: int
    brought: int
    brought_bytes: int
    num_missing: I64Array


def _figures(hits: U8Array, brought: U8Array, expert_bytes: int) -> _LayerFigures:
    num_brought, num_used = int(brought.sum()), hits.shape[1]
    missing = np.bincount(num_used - hits.sum(axis=1, dtype=np.int64), minlength=num_used + 1)
    return _LayerFigures(int(hits.sum()), num_brought, num_brought * expert_bytes, missing)


def _joined(layers: Sequence[_LayerFigures], num_selections: Sequence[int]) -> Replay:
    num_missing = np.zeros((len(layers), max(each.num_missing.size for each in layers)), np.int64)
    for row, each in zip(num_missing, layers, strict=True):
        row[: each.num_missing.size] = each.num_missing
    return Replay(
        hits=np.array([each.hits for each in layers], np.int64),
        brought=np.array([each.brought for each in layers], np.int64),
        num_selections=np.array(num_selections, np.int64),
        brought_bytes=sum(each.brought_bytes for each in layers),
        num_missing=num_missing,
    )


# -- one layer ------------------------------------------------------------------------------------

# `_functions` substitutes compiled ones.
_note_use, _demoted, _victim, _is_kept = p.note_use, p.demoted, p.victim, p.is_kept


def _replay(
    ids: I32Array,
    policy: int,
    num_slots: int,
    rates: F64Array,
    place: U8Array,
    last_use: I64Array,
    uses: F64Array,
    is_pinned: U8Array,
    hits: U8Array,
    brought: U8Array,
) -> None:
    """Writes hits and brought [N, K], 1 or 0. `rates`: by how much more a use counts with each
    token, and the margin."""
    num_tokens, num_used = ids.shape
    num_there = 0
    for expert in range(place.size):
        num_there += place[expert] != p.ABSENT
    most_protected = int(num_slots * p.PROTECTED_SHARE)
    weight = 1.0
    for token in range(num_tokens):
        for k in range(num_used):
            expert = ids[token, k]
            hits[token, k] = place[expert] != p.ABSENT
            brought[token, k] = 0
            if _note_use(policy, expert, token, weight, place, last_use, uses):
                leaving = _demoted(most_protected, place, last_use, is_pinned)
                if leaving >= 0:
                    place[leaving] = p.PROBATION
        for k in range(num_used):
            expert = ids[token, k]
            if place[expert] != p.ABSENT or policy == p.STATIC:
                continue
            if num_there < num_slots:
                num_there += 1
            else:
                leaving = _victim(policy, token, place, last_use, uses, is_pinned)
                if not _is_kept(policy, expert, leaving, rates[1] * weight, uses):
                    continue
                place[leaving] = p.ABSENT
                if policy != p.LFU:
                    uses[leaving] = 0.0
            place[expert] = p.PROBATION
            brought[token, k] = 1
        if policy == p.LFU:  # others count each use alike
            weight *= rates[0]
        if weight > p.LARGEST_WEIGHT:
            for expert in range(uses.size):
                uses[expert] /= weight
            weight = 1.0


def _next_uses(ids: I32Array, following: I32Array, out: I32Array) -> None:
    """The number of the token that uses each choice's expert next. `following` [E]: what to write
    for the last; overwritten. Shapes: ids, out [N, K]."""
    num_tokens, num_used = ids.shape
    for token in range(num_tokens - 1, -1, -1):
        for k in range(num_used):
            out[token, k] = following[ids[token, k]]
        for k in range(num_used):
            following[ids[token, k]] = token


def _belady(
    ids: I32Array,
    next_use: I32Array,
    num_slots: int,
    there: U8Array,
    hits: U8Array,
    brought: U8Array,
) -> None:
    """Writes hits and brought [N, K]. Shapes: there [E], zeros."""
    num_tokens, num_used = ids.shape
    following = np.zeros(there.size, np.int32)
    num_there = 0
    for token in range(num_tokens):
        for k in range(num_used):
            expert = ids[token, k]
            hits[token, k], brought[token, k] = there[expert], 0
            following[expert] = next_use[token, k]
        for k in range(num_used):
            expert = ids[token, k]
            if there[expert]:
                continue
            if num_there < num_slots:
                num_there += 1
            else:
                latest = expert
                for other in range(there.size):
                    if there[other] and following[other] > following[latest]:
                        latest = other
                if latest == expert:
                    continue
                there[latest] = 0
            there[expert], brought[token, k] = 1, 1


@dataclass(frozen=True, slots=True)
class _Functions:
    replay: Callable[..., None]
    next_uses: Callable[..., None]
    belady: Callable[..., None]
    replay_steps: Callable[..., None]
    decide: Callable[..., None]
    replay_pool: Callable[..., None]


PLAIN = _Functions(
    _replay, _next_uses, _belady, step_slots.replay_steps, adaptive.decide, adaptive.replay_pool
)


@cache
def _functions() -> _Functions:
    """Compiled, where that is possible: a trace of an hour takes Python minutes."""
    try:
        from dflash_runtime.compute.cpu.compile.compiling import compile_kernel, helper, variant
        from dflash_runtime.compute.cpu.simd.untyped import types
    except ImportError:
        return PLAIN

    def array(element: Any, ndim: int) -> Any:
        return types.Array(element, ndim, "C")

    ids, flags = array(types.int32, 2), array(types.uint8, 2)
    state = (
        array(types.uint8, 1),
        array(types.int64, 1),
        array(types.float64, 1),
        array(types.uint8, 1),
    )
    replay = variant(
        _replay,
        "cache_replay",
        _note_use=helper(p.note_use),
        _demoted=helper(p.demoted),
        _victim=helper(p.victim),
        _is_kept=helper(p.is_kept),
    )
    replay_steps = variant(
        step_slots.replay_steps, "cache_replay_steps", _slot_of=helper(step_slots.slot_of)
    )
    of_steps = (
        array(types.uint8, 1),
        array(types.float32, 1),
        array(types.uint8, 1),
        array(types.int32, 1),
        array(types.float32, 1),
    )
    sizes = types.int64, types.int64, array(types.float64, 1)
    return _Functions(
        compile_kernel(replay, ids, *sizes, *state, flags, flags),
        compile_kernel(_next_uses, ids, array(types.int32, 1), ids),
        compile_kernel(_belady, ids, ids, types.int64, array(types.uint8, 1), flags, flags),
        compile_kernel(replay_steps, ids, *of_steps, flags, flags),
        compile_kernel(adaptive.decide, array(types.float64, 2), array(types.int64, 1)),
        compile_kernel(
            adaptive.replay_pool,
            ids,
            *(array(types.int64, 1),) * 6,
            array(types.float64, 2),
            flags,
        ),
    )
