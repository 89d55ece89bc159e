"""The one model as Ollama's interface describes it."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash_adapters.gguf.shard_names import MAX_SHARDS, SHARD_NAME
from dflash_runtime.engine.engine import Engine
from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.status import expert_types, model_id
from dflash_runtime.serving.tools import can_reason

_FOREVER = "2318-01-01T00:00:00Z"
_LATEST = ":latest"


def check_name(engine: Engine, name: str) -> None:
    """Raises: ApiError if the model is called otherwise, with ``:latest`` or without."""
    if name.removesuffix(_LATEST) != model_id(engine).removesuffix(_LATEST):
        shown = ascii(name)[:100]
        raise ApiError(
            404,
            f"model {shown} not found; the model is called {model_id(engine)}",
            param="model",
            code="model_not_found",
        )


def tag(engine: Engine) -> dict[str, Any]:
    """The model as an element of ``/api/tags``."""
    name = f"{model_id(engine).removesuffix(_LATEST)}{_LATEST}"
    num_bytes, modified_ns = _on_disk(engine.model_path)
    identity = f"{name} {num_bytes} {modified_ns}"
    modified = datetime.fromtimestamp(modified_ns // 10**9, UTC)
    return {
        "name": name,
        "model": name,
        "modified_at": modified.isoformat().replace("+00:00", "Z"),
        "size": num_bytes,
        # Of the file's name, size and time: its content would take minutes.
        "digest": hashlib.sha256(identity.encode(errors="replace")).hexdigest(),
        "details": details(engine),
    }


def running(engine: Engine) -> dict[str, Any]:
    """The model as an element of ``/api/ps``."""
    found = tag(engine)
    del found["modified_at"]
    return {**found, "expires_at": _FOREVER, "context_length": engine.num_positions}


def shown(engine: Engine, template: str) -> dict[str, Any]:
    """The model as ``/api/show`` describes it. `template`: of chats; empty if there is none."""
    spec = engine.spec
    architecture = spec.architecture
    of_architecture = {
        "block_count": spec.num_layers,
        "context_length": spec.context_length,
        "embedding_length": spec.hidden_size,
        "expert_count": max(layer.num_experts for layer in spec.moe.layers),
        "expert_used_count": max(layer.num_experts_used for layer in spec.moe.layers),
        "vocab_size": spec.vocab_size,
    }
    capabilities = ["completion"]
    if "tools" in template:
        capabilities.append("tools")
    if can_reason(template):
        capabilities.append("thinking")
    return {
        "license": "",
        "modelfile": "",
        "parameters": f"num_ctx {engine.num_positions}",
        "template": template,
        "details": details(engine),
        "model_info": {
            "general.architecture": architecture,
            "general.name": spec.name,
            **{f"{architecture}.{name}": value for name, value in of_architecture.items()},
        },
        "capabilities": capabilities,
        "modified_at": tag(engine)["modified_at"],
    }


def details(engine: Engine) -> dict[str, Any]:
    """The model's format and family."""
    architecture = engine.spec.architecture
    return {
        "parent_model": "",
        "format": "gguf",
        "family": architecture,
        "families": [architecture],
        "parameter_size": "",
        "quantization_level": next(iter(expert_types(engine.spec.moe)), ""),
    }


def _on_disk(path: Path) -> tuple[int, int]:
    """Bytes of all the model's files, and when the named one was written; 0 if it is gone."""
    split = SHARD_NAME.fullmatch(path.name)
    paths = [path]
    if split is not None and int(split["count"]) <= MAX_SHARDS:
        stem, count = split["stem"], split["count"]
        names = (f"{stem}-{each + 1:05}-of-{count}.gguf" for each in range(int(count)))
        paths = [path.with_name(name) for name in names]
    try:
        return sum(each.stat().st_size for each in paths), path.stat().st_mtime_ns
    except OSError:
        return 0, 0
