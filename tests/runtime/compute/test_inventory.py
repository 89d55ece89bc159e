"""The inventory of an interpreter: with and without CuPy, and as a program by itself."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_protocol.device import Device, DeviceKind
from dflash_runtime.compute import inventory as inventory_module
from dflash_runtime.compute.gpu.device import devices, driver
from dflash_runtime.compute.inventory import inventory
from dflash_runtime.tools import doctor
from dflash_runtime.tools.doctor import gpu_lines
from support.fake_driver.fake_driver import FakeDriver, Setting

BACKENDS = ("reference", "cpu", "cuda", "hip")


class FakeCupy:
    """Two devices of a vendor; `error` is raised when they are counted."""

    def __init__(self, *, is_hip: bool = False, num_devices: int = 2, error: str = "") -> None:
        self._num_devices = num_devices
        self._error = error
        self._current = -1
        runtime = SimpleNamespace(
            is_hip=is_hip,
            getDeviceCount=self._count,
            memGetInfo=lambda: ((self._current + 1) << 30, 8 << 30),
            getDeviceProperties=lambda index: {"name": f"Card {index}".encode()},
        )
        self.cuda = SimpleNamespace(runtime=runtime, Device=self._device)

    def _count(self) -> int:
        if self._error:
            raise RuntimeError(self._error)
        return self._num_devices

    @contextlib.contextmanager
    def _device(self, index: int) -> Iterator[None]:
        self._current = index
        yield


def with_cupy(monkeypatch: pytest.MonkeyPatch, cupy: object) -> dict[str, Any]:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    found: dict[str, Any] = inventory()
    return found


@pytest.mark.parametrize(("is_hip", "kind"), [(False, "cuda"), (True, "hip")])
def test_devices_that_cupy_sees(monkeypatch: pytest.MonkeyPatch, is_hip: bool, kind: str) -> None:
    found = with_cupy(monkeypatch, FakeCupy(is_hip=is_hip))
    assert found["why_no_gpu"] is None
    assert found["gpus"] == [
        {"device": f"{kind}:{i}", "name": f"Card {i}", "free_bytes": (i + 1) << 30,
         "total_bytes": 8 << 30}
        for i in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cupy", "why"),
    [
        (None, "cupy is not installed"),  # makes its import fail
        (FakeCupy(num_devices=0), "CuPy sees no cuda device"),
        (FakeCupy(error="no driver\nat all"), "RuntimeError: no driver"),
    ],
    ids=["no cupy", "no device", "no driver"],
)
def test_why_there_is_no_device(monkeypatch: pytest.MonkeyPatch, cupy: object, why: str) -> None:
    found = with_cupy(monkeypatch, cupy)
    assert (found["gpus"], found["why_no_gpu"]) == ([], why)
    is_told = [str(found["backends"][kind]) for kind in ("cuda", "hip")]
    assert all(("has no CuPy" in reason) == (cupy is None) for reason in is_told)


def test_what_drivers_say_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    for module in (devices, driver):
        monkeypatch.setattr(module, "open_driver", fake.open)
    fake.set(Setting.NUM_DEVICES, 2)
    fake.set(Setting.VERSION, 12040)
    found = with_cupy(monkeypatch, FakeCupy(num_devices=1))
    first, second = (gpu for gpu in found["gpus"] if gpu["device"].startswith("cuda"))
    assert first["why_not"] is None
    assert (first["name"], first["pci_bus_id"]) == ("Fake 100", "0000:64:00.0")
    assert (first["architecture"], first["lanes"], first["lacks"]) == ("sm_90a", 32, [])
    assert second["why_not"] == "CuPy does not see it"
    assert found["drivers"]["cuda"]["version"] == 12040
    assert "NVRTC" in found["drivers"]["cuda"]["compiler"].upper()
    lines = "\n".join(gpu_lines(first) + gpu_lines(second))
    assert "PCIe 0000:64:00.0, UUID 6464" in lines
    assert "sm_90a, warps of 32 lanes; kernels do without: nothing" in lines
    assert "unusable: CuPy does not see it" in lines
    found["backends"]["cuda"] = None  # pretend that no more is needed
    assert doctor._why_no_gpu(found, Device(DeviceKind.CUDA, 0)) is None
    reason = doctor._why_no_gpu(found, Device(DeviceKind.CUDA, 1))
    assert reason == "cuda:1: CuPy does not see it"
    fake.set(Setting.MAJOR, 5)
    found = with_cupy(monkeypatch, FakeCupy(num_devices=2))
    assert "5.0 is too old" in found["gpus"][0]["why_not"]


def test_its_source_is_a_program_that_needs_the_standard_library_alone(tmp_path: Path) -> None:
    source = Path(inventory_module.__file__).read_text()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", source],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["version"] is None
    assert found["packages"] == {}
    assert found["backends"] == dict.fromkeys(BACKENDS, "numpy is not installed")
    assert set(found["transports"].values()) == {"numpy is not installed"}
    assert found["memory"]["total_bytes"] > 0


def test_a_python_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory_module, "OLDEST_PYTHON", (99, 9))
    backends = inventory()["backends"]
    assert backends == dict.fromkeys(BACKENDS, "Python 99.9 or newer is needed")
