"""Replaces experts of this process's owners by others, without loading their banks anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.ids import I32Array
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime.compute.backend import ReplaceableBank
from dflash_runtime.experts.compute import ExpertCompute, LocalExpertCompute


def replace_experts(
    owners: Sequence[ExpertCompute], file: GgufFile, *, before: Placement, after: Placement
) -> None:
    """Give owners of this process the experts of another placement, which has as many for each of
    them in each layer. Nothing may be in flight.

    All is checked before anything changes. Raises: ValueError for a placement that needs more than
    that; DeviceUnavailable.
    """
    if after.owner_names != before.owner_names:
        raise ValueError(f"the owners are {before.owner_names}, not {after.owner_names}")
    changes = [
        change
        for owner, old, new in zip(owners, before.owners, after.owners, strict=True)
        if old.fingerprint != new.fingerprint
        for change in _changes(owner, old, new)
    ]
    for bank, local_expert_ids, global_expert_ids in changes:
        bank.replace(file, local_expert_ids, global_expert_ids)


def _changes(
    owner: ExpertCompute, old: OwnedExperts, new: OwnedExperts
) -> Iterator[tuple[ReplaceableBank, I32Array, I32Array]]:
    """Banks with the local ids that get other experts, and those experts."""
    if not isinstance(owner, LocalExpertCompute):
        raise ValueError("experts of daemons cannot be replaced")
    if {*old.by_layer} != {*new.by_layer}:
        raise ValueError("an owner has experts of the same layers as before")
    for layer_id, ids in new.by_layer.items():
        was, bank = old.by_layer[layer_id], owner.banks[layer_id]
        if was.size != ids.size or not isinstance(bank, ReplaceableBank):
            raise ValueError(f"layer {layer_id} has room for {was.size} experts, not {ids.size}")
        changed = np.flatnonzero(was != ids).astype(np.int32)
        if changed.size:
            yield bank, changed, ids[changed]
