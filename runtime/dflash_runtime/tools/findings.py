"""Findings of ``dflash-moe doctor``, and their text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dflash_protocol.process.output import noun


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


def shown(found: Findings) -> list[str]:
    """The findings, as lines of text."""
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
        lines.append(
            f"connect        {connection['endpoint']}: {connection['why_not'] or 'answers'}"
        )
    machine = found.machine
    lines.append(f"system         {machine['system']}")
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
