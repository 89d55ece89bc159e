"""``dflash-moe doctor``: what each launcher, this machine and its folders offer, and whether that
covers what the settings ask for."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_protocol.device import CPU, Device, DeviceKind
from dflash_protocol.endpoint import Endpoint, parse_endpoint
from dflash_protocol.errors import DflashError, SettingsError
from dflash_protocol.process.output import noun
from dflash_protocol.settings import DaemonSetting, Settings, cache_directory, run_directory
from dflash_protocol.wire.messages import Offer
from dflash_runtime.compute.topology import read_topology
from dflash_runtime.tools.doctor_cores import core_hints, core_lines, examine_cores

if TYPE_CHECKING:
    from dflash_runtime.experts.daemons.launching import DaemonChoice
    from dflash_runtime.placement.box import LinkSpeed

_PROBE_S = 120.0
"""Limit for a launcher's report: it may have to compile the test of a CPU tier."""
_CONNECT_S = 2.0
_LARGEST_REPORT = 1 << 20
_FEW_FILES = 1024
_SHM = Path("/dev/shm")


@dataclass(slots=True)
class Findings:
    """What was found. `problems` concern what was asked for, `hints` everything else."""

    launchers: list[dict[str, Any]] = field(default_factory=list)
    daemons: list[dict[str, Any]] = field(default_factory=list)
    connections: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    transports: dict[str, str | None] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def examine(settings: Settings) -> Findings:
    """Examine everything. `problems` of the result concern what the settings ask for."""
    found = Findings()
    timed_threads = _examine_model(settings, found)
    has_model = bool(settings.model) and not found.problems
    _examine_launchers(settings, found)
    _examine_connections(settings, found, asks=has_model)
    _examine_machine(settings, found, timed_threads)
    _add_hints(found)
    return found


def _examine_model(settings: Settings, found: Findings) -> int | None:
    """If the settings name one: its metadata, no weights. Returns the threads of decode steps that
    were found to be the fastest for it on this machine."""
    if not settings.model:
        return None
    from dflash_adapters.gguf.file import GgufFile
    from dflash_adapters.library.finding import model_file
    from dflash_adapters.registry import read_spec
    from dflash_runtime.compute.thread_trial import kept_count

    try:
        with GgufFile.open(model_file(settings.model)) as file:
            read_spec(file)
            return kept_count(file, read_topology(), settings.cache_dir)
    except DflashError as error:
        found.problems.append(f"model: {error}")
        return None


def _examine_launchers(settings: Settings, found: Findings) -> None:
    """This interpreter, and the launcher of every daemon in the settings, each in its
    environment."""
    from dflash_runtime.experts.daemons.launching import choose_daemon

    reports: dict[tuple[object, ...], dict[str, Any]] = {}

    def report_of(choice: DaemonChoice) -> dict[str, Any]:
        key = choice.program, choice.setting.environment
        if key not in reports:
            reports[key] = _report(choice, settings)
            found.launchers.append(reports[key])
        return reports[key]

    def why_not(report: dict[str, Any], device: Device) -> str | None:
        reason: str | None = report["failure"] or report["backends"]["reference"]
        if reason is None and settings.ipc_transport == "shared":
            reason = report["transports"]["shared"]
        if reason is None and device.kind is not DeviceKind.CPU:
            reason = _why_no_gpu(report, device)
        return reason

    without_launcher = Settings(cpu_tier=settings.cpu_tier, cache_dir=settings.cache_dir)
    here = report_of(choose_daemon("cpu", 0, without_launcher))
    reason = why_not(here, settings.device or CPU)
    if reason is None and settings.cpu_tier != Settings().cpu_tier:
        reason = here["backends"]["cpu"]
    if reason is not None:
        found.problems.append(f"this interpreter: {reason}")
    found.transports = here.get("transports", {})
    asked = [(each, each.name) for each in settings.daemons]
    if settings.ipc_bin and not asked:  # set, though no daemon uses it yet
        asked = [(DaemonSetting("cpu"), "of the default launcher")]
    for index, (setting, name) in enumerate(asked):
        daemon: dict[str, Any] = {"name": name, "device": setting.device}
        try:
            choice = choose_daemon(setting, index, settings)
        except SettingsError as error:
            daemon["why_not"] = str(error)
        else:
            report = report_of(choice)
            daemon["name"] = name or choice.name
            daemon["launcher"] = str(choice.program)
            daemon["device"] = str(choice.device)
            slowest = "reference" if report["backends"].get("cpu") else "cpu"
            is_cpu = choice.device.kind is DeviceKind.CPU
            daemon["backend"] = slowest if is_cpu else choice.device.kind.value
            daemon["why_not"] = why_not(report, choice.device)
        if daemon["why_not"] is not None:
            called = daemon["name"] or f"{index} ({setting.device})"
            found.problems.append(f"daemon {called}: {daemon['why_not']}")
        found.daemons.append(daemon)


def _why_no_gpu(report: dict[str, Any], device: Device) -> str | None:
    """Why a launcher cannot use a device, from its report; None if it can."""
    backends, gpus = report["backends"], {gpu["device"]: gpu for gpu in report["gpus"]}
    if (reason := backends.get(device.kind.value, "its version knows no such device")) is not None:
        return f"{device}: {reason}"
    if str(device) not in gpus:
        return f"{device}: {report['why_no_gpu'] or 'there is only ' + ', '.join(gpus)}"
    if (reason := gpus[str(device)].get("why_not")) is not None:
        return f"{device}: {reason}"
    return None


def _report(choice: DaemonChoice, settings: Settings) -> dict[str, Any]:
    """The launcher's report of itself, run in the environment of its daemons."""
    from dflash_runtime.compute import inventory

    command = [str(choice.program)]
    # The module's source, since another environment may lack our packages.
    command += ["-c", Path(inventory.__file__).read_text()] if choice.is_python else ["--report"]
    report: dict[str, Any] = {
        "launcher": str(choice.program),
        "is_this": choice.launcher is None,
        "failure": None,
        "backends": {},
    }
    # It must not import from the working directory.
    environment = {**choice.environment(settings), "PYTHONSAFEPATH": "1"}
    try:
        said = json.loads(_last_line(command, environment))
        if not {"cpu", "reference"} <= set(said["backends"]) or "shared" not in said["transports"]:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        report["failure"] = "its report is not that of a daemon's launcher"
    except SettingsError as error:
        report["failure"] = str(error)
    else:
        report.update(said)
    return report


def _last_line(command: list[str], environment: dict[str, str]) -> str:
    """The last line of a program's output. Raises: SettingsError if it fails, times out, or writes
    too much."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
    except OSError as error:
        raise SettingsError(f"cannot be started: {error.strerror}") from error
    try:
        output, errors = process.communicate(timeout=_PROBE_S)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # its children may hold the pipes too
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise SettingsError(f"it did not answer within {_PROBE_S:.0f} s") from None
        raise
    if process.returncode != 0:
        last = (errors.strip().splitlines() or ["no reason given"])[-1]
        raise SettingsError(f"it ended with exit code {process.returncode}: {last[:200]}")
    if len(output) > _LARGEST_REPORT:
        raise SettingsError("its report is too long")
    return (output.strip().splitlines() or [""])[-1]


def _examine_connections(settings: Settings, found: Findings, *, asks: bool) -> None:
    """With `asks`, daemons that answer are asked what they offer for the settings' model."""
    for address in settings.connect:
        endpoint = parse_endpoint(address)
        why_not: str | None = None
        try:
            endpoint.is_folder_there()
            if endpoint.path is not None:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.settimeout(_CONNECT_S)
                    probe.connect(os.fsencode(endpoint.path))
            else:
                host = (endpoint.host or "").strip("[]")
                socket.create_connection((host, endpoint.port), timeout=_CONNECT_S).close()
        except SettingsError as error:
            why_not = str(error)
            found.problems.append(why_not)
        except OSError as error:
            why_not = f"nothing answers: {error.strerror or error}"
            found.problems.append(f"{address}: {why_not}")
        offer, link = None, None
        if why_not is None and asks:
            try:
                offer, link = _offer_at(endpoint, settings)
            except DflashError as error:
                why_not = str(error)
                found.problems.append(why_not)
        record = None if offer is None else asdict(offer)
        request_s = None if link is None else link.step.at(1)
        found.connections.append(
            {"endpoint": address, "why_not": why_not, "offer": record, "request_s": request_s}
        )


def _offer_at(endpoint: Endpoint, settings: Settings) -> tuple[Offer | None, LinkSpeed | None]:
    """What a daemon offers for the settings' model, and its link. Raises: DflashError."""
    from dflash_adapters.gguf.file import GgufFile
    from dflash_adapters.library.finding import model_file
    from dflash_adapters.registry import read_spec
    from dflash_runtime.experts.daemons.connecting import offer_at

    with GgufFile.open(model_file(settings.model)) as file:
        return offer_at(endpoint, file, read_spec(file), settings=settings)


def _examine_machine(settings: Settings, found: Findings, timed_threads: int | None) -> None:
    found.machine = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": examine_cores(settings, read_topology(), timed=timed_threads),
        "run_directory": _folder(found, run_directory, settings),
        "cache_directory": _folder(found, cache_directory, settings),
        "shared_memory": _space(_SHM) if _SHM.is_dir() else None,
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "locked_memory_bytes": _limit(resource.RLIMIT_MEMLOCK),
    }


def _folder(found: Findings, make: Any, settings: Settings) -> dict[str, Any]:
    try:
        path = make(settings)
    except SettingsError as error:
        found.problems.append(str(error))
        return {"why_not": str(error)}
    return {"path": str(path), "filesystem": _filesystem(path), **_space(path), "why_not": None}


def _filesystem(path: Path) -> str:
    """The type of the file system that holds a path; ``tmpfs`` is memory."""
    import psutil

    resolved = path.resolve()
    found, depth = "unknown", -1
    for mount in psutil.disk_partitions(all=True):
        at = Path(mount.mountpoint)
        if len(at.parts) >= depth and resolved.is_relative_to(at):  # the latest mount is on top
            found, depth = mount.fstype, len(at.parts)
    return found


def _space(path: Path) -> dict[str, int]:
    usage = shutil.disk_usage(path)
    return {"free_bytes": usage.free, "total_bytes": usage.total}


def _limit(which: int) -> dict[str, int | None]:
    """Soft and hard limit; None: no limit."""
    soft, hard = (
        None if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(which)
    )
    return {"soft": soft, "hard": hard}


def _add_hints(found: Findings) -> None:
    """Add hints for what works, but could work better."""
    folder = found.machine["run_directory"]
    if folder["why_not"] is None and folder["filesystem"] != "tmpfs":
        found.hints.append(
            f"the run directory is on {folder['filesystem']}: no GPU sees shared memory "
            "there, and CPUs are faster with a tmpfs, as in --ipc-work-dir /dev/shm/moe"
        )
    found.hints += core_hints(found.machine["cores"])
    open_files = found.machine["open_files"]["soft"]
    if open_files is not None and open_files < _FEW_FILES:
        found.hints.append(f"only {open_files} files may be open; ulimit -n raises it")


def shown(found: Findings) -> list[str]:
    """The findings, as lines of text."""
    from dflash_runtime.experts.daemons.offers import offer_text

    lines = []
    for report in found.launchers:
        ours = " (this interpreter)" if report["is_this"] else ""
        lines.append(f"launcher       {report['launcher']}{ours}")
        lines += _launcher_lines(report) if report["failure"] is None else []
        if report["failure"] is not None:
            lines.append(f"  unusable     {report['failure']}")
        lines.append("")
    for daemon in found.daemons:
        verdict = daemon["why_not"] or f"usable, {daemon['backend']} kernels"
        lines.append(f"daemon         {daemon['name'] or daemon['device']}: {verdict}")
    for connection in found.connections:
        text = connection["why_not"] or "answers"
        if connection["offer"] is not None:
            text += f", {offer_text(Offer(**connection['offer']))}"
        if connection["request_s"] is not None:
            text += f", {connection['request_s'] * 1e6:.0f} us to ask it"
        lines.append(f"connect        {connection['endpoint']}: {text}")
    machine = found.machine
    lines.append(f"system         {machine['system']}")
    lines += core_lines(machine["cores"])
    for key, what in (("run_directory", "run directory"), ("cache_directory", "cache")):
        lines.append(f"{what:14s} {_folder_text(machine[key])}")
    shm = machine["shared_memory"]
    lines += [
        f"{'/dev/shm':14s} {_space_text(shm) if shm else 'does not exist'}",
        f"open files     {_limit_text(machine['open_files'])}",
        f"locked memory  {_limit_text(machine['locked_memory_bytes'], is_bytes=True)}",
    ]
    for name, why_not in found.transports.items():
        lines.append(f"transport      {name}: {why_not or 'usable'}")
    lines += [f"hint           {hint}" for hint in found.hints]
    lines += ["", *(f"problem        {problem}" for problem in found.problems)]
    return lines if found.problems else [*lines, "All that is asked for can be used."]


def _launcher_lines(report: dict[str, Any]) -> list[str]:
    packages = ", ".join(f"{name} {version}" for name, version in report["packages"].items())
    cpu, memory = report["cpu"], report["memory"]
    tier = f", tier {cpu['tier']}" if cpu["tier"] else ""
    lines = [
        f"  version      {report['version'] or 'none: dflash-moe is not installed'}",
        f"  python       {report['python']}",
        f"  packages     {packages or 'none of ours'}",
        f"  cpu          {cpu['name']}, {cpu['processors']} "
        f"{noun(cpu['processors'], 'processor')}{tier}",
        f"  memory       {_space_text(memory) if memory else 'unknown'}",
    ]
    for kind, driver in report.get("drivers", {}).items():
        if driver["version"] is not None:
            compiler = driver["compiler"] or "no compiler"
            lines.append(f"  {kind + ' driver':12s} {driver['version']}, {compiler}")
    for gpu in report["gpus"]:
        lines += gpu_lines(gpu)
    if report["why_no_gpu"]:
        lines.append(f"  gpu          none: {report['why_no_gpu']}")
    for name, why_not in report["backends"].items():
        lines.append(f"  {name:12s} {why_not or 'usable'}")
    return lines


def gpu_lines(gpu: dict[str, Any]) -> list[str]:
    """One GPU; not every report has all fields."""
    lines = [f"  {gpu['device']:12s} {gpu['name']}, {_space_text(gpu)}"]
    if gpu.get("note"):
        lines.append(f"{'':15s}{gpu['note']}")
    if gpu.get("pci_bus_id"):
        lines.append(f"{'':15s}PCIe {gpu['pci_bus_id']}, UUID {gpu['uuid']}")
    if gpu.get("architecture"):
        lacks = ", ".join(gpu["lacks"]) or "nothing"
        lines.append(
            f"{'':15s}{gpu['architecture']}, warps of {gpu['lanes']} lanes; kernels do without: "
            f"{lacks}"
        )
    if gpu.get("why_not"):
        lines.append(f"{'':15s}unusable: {gpu['why_not']}")
    return lines


def _folder_text(folder: dict[str, Any]) -> str:
    if folder["why_not"]:
        return str(folder["why_not"])
    return f"{folder['path']} ({folder['filesystem']}, {_space_text(folder)})"


def _space_text(space: dict[str, Any]) -> str:
    free, total = (space[name] / 2**30 for name in ("free_bytes", "total_bytes"))
    return f"{free:.1f} of {total:.1f} GiB free"


def _limit_text(limit: dict[str, int | None], *, is_bytes: bool = False) -> str:
    def text(number: int | None) -> str:
        if number is None:
            return "unlimited"
        return f"{number / 2**20:.0f} MiB" if is_bytes else str(number)

    return f"{text(limit['soft'])}, can be raised to {text(limit['hard'])}"
