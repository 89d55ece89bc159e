"""Another placement for the owners that there are: daemons load what they miss beside what they
have, experts of this process are replaced in place, without loading their banks anew."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.ids import I32Array
from dflash_protocol.placement import OwnedExperts, Placement
from dflash_runtime.compute.backend import ExpertStage, ReplaceableBank, ResizableBank
from dflash_runtime.experts.compute import (
    ExpertCompute,
    LocalExpertCompute,
    PreparedExperts,
)
from dflash_runtime.experts.telemetry import OwnerKind

Replaced: TypeAlias = tuple[ReplaceableBank, I32Array, I32Array, I32Array]
"""A bank, the local ids that get other experts, the experts that leave, and those."""

Resized: TypeAlias = tuple[ResizableBank, I32Array, I32Array]
"""A bank, the experts that it has, and those that it will have, by local ids."""

Change: TypeAlias = Replaced | Resized


class NotUndone(DeviceUnavailable):
    """A re-placement failed, and the device could not be put back either: nothing may be computed
    with it any more."""


class Prepared:
    """What daemons have prepared for another placement. Used by the thread that uses the owners.

    States: being prepared; ready, once all have what they need; over, by `take_over` or `withdraw`.
    """

    def __init__(
        self, owners: Sequence[ExpertCompute], *, before: Placement, after: Placement
    ) -> None:
        """Begin. Raises: ValueError for a placement that needs what owners cannot do;
        DaemonUnavailable if a daemon that is to change is lost."""
        if after.owner_names != before.owner_names:
            raise ValueError(f"the owners are {before.owner_names}, not {after.owner_names}")
        if after.experts_per_layer != before.experts_per_layer:
            raise ValueError("it is the placement of another model")
        self.before = before
        self.changes = _changes(owners, before, after)
        """In banks of this process."""
        self.placement = after
        self._experts: list[PreparedExperts] = []
        try:
            for owner, old, new in zip(owners, before.owners, after.owners, strict=True):
                if old.fingerprint != new.fingerprint:
                    experts = owner.prepare(new)
                    self._experts += [] if experts is None else [experts]
        except BaseException:
            self.withdraw()
            raise

    @property
    def is_of_daemons(self) -> bool:
        """Whether daemons get other experts."""
        return bool(self._experts)

    @property
    def is_ready(self) -> bool:
        """Raises: DflashError if a daemon cannot have them."""
        return all([each.is_ready for each in self._experts])

    def wait(self) -> None:
        """Wait until it is ready. Raises: DflashError if a daemon cannot have them."""
        for each in self._experts:
            each.wait()

    def take_over(self) -> None:
        """Give daemons their experts, all of them even if one fails; nothing may be in flight."""
        with contextlib.ExitStack() as all_of_them:
            while self._experts:
                all_of_them.callback(self._experts.pop().take_over)

    def withdraw(self) -> None:
        """Have daemons keep those that they have, unless others have taken over. Idempotent."""
        while self._experts:
            self._experts.pop().withdraw()


def replace_experts(
    file: GgufFile, changes: Sequence[Change], *, stage: ExpertStage | None = None
) -> None:
    """Give banks of this process other experts. Nothing may be in flight. `stage` may have weights
    of some. What has changed when it fails is undone.

    Raises: DeviceUnavailable; NotUndone.
    """
    for index, change in enumerate(changes):
        try:
            _apply(file, change, stage)
        except BaseException as error:
            try:
                for each in changes[: index + 1]:
                    _undo(file, each)
            except BaseException:
                raise NotUndone(str(error)) from error
            raise


def _apply(file: GgufFile, change: Change, stage: ExpertStage | None) -> None:
    if len(change) == 3:
        resized, _, after = change
        resized.resize(file, after)
    else:
        bank, local_expert_ids, _, arriving = change
        bank.replace(file, local_expert_ids, arriving, stage=stage)


def _undo(file: GgufFile, change: Change) -> None:
    if len(change) == 3:
        resized, before, _ = change
        resized.resize(file, before)
    else:
        bank, local_expert_ids, leaving, _ = change
        bank.replace(file, local_expert_ids, leaving)


def _changes(owners: Sequence[ExpertCompute], before: Placement, after: Placement) -> list[Change]:
    """Of all owners of this process, which have as many experts of each layer as before, but for
    banks that can be resized.

    Raises: ValueError.
    """
    _check_answers(owners, before, after)
    return [
        change
        for owner, old, new in zip(owners, before.owners, after.owners, strict=True)
        if isinstance(owner, LocalExpertCompute) and old.fingerprint != new.fingerprint
        for change in _changes_of(owner, old, new)
    ]


def check_counts(before: Placement, after: Placement, owner_names: Collection[str]) -> None:
    """Check that these owners have as many experts of each layer as before. Raises: ValueError."""
    for name, old, new in zip(before.owner_names, before.owners, after.owners, strict=False):
        for layer_id, ids in new.by_layer.items() if name in owner_names else ():
            was = old.by_layer.get(layer_id)
            if was is not None and was.size != ids.size:
                raise ValueError(
                    f"layer {layer_id} has room for {was.size} experts, not {ids.size}"
                )


def _changes_of(
    owner: LocalExpertCompute, old: OwnedExperts, new: OwnedExperts
) -> Iterator[Change]:
    if {*old.by_layer} != {*new.by_layer}:
        raise ValueError("an owner has experts of the same layers as before")
    for layer_id, ids in new.by_layer.items():
        was, bank = old.by_layer[layer_id], owner.banks[layer_id]
        is_resized = isinstance(bank, ResizableBank) and ids.size <= bank.most_experts
        if was.size != ids.size and is_resized:
            assert isinstance(bank, ResizableBank)
            yield bank, was, ids
            continue
        if was.size != ids.size or not isinstance(bank, ReplaceableBank):
            raise ValueError(f"layer {layer_id} has room for {was.size} experts, not {ids.size}")
        changed = np.flatnonzero(was != ids).astype(np.int32)
        if changed.size:
            yield bank, changed, was[changed], ids[changed]


def _check_answers(owners: Sequence[ExpertCompute], before: Placement, after: Placement) -> None:
    """An owner of this process answers for all that it has, or for the same as before: tables of a
    device that leave out some of its experts do not follow.

    Raises: ValueError.
    """
    for index, owner in enumerate(owners):
        if owner.stats.kind is not OwnerKind.LOCAL:
            continue
        old, new = before.local_ids_of(index), after.local_ids_of(index)
        for layer_id in old.keys() & new.keys():
            is_whole = all(
                np.count_nonzero(ids[layer_id] >= 0) == each.owners[index].by_layer[layer_id].size
                for ids, each in ((old, before), (new, after))
            )
            if not is_whole and not np.array_equal(old[layer_id], new[layer_id]):
                name = after.owner_names[index]
                raise ValueError(f"layer {layer_id}: others answer for some experts of {name!a}")
