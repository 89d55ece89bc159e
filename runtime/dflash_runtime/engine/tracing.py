"""Writes which experts each token chose to an expert trace, as an engine computes."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import ModelSpec
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import I32Array, Phase
from dflash_protocol.settings import Settings
from dflash_runtime.placement.cache.traces import TraceHeader, TraceWriter


class ExpertTracer:
    """Notes the choices of chunks that the host computes layer by layer, and takes those of
    recorded steps. Used by the thread that runs the model.

    Owns: the writer, until closed.
    """

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._noted: dict[int, I32Array] = {}
        """Of the chunk at hand, by layer id."""

    def noting(self, experts: Any) -> Any:
        """The routed experts of a model on the host, whose choices are noted."""

        def noted(
            layer_id: int, hidden: Any, topk_ids: I32Array, topk_weights: Any
        ) -> Generator[None, None, Any]:
            self._noted[layer_id] = topk_ids.copy()
            return (yield from experts(layer_id, hidden, topk_ids, topk_weights))

        return noted

    def end_chunk(self, phase: Phase | None) -> None:
        """Write what was noted; None: drop it, as the chunk has failed."""
        noted, self._noted = self._noted, {}
        if phase is not None and noted:
            self.add(phase, np.concatenate([noted[each] for each in sorted(noted)], axis=1))

    def add(self, phase: Phase, choices: I32Array) -> None:
        """Write tokens. Shapes: choices [T, ids of all layers]."""
        self._writer.add(phase, choices)

    def close(self) -> None:
        self._writer.close()


def open_tracer(
    file: GgufFile, spec: ModelSpec, settings: Settings, *, is_on_host: bool
) -> ExpertTracer | None:
    """None: none is wanted. Raises: SettingsError if it cannot be written."""
    if not settings.expert_trace:
        return None
    if not is_on_host:
        raise SettingsError(
            "expert_trace: traces of a parent on a GPU are not written yet; use device cpu"
        )
    header = TraceHeader.of(spec, file.identity())
    path = Path(settings.expert_trace).absolute()
    return ExpertTracer(TraceWriter(path, header, most_bytes=settings.expert_trace_mb << 20))
