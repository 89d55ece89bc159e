"""What a run of the GPU bench found, put together: the time of a token, tables, and goals.

Knows nothing of GPUs; all figures come from the parts' results.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.pairs import Spread

from bench import report

Results = Mapping[str, Mapping[str, Any]]
"""Results by part."""

OURS, PEER = "ours", "llama.cpp"
"""Sides, as results name them."""
DECODE, PREFILL = "decode at 448", "prefill 4096"
"""The rows that set-ups are compared by."""
GPU_USE, IDLE_CPU = "GPU use", "CPU of a process"
"""The rows of the idle part, in percent."""
_HEAD = frozenset({"output", "token_embd"})
_EMBEDDING = "embed"


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that is wanted: where it is found, what it must be, what would be better still.

    Figures that are no ratios are stated for an H100 (`resident`, `split-cpu`) or two H200.
    """

    part: str
    row: str
    must: float
    reach: float | None = None
    is_ratio: bool = False
    """Whether `must` is a ratio to llama.cpp in the same row, or to all experts on one GPU."""
    is_most: bool = False
    """A percentage that is not to be exceeded."""


GOALS = (
    Goal("resident", DECODE, 600, 800),
    Goal("resident", PREFILL, 18_000, 30_000),
    Goal("resident", "decode at 8192", 1.8, is_ratio=True),
    Goal("resident", "decode at 32768", 1.8, is_ratio=True),
    Goal("resident", "prefill 8192", 1.3, is_ratio=True),
    Goal("resident", "prefill 32768", 1.3, is_ratio=True),
    Goal("mail-gpu", DECODE, 600, 800),
    Goal("mail-gpu", DECODE, 0.86, is_ratio=True),
    Goal("mail-gpu", PREFILL, 14_000, 22_000),
    Goal("mail-host", DECODE, 550, 700),
    Goal("mail-host", DECODE, 0.80, is_ratio=True),
    Goal("mail-half", DECODE, 0.92, is_ratio=True),
    Goal("mail-three", DECODE, 0.75, is_ratio=True),
    Goal("idle", GPU_USE, 0, is_most=True),
    Goal("idle", IDLE_CPU, 2, is_most=True),
    Goal("split-gpu", DECODE, 180),
    Goal("split-gpu", PREFILL, 8_500),
    Goal("split-half", DECODE, 0.5, is_ratio=True),
    Goal("split-half", PREFILL, 0.7, is_ratio=True),
    Goal("split-cpu", DECODE, 55, 80),
    Goal("split-cpu", PREFILL, 1_000, 2_000),
)
"""Goals for Qwen3-30B-A3B."""
GOALS_OF_SHAPE = {
    "qwen3moe": GOALS,
    "qwen35moe": (
        Goal("resident", DECODE, 1.0, is_ratio=True),
        Goal("resident", "decode at 8192", 1.0, is_ratio=True),
        Goal("resident", "prefill 512", 1.0, is_ratio=True),
        Goal("resident", PREFILL, 1.0, is_ratio=True),
    ),
}
"""By the shape of the model, as model_shapes names it."""


def budget(kernels: Mapping[str, Any], token_s: float | None = None) -> dict[str, float]:
    """Where the time of a step goes, in seconds, by name; the last is the sum of all others.

    `kernels` is one entry of the kernels part: ``step_s``, and ``kernels`` with ``gained_s``.
    `token_s` is the time of a whole token through the engine, if that is known.
    """
    times = dict.fromkeys(("layers", "head", "embedding and choice of the token"), 0.0)
    for each in kernels["kernels"]:
        times[_group(each)] += each["gained_s"]
    times["overlap and gaps, in no single kernel"] = kernels["step_s"] - sum(times.values())
    if token_s is not None:
        times["host, between steps"] = token_s - kernels["step_s"]
    times["a token"] = sum(times.values())
    return times


def _group(kernel: Mapping[str, Any]) -> str:
    if kernel["count"] > 1:
        return "layers"
    is_head = kernel["kernel"] != _EMBEDDING and kernel["reads"] in _HEAD
    return "head" if is_head else "embedding and choice of the token"


def rows_by_name(results: Results, part: str = "resident") -> dict[str, Mapping[str, Any]]:
    """The rows of a part."""
    return {row["work"]: row for row in results.get(part, {}).get("rows", [])}


def ours_in(results: Results, row: str, part: str = "resident") -> float | None:
    """Our tokens per second in a row; None if it was not measured."""
    found = rows_by_name(results, part).get(row)
    values = found["tokens_per_s"].get(OURS) if found else None
    return statistics.median(values) if values else None


def share_of_resident(results: Results, part: str, row: str) -> float | None:
    """Tokens per second of a split over those with all experts on one GPU, in the same row."""
    split, resident = ours_in(results, row, part), ours_in(results, row)
    return None if split is None or resident is None else split / resident


def figure(goal: Goal, results: Results) -> float | None:
    """The figure of a goal; None if it was not measured."""
    if goal.is_most:
        largest: Mapping[str, float] = results.get(goal.part, {}).get("largest", {})
        return largest.get(goal.row)
    if not goal.is_ratio:
        return ours_in(results, goal.row, goal.part)
    if goal.part != "resident":
        return share_of_resident(results, goal.part, goal.row)
    row = rows_by_name(results).get(goal.row, {})
    return float(row["ratio"]["median"]) if "ratio" in row else None


def verdicts(results: Results, goals: Sequence[Goal] = GOALS) -> list[dict[str, Any]]:
    """Every goal with its figure, and whether it is met; None = it was not measured."""
    listed = []
    for goal in goals:
        value = figure(goal, results)
        listed.append(
            {
                "part": goal.part,
                "row": goal.row,
                "must": goal.must,
                "reach": goal.reach,
                "is_ratio": goal.is_ratio,
                "is_most": goal.is_most,
                "found": value,
                "met": None if value is None else _is_met(goal, value),
            }
        )
    return listed


def _is_met(goal: Goal, value: float) -> bool:
    return value <= goal.must if goal.is_most else value >= goal.must


def goals_table(listed: Sequence[Mapping[str, Any]]) -> str:
    """What must be and what is."""
    words = {None: "not measured", True: "met", False: "MISSED"}
    rows = []
    for each in listed:
        digits = 2 if each["is_ratio"] else 1 if each["is_most"] else 0
        bound, unit = ("≤ ", " %") if each["is_most"] else ("", "")
        of = {"resident": f" ÷ {PEER}"}.get(each["part"], " ÷ all on one GPU")
        reach = each["reach"]
        rows.append(
            [
                f"{each['part']}: {each['row']}{of if each['is_ratio'] else ''}",
                f"{bound}{each['must']:,g}{unit}",
                "" if reach is None else f"{reach:,.0f}",
                "" if each["found"] is None else f"{each['found']:,.{digits}f}{unit}",
                words[each["met"]],
            ]
        )
    return report.table(["goal", "must", "reach for", "found", ""], rows)


def resident_table(results: Results) -> str:
    """All experts on one GPU, beside llama.cpp."""
    rows = []
    for name, row in rows_by_name(results).items():
        values = row["tokens_per_s"]
        ours = {label: values[label] for label in values if label == OURS}
        theirs = {label: values[label] for label in values if label != OURS}
        ratio = str(Spread(**row["ratio"])) if "ratio" in row else ""
        rows.append([name, _sides(ours), _sides(theirs), ratio])
    columns = ["tokens/s, all experts on one GPU", OURS, PEER, f"{OURS} ÷ {PEER} (range)"]
    return report.table(columns, rows)


def kernels_table(
    kernels: Mapping[str, Any], *, copy_bytes_per_s: float | None, token_s: float | None
) -> str:
    """Kernels of a step at one context, and the time of a token that they add up to."""
    rows = []
    for each in kernels["kernels"]:
        num_bytes, seconds = each["weight_bytes"] + each["cache_bytes"], each["gained_s"]
        rate = num_bytes / seconds if num_bytes and seconds > 0 else 0.0
        share = f"{rate / copy_bytes_per_s:.0%}" if rate and copy_bytes_per_s else ""
        rows.append(
            [
                each["label"],
                str(each["count"]),
                f"{1e6 * seconds / each['count']:.2f}",
                f"{1e6 * seconds:.0f}",
                f"{num_bytes / 1e6:.1f}" if num_bytes else "",
                f"{rate / 1e9:,.0f}" if rate else "",
                share,
            ]
        )
    for name, seconds in budget(kernels, token_s).items():
        rows.append([name, "", "", f"{1e6 * seconds:.0f}", "", "", ""])
    title = f"kernel, at context {kernels['context']}"
    columns = [title, "a step", "µs each", "µs a step", "MB a step", "GB/s", "of a copy"]
    return report.table(columns, rows)


def splits_table(results: Results, names: Sequence[str]) -> str:
    """Experts elsewhere, and llama.cpp's."""
    rows = []
    for name in names:
        result = results.get(name, {})
        same = result.get("same_tokens")
        for row_name, row in rows_by_name(results, name).items():
            share = share_of_resident(results, name, row_name)
            rows.append(
                [
                    f"{result['title']}: {row_name}",
                    _sides(row["tokens_per_s"], digits=1),
                    "" if share is None else f"{share:.2f}",
                    f"{same[0]} of {same[1]}" if same else "",
                ]
            )
    columns = ["experts elsewhere", "tokens/s", "÷ all on one GPU", "same tokens"]
    return report.table(columns, rows)


def idle_table(idle: Mapping[str, Any]) -> str:
    """What processes and GPUs used that had nothing to do."""
    rows = [
        [f"CPU of the {name}", f"{each:.2f} % of a core"]
        for name, each in idle["cpu_percent"].items()
    ]
    for name, values in idle["gpu_percent"].items():
        shown = "not known" if values is None else ", ".join(f"{each:.0f}" for each in values)
        rows.append([f"{GPU_USE} of {name}, samples", shown if values is None else f"{shown} %"])
    return report.table([f"idle for {idle['seconds_idle']:.0f} s after decode", "used"], rows)


def tables(results: Results, split_names: Sequence[str], goals: Sequence[Goal] = GOALS) -> str:
    """Everything that was measured, to be read."""
    gpu = results.get("device", {})
    copy, read = gpu.get("copy_bytes_per_s"), gpu.get("read_bytes_per_s")
    lines = []
    if "name" in gpu:
        lines.append(
            f"{gpu['name']}, driver {gpu['driver']}, {gpu['multiprocessors']} multiprocessors."
        )
    for what, value in (("copied (read and written)", copy), ("read by a kernel", read)):
        if value:
            lines.append(f"Memory {what} at {value / 1e12:.2f} TB/s.")
    parts = ["\n".join(lines)] if lines else []
    if rows_by_name(results):
        parts.append(resident_table(results))
        if "logits_difference" in results["resident"]:
            difference = results["resident"]["logits_difference"]
            parts.append(f"Logits differ from {PEER}'s by {difference:.4f} (relative RMS).")
    for each in results.get("kernels", {}).get("contexts", []):
        rate = ours_in(results, f"decode at {each['context']}")
        token_s = 1 / rate if rate else None
        parts.append(kernels_table(each, copy_bytes_per_s=copy, token_s=token_s))
    if any(name in results for name in split_names):
        parts.append(splits_table(results, split_names))
    if "cpu_percent" in results.get("idle", {}):
        parts.append(idle_table(results["idle"]))
    parts.append(
        goals_table([each for each in verdicts(results, goals) if each["part"] in results])
    )
    if summary := results.get("tests", {}).get("summary"):
        parts.append(f"Tests that need a GPU: {summary}")
    failures = [f"{name}: {text}" for name, each in results.items() for text in each["errors"]]
    if failures:
        parts.append(
            "Not measured, or not to the end:\n\n"
            + "\n".join(f"* {_line(each)}" for each in failures)
        )
    return "\n\n".join(parts)


def _line(text: str) -> str:
    """The last line of a traceback says what it was."""
    lines = text.strip().splitlines()
    return lines[0] if len(lines) < 2 else f"{lines[0]} {lines[-1]}"


def _sides(values: Mapping[str, Sequence[float]], digits: int = 0) -> str:
    """Medians, each with what it is of, where that is more than its side."""
    shown = []
    for label, each in values.items():
        size = label.partition(", ")[2]
        median = f"{statistics.median(each):,.{digits}f}"
        shown.append(f"{median} ({size})" if size else median)
    return "; ".join(shown)
