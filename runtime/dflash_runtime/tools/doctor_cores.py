"""The part of ``dflash-moe doctor`` about cores: what there are, and how many threads compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_protocol.process.output import noun
from dflash_protocol.settings import Settings
from dflash_runtime.compute.cores import LEAST_TIMED, default_counts, most_threads
from dflash_runtime.compute.topology import Topology

_INDENT = " " * 15


@dataclass(frozen=True, slots=True)
class _Count:
    """A number of threads, and why it is that."""

    threads: int
    why: str


def examine_cores(settings: Settings, topology: Topology, *, timed: int | None) -> dict[str, Any]:
    """Facts for JSON. `timed`: the threads with which decode steps of the settings' model are
    fastest, if known."""
    prompts, decode = _counts(settings, topology, timed=timed)
    return {
        "physical": len(topology.cores),
        "processors": topology.num_processors,
        "clusters": topology.num_clusters,
        "efficient": sum(core.is_efficient for core in topology.cores),
        "quota": topology.quota,
        "most_threads": most_threads(topology),
        "prompts": {"threads": prompts.threads, "why": prompts.why},
        "decode": {"threads": decode.threads, "why": decode.why},
    }


def _counts(settings: Settings, topology: Topology, *, timed: int | None) -> tuple[_Count, _Count]:
    """Threads of prompts and of decode steps."""
    if settings.threads:
        both = _Count(settings.threads, "as --threads says")
        return both, both
    counts, most = default_counts(topology), most_threads(topology)
    has_efficient = topology.num_fast_cores < len(topology.cores)
    of_quota = "as many as the quota has room for"
    each = "one for each core"
    prompts = _Count(counts.prompts, of_quota if counts.prompts == most else each)
    if timed is not None:
        return prompts, _Count(timed, "the fastest number for this model, as timed here")
    why = of_quota if counts.decode == most else each
    if has_efficient and counts.decode == topology.num_fast_cores:
        why += " without efficiency cores"
    if counts.prompts >= LEAST_TIMED:
        why += "; the fastest number is timed when a model is opened first"
    return prompts, _Count(counts.decode, why)


def core_lines(cores: dict[str, Any]) -> list[str]:
    """The facts, as lines of text."""
    physical, processors = cores["physical"], cores["processors"]
    text = f"{physical} physical {noun(physical, 'core')}"
    if processors > physical:
        text += f" with {processors} processors (SMT siblings), one used of each"
    if cores["clusters"] > 1:
        text += f"; {cores['clusters']} clusters that share a cache each"
    lines = [f"cores          {text}"]
    if cores["efficient"]:
        lines.append(f"{_INDENT}{cores['efficient']} of them are efficiency cores")
    if cores["quota"] is not None:
        most = cores["most_threads"]
        lines.append(
            f"quota          {cores['quota']:.2f} processors (cgroup), room for {most} "
            f"{noun(most, 'thread')}: more would be stopped together"
        )
    for phase in ("prompts", "decode"):
        threads = cores[phase]["threads"]
        lines.append(f"{phase:14s} {threads} {noun(threads, 'thread')}: {cores[phase]['why']}")
    return [*lines, f"{_INDENT}--threads N sets another number for both"]


def core_hints(cores: dict[str, Any]) -> list[str]:
    """What could be better."""
    threads, most = cores["prompts"]["threads"], cores["most_threads"]
    if most is not None and threads > most:
        return [
            f"{threads} threads are more than the CPU quota has room for ({most}): all of them "
            "are stopped for a part of each period"
        ]
    if threads > cores["processors"]:
        return [f"{threads} threads are more than the {cores['processors']} processors"]
    return []
