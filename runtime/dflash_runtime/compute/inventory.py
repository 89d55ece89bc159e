"""What an interpreter and its machine offer for computing: versions, processors, devices.

Also a program by itself: ``dflash-moe doctor`` passes its source to launchers whose interpreters
may lack our packages or have older ones, so importing it needs the standard library alone.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from importlib import metadata

OLDEST_PYTHON = (3, 11)
_DISTRIBUTIONS = ("dflash-moe", "numpy", "numba", "llvmlite", "pyzmq", "msgpack", "psutil", "gguf")
_NEEDED = ("numpy", "zmq", "msgpack", "psutil", "gguf")
"""Modules without which no daemon starts."""


def inventory() -> dict[str, object]:
    """Facts for JSON, with a reason wherever something cannot be used.

    ``backends`` and ``transports`` map each name to None if it can be used, else to why not;
    ``gpus`` lists GPUs, and ``drivers`` the drivers that were asked for them.
    """
    backends, tier = _backends()
    gpus, why_no_gpu = _gpus()
    drivers, described = _gpus_of_drivers()
    gpus = _merged(gpus, described)
    if gpus and why_no_gpu and not any(gpu.get("why_not") is None for gpu in gpus):
        why_no_gpu = f"none can be used: {why_no_gpu}"
    backends |= _gpu_backends(backends["reference"])
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "version": _our_version(),
        "packages": _packages(),
        "cpu": {"name": _cpu_name(), "processors": _num_processors(), "tier": tier},
        "memory": _memory(),
        "gpus": gpus,
        "why_no_gpu": why_no_gpu,
        "drivers": drivers,
        "backends": backends,
        "transports": {"stream": backends["reference"], "shared": _why_not_shared(backends)},
    }


def _our_version() -> str | None:
    try:
        from dflash_protocol import __version__
    except ImportError:
        return None
    return __version__


def _packages() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for distribution in metadata.distributions():
        name = str(distribution.metadata["Name"] or "")
        if name.lower().startswith("cupy"):  # named by vendor and version
            found[name] = distribution.version
    return found


def _backends() -> tuple[dict[str, str | None], str | None]:
    """Backends with the reason why not, and the CPU kernels' tier."""
    backends: dict[str, str | None] = {"reference": _why_no_daemon(), "cpu": None}
    backends["cpu"] = backends["reference"]
    if backends["cpu"] is not None:
        return backends, None
    try:
        importlib.import_module("numba")  # first, so that the reason names what is to be installed
        from dflash_protocol.errors import DflashError
        from dflash_protocol.settings import load_settings
        from dflash_runtime.compute.cpu.compile.tiers import choose_tier
    except Exception as error:  # incompatible libraries raise anything
        backends["cpu"] = _reason(error)
        return backends, None
    try:
        settings = load_settings()
        try:
            return backends, str(choose_tier(settings.cpu_tier, settings.cache_dir))
        except TypeError:  # older versions of our packages find the folder themselves
            return backends, str(choose_tier(settings.cpu_tier))
    except DflashError as error:
        backends["cpu"] = str(error)
        return backends, None


def _gpu_backends(why_no_daemon: str | None) -> dict[str, str | None]:
    """For each kind of GPU, why a daemon cannot use it. Does not check that there is one."""
    kinds = ("cuda", "hip")
    if why_no_daemon is not None:
        return dict.fromkeys(kinds, why_no_daemon)
    try:
        from dflash_protocol.device import DeviceKind
        from dflash_runtime.compute.devices import why_unusable
    except ImportError as error:  # older versions of our packages
        return dict.fromkeys(kinds, _reason(error))
    return {kind: why_unusable(DeviceKind(kind)) for kind in kinds}


def _why_not_shared(backends: dict[str, str | None]) -> str | None:
    if backends["reference"] is not None:
        return backends["reference"]
    try:
        from dflash_protocol.ring.compiled import why_unavailable
    except ImportError as error:
        return _reason(error)
    return why_unavailable() or None


def _why_no_daemon() -> str | None:
    if sys.version_info < OLDEST_PYTHON:
        return "Python {}.{} or newer is needed".format(*OLDEST_PYTHON)
    try:
        for name in (*_NEEDED, "dflash_protocol", "dflash_runtime", "dflash_daemon"):
            __import__(name)
    except Exception as error:
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name} is not installed"
    first_line, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first_line}"


def _cpu_name() -> str:
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()


def _num_processors() -> int:
    return len(os.sched_getaffinity(0))


def _memory() -> dict[str, int]:
    """Total and available bytes: of this process's cgroup, where our packages can tell."""
    try:
        from dflash_runtime.compute.memory import host_memory
    except ImportError:  # our packages are missing or older
        return _memory_of_system()
    memory = host_memory()
    return {"total_bytes": memory.total_bytes, "free_bytes": memory.free_bytes}


def _memory_of_system() -> dict[str, int]:
    names = {"MemTotal": "total_bytes", "MemAvailable": "free_bytes"}
    found = {}
    for line in _lines("/proc/meminfo"):
        key, _, value = line.partition(":")
        if key in names:
            found[names[key]] = int(value.split()[0]) * 1024
    return found


def _lines(path: str) -> list[str]:
    try:
        with open(path) as stream:
            return stream.read().splitlines()
    except OSError:
        return []


def _gpus() -> tuple[list[dict[str, object]], str | None]:
    """GPUs that CuPy sees, and why there are none."""
    try:
        cupy = importlib.import_module("cupy")
    except Exception as error:
        return [], _reason(error)
    try:
        runtime = cupy.cuda.runtime
        kind = "hip" if runtime.is_hip else "cuda"
        gpus: list[dict[str, object]] = []
        for index in range(runtime.getDeviceCount()):
            with cupy.cuda.Device(index):
                free_bytes, total_bytes = runtime.memGetInfo()
            properties = runtime.getDeviceProperties(index)
            name = properties["name"]
            gpus.append(
                {
                    "device": f"{kind}:{index}",
                    "name": name.decode(errors="replace") if isinstance(name, bytes) else str(name),
                    "total_bytes": int(total_bytes),
                    "free_bytes": int(free_bytes),
                }
            )
        return gpus, None if gpus else f"CuPy sees no {kind} device"
    except Exception as error:  # no driver, no device, a driver that is too old
        return [], _reason(error)


def _gpus_of_drivers() -> tuple[dict[str, dict[str, object]], list[dict[str, object]]]:
    """Drivers by kind, and the GPUs that they see, whether or not CuPy does."""
    drivers: dict[str, dict[str, object]] = {}
    gpus: list[dict[str, object]] = []
    try:
        from dflash_protocol.device import DeviceKind
        from dflash_protocol.errors import DflashError
        from dflash_runtime.compute.gpu.device.devices import VENDORS, describe_gpus
        from dflash_runtime.compute.gpu.device.driver import open_driver
        from dflash_runtime.compute.gpu.device.rtc import runtime_compiler
    except ImportError:  # our packages are missing or older
        return drivers, gpus
    for kind, vendor in VENDORS.items():
        found, why_none = describe_gpus(DeviceKind(kind))
        facts: dict[str, object] = {"version": None, "compiler": None, "why_not": why_none}
        try:
            if found:
                facts["version"] = version = open_driver(vendor).version()
                newest = version // 1000 if kind is DeviceKind.CUDA else None
                facts["compiler"] = runtime_compiler(vendor, newest).version
        except DflashError as error:
            facts["why_not"] = str(error)
        drivers[str(kind)] = facts
        for each in found:
            able, memory = each.capabilities, each.memory
            gpus.append(
                {
                    "device": str(each.device),
                    "name": each.name,
                    "total_bytes": memory.total_bytes,
                    "free_bytes": memory.free_bytes,
                    "is_shared_with_host": memory.is_shared_with_host,
                    "stays_free_bytes": memory.stays_free_bytes,
                    "note": memory.note,
                    "pci_bus_id": each.pci_bus_id,
                    "uuid": each.uuid,
                    "architecture": None if able is None else able.architecture,
                    "lanes": None if able is None else able.lanes,
                    "lacks": None if able is None else list(able.missing()),
                    "why_not": each.why_not or facts["why_not"],
                }
            )
    return drivers, gpus


def _merged(
    seen: list[dict[str, object]], described: list[dict[str, object]]
) -> list[dict[str, object]]:
    """Merge GPUs as the drivers describe them; one that CuPy does not see cannot be used."""
    by_device = {gpu["device"]: gpu for gpu in seen}
    for gpu in described:
        if gpu["device"] not in by_device:
            gpu["why_not"] = gpu["why_not"] or "CuPy does not see it"
        by_device[gpu["device"]] = gpu
    return list(by_device.values())


if __name__ == "__main__":
    print(json.dumps(inventory()))
