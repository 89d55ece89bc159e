"""Writes which experts each token chose to an expert trace, as an engine computes."""

from __future__ import annotations

from pathlib import Path

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import ModelSpec
from dflash_protocol.ids import I32Array, Phase
from dflash_protocol.settings import Settings
from dflash_runtime.compute.backend import CapturedStep
from dflash_runtime.placement.cache.traces import TraceHeader, TraceWriter


class ExpertTracer:
    """Takes the choices of captured steps, several at a time where these keep them, and is given
    those of other passes. Used by the thread that runs the model.

    Owns: the writer, until closed.
    """

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._captured: CapturedStep | None = None
        self._first, self._num_steps = 0, 0
        """Positions of the steps that were noted, and not written."""

    def note_step(self, captured: CapturedStep, position: int) -> None:
        """Note a captured step that was not discarded; before the next one is read."""
        if position != self._first + self._num_steps:
            self.write_steps()
            self._first = position
        self._captured, self._num_steps = captured, self._num_steps + 1
        # Steps that were started ahead overwrite the oldest.
        if self._num_steps >= max(1, captured.most_choices - captured.most_ahead - 1):
            self.write_steps()

    def write_steps(self) -> None:
        """Write the steps that were noted. Raises: DeviceUnavailable."""
        captured, count = self._captured, self._num_steps
        self._captured, self._num_steps = None, 0
        if captured is not None and count and self._writer.is_open:
            first, self._first = self._first, self._first + count
            self._writer.add(Phase.DECODE, captured.choices(first, count))

    def add(self, phase: Phase, choices: I32Array) -> None:
        """Write other tokens. Shapes: choices [T, ids of all layers]. Raises: DeviceUnavailable."""
        self.write_steps()
        self._writer.add(phase, choices)

    def close(self) -> None:
        """Without steps that were not written. Idempotent."""
        self._writer.close()


def open_tracer(file: GgufFile, spec: ModelSpec, settings: Settings) -> ExpertTracer | None:
    """None: none is wanted. Raises: SettingsError if it cannot be written."""
    if not settings.expert_trace:
        return None
    header = TraceHeader.of(spec, file.identity())
    path = Path(settings.expert_trace).absolute()
    return ExpertTracer(TraceWriter(path, header, most_bytes=settings.expert_trace_mb << 20))
