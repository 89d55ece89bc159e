"""Daemons to spawn: from their settings to the Launch, command and environment, of each."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from dflash_protocol.device import Device, DeviceKind, parse_device
from dflash_protocol.endpoint import Endpoint
from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import Settings, daemon_environment, package_roots
from dflash_protocol.settings.kinds import (
    Daemons,
    DaemonSetting,
    check_expert_budget,
    checked,
)
from dflash_protocol.transports.in_flight import LONG_SPIN_S
from dflash_runtime.compute.backend import BackendName
from dflash_runtime.compute.cores import (
    most_threads,
    parse_cores,
    share_of_cores,
    usable_cores,
)
from dflash_runtime.compute.topology import read_topology
from dflash_runtime.experts.daemons.link import Launch
from dflash_runtime.placement.budgets import ExpertBudget, budget_of
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER

_PACKAGES = ("dflash_protocol", "dflash_adapters", "dflash_runtime", "dflash_daemon")


@dataclass(frozen=True, slots=True)
class DaemonChoice:
    """A daemon to spawn, checked. `launcher` None: this interpreter."""

    name: str
    device: Device
    launcher: Path | None
    cores: tuple[int, ...]
    setting: DaemonSetting

    @property
    def program(self) -> Path:
        """The program to execute."""
        return self.launcher or Path(sys.executable)

    @property
    def is_python(self) -> bool:
        """Whether it is an interpreter that runs our module; other programs get the arguments."""
        return self.launcher is None or self.launcher.name.startswith("python")

    def environment(self, settings: Settings) -> dict[str, str]:
        """The child's whole environment."""
        python_paths = package_roots(_PACKAGES) if self.launcher is None else None
        return daemon_environment(settings, self.setting, python_paths=python_paths)


def choose_daemons(
    daemons: Sequence[DaemonSetting | str], settings: Settings
) -> list[DaemonChoice]:
    """Check daemons, and name those without a name ``cpu0``, ``cpu1`` …

    Whether a launcher can use its device is not checked here.
    Raises: SettingsError if a launcher cannot be executed, or a core cannot be used by us.
    """
    return [choose_daemon(each, index, settings) for index, each in enumerate(daemons)]


def choose_daemon(daemon: DaemonSetting | str, daemon_idx: int, settings: Settings) -> DaemonChoice:
    """Check the daemon at one index. Raises: SettingsError that names its setting."""
    if isinstance(daemon, str):
        setting = checked("daemon", daemon, Daemons().from_item)
        assert isinstance(setting, DaemonSetting)
    else:
        setting = daemon
    check_expert_budget(setting.source or "daemon", setting)
    where = f"{setting.source or 'daemon'}={setting.device!r}"
    read = partial(parse_device, default_index=settings.ipc_gpu)
    device = checked(setting.source or "daemon", setting.device, read)
    assert isinstance(device, Device)
    cores: tuple[int, ...] = ()
    if setting.cores:
        try:
            cores = tuple(parse_cores(setting.cores))
        except SettingsError as error:
            raise SettingsError(f"{where}: {error}") from error
    return DaemonChoice(
        name=setting.name or f"{device.kind}{daemon_idx}",
        device=device,
        launcher=_launcher(setting.launcher or settings.ipc_bin),
        cores=cores,
        setting=setting,
    )


def daemon_names(choices: Sequence[DaemonChoice], endpoints: Sequence[Endpoint]) -> list[str]:
    """Names for statistics and messages: of spawned daemons, then ``link0``, ``link1`` …

    Raises: SettingsError if two are equal, or one is that of another owner.
    """
    names = [choice.name for choice in choices]
    names += [f"link{index}" for index in range(len(endpoints))]
    for index, name in enumerate(names):
        if name in (LOCAL_OWNER, HOST_OWNER):
            raise SettingsError(f"a daemon is called {name!r}, as the parent is; rename it")
        if name in names[:index]:
            raise SettingsError(f"two daemons are called {name!r}; give one another name")
    return names


def names_here(
    names: Sequence[str], num_spawned: int, endpoints: Sequence[Endpoint]
) -> frozenset[str]:
    """Daemons of this machine, of `names` that begin with those that are spawned."""
    connected = zip(names[num_spawned:], endpoints, strict=True)
    near = (name for name, each in connected if each.path is not None or each.is_loopback)
    return frozenset((*names[:num_spawned], *near))


def budgets_of(choices: Sequence[DaemonChoice]) -> dict[str, ExpertBudget]:
    """The most that daemons get of experts' weights, by name, of those that have a budget."""
    found = {choice.name: budget_of(choice.setting) for choice in choices}
    return {name: budget for name, budget in found.items() if budget is not None}


def launch_of(
    choices: Sequence[DaemonChoice],
    daemon_idx: int,
    *,
    model_path: Path,
    backend_name: str,
    settings: Settings,
) -> Launch:
    """How to start one of the daemons; unless set otherwise, it gets an equal share of the cores,
    and no more threads than its share of a CPU quota has room for.

    A parent that computes on a GPU keeps one core, to poll for replies. A daemon with cores of its
    own polls longer, unless set otherwise.
    """
    choice = choices[daemon_idx]
    cores = choice.cores or share_of_cores(
        _cores_of_daemons(len(choices), backend_name), daemon_idx, len(choices)
    )
    is_alike = choice.device.kind is DeviceKind.CPU and (
        # Another environment may lack the kernels' packages: it then logs that it is slow.
        backend_name == BackendName.REFERENCE
        or (backend_name == BackendName.CPU and choice.launcher is None)
    )
    command = (
        str(choice.program),
        # -P: import nothing from the working directory.
        *(("-P", "-m", "dflash_daemon") if choice.is_python else ()),
        str(model_path.absolute()),
        "--device",
        str(choice.device),
        "--backend",
        backend_name if is_alike else BackendName.AUTO.value,
        "--threads",
        str(choice.setting.threads or _num_threads(cores, len(choices))),
        *(("--cores", ",".join(map(str, cores))) if choice.cores or settings.pin_daemons else ()),
    )
    if settings.spin_us is None and _has_own_cores(choices, daemon_idx):
        settings = replace(settings, spin_us=round(1e6 * LONG_SPIN_S))
    return Launch(command, choice.environment(settings))


def _has_own_cores(choices: Sequence[DaemonChoice], daemon_idx: int) -> bool:
    """Whether several cores, but not all, were chosen for a daemon, and for no other one."""
    own = set(choices[daemon_idx].cores)
    others = (each.cores for index, each in enumerate(choices) if index != daemon_idx)
    return 1 < len(own) < len(usable_cores()) and own.isdisjoint(chain.from_iterable(others))


def _num_threads(cores: Sequence[int], num_daemons: int) -> int:
    most = most_threads(read_topology())
    return len(cores) if most is None else min(len(cores), max(1, most // num_daemons))


def _cores_of_daemons(num_daemons: int, backend_name: str) -> list[int]:
    cores = usable_cores()
    is_on_gpu = backend_name not in tuple(BackendName)
    return cores[1:] if is_on_gpu and len(cores) > max(2, num_daemons) else cores


def _launcher(text: str) -> Path | None:
    """The path of a launcher; None for this interpreter. Raises: SettingsError if it is not
    executable."""
    if not text:
        return None
    path = Path(shutil.which(text) or text).absolute()
    try:
        is_regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise SettingsError(f"daemon launcher {text!r}: {error.strerror}") from error
    if not is_regular or not os.access(path, os.X_OK):
        raise SettingsError(f"daemon launcher {text!r} is not an executable file")
    # The folder counts too: the interpreters of two environments may link to one file.
    ours = Path(sys.executable)
    is_ours = path.parent == ours.parent and path.resolve() == ours.resolve()
    return None if is_ours else path
