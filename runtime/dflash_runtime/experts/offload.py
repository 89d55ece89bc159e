"""Prompt offload: which remote experts of a prompt chunk the parent's device computes itself, with
weights copied for that chunk, because their owner's CPU would take longer.

A chunk of many tokens does much work with each weight, so that copying it to a GPU costs less than
a CPU's products. It is decided at opening, by the plan's prices, and by layer: bits depend on what
computes an expert, and must depend neither on a clock nor on a chunk's size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from dflash_protocol.ids import Phase
from dflash_protocol.numeric_class import is_same_class
from dflash_protocol.placement import Placement
from dflash_runtime.experts.compute import ExpertCompute
from dflash_runtime.experts.telemetry import OwnerKind, OwnerStats
from dflash_runtime.placement.class_map import ClassMap
from dflash_runtime.placement.split import LOCAL_OWNER

_LOG = logging.getLogger(__name__)

FEWEST_TOKENS = 64
"""Of a chunk whose experts' owner is lost: smaller ones use nearly as many weights as large ones,
and are left to the fallback."""

_FALLBACK = -1
"""Stands for an owner's index."""
_ON_CPU = ("", "cpu")
"""Devices reported by owners that compute on a CPU."""


class OffloadMode(StrEnum):
    """Values of the setting."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class OffloadChoice:
    """Which experts are offloaded: with ON all of other owners, with AUTO those of owners on CPUs
    in `layers`, and those of lost owners in chunks of FEWEST_TOKENS or more."""

    mode: OffloadMode
    layers: frozenset[int] = frozenset()
    numeric_class: str = ""
    """Of the parent's device."""


@dataclass(slots=True)
class _Known:
    """What was asked of a placement, for as long as its owners stay as they are."""

    placement: Placement
    owners: tuple[object, ...]
    """What answers depend on."""
    experts: dict[tuple[int, bool], npt.NDArray[np.bool_] | None] = field(default_factory=dict)
    other_class: dict[int, npt.NDArray[np.bool_]] = field(default_factory=dict)


class PromptOffload:
    """Which experts of a chunk the parent's device computes instead of their owners.

    `owners` are in the placement's order; the experts of `device_owner`, an index, are on the
    device already. Used by one thread.
    """

    def __init__(
        self,
        choice: OffloadChoice,
        owners: Sequence[ExpertCompute],
        *,
        fallback: ExpertCompute | None,
        device_owner: int | None,
    ) -> None:
        self.mode = choice.mode
        self._choice = choice
        self._owners = owners
        self._has_fallback = fallback is not None
        self._device_owner = device_owner
        self._map: tuple[Placement, object, ClassMap] | None = None
        """The class map asked for last, and what it is of."""
        self._known: _Known | None = None
        self._logged: set[int] = set()

    @property
    def may_name_some_now(self) -> bool:
        """Whether experts of a large chunk may be offloaded with the owners as they are; only their
        losses change that."""
        if self.mode is not OffloadMode.AUTO:
            return self.mode is OffloadMode.ON
        on_cpu = any(self._is_offloaded(index) for index in range(len(self._owners)))
        return (bool(self._choice.layers) and on_cpu) or (self._has_fallback and bool(self._lost()))

    def experts(
        self, placement: Placement, layer_id: int, num_tokens: int
    ) -> npt.NDArray[np.bool_] | None:
        """See RemoteExperts.to_offload. The same array as long as nothing changes."""
        if self.mode is OffloadMode.OFF:
            return None
        known, key = self._known_of(placement), (layer_id, num_tokens >= FEWEST_TOKENS)
        if key not in known.experts:
            known.experts[key] = self._experts(placement, layer_id, is_large=key[1])
        return known.experts[key]

    def other_class(self, placement: Placement, layer_id: int) -> npt.NDArray[np.bool_]:
        """Experts whose bits in prompts change if the device computes them: the class map leaves
        them to owners of other classes. Shapes: result [E]."""
        known = self._known_of(placement)
        if layer_id not in known.other_class:
            known.other_class[layer_id] = self._other_class(placement, layer_id)
        return known.other_class[layer_id]

    def class_map(self, placement: Placement) -> ClassMap:
        """What computes each expert with a placement, while no owner is lost.

        An owner whose sums are rounded on their way has a class of its own: bits show which of a
        token's experts it has.
        """
        is_on = self.mode is OffloadMode.ON
        layers = placement.experts_per_layer if is_on else self._choice.layers
        offloads = self.mode is not OffloadMode.OFF
        of_owners = tuple(
            (
                name,
                exact or f"{name}'s {owner.stats.numeric_class}",
                offloads and self._is_offloaded(index),
            )
            for index, (name, owner, exact) in enumerate(
                zip(
                    placement.owner_names,
                    self._owners,
                    exact_classes(placement, self._owners),
                    strict=True,
                )
            )
        )
        if self._map is None or self._map[0] is not placement or self._map[1] != of_owners:
            made = ClassMap.of(
                placement,
                {LOCAL_OWNER: self._choice.numeric_class}
                | {name: numeric_class for name, numeric_class, _ in of_owners},
                prompts_here=layers if offloads else (),
                processors=[name for name, _, is_offloaded in of_owners if is_offloaded],
            )
            self._map = placement, of_owners, made
        return self._map[2]

    def _known_of(self, placement: Placement) -> _Known:
        stats = [owner.stats for owner in self._owners]
        owners = self.mode, *[(each.device, each.numeric_class, _is_lost(each)) for each in stats]
        known = self._known
        if known is None or known.placement is not placement or known.owners != owners:
            known = self._known = _Known(placement, owners)
        return known

    def _experts(
        self, placement: Placement, layer_id: int, *, is_large: bool
    ) -> npt.NDArray[np.bool_] | None:
        is_named = self.mode is OffloadMode.ON or layer_id in self._choice.layers
        chosen = [i for i in range(len(self._owners)) if is_named and self._is_offloaded(i)]
        if self._has_fallback and (is_named or is_large):
            chosen.append(_FALLBACK)  # else asking it raises the error that is due
        owner_of_expert = placement.routing_without(self._lost())[layer_id].owner_index
        is_chosen = np.zeros(len(self._owners) + 1, np.bool_)
        is_chosen[chosen] = True
        experts: npt.NDArray[np.bool_] = is_chosen[owner_of_expert]
        if not experts.any():
            return None
        experts.setflags(write=False)
        if not self._logged.issuperset(chosen):
            self._log(placement, {*owner_of_expert[experts].tolist()} - self._logged)
        return experts

    def _other_class(self, placement: Placement, layer_id: int) -> npt.NDArray[np.bool_]:
        is_named = self.mode is OffloadMode.ON or layer_id in self._choice.layers
        of_owner = [
            index != self._device_owner
            and not (is_named and self._is_offloaded(index))
            and not is_same_class(numeric_class, self._choice.numeric_class, Phase.PREFILL)
            for index, numeric_class in enumerate(exact_classes(placement, self._owners))
        ]
        return np.array(of_owner, np.bool_)[placement.routing[layer_id].owner_index]

    def _is_offloaded(self, index: int) -> bool:
        """Whether an owner's experts are, in the layers of the choice."""
        if index == self._device_owner:
            return False
        return self.mode is OffloadMode.ON or self._owners[index].stats.device in _ON_CPU

    def _lost(self) -> frozenset[int]:
        return frozenset(i for i, owner in enumerate(self._owners) if _is_lost(owner.stats))

    def _log(self, placement: Placement, new: set[int]) -> None:
        """Log once for each owner."""
        self._logged |= new
        for index in sorted(new):
            name = "the fallback" if index == _FALLBACK else placement.owner_names[index]
            # docs: once for each owner: its CPU would take longer (`PREFILL_OFFLOAD`);
            # `selections_total{place="offloaded"}` counts them
            _LOG.info(
                "experts of %s in prompts: computed on the parent's device, with copies of their "
                "weights",
                name,
            )


def exact_classes(placement: Placement, owners: Sequence[ExpertCompute]) -> list[str]:
    """The numeric class of each owner now, by index; empty where it is not known, or sums are
    rounded on their way."""
    exact = placement.numeric_classes
    return [
        owner.stats.numeric_class if exact.get(name) else ""
        for name, owner in zip(placement.owner_names, owners, strict=True)
    ]


def _is_lost(stats: OwnerStats) -> bool:
    return stats.kind is OwnerKind.DAEMON and stats.is_lost
