"""The even split: the first N experts of each layer stay local, the rest are dealt to the daemons;
without daemons the rest is computed by the processor of a parent that has a device.

All daemons count alike, whatever their speed or memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_adapters.spec import MoeSpec
from dflash_protocol.errors import SettingsError
from dflash_protocol.placement import OwnedExperts, Placement

LOCAL_OWNER = "local"
"""The parent, on its device."""
HOST_OWNER = "host"
"""The processor of a parent whose device is another one."""


def even_split(
    spec: MoeSpec,
    daemon_names: Sequence[str],
    num_local_experts: int | None,
    *,
    has_host: bool = False,
) -> Placement:
    """Deal experts one by one: the daemons' numbers of experts of a layer differ by at most one.

    `num_local_experts` a layer stay in the parent: none by default if there are daemons, else all.
    `has_host`: without daemons the parent's processor can compute the others.
    Raises: SettingsError if a layer has fewer experts, or if some have no owner.
    """
    if has_host and not daemon_names and num_local_experts is not None:
        daemon_names = [HOST_OWNER]
    experts: dict[str, dict[int, range]] = {name: {} for name in (LOCAL_OWNER, *daemon_names)}
    for layer in spec.layers:
        num_local = 0 if daemon_names else layer.num_experts
        if num_local_experts is not None:
            num_local = num_local_experts
        if not 0 <= num_local <= layer.num_experts:
            raise SettingsError(
                f"{num_local} local experts asked for; layer {layer.layer_id} has "
                f"{layer.num_experts}"
            )
        if num_local < layer.num_experts and not daemon_names:
            raise SettingsError(
                f"{layer.num_experts - num_local} experts a layer have no owner: add a daemon, or "
                "keep all of them local"
            )
        experts[LOCAL_OWNER][layer.layer_id] = range(num_local)
        for index, name in enumerate(daemon_names):
            experts[name][layer.layer_id] = range(
                num_local + index, layer.num_experts, len(daemon_names)
            )
    owners = {name: OwnedExperts.from_lists(by_layer) for name, by_layer in experts.items()}
    for name in (LOCAL_OWNER, HOST_OWNER):
        if name in owners and not owners[name].num_experts:
            del owners[name]
    return make_placement(spec, owners)


def make_placement(spec: MoeSpec, owners: Mapping[str, OwnedExperts]) -> Placement:
    """A placement of this model's experts. Raises: ProtocolError if one has no owner."""
    return Placement(
        experts_per_layer={layer.layer_id: layer.num_experts for layer in spec.layers},
        owner_names=tuple(owners),
        owners=tuple(owners.values()),
    )
