"""The server's description of itself: the model, where its experts are, what their owners did."""

from __future__ import annotations

from typing import Any

from dflash_protocol import __version__
from dflash_runtime.engine.engine import Engine
from dflash_runtime.serving.state import ServerState

SCHEMA_VERSION = 1
"""Version of `describe`; raised when a field changes its meaning or is removed."""


def model_id(engine: Engine) -> str:
    """The model's id in the API: the file's name without its suffix."""
    return engine.model_path.stem


def chat_template(state: ServerState, engine: Engine) -> str | None:
    """The settings' template, else the model's; None if neither has one."""
    tokenizer = engine.tokenizer
    return state.chat_template or (tokenizer.chat_template if tokenizer is not None else None)


def describe(state: ServerState, engine: Engine) -> dict[str, Any]:
    """The description, for JSON. Never waits for the engine."""
    spec, stats, placement = engine.spec, state.worker.stats, engine.placement
    running = state.worker.running
    return {
        "schema_version": SCHEMA_VERSION,
        "version": __version__,
        "model": {
            "id": model_id(engine),
            "name": spec.name,
            "architecture": spec.architecture,
            "path": str(engine.model_path),
            "num_layers": spec.num_layers,
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "context_length": spec.context_length,
            "num_moe_layers": len(spec.moe.layers),
            "num_experts": max(layer.num_experts for layer in spec.moe.layers),
            "num_experts_used": max(layer.num_experts_used for layer in spec.moe.layers),
        },
        "backend": engine.backend_name,
        "kv_type": engine.kv_type.value,
        "num_positions": engine.num_positions,
        "chat_template": chat_template(state, engine),
        "settings": {
            "ipc_mode": state.settings.ipc_mode,
            "ipc_transport": state.settings.ipc_transport,
            "ipc_dtype": state.settings.ipc_dtype,
            "ipc_required": state.settings.ipc_required,
        },
        "placement": {
            name: {str(layer_id): ids.tolist() for layer_id, ids in owned.by_layer.items()}
            for name, owned in zip(placement.owner_names, placement.owners, strict=True)
        },
        "owners": {name: owner.as_record() for name, owner in stats.owners.items()},
        "events": [
            {"time_s": e.time_s, "kind": e.kind, "owner": e.owner, "reason": e.reason}
            for e in stats.events
        ],
        "queue": {
            "capacity": state.settings.queue_capacity,
            "waiting": state.worker.num_waiting,
            "running": 0 if running is None else 1,
        },
    }
