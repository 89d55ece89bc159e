"""Two GPUs connected by a mailbox, a parent's and a daemon's, each in its own process: emulated or
real ones behind one interface, so that the same tests run on both; and an emulated GPU with a
daemon's processor.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, Protocol

import pytest

from dflash_protocol.device import Device
from dflash_protocol.errors import DeviceUnavailable
from dflash_protocol.settings import Settings
from dflash_runtime.compute.gpu.device.cupy_device import CupyDevice
from support.driver_use import DriverUse
from support.emulated_device import EmulatedDevice
from support.emulated_gpu import TINY, EmulatedGpus
from support.gpu_devices import EMULATED, two_gpus, used_bytes
from support.mailbox_rig import (
    NUM_TOKENS,
    TRIED_STEPS,
    install_mailing_gpus,
)
from support.processes import MOST_POOL_THREADS, ROOT
from support.random_gguf import RandomShape, write_model
from support.random_qwen35moe import Qwen35MoeShape
from support.watched_daemon import RESIDENT

GPU, PROCESSOR = "gpu", "processor"
QWEN3MOE, RECURRENT = "qwen3moe", "qwen35moe"

_TINY_RECURRENT = Qwen35MoeShape(
    hidden_size=64,
    num_experts=7,
    num_experts_used=2,
    ffn_size=32,
    num_layers=2,
    recurrent_layers=(True, False),
    head_dim=16,
    shared_ffn_size=32,
    vocab_size=TINY.vocab_size,
)
_BLOCK_BYTES = 2 << 20
_EVENTS = 8
"""Most events that a driver may keep for reuse."""


@dataclass(frozen=True)
class Pace:
    """Time limits and sizes of tests that suit the speed of a pair."""

    limit_ms: int
    """Time limit of a step."""
    asked_limit_ms: int
    """The setting that it comes from."""
    silence_s: float
    """Silence after which a daemon drops a parent."""
    num_tokens: int
    """Length of a text."""
    context: int
    fault_at: int
    """The step of a text in which a fault happens."""
    dying_steps: tuple[int, ...]
    """Steps in which parents die: first some of a text, so that daemons have run all their code,
    then some of the trial before it."""


EMULATED_PACE = Pace(
    limit_ms=2000,
    asked_limit_ms=2000,
    silence_s=5.0,
    num_tokens=NUM_TOKENS,
    context=32,
    fault_at=3,
    dying_steps=tuple(range(2 * TRIED_STEPS + 2, 0, -1)),
)
GPU_PACE = Pace(
    limit_ms=Settings().step_limit_ms,
    asked_limit_ms=Settings().step_limit_ms,
    silence_s=5.0,
    num_tokens=200,
    context=256,
    fault_at=20,
    # The trial takes 48 steps in each kind of memory.
    dying_steps=(290, 200, 140, 110, 95, 80, 52, 47, 30, 1),
)
PROCESSOR_PACE = replace(EMULATED_PACE, asked_limit_ms=EMULATED_PACE.limit_ms // 10)
PACES = {EMULATED: EMULATED_PACE, GPU: GPU_PACE, PROCESSOR: PROCESSOR_PACE}


class DevicePair(Protocol):
    """A parent's device and a daemon's."""

    @property
    def name(self) -> str:
        """EMULATED, GPU or PROCESSOR."""

    @property
    def pace(self) -> Pace:
        """Time limits and sizes."""

    @property
    def devices(self) -> tuple[str, str]:
        """Names of the parent's and the daemon's device, as their processes see them."""

    @property
    def daemon_module(self) -> str:
        """The module that a daemon's process runs."""

    def model(self, name: str, folder: Path) -> Path:
        """A model file; `name` is QWEN3MOE or RECURRENT."""

    def shared_folder(self, run_dir: Path) -> AbstractContextManager[Path]:
        """A run directory in which both can share memory; must be empty at the end."""

    def hide_memory(self) -> None:
        """From now on this device cannot map peers' memory: lines are in host memory."""

    def held(self) -> dict[str, int]:
        """This process's device resources, by kind."""

    def used(self) -> dict[str, int]:
        """Bytes in use on each device, by all processes."""

    def may_grow(self) -> dict[str, int]:
        """Growth of each count that is not a leak."""


class EmulatedPair:
    """Two emulated GPUs: slow, but every byte is counted."""

    name = EMULATED
    pace = EMULATED_PACE
    devices = "cuda:0", "cuda:0"
    """Each process has its own ``cuda:0``."""
    daemon_module = "support.emulated_daemon"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._gpus: EmulatedGpus = install_mailing_gpus(monkeypatch)
        self._monkeypatch = monkeypatch

    def model(self, name: str, folder: Path) -> Path:
        """As DevicePair.model: a random one."""
        shape: RandomShape = TINY if name == QWEN3MOE else _TINY_RECURRENT
        return write_model(folder / f"{name}.gguf", shape, seed=4, tensor_type="Q8_0")

    @contextmanager
    def shared_folder(self, run_dir: Path) -> Iterator[Path]:
        """As DevicePair.shared_folder: any will do."""
        yield run_dir

    def hide_memory(self) -> None:
        """As DevicePair.hide_memory."""
        self._monkeypatch.setattr(EmulatedDevice, "import_memory", _see_nothing)

    def held(self) -> dict[str, int]:
        """As DevicePair.held."""
        return self._gpus.held()

    def used(self) -> dict[str, int]:
        """As DevicePair.used: this process only."""
        return {}

    def may_grow(self) -> dict[str, int]:
        """As DevicePair.may_grow."""
        return _HOST_MAY_GROW


class ProcessorPair(EmulatedPair):
    """An emulated GPU and a processor, which computes a daemon's experts."""

    name = PROCESSOR
    pace = PROCESSOR_PACE
    devices = "cuda:0", "cpu"
    daemon_module = "support.watched_daemon"


class GpuPair:
    """The first two GPUs; skips the test if there are fewer."""

    name = GPU
    pace = GPU_PACE
    daemon_module = "support.watched_daemon"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._devices: tuple[Device, Device] = two_gpus()
        self.devices = str(self._devices[0]), str(self._devices[1])
        self._monkeypatch = monkeypatch
        self.held = DriverUse(monkeypatch).held

    def model(self, name: str, folder: Path) -> Path:
        """As DevicePair.model: a trained one."""
        stem = {QWEN3MOE: "dflash-demo", RECURRENT: "dflash-demo-qwen35moe"}[name]
        return ROOT / "demo" / f"{stem}.gguf"

    @contextmanager
    def shared_folder(self, run_dir: Path) -> Iterator[Path]:
        """As DevicePair.shared_folder: GPUs can map only memory of a tmpfs."""
        # Not a name that leak checks of other test sessions look for.
        folder = Path(tempfile.mkdtemp(prefix="mailbox-test-", dir="/dev/shm"))
        self._monkeypatch.setenv("DFLASH_MOE_EXPERT_COMPUTE_IPC_WORK_DIR", str(folder))
        yield folder
        left = [path.name for path in folder.iterdir()]
        shutil.rmtree(folder)
        assert not left, f"left in {folder}: {left}"

    def hide_memory(self) -> None:
        """As DevicePair.hide_memory."""
        self._monkeypatch.setattr(CupyDevice, "import_memory", _see_nothing)

    def used(self) -> dict[str, int]:
        """As DevicePair.used."""
        return {f"bytes used of {device}": used_bytes(device) for device in self._devices}

    def may_grow(self) -> dict[str, int]:
        """As DevicePair.may_grow. A driver allocates blocks that small allocations share, so that
        another order of the same allocations may need one block more; `held` finds smaller leaks.
        Events are kept for reuse."""
        blocks = {f"bytes used of {device}": 2 * _BLOCK_BYTES for device in self._devices}
        return _HOST_MAY_GROW | blocks | {"events": _EVENTS}


def _see_nothing(*_: object) -> NoReturn:
    raise DeviceUnavailable("lines are where the test damages them")


_HOST_MAY_GROW = {RESIDENT: 8 << 20, "threads": MOST_POOL_THREADS}
"""Fragmentation of the host's heap: 1 to 2 MB were seen after 20 rounds."""
PAIRS: dict[str, Callable[[pytest.MonkeyPatch], DevicePair]] = {
    EMULATED: EmulatedPair,
    PROCESSOR: ProcessorPair,
    GPU: GpuPair,
}
