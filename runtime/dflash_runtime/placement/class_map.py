"""The class map: which numeric class computes each expert, of prompts and of decoded tokens.

Logits depend on weights, tokens and the class map alone, so that it is part of the fingerprint of
what was computed, as of kept prefixes. It follows from placement and plan, never from a chunk's
size, a time, or what a reused prefix has left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflash_protocol.errors import SettingsError
from dflash_protocol.fingerprint import digest
from dflash_protocol.ids import I32Array, Phase
from dflash_protocol.numeric_class import class_in_phase
from dflash_protocol.placement import Placement
from dflash_runtime.placement.split import LOCAL_OWNER


@dataclass(frozen=True, eq=False)
class ClassMap:
    """Numeric classes by layer and global expert id.

    Shapes: by layer id [E] int32, indices of `classes`, which are sorted. Verified tokens are
    decoded ones. Two maps with the same `digest` are equal.
    """

    classes: tuple[str, ...]
    prefill: Mapping[int, I32Array]
    decode: Mapping[int, I32Array]

    @classmethod
    def of(
        cls,
        placement: Placement,
        class_of_owner: Mapping[str, str],
        *,
        prompts_here: Collection[int] = (),
        processors: Collection[str] = (),
    ) -> ClassMap:
        """`class_of_owner`: the numeric class of each owner by name, of ``local`` in any case if
        `prompts_here` is not empty; `prompts_here`: layers in which the parent's device computes
        prompts' experts of `processors`, owners by name.

        Raises: SettingsError for an owner without a class.
        """
        used = {
            placement.owner_names[index]
            for routing in placement.routing.values()
            for index in np.unique(routing.owner_index).tolist()
        }
        if prompts_here and used & set(processors):
            used.add(LOCAL_OWNER)
        for name in sorted(used):
            if name not in class_of_owner:
                raise SettingsError(f"the numeric class of {name!a} is not known")
        named = {class_of_owner[name] for name in used}
        classes = tuple(sorted(named | {class_in_phase(each, Phase.DECODE) for each in named}))
        index_of = {name: index for index, name in enumerate(classes)}

        def indices(phase: Phase, *, is_here: bool = False) -> I32Array:
            """By owner; -1 for owners that are not used. `is_here`: the parent's device computes
            those of processors."""
            of_owners = []
            for name in placement.owner_names:
                by = LOCAL_OWNER if is_here and name in processors else name
                own = class_in_phase(class_of_owner[by], phase) if name in used else ""
                of_owners.append(index_of.get(own, -1))
            return np.array(of_owners, np.int32)

        decoded, prompted = indices(Phase.DECODE), indices(Phase.PREFILL)
        here = indices(Phase.PREFILL, is_here=True) if prompts_here else prompted
        decode, prefill = {}, {}
        for layer_id, routing in placement.routing.items():
            decode[layer_id] = decoded[routing.owner_index]
            of_prompts = here if layer_id in prompts_here else prompted
            prefill[layer_id] = of_prompts[routing.owner_index]
        return cls(classes, prefill, decode)

    def class_of(self, phase: Phase, layer_id: int, global_expert_id: int) -> str:
        """The numeric class that computes an expert. Raises: KeyError, IndexError."""
        layers = self.prefill if phase is Phase.PREFILL else self.decode
        return self.classes[int(layers[layer_id][global_expert_id])]

    def decodes_as(self, other: ClassMap) -> bool:
        """Whether the same classes compute decoded tokens."""
        return self.decode.keys() == other.decode.keys() and all(
            np.array_equal(
                np.array(self.classes)[self.decode[layer_id]],
                np.array(other.classes)[other.decode[layer_id]],
            )
            for layer_id in self.decode
        )

    @cached_property
    def digest(self) -> str:
        """Fingerprint of the whole map."""
        chunks = [name.encode() for name in self.classes]
        for layers in (self.prefill, self.decode):
            chunks.append(len(layers).to_bytes(4, "little"))
            for layer_id in sorted(layers):
                chunks.append(layer_id.to_bytes(4, "little"))
                chunks.append(layers[layer_id].astype("<i4").tobytes())
        return digest("class-map-v1", chunks)
