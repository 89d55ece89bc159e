"""What a captured step is given where all its experts are in this process, or none are asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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

    def daemon_threads(self, unknown: int) -> int:
        """None."""
        return 0

    def routing(self, layer_id: int) -> LayerRouting:
        num_experts = self._here[layer_id].size
        ids = np.arange(num_experts, dtype=np.int32)
        return LayerRouting(np.zeros(num_experts, np.int32), ids, 0, is_identity=True)

    def ask_routes(self) -> Sequence[AskRoute]:
        """None is needed."""
        return ()

    def is_any_to_be_checked(self, num_requests: int) -> bool:
        return False

    def count_asked(self, taken: AskedLayers, phase: Phase = Phase.DECODE) -> None:
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
        but: Collection[int] = (),
    ) -> None:
        """Nothing."""

    def is_step_to_be_checked(self, routes: Sequence[MailRoute]) -> bool:
        return False

    def note_checked_step(self, elapsed_s: float) -> None:
        """Nothing."""


class AskedProcessor(NoOwners):
    """Implements backend.MailedExperts: the processor and the device compute some experts of each
    layer, and nothing computes the others. Used by one captured step."""

    num_owners, own_index = 2, 1

    def __init__(
        self,
        asked: Mapping[int, npt.NDArray[np.bool_]],
        banks: Mapping[int, ExpertBank],
        *,
        here: Mapping[int, npt.NDArray[np.bool_]] | None = None,
    ) -> None:
        """`asked`, `here`: by layer id, the experts that the processor and the device compute, the
        latter none if None. Shapes: each [E]. `banks`: all experts of each layer, under their
        global ids."""
        none = {layer_id: np.zeros_like(mask) for layer_id, mask in asked.items()}
        super().__init__(none if here is None else here)
        self.own_banks = banks
        self._asked = asked
        self._settle: Callable[[], None] = _nothing
        self.begin_counts()

    def routing(self, layer_id: int) -> LayerRouting:
        asked = self._asked[layer_id]
        ids = np.arange(asked.size, dtype=np.int32)
        return LayerRouting(asked.astype(np.int32), ids, 0, is_identity=True)

    def settle_with(self, settle: Callable[[], None] | None) -> None:
        self._settle = _nothing if settle is None else settle

    def count_asked(self, taken: AskedLayers, phase: Phase = Phase.DECODE) -> None:
        own = taken.owners[self.own_index]
        self._num_layers += taken.num_layers
        self._num_asked += own.num_requests
        self._num_pairs += own.num_pairs
        self._compute_s += own.compute_s

    def begin_counts(self) -> None:
        """Count from now on."""
        self._settle()
        self._num_layers = self._num_asked = self._num_pairs = 0
        self._compute_s = 0.0

    def counts(self) -> tuple[float, float]:
        """The share of layers that asked so far, and the mean number of experts asked in a layer,
        those that did not ask included."""
        self._settle()
        num_layers = max(1, self._num_layers)
        return self._num_asked / num_layers, self._num_pairs / num_layers

    def computed(self) -> tuple[float, float]:
        """Steps so far, and the seconds of computing in them."""
        self._settle()
        return self._num_layers / max(1, len(self._asked)), self._compute_s

    def mean_computing_s(self) -> float:
        """The mean seconds that computing took for the layers that asked so far; 0 if none did."""
        self._settle()
        return self._compute_s / max(1, self._num_asked)


def _nothing() -> None:
    """Do nothing: there is no step yet."""
