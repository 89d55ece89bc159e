"""What the server says of itself: ``/props``, and the data that the status page polls.

docs/serving.md explains each field. Nothing here waits for the engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import prometheus_client

from dflash_adapters.library.finding import is_kept_for_others
from dflash_adapters.library.names import SUFFIX
from dflash_adapters.spec import MoeSpec
from dflash_protocol import __version__
from dflash_protocol.errors import one_line
from dflash_protocol.ids import Phase
from dflash_protocol.placement import Placement
from dflash_runtime.engine.engine import Engine
from dflash_runtime.engine.measured_speeds import plan_report
from dflash_runtime.experts.events import Event
from dflash_runtime.experts.remote.breaker import BreakerState
from dflash_runtime.experts.telemetry import OwnerStats
from dflash_runtime.serving.llama_fields import default_settings
from dflash_runtime.serving.state import ServerState

SCHEMA_VERSION = 1
"""Version of `props`, `status` and `expert_map`; raised when a field changes its meaning or is
removed."""

_LONGEST_ID = 100

_COUNTERS = (
    "transport", "num_experts", "requests", "pairs", "wait_s", "retries", "fallbacks", "restarts",
)  # fmt: skip
"""Fields of OwnerStats that the status page shows as they are."""


def model_id(engine: Engine) -> str:
    """The model's id in the API: the file's name without its suffix; where another program names
    files by their hashes, what the file itself says."""
    path = engine.model_path
    if path.suffix != SUFFIX and is_kept_for_others(path):
        return one_line(engine.spec.name, _LONGEST_ID)
    return path.stem


def chat_template(state: ServerState, engine: Engine) -> str | None:
    """The settings' template, else the model's; None if neither has one."""
    tokenizer = engine.tokenizer
    return state.chat_template or (tokenizer.chat_template if tokenizer is not None else None)


def props(state: ServerState, engine: Engine) -> dict[str, Any]:
    """``/props``: the model, where its experts are, what their owners did."""
    spec, stats, placement = engine.spec, state.worker.stats, engine.placement
    return {
        "schema_version": SCHEMA_VERSION,
        "version": __version__,
        "model": {
            **_model(engine),
            "path": str(engine.model_path),
            "num_layers": spec.num_layers,
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "context_length": spec.context_length,
        },
        "backend": engine.backend_name,
        "kv_type": engine.kv_type.value,
        "num_positions": engine.num_positions,
        "chat_template": chat_template(state, engine),
        "settings": {
            name: getattr(state.settings, name)
            for name in ("ipc_mode", "ipc_transport", "ipc_dtype", "ipc_required")
        },
        "placement": {
            name: {str(layer_id): ids.tolist() for layer_id, ids in owned.by_layer.items()}
            for name, owned in zip(placement.owner_names, placement.owners, strict=True)
        },
        "owners": {name: owner.as_record() for name, owner in stats.owners.items()},
        "events": [asdict(event) for event in stats.events],
        "queue": _queue(state),
        **_llama_props(state, engine),
    }


def _llama_props(state: ServerState, engine: Engine) -> dict[str, Any]:
    """What llama-server's ``/props`` has besides."""
    tokenizer = engine.tokenizer
    return {
        "default_generation_settings": {
            "id": 0,
            "n_ctx": engine.num_positions,
            "speculative": False,
            "is_processing": state.worker.running is not None,
            "params": default_settings(),
        },
        "total_slots": 1,
        "model_alias": model_id(engine),
        "model_path": str(engine.model_path),
        "modalities": {"vision": False, "audio": False},
        "bos_token": "" if tokenizer is None else tokenizer.bos_text,
        "eos_token": "" if tokenizer is None else tokenizer.eos_text,
        "build_info": f"dflash-moe {__version__}",
        "is_sleeping": False,
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
    }


def status(state: ServerState, engine: Engine) -> dict[str, Any]:
    """``/status``: a few numbers."""
    stats, worker = state.worker.stats, state.worker
    reading = worker.reading
    expert_bytes = bytes_of_experts(engine.spec.moe, engine.placement)
    return {
        "schema_version": SCHEMA_VERSION,
        "is_well": worker.is_well,
        "version": __version__,
        "time_s": time.monotonic(),
        "model": {
            **_model(engine),
            "expert_types": expert_types(engine.spec.moe),
            "num_positions": engine.num_positions,
            "has_chat_template": chat_template(state, engine) is not None,
            "backend": engine.backend_name,
        },
        "owners": [
            {
                **owner_status(name, owner, stats.events, parent_device=engine.backend_name),
                "expert_bytes": expert_bytes.get(name, 0),
            }
            for name, owner in stats.owners.items()
        ],
        "plan": plan_report(engine.plan, state.metrics.speeds),
        "moves": asdict(stats.moves),
        "hits": asdict(stats.hits),
        "disk": None if stats.disk is None else asdict(stats.disk),
        "slots": None if stats.slots is None else asdict(stats.slots),
        "memory": None if stats.memory is None else asdict(stats.memory),
        "daemon_memory": {name: asdict(each) for name, each in stats.daemon_memory.items()},
        "cache": {"type": engine.kv_type.value, **asdict(stats.cache)},
        "queue": {
            **_queue(state),
            "reading": None if reading is None else {"done": reading[0], "total": reading[1]},
            "stalled_s": worker.stalled_s,
        },
        "tokens": {
            "prompt": _value(state.metrics.prompt_tokens),
            "generated": _value(state.metrics.generated_tokens),
        },
    }


def expert_map(engine: Engine, selections: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """``/status/experts``: the owner of each expert of each layer, as an index into `owner_names`,
    and how often it was chosen; lists by global expert id. `selections`: as in EngineStats."""
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
) -> dict[str, Any]:
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
        **{field: getattr(owner, field) for field in _COUNTERS},
        "offer": None if owner.offer is None else asdict(owner.offer),
        "decode_round_trip_s": decode.round_trips.quantile_s(0.5)
        if decode is not None and has_round_trips
        else None,
    }


def bytes_of_experts(moe: MoeSpec, placement: Placement) -> dict[str, int]:
    """What the experts of each owner take, by its name, as they are in the file."""
    sizes = {layer.layer_id: layer.expert_bytes for layer in moe.layers}
    return {
        name: sum(len(ids) * sizes[layer_id] for layer_id, ids in owned.by_layer.items())
        for name, owned in zip(placement.owner_names, placement.owners, strict=True)
    }


def expert_types(moe: MoeSpec) -> list[str]:
    """Types of the experts' matrices, the one with the most bytes first."""
    num_bytes: Counter[str] = Counter()
    for layer in moe.layers:
        for projection in (layer.gate, layer.up, layer.down):
            num_bytes[projection.tensor_type.name] += layer.num_experts * projection.num_bytes
    return [name for name, _ in num_bytes.most_common()]


def _model(engine: Engine) -> dict[str, Any]:
    """What both descriptions of the model have."""
    spec = engine.spec
    return {
        "id": model_id(engine),
        "name": spec.name,
        "architecture": spec.architecture,
        "num_moe_layers": len(spec.moe.layers),
        "num_experts": max(layer.num_experts for layer in spec.moe.layers),
        "num_experts_used": max(layer.num_experts_used for layer in spec.moe.layers),
    }


def _queue(state: ServerState) -> dict[str, int]:
    return {
        "capacity": state.settings.queue_capacity,
        "waiting": state.worker.num_waiting,
        "running": 0 if state.worker.running is None else 1,
    }


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
