"""What a captured step is given where all its experts are in this process, or none are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from dflash_protocol.ids import Phase
from dflash_protocol.placement import LayerRouting
from dflash_runtime.compute.asking import AskedLayers, AskRoute
from dflash_runtime.compute.backend import ExpertBank, MailRoute
from dflash_runtime.engine.absent_owners import AbsentOwners


class NoOwners(AbsentOwners):
    """Implements backend.MailedExperts: experts outside `here` are never asked for. Immutable."""

    num_owners, own_index, device_index = 1, -1, 0
    asks_daemons = False
    own_banks: Mapping[int, ExpertBank] = MappingProxyType({})

    def __init__(self, here: Mapping[int, npt.NDArray[np.bool_]]) -> None:
        """`here`: by layer id, the experts that this process computes. Shapes: each [E]."""
        super().__init__(here.__getitem__)
        self._here = here

    def routing(self, layer_id: int) -> LayerRouting:
        num_experts = self._here[layer_id].size
        ids = np.arange(num_experts, dtype=np.int32)
        return LayerRouting(np.zeros(num_experts, np.int32), ids, 0, is_identity=True)

    def ask_routes(self) -> Sequence[AskRoute]:
        """None is needed."""
        return ()

    def is_any_to_be_checked(self, num_requests: int) -> bool:
        return False

    def count_asked(self, taken: AskedLayers) -> None:
        """Nothing."""

    def settle_with(self, settle: Callable[[], None] | None) -> None:
        """Nothing."""

    def mail_routes(self) -> tuple[MailRoute, ...]:
        """None."""
        return ()

    def count_mailed(
        self,
        routes: Sequence[MailRoute],
        num_steps: int,
        *,
        phase: Phase = Phase.DECODE,
        num_tokens: int = 1,
    ) -> None:
        """Nothing."""

    def is_step_to_be_checked(self, routes: Sequence[MailRoute]) -> bool:
        return False

    def note_checked_step(self, elapsed_s: float) -> None:
        """Nothing."""
