"""Random placements: any owner may have any experts, in any local order, some of them twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_adapters.spec import MoeSpec
from dflash_protocol.placement import OwnedExperts, Placement, write_owned_experts
from dflash_runtime.placement.split import even_split, make_placement


def write_even_placement(folder: Path, model: Path) -> tuple[Path, Placement]:
    """Write a placement of a qwen3moe model: the parent has four experts per layer, the daemon
    ``link0`` the others. Returns the file and the placement."""
    with GgufFile.open(model) as file:
        spec = read_spec(file).moe
    placement = even_split(spec, ["link0"], 4)
    layer = spec.layers[0]
    path = folder / "placement.json"
    write_owned_experts(
        path,
        placement.owners[placement.owner_names.index("link0")],
        num_layers=len(spec.layers),
        num_experts=layer.num_experts,
        num_experts_used=layer.num_experts_used,
    )
    return path, placement


def random_placement(
    spec: MoeSpec, owner_names: Sequence[str], random: np.random.Generator
) -> Placement:
    """Each expert gets a random owner, and some a second one (a replica)."""
    by_owner: dict[str, dict[int, list[int]]] = {name: {} for name in owner_names}
    for layer in spec.layers:
        for global_expert_id in random.permutation(layer.num_experts).tolist():
            num_owners = 2 if len(owner_names) > 1 and random.random() < 0.2 else 1
            for name in random.choice(owner_names, size=num_owners, replace=False).tolist():
                by_owner[name].setdefault(layer.layer_id, []).append(global_expert_id)
    return make_placement(
        spec, {name: OwnedExperts.from_lists(layers) for name, layers in by_owner.items()}
    )
