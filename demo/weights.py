"""Trained weights on disk: a folder with config.json and float16 arrays in .npz shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from demo.config import ModelConfig, config_from

if TYPE_CHECKING:
    from demo.model import Model

Arrays = dict[str, npt.NDArray[np.float32]]


def save_weights(model: Model, folder: Path, shard_bytes: int = 15 << 20) -> None:
    """Write the configuration and the parameters, in shards of at most about `shard_bytes`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2) + "\n")
    shards: list[dict[str, Any]] = [{}]
    size = 0
    for name, p in model.named_parameters():
        array = p.detach().cpu().numpy().astype(np.float16)
        if size + array.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    for i, shard in enumerate(shards):
        np.savez(folder / f"weights-{i}.npz", **shard)


def load_config(folder: Path) -> ModelConfig:
    """The configuration of saved weights."""
    return config_from(json.loads((folder / "config.json").read_text()))


def load_weights(folder: Path) -> Arrays:
    """All saved parameters by name, as float32."""
    arrays: Arrays = {}
    for shard in sorted(folder.glob("weights-*.npz")):
        with np.load(shard) as stored:
            arrays |= {name: stored[name].astype(np.float32) for name in stored.files}
    return arrays
