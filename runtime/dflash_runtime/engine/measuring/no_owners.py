"""What a captured step is given where all its experts are in this process, or none are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dflash_protocol.ids import Phase
from dflash_protocol.placement import LayerRouting
from dflash_protocol.transports.lent_slot import LentSlot
from dflash_runtime.compute.asking import AskedLayers, AskRoute
from dflash_runtime.compute.backend import MailRoute
from dflash_runtime.engine.absent_owners import AbsentOwners

_OWN, _OTHER = 0, 1


class NoOwners(AbsentOwners):
    """Implements backend.MailedExperts: experts outside `here` are never asked for, though compiled
    code passes by as if they could be. Immutable."""

    num_owners = 2
    own_index = _OWN

    def __init__(self, here: Mapping[int, npt.NDArray[np.bool_]]) -> None:
        """`here`: by layer id, the experts that this process computes. Shapes: each [E]."""
        super().__init__(here.__getitem__)
        self._here = here
        self._route = AskRoute(
            _OTHER, _lend, deadline_s=lambda phase, num_pairs: 1.0, fail=lambda *_: None
        )

    def routing(self, layer_id: int) -> LayerRouting:
        num_experts = self._here[layer_id].size
        ids = np.arange(num_experts, dtype=np.int32)
        return LayerRouting(np.full(num_experts, _OWN, np.int32), ids, _OWN, is_identity=True)

    def ask_routes(self) -> Sequence[AskRoute]:
        """One, which nothing is asked through."""
        return (self._route,)

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


class _NoSlot(LentSlot):
    """A slot of no ring."""

    def __init__(self) -> None:
        self.port = 0

    @property
    def spin_ns(self) -> int:
        return 0

    def give_back(self) -> None:
        """Nothing."""


def _lend() -> LentSlot:
    return _NoSlot()
