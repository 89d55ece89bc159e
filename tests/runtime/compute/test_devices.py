"""Opening the backend of a device: which one it is, and the errors if there is none."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from dflash_protocol.device import CPU, Device, DeviceKind
from dflash_protocol.errors import SettingsError
from dflash_runtime.compute import BackendName, devices, open_backend
from dflash_runtime.compute.backend import ComputeBackend
from support.processes import ROOT, environment

GPUS = [Device(DeviceKind.CUDA, 1), Device(DeviceKind.HIP)]


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """Pretend that there is such a module."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("device", [None, CPU])
@pytest.mark.parametrize("name", [BackendName.CPU, BackendName.REFERENCE])
def test_the_cpu_has_the_backends_it_had(device: Device | None, name: BackendName) -> None:
    backend = open_backend(device, backend=name, num_threads=1)
    assert backend.name == name
    backend.close()


@pytest.mark.parametrize("device", GPUS, ids=str)
def test_without_cupy_a_gpu_is_refused_with_what_to_do(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # makes its import fail
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        name: requirements
        for name, requirements in project["optional-dependencies"].items()
        if name != "dev" and name.startswith("rocm" if device.kind == "hip" else "cuda")
    }
    assert extras
    with pytest.raises(SettingsError, match=f"^device {device}: .*CuPy") as caught:
        open_backend(device)
    assert len(str(caught.value).splitlines()) == 1
    # In a clone pip finds no dflash-moe: the advice names what the extra would install.
    assert "dflash-moe[" not in str(caught.value)
    caught.match(f"{sys.executable} -m pip install '.*device cpu$")
    for requirements in extras.values():
        for requirement in requirements:
            assert f"'{requirement}'" in str(caught.value)
    assert "Traceback" not in str(devices.why_unusable(device.kind))
    assert devices.why_unusable(DeviceKind.CPU) is None


def test_a_version_without_kernels_for_gpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "cupy")
    monkeypatch.setattr(devices, "_GPU_MODULE", "dflash_runtime.compute.not_in_this_version")
    for device in GPUS:
        with pytest.raises(SettingsError, match=f"^device {device}: .*version"):
            open_backend(device)


@pytest.mark.parametrize("device", GPUS, ids=str)
def test_the_module_of_gpus_is_asked_for_its_backend(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Device, str | None]] = []

    def opened(device: Device, *, cache_dir: str | None) -> ComputeBackend:
        asked.append((device, cache_dir))
        return open_backend(CPU, backend=BackendName.REFERENCE)

    install(monkeypatch, "cupy")
    install(monkeypatch, "gpu_backend_of_a_test", CupyBackend=opened)
    monkeypatch.setattr(devices, "_GPU_MODULE", "gpu_backend_of_a_test")
    open_backend(device, cache_dir="/some/where").close()
    assert asked == [(device, "/some/where")]


@pytest.mark.parametrize("name", [BackendName.CPU, BackendName.REFERENCE])
def test_a_backend_of_the_cpu_is_refused_on_a_gpu(name: BackendName) -> None:
    with pytest.raises(SettingsError, match=rf"^backend {name}\b.*\bcuda:1\b"):
        open_backend(GPUS[0], backend=name)


def test_the_cpu_imports_nothing_of_gpus() -> None:
    code = """
import sys
import tomllib
from dflash_runtime.compute import BackendName, open_backend
open_backend(None, backend=BackendName.REFERENCE).close()
print([name for name in sys.modules if "cupy" in name])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "[]\n"
