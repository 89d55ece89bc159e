"""Data of the status page: a few numbers that it polls, and the experts' heat map.

Nothing here waits for the engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypedDict

import prometheus_client

from dflash_adapters.spec import MoeSpec
from dflash_protocol import __version__
from dflash_protocol.ids import Phase
from dflash_runtime.engine.engine import Engine
from dflash_runtime.experts.events import Event
from dflash_runtime.experts.remote.breaker import BreakerState
from dflash_runtime.experts.telemetry import OwnerStats
from dflash_runtime.serving.description import chat_template, model_id
from dflash_runtime.serving.state import ServerState

SCHEMA_VERSION = 1
"""Version of `status` and `expert_map`; raised when a field changes its meaning or is removed."""


class ModelStatus(TypedDict):
    """The model and how it was opened."""

    id: str
    name: str
    architecture: str
    expert_types: list[str]
    """Types of the experts' matrices, the one with the most bytes first."""
    num_moe_layers: int
    num_experts: int
    num_experts_used: int
    num_positions: int
    has_chat_template: bool
    backend: str


class OwnerStatus(TypedDict):
    """One owner of experts, since the start."""

    name: str
    kind: str
    device: str
    state: str
    """``ready``; ``lost``: not connected; ``paused``, ``probed``: its circuit breaker is open, or
    half-open."""
    reason: str
    """Why it is not ready."""
    transport: str
    num_experts: int
    requests: int
    pairs: int
    wait_s: float
    retries: int
    fallbacks: int
    restarts: int
    decode_round_trip_s: float | None
    """Median; None before the first one."""


class Reading(TypedDict):
    """Prompt tokens of the running request: computed, and in all."""

    done: int
    total: int


class QueueStatus(TypedDict):
    """The queue, and the running request."""

    capacity: int
    waiting: int
    running: int
    reading: Reading | None
    """None once the first token is written."""
    stalled_s: float | None
    """Time since the running request last began a layer; None if none runs."""


class TokenStatus(TypedDict):
    """Tokens since the start; a prompt's are counted when its request ends."""

    prompt: int
    generated: int


class Status(TypedDict):
    """All but the heat map. `time_s` is monotonic, for rates; `is_well` is the state of
    ``/health``."""

    schema_version: int
    is_well: bool
    version: str
    time_s: float
    model: ModelStatus
    owners: list[OwnerStatus]
    queue: QueueStatus
    tokens: TokenStatus


class LayerMap(TypedDict):
    """One layer. Both lists are indexed by global expert id."""

    layer_id: int
    owners: list[int]
    """The expert's owner, as an index into `owner_names`."""
    selections: list[int]


class ExpertMap(TypedDict):
    """The owner of each expert, and how often it was chosen."""

    schema_version: int
    owner_names: list[str]
    layers: list[LayerMap]


def status(state: ServerState, engine: Engine) -> Status:
    """The current Status."""
    spec, stats, worker = engine.spec, state.worker.stats, state.worker
    reading = worker.reading
    return {
        "schema_version": SCHEMA_VERSION,
        "is_well": worker.is_well,
        "version": __version__,
        "time_s": time.monotonic(),
        "model": {
            "id": model_id(engine),
            "name": spec.name,
            "architecture": spec.architecture,
            "expert_types": expert_types(spec.moe),
            "num_moe_layers": len(spec.moe.layers),
            "num_experts": max(layer.num_experts for layer in spec.moe.layers),
            "num_experts_used": max(layer.num_experts_used for layer in spec.moe.layers),
            "num_positions": engine.num_positions,
            "has_chat_template": chat_template(state, engine) is not None,
            "backend": engine.backend_name,
        },
        "owners": [
            owner_status(name, owner, stats.events, parent_device=engine.backend_name)
            for name, owner in stats.owners.items()
        ],
        "queue": {
            "capacity": state.settings.queue_capacity,
            "waiting": worker.num_waiting,
            "running": 0 if worker.running is None else 1,
            "reading": None if reading is None else {"done": reading[0], "total": reading[1]},
            "stalled_s": worker.stalled_s,
        },
        "tokens": {
            "prompt": _value(state.metrics.prompt_tokens),
            "generated": _value(state.metrics.generated_tokens),
        },
    }


def expert_map(engine: Engine, selections: Mapping[int, Sequence[int]]) -> ExpertMap:
    """The heat map: all experts of all layers, in order. `selections`: as in EngineStats."""
    return {
        "schema_version": SCHEMA_VERSION,
        "owner_names": list(engine.placement.owner_names),
        "layers": [
            {
                "layer_id": layer_id,
                "owners": routing.owner_index.tolist(),
                "selections": list(selections[layer_id]),
            }
            for layer_id, routing in sorted(engine.placement.routing.items())
        ],
    }


def owner_status(
    name: str, owner: OwnerStats, events: Sequence[Event], *, parent_device: str
) -> OwnerStatus:
    """One owner; if it is not ready, the reason is taken from `events`."""
    state = _owner_state(owner)
    decode = owner.phases.get(Phase.DECODE)
    has_round_trips = decode is not None and decode.round_trips.num_samples > 0
    return {
        "name": name,
        "kind": owner.kind.value,
        "device": owner.device or ("" if owner.kind == "daemon" else parent_device),
        "state": state,
        "reason": "" if state == "ready" else _last_reason(name, events),
        "transport": owner.transport,
        "num_experts": owner.num_experts,
        "requests": owner.requests,
        "pairs": owner.pairs,
        "wait_s": owner.wait_s,
        "retries": owner.retries,
        "fallbacks": owner.fallbacks,
        "restarts": owner.restarts,
        "decode_round_trip_s": decode.round_trips.quantile_s(0.5)
        if decode is not None and has_round_trips
        else None,
    }


def expert_types(moe: MoeSpec) -> list[str]:
    """Types of the experts' matrices, the one with the most bytes first."""
    num_bytes: Counter[str] = Counter()
    for layer in moe.layers:
        for projection in (layer.gate, layer.up, layer.down):
            num_bytes[projection.tensor_type.name] += layer.num_experts * projection.num_bytes
    return [name for name, _ in num_bytes.most_common()]


def _owner_state(owner: OwnerStats) -> str:
    if owner.is_lost:
        return "lost"
    match owner.breaker:
        case BreakerState.OPEN:
            return "paused"
        case BreakerState.HALF_OPEN:
            return "probed"
    return "ready"


def _last_reason(name: str, events: Sequence[Event]) -> str:
    """The reason of the owner's last event other than ``daemon_back``."""
    of_owner = (each for each in reversed(events) if each.owner == name)
    return next((each.reason for each in of_owner if each.kind != "daemon_back"), "")


def _value(counter: prometheus_client.Counter) -> int:
    """The value of a counter without labels."""
    (family,) = counter.collect()
    return int(next(sample.value for sample in family.samples if sample.name.endswith("_total")))
