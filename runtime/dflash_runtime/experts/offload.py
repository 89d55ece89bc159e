"""Prompt offload: which remote experts of a prompt chunk the parent's device computes itself, with
weights copied for that chunk, because their owner's CPU would take longer.

A chunk of many tokens does much work with each weight, so that copying it to a GPU costs less than
a CPU's products; a few tokens do not. Only decides: the time of copying is passed in.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from dflash_protocol.ids import I32Array
from dflash_protocol.placement import Placement
from dflash_runtime.experts.compute import ExpertCompute
from dflash_runtime.experts.telemetry import OwnerKind, OwnerStats

_LOG = logging.getLogger(__name__)

FEWEST_TOKENS = 64
"""Smaller chunks are never offloaded: they use nearly as many weights as large ones."""

_CERTAIN = 16.0
"""An owner that is this many times slower than copying, by the rate it reported, is not even tried.
Reported rates are those of decode and may be off by a factor of ten at prefill."""
_RATE_WEIGHT = 0.5
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
    """Whether experts are offloaded, and in which layers if not in all."""

    mode: OffloadMode
    layers: frozenset[int] | None = None


class PromptOffload:
    """Which experts of a chunk the parent's device computes instead of their owners.

    Compares the time of asking an owner with that of copying. The former is measured end to end, by
    owner and by order of magnitude of the chunk, on ordinary requests or on a layer asked as a
    trial. `owners` are in the placement's order; the experts of `device_owner`, an index, are on
    the device already.
    """

    def __init__(
        self,
        choice: OffloadChoice,
        placement: Placement,
        owners: Sequence[ExpertCompute],
        *,
        fallback: ExpertCompute | None,
        device_owner: int | None,
    ) -> None:
        self.mode, self._layers = choice.mode, choice.layers
        self._placement = placement
        self._owners = owners
        self._fallback = fallback
        self._device_owner = device_owner
        self._s_per_pair: dict[tuple[int, int], float] = {}
        """By owner, and bits of the chunk's number of tokens."""
        self._chosen: frozenset[int] = frozenset()
        """Owners whose experts are offloaded, by the last decision."""
        self._logged: set[int] = set()

    @property
    def may_name_some_now(self) -> bool:
        """Whether any expert may be offloaded with the owners as they are; only their losses change
        that."""
        if self.mode is not OffloadMode.AUTO:
            return self.mode is OffloadMode.ON
        return any(
            owned.num_experts and index != self._device_owner and self._is_on_cpu(owner.stats)
            for index, (owned, owner) in enumerate(
                zip(self._placement.owners, self._owners, strict=True)
            )
        )

    def experts(
        self, layer_id: int, topk_ids: I32Array | None, *, expert_s: float
    ) -> npt.NDArray[np.bool_] | None:
        """See RemoteExperts.to_offload."""
        if self._layers is not None and layer_id not in self._layers:
            return None
        lost = frozenset(
            index
            for index, owner in enumerate(self._owners)
            if index != self._device_owner and _is_lost(owner.stats)
        )
        owner_of_expert = self._placement.routing_without(lost)[layer_id].owner_index
        if topk_ids is not None:
            counts = np.bincount(topk_ids.reshape(-1), minlength=owner_of_expert.size)
            chosen = frozenset(
                index
                for index in np.unique(owner_of_expert[counts > 0]).tolist()
                if self._is_worth_it(
                    index,
                    counts[owner_of_expert == index],
                    num_tokens=topk_ids.shape[0],
                    expert_s=expert_s,
                )
            )
            self._log(chosen - self._logged, topk_ids.shape[0])
            self._chosen = chosen
        if not self._chosen:
            return None
        experts: npt.NDArray[np.bool_] = np.isin(owner_of_expert, list(self._chosen))
        return experts

    def use(self, placement: Placement) -> None:
        """Experts have moved between the owners."""
        self._placement = placement

    def note(self, owner: int, *, num_tokens: int, num_pairs: int, elapsed_s: float) -> None:
        """Record the time of a layer's share that an owner, or for a negative index the fallback,
        has computed."""
        kind = owner, num_tokens.bit_length()
        s_per_pair = elapsed_s / max(num_pairs, 1)
        known = self._s_per_pair.get(kind, s_per_pair)
        self._s_per_pair[kind] = known + _RATE_WEIGHT * (s_per_pair - known)

    def _is_worth_it(
        self, index: int, counts: npt.NDArray[np.intp], *, num_tokens: int, expert_s: float
    ) -> bool:
        """Shapes: counts [experts of this owner], pairs of each."""
        owner = self._fallback if index == _FALLBACK else self._owners[index]
        if owner is None or index == self._device_owner:
            return False  # asking it raises the error that is due
        if self.mode is not OffloadMode.AUTO:
            return self.mode is OffloadMode.ON
        if num_tokens < FEWEST_TOKENS or not self._is_on_cpu(owner.stats):
            return False
        num_pairs, copying_s = int(counts.sum()), float(np.count_nonzero(counts) * expert_s)
        known = self._s_per_pair.get((index, num_tokens.bit_length()))
        if known is not None:
            return known * num_pairs > copying_s
        return owner.pairs_per_s > 0 and num_pairs / owner.pairs_per_s > _CERTAIN * copying_s

    def _is_on_cpu(self, stats: OwnerStats) -> bool:
        """Whether a CPU would compute an owner's experts: the fallback's, if the owner is lost."""
        if stats.device in _ON_CPU:
            return True
        return _is_lost(stats) and self._fallback is not None

    def _log(self, new: frozenset[int], num_tokens: int) -> None:
        """Log once for each owner: decisions change from chunk to chunk."""
        self._logged |= new
        for index in sorted(new):
            name = "the fallback" if index == _FALLBACK else self._placement.owner_names[index]
            # docs: once for each owner: its CPU would take longer (`PREFILL_OFFLOAD`);
            # `selections_total{place="offloaded"}` counts them
            _LOG.info(
                "experts of %s in a chunk of %d tokens: computed on the parent's device, with "
                "copies of their weights",
                name,
                num_tokens,
            )


def _is_lost(stats: OwnerStats) -> bool:
    return stats.kind is OwnerKind.DAEMON and stats.is_lost
