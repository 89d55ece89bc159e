"""A layer's (token, expert, weight) triples, as they are shared out among owners.

Pure; knows nothing of who computes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_protocol.ids import F32Array, I32Array
from dflash_protocol.placement import LayerRouting


@dataclass(slots=True)
class Pairs:
    """Some of a layer's (token, expert, weight) triples. Shapes: all [P]."""

    token_indices: I32Array
    global_expert_ids: I32Array
    weights: F32Array

    @property
    def num_pairs(self) -> int:
        return int(self.token_indices.size)

    def where(self, chosen: npt.NDArray[np.bool_]) -> Pairs:
        """Some of them. Shapes: chosen [P]."""
        places = np.flatnonzero(chosen)  # of thousands, that is a tenth of indexing by bools
        return Pairs(
            self.token_indices[places], self.global_expert_ids[places], self.weights[places]
        )


def split_by_owner(pairs: Pairs, routing: LayerRouting) -> Iterator[tuple[int, Pairs]]:
    """Each owner's share; owner -1 is nobody."""
    if routing.sole_owner is not None:
        yield routing.sole_owner, pairs
        return
    owner_of_pair = routing.owner_index[pairs.global_expert_ids]
    num_pairs_of_owner = np.bincount(owner_of_pair + 1)  # nobody's first
    if num_pairs_of_owner[-1] == pairs.num_pairs:
        yield num_pairs_of_owner.size - 2, pairs
        return
    for owner_index in (np.flatnonzero(num_pairs_of_owner) - 1).tolist():
        yield owner_index, pairs.where(owner_of_pair == owner_index)


def concatenated(shares: Sequence[Pairs]) -> Pairs:
    return Pairs(
        np.concatenate([share.token_indices for share in shares] or [np.empty(0, np.int32)]),
        np.concatenate([share.global_expert_ids for share in shares] or [np.empty(0, np.int32)]),
        np.concatenate([share.weights for share in shares] or [np.empty(0, np.float32)]),
    )
