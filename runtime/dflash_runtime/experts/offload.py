"""Whose experts of a prompt's chunk the parent's device computes itself, with weights that are
copied to it for that chunk, since their owner's CPU would take longer.

A chunk of many tokens does a lot with each weight, so that copying it to a GPU costs less than a
CPU's products; a few tokens do not. Knows nothing of copies: it is told what they take.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from dflash_protocol.ids import I32Array
from dflash_protocol.placement import Placement
from dflash_runtime.experts.compute import ExpertCompute, OwnerKind, OwnerStats

_LOG = logging.getLogger(__name__)

FEWEST_TOKENS = 64
"""Chunks of fewer are never worth it: they use nearly as many weights as long ones."""

_CERTAIN = 16.0
"""So many times slower than copying by its own account, an owner is not even tried. What owners say
is what they do at decode, which at prefill may be off by a factor of ten."""
_RATE_WEIGHT = 0.5
_FALLBACK = -1
"""In an owner's place."""
_ON_CPU = ("", "cpu")
"""What owners say of the device that they compute on, if it is none."""


class OffloadMode(StrEnum):
    """As in the settings."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class OffloadChooser:
    """Compares what asking an owner takes with what copying takes.

    Pure. Owners are known by any number. Asking is measured from beginning to end, by owner and by
    the magnitude of chunks, and learnt from what is asked anyway, or from a layer that is a trial.
    """

    def __init__(self, mode: OffloadMode) -> None:
        self.mode = mode
        self._s_per_pair: dict[tuple[int, int], float] = {}

    def is_worth_it(
        self,
        owner: int,
        *,
        num_tokens: int,
        num_pairs: int,
        pairs_per_s: float,
        copying_s: float,
    ) -> bool:
        """Whether to copy what a chunk of so many tokens uses of an owner's experts in a layer,
        which takes `copying_s`; `pairs_per_s` is what it said before it was asked, 0: nothing."""
        if self.mode is not OffloadMode.AUTO:
            return self.mode is OffloadMode.ON
        if num_tokens < FEWEST_TOKENS:
            return False
        known = self._s_per_pair.get((owner, num_tokens.bit_length()))
        if known is not None:
            return known * num_pairs > copying_s
        return pairs_per_s > 0 and num_pairs / pairs_per_s > _CERTAIN * copying_s

    def note(self, owner: int, *, num_tokens: int, num_pairs: int, elapsed_s: float) -> None:
        """A layer's share was asked for, and has come."""
        kind = owner, num_tokens.bit_length()
        s_per_pair = elapsed_s / max(num_pairs, 1)
        known = self._s_per_pair.get(kind, s_per_pair)
        self._s_per_pair[kind] = known + _RATE_WEIGHT * (s_per_pair - known)


class PromptOffload:
    """Which experts of a chunk are not asked for, by the owners of a placement.

    `owners` are in its order; those that `device_owner`, an index, answers for are on the device.
    """

    def __init__(
        self,
        mode: OffloadMode,
        placement: Placement,
        owners: Sequence[ExpertCompute],
        *,
        fallback: ExpertCompute | None,
        device_owner: int | None,
    ) -> None:
        self._mode = mode
        self._placement = placement
        self._owners = owners
        self._fallback = fallback
        self._device_owner = device_owner
        self._chooser = OffloadChooser(mode)
        self._chosen: frozenset[int] = frozenset()
        """Owners whose experts are not asked for, as was decided last."""
        self._logged: set[int] = set()

    @property
    def may_name_some(self) -> bool:
        return self._mode is not OffloadMode.OFF

    @property
    def may_name_some_now(self) -> bool:
        """Whether that may be so of the owners as they are: only their losses change that."""
        if self._mode is not OffloadMode.AUTO:
            return self._mode is OffloadMode.ON
        return any(
            owned.num_experts and index != self._device_owner and self._is_on_cpu(owner.stats)
            for index, (owned, owner) in enumerate(
                zip(self._placement.owners, self._owners, strict=True)
            )
        )

    def experts(
        self, layer_id: int, topk_ids: I32Array | None, *, expert_s: float
    ) -> npt.NDArray[np.bool_] | None:
        """As RemoteExperts.to_offload."""
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

    def note(self, owner: int, *, num_tokens: int, num_pairs: int, elapsed_s: float) -> None:
        """As OffloadChooser.note; `owner` is its index, negative for the fallback."""
        self._chooser.note(owner, num_tokens=num_tokens, num_pairs=num_pairs, elapsed_s=elapsed_s)

    def _is_worth_it(
        self, index: int, counts: npt.NDArray[np.intp], *, num_tokens: int, expert_s: float
    ) -> bool:
        """Shapes: counts [experts of this owner], pairs of each."""
        owner = self._fallback if index == _FALLBACK else self._owners[index]
        if owner is None or index == self._device_owner:
            return False  # an error is due; it is here
        if self._mode is OffloadMode.AUTO and not self._is_on_cpu(owner.stats):
            return False
        return self._chooser.is_worth_it(
            index,
            num_tokens=num_tokens,
            num_pairs=int(counts.sum()),
            pairs_per_s=owner.pairs_per_s,
            copying_s=np.count_nonzero(counts) * expert_s,
        )

    def _is_on_cpu(self, stats: OwnerStats) -> bool:
        """Whether a CPU computes what an owner is asked for: the fallback's, if that is lost."""
        if stats.device in _ON_CPU:
            return True
        return _is_lost(stats) and self._fallback is not None

    def _log(self, new: frozenset[int], num_tokens: int) -> None:
        """Once for each owner: what is decided changes from chunk to chunk."""
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
