"""What a plan is made from: the model, the devices, the box, the heat, and what is asked for.

Pure: whoever opens a model fills these, the planner reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_adapters.spec import ModelSpec
from dflash_protocol.device import Device, DeviceKind
from dflash_protocol.ids import F64Array
from dflash_runtime.compute.room import Room
from dflash_runtime.placement.box import Box


@dataclass(frozen=True, slots=True)
class ParentDevice:
    """A device that the parent can compute on."""

    device: Device
    free_bytes: int
    """What a plan may use: free memory less what is to stay free."""
    footprint: Room
    chunks: tuple[int, ...]
    """Sizes that prompts may be cut into, in tokens, the preferred one first, then smaller ones."""
    shares_host_memory: bool = False
    """Whether it has no memory of its own: then `free_bytes` is that of both."""
    numeric_class: str = ""
    """Devices of one class compute the same bits; empty: not known, equal to no other."""
    cache_slots: int = 0
    """Experts of each layer that steps keep besides those that live there; the footprint has room
    for them. One device may be given with several numbers."""

    @property
    def is_host(self) -> bool:
        """Whether it is the processor."""
        return self.device.kind is DeviceKind.CPU


@dataclass(frozen=True, slots=True)
class ExpertDaemon:
    """A process that computes experts for the parent; its speed and link are in the box."""

    name: str
    device: Device
    free_bytes: int
    """On a GPU without what its computing takes, as the daemon says."""
    footprint: Room
    numeric_class: str = ""
    """See ParentDevice."""
    budget_bytes: int | None = None
    """The most that experts may take there, if that was asked for."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """The request whose time is minimised, in tokens."""

    prompt: int = 1000
    written: int = 400
    long_prompt: int = 4096
    long_share: float = 0.1
    """For each such request so many prompts of `long_prompt` tokens are expected."""

    def __post_init__(self) -> None:
        assert self.prompt >= 1
        assert self.written >= 0


@dataclass(frozen=True, slots=True, eq=False)
class ExpertShares:
    """How many of a token's selections each expert is expected to have, by layer id.

    Shapes: each [E], in 0..1, with the number of experts used as sum. `num_tokens` is how many
    tokens were counted; 0: nothing says which experts are hot, and all are alike, so that any N of
    them are expected to have N / E of the selections.
    """

    decode: Mapping[int, F64Array]
    prefill: Mapping[int, F64Array]
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a plan depends on, but for wishes."""

    model_identity: str
    spec: ModelSpec
    head_bytes: int
    """Bytes of the head's matrix on the device, as `Box` counts them."""
    box: Box
    parents: tuple[ParentDevice, ...]
    """Devices that this Python can compute on, in order of preference; the cpu is one of them."""
    daemons: tuple[ExpertDaemon, ...]
    host_bytes: int
    """Memory that the processor's experts may take: pages of the mapped file."""
    shares: ExpertShares
    request: PlannedRequest = field(default_factory=PlannedRequest)
    most_swaps: int = 0
    """Experts that may move to the parent's device between two requests: it keeps memory for copies
    of so many."""

    def of_device(self, device: Device) -> list[ParentDevice]:
        """The same device with each number of slots that steps may have."""
        return [each for each in self.parents if each.device == device]
