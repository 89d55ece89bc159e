"""``dflash-moe doctor --measure``: what this machine's devices and links do with a model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol import json_fields as read
from dflash_protocol.process.output import ascii_json
from dflash_protocol.process.text_files import file_error, read_file
from dflash_protocol.settings import Settings
from dflash_runtime.engine.demo_model import chosen_model_path
from dflash_runtime.engine.engine import Engine
from dflash_runtime.engine.measuring.kept import (
    LIMIT_BYTES,
    box_from_json,
    box_record,
    keep_box,
)
from dflash_runtime.engine.measuring.links import measure_links
from dflash_runtime.engine.measuring.machine import box_of_machine
from dflash_runtime.placement.box import Box, CopySpeed, Curve, DeviceSpeed, LinkSpeed

_INDENT = " " * 4
_KIND = "box"


@dataclass(frozen=True, slots=True)
class MeasuredBox:
    """A box, and what it was measured with."""

    model: Path
    box: Box
    elapsed_s: float

    def as_json(self) -> str:
        """One object, on one line."""
        record = {"model": str(self.model), "elapsed_s": self.elapsed_s, **box_record(self.box)}
        return ascii_json(record)

    def as_lines(self) -> list[str]:
        """A table for people; times are of a layer, in microseconds."""
        lines = [f"{self.model.name}: measured in {self.elapsed_s:.1f} s"]
        for device in self.box.devices.values():
            lines += ["", device.device, *_device_lines(device)]
            if (stop := self.box.host_stop.get(device.device)) is not None:
                lines.append(f"{_INDENT}stop of a step for the host: {_points(stop, _rows, _us)}")
            if (asked := self.box.host_asked.get(device.device)) is not None:
                shown = _points(asked.beyond, _megabytes, _us)
                lines.append(f"{_INDENT}experts of a step asked of it: {shown}")
            if (copies := self.box.copies.get(device.device)) is not None:
                lines += [f"{_INDENT}{line}" for line in _copy_lines(copies)]
            if (offload := self.box.offload.get(device.device)) is not None:
                shown = _points(offload.copies, _rows, lambda seconds: _gb_per_s(1e9 / seconds))
                lines.append(f"{_INDENT}copies of experts in prompts: {shown}")
                shown = _points(offload.after, _rows, _us)
                lines.append(f"{_INDENT}a layer that waits for them, after them: {shown}")
                shown = _points(offload.single, _rows, _us)
                lines.append(f"{_INDENT}a layer whose copies are in time, beside them: {shown}")
                shown = _points(offload.grouped, _rows, _us)
                lines.append(f"{_INDENT}with copies, of each chunk of a group: {shown}")
        for link in self.box.links.values():
            lines += ["", f"link to {link.owner}, beyond what is computed"]
            lines.append(f"{_INDENT}steps   {_points(link.step, _rows, _us)}")
            lines.append(f"{_INDENT}chunks  {_points(link.chunk, _rows, _us)}")
        if self.box.together:
            lines += ["", "together, times as long as alone"]
        for each in self.box.together:
            lines.append(
                f"{_INDENT}{each.first} {each.first_factor:.2f}, "
                f"{each.second} {each.second_factor:.2f}"
            )
        if self.box.disk is not None:
            lines += ["", "disk, reads of an expert, past the page cache"]
            lines.append(f"{_INDENT}{_points(self.box.disk, _pending, _gb_per_s)}")
        return lines


def read_measured(path: Path) -> MeasuredBox:
    """What `MeasuredBox.as_json` wrote. Raises: SettingsError naming the file and what is wrong."""
    content = read_file(_KIND, path, limit_bytes=LIMIT_BYTES)
    try:
        given = read.parsed(content)
        if not isinstance(given, dict) or not {"model", "elapsed_s"} <= given.keys():
            raise ValueError("it is not what doctor --measure --json prints")
        model, elapsed_s = read.text(given.pop("model"), "model"), given.pop("elapsed_s")
        box = box_from_json(json.dumps(given).encode())
        return MeasuredBox(Path(model), box, read.number(elapsed_s, "elapsed_s", 1e9))
    except ValueError as error:
        raise file_error(_KIND, path, str(error)) from None


def measure(
    model: str | None,
    settings: Settings,
    *,
    on_progress: Callable[[str, str, int, int], None] = lambda *_: None,
) -> MeasuredBox:
    """Measure all that a model could use here, and keep it for starts. Takes a minute at most, but
    for kernels that are compiled for the first time.

    `model`: a file; None or empty: the settings' one, else the demo model.
    Raises: as box_of_machine; SettingsError, ModelFileError, UnsupportedModel.
    """
    path = chosen_model_path(replace(settings, model=model) if model else settings)

    def report(what: str, num_done: int, num_total: int) -> None:
        on_progress("measuring", what, num_done, num_total)

    began_s = time.monotonic()
    with GgufFile.open(path) as file:
        box = box_of_machine(file, settings, measures_all=True, on_progress=report)
    if settings.daemons or settings.connect:
        report("links to daemons", 0, 1)
        box = replace(box, links={**box.links, **_links(path, settings)})
        keep_box(box, settings.cache_dir)
    return MeasuredBox(path, box, time.monotonic() - began_s)


def _links(path: Path, settings: Settings) -> dict[str, LinkSpeed]:
    """Of the settings' daemons, in an engine whose experts are divided as the settings say."""
    random = np.random.default_rng(1)
    with Engine.open(path, settings=settings) as engine:

        def generate(num_prompt: int, num_tokens: int) -> None:
            prompt = random.integers(0, engine.spec.vocab_size, num_prompt)
            for _ in engine.generate(prompt.tolist(), num_tokens, ignore_eos=True):
                pass

        return measure_links(
            generate,
            lambda: engine.stats().owners,
            num_positions=engine.num_positions,
            num_layers=len(engine.spec.moe.layers),
        )


def _device_lines(device: DeviceSpeed) -> Iterator[str]:
    yield f"{_INDENT}{'rows':>6s} {'trunk':>12s} {'experts':>12s} {'':>9s} {'head':>12s}  attention"
    for rows, curve in device.experts.items():
        amount, seconds = curve.points[-1]
        rate = f"{amount / seconds / 1e9:.1f} GB/s" if seconds > 0.0 else ""
        attention = device.attention.get(rows)
        behind = "" if attention is None else _points(attention, _megabytes, _us, first=1)
        cells = (
            _last(device.trunk, rows),
            f"{_us(seconds):>12s}",
            f"{rate if rows == 1 else '':>9s}",
        )
        yield f"{_INDENT}{rows:6d} {' '.join(cells)} {_last(device.head, rows)}  {behind}".rstrip()


def _last(curves: Mapping[int, Curve], rows: int) -> str:
    curve = curves.get(rows)
    return f"{'' if curve is None else _us(curve.points[-1][1]):>12s}"


def _copy_lines(copies: CopySpeed) -> Iterator[str]:
    rates: dict[str, float] = {
        "from locked memory": copies.from_locked,
        "from the page cache": copies.from_page_cache,
        "written by kernels": copies.to_host,
        "read by kernels": copies.kernel_reads,
    }
    yield ", ".join(f"{what} {_gb_per_s(rate)}" for what, rate in rates.items() if rate)
    if copies.pcie:
        yield f"PCIe {copies.pcie}"


def _points(
    curve: Curve, shown: Callable[[float], str], value: Callable[[float], str], *, first: int = 0
) -> str:
    return ", ".join(f"{shown(amount)} {value(each)}" for amount, each in curve.points[first:])


def _rows(amount: float) -> str:
    return f"{amount:.0f} {'row' if round(amount) == 1 else 'rows'}"


def _pending(amount: float) -> str:
    return f"{amount:.0f}:"


def _megabytes(amount: float) -> str:
    return f"{amount / 1e6:.1f} MB"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} us"


def _gb_per_s(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"
