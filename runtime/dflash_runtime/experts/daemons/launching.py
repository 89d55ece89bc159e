"""Daemons to spawn: from what was asked for to the command and environment that start each.

Knows nothing of experts or links; what it makes is a Launch.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dflash_protocol.device import Device, DeviceKind, parse_device
from dflash_protocol.endpoint import Endpoint
from dflash_protocol.errors import SettingsError
from dflash_protocol.settings import Settings, daemon_environment, package_roots
from dflash_protocol.settings.kinds import Daemons, DaemonSetting, checked
from dflash_runtime.compute.backend import BackendName
from dflash_runtime.compute.cores import parse_cores, share_of_cores, usable_cores
from dflash_runtime.experts.daemons.link import Launch

_PACKAGES = ("dflash_protocol", "dflash_adapters", "dflash_runtime", "dflash_daemon")


@dataclass(frozen=True, slots=True)
class DaemonChoice:
    """A daemon to spawn, checked. `launcher` None = this very interpreter."""

    name: str
    device: Device
    launcher: Path | None
    cores: tuple[int, ...]
    setting: DaemonSetting

    @property
    def program(self) -> Path:
        """What is executed."""
        return self.launcher or Path(sys.executable)

    @property
    def is_python(self) -> bool:
        """A Python interpreter runs our module; any other executable takes the arguments itself."""
        return self.launcher is None or self.launcher.name.startswith("python")

    def environment(self, settings: Settings) -> dict[str, str]:
        """All that the child's environment holds."""
        python_paths = package_roots(_PACKAGES) if self.launcher is None else None
        return daemon_environment(settings, self.setting, python_paths=python_paths)


def choose_daemons(
    daemons: Sequence[DaemonSetting | str], settings: Settings
) -> list[DaemonChoice]:
    """Daemons as asked for, checked and named: ``cpu0``, ``cpu1`` … unless they have names.

    Whether a launcher can use its device is for the launcher to find out.
    Raises: SettingsError if a launcher cannot be executed, or cores are not ours.
    """
    return [choose_daemon(each, index, settings) for index, each in enumerate(daemons)]


def choose_daemon(daemon: DaemonSetting | str, daemon_idx: int, settings: Settings) -> DaemonChoice:
    """One of them, by its place. Raises: SettingsError that says what is wrong with which."""
    if isinstance(daemon, str):
        setting = checked("daemon", daemon, Daemons().from_item)
        assert isinstance(setting, DaemonSetting)
    else:
        setting = daemon
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
    """Names for statistics and messages: of the spawned ones, then ``link0``, ``link1`` …

    Raises: SettingsError if two have the same.
    """
    names = [choice.name for choice in choices]
    names += [f"link{index}" for index in range(len(endpoints))]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise SettingsError(f"two daemons are called {name!r}; give one another name")
    return names


def launch_of(
    choices: Sequence[DaemonChoice],
    daemon_idx: int,
    *,
    model_path: Path,
    backend_name: str,
    settings: Settings,
) -> Launch:
    """How to start one of the daemons: unless told otherwise, it has its share of the cores.

    A parent that computes on a GPU keeps one, on which it looks for what others have done.
    """
    choice = choices[daemon_idx]
    cores = choice.cores or share_of_cores(
        _cores_of_daemons(len(choices), backend_name), daemon_idx, len(choices)
    )
    is_alike = choice.device.kind is DeviceKind.CPU and (
        # Another environment may lack what our kernels need; then it is slow, and says so.
        backend_name == BackendName.REFERENCE
        or (backend_name == BackendName.CPU and choice.launcher is None)
    )
    command = (
        str(choice.program),
        # -P: what lies in the folder we were started in is not ours to import.
        *(("-P", "-m", "dflash_daemon") if choice.is_python else ()),
        str(model_path.absolute()),
        "--device",
        str(choice.device),
        "--backend",
        backend_name if is_alike else BackendName.AUTO.value,
        "--threads",
        str(choice.setting.threads or len(cores)),
        *(("--cores", _as_list(cores)) if choice.cores or settings.pin_daemons else ()),
    )
    return Launch(command, choice.environment(settings))


def _cores_of_daemons(num_daemons: int, backend_name: str) -> list[int]:
    cores = usable_cores()
    is_on_gpu = backend_name not in tuple(BackendName)
    return cores[1:] if is_on_gpu and len(cores) > max(2, num_daemons) else cores


def _launcher(text: str) -> Path | None:
    """Raises: SettingsError if it cannot be executed."""
    if not text:
        return None
    path = Path(shutil.which(text) or text).absolute()
    try:
        is_regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise SettingsError(f"daemon launcher {text!r}: {error.strerror}") from error
    if not is_regular or not os.access(path, os.X_OK):
        raise SettingsError(f"daemon launcher {text!r} is not an executable file")
    # By folder too: the interpreters of two environments may be links to the same file.
    ours = Path(sys.executable)
    is_ours = path.parent == ours.parent and path.resolve() == ours.resolve()
    return None if is_ours else path


def _as_list(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))
