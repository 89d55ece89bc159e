"""Steps: chunks of an engine's one sequence through all layers, one run after the other.

Knows nothing of text or sampling; hands every layer's routing to the MoeExpertComputeRuntime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.ops import KvCache, Model
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import AnyArray, F32Array, I32Array, Phase
from dflash_runtime.engine.arguments import chunk_bounds
from dflash_runtime.engine.prefix import CachedPrefix
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime

_PREFILL_CHUNK = 512


class Cancelled(Exception):
    """Nobody wants the rest of this run."""


class Steps:
    """The one sequence, its key/value cache, and the run over it that counts: the latest.

    `is_chunk_invariant` is CachedPrefix's. The file, cache and runtime are the caller's.
    """

    def __init__(
        self,
        file: GgufFile,
        model: Model[AnyArray],
        cache: KvCache,
        *,
        runtime: MoeExpertComputeRuntime,
        num_positions: int,
        is_chunk_invariant: bool,
    ) -> None:
        self.num_positions = num_positions
        """How long the sequence can be."""
        self._file = file
        self._model = model
        self._cache = cache
        self._runtime = runtime
        self._prefix = CachedPrefix(num_positions, is_chunk_invariant=is_chunk_invariant)
        self._num_runs = 0
        self._is_cancelled: Callable[[], bool] | None = None

    def begin(self, is_cancelled: Callable[[], bool] | None = None) -> int:
        """A number for a run over the one sequence; the run before it is at its end.

        Raises: SettingsError if the engine is closed; ModelFileError if the file was written to
        since it was opened.
        """
        if self._num_runs < 0:
            raise SettingsError("this engine is closed")
        self._file.require_unwritten()
        self._num_runs += 1
        self._is_cancelled = is_cancelled
        return self._num_runs

    def end(self) -> None:
        """No run goes on, and none begins any more."""
        self._num_runs = -1

    def chunks(
        self, num_tokens: int, chunk: int | Iterable[int] | None = None
    ) -> Iterable[tuple[int, int]]:
        """Successive (first, last) of what is computed at once, as `chunk_bounds` says."""
        return chunk_bounds(num_tokens, chunk, _PREFILL_CHUNK)

    def num_reusable(self, prompt: I32Array) -> int:
        """How many of a prompt's first positions are in the cache already. Shapes: prompt [T]."""
        return self._prefix.num_reusable(prompt, self.chunks(prompt.size))

    def forward(self, run: int, token_ids: I32Array, first_position: int) -> AnyArray:
        """One chunk of a run through all layers. Shapes: token_ids [T]; result [T, H].

        Raises: SettingsError if another run has taken over the sequence, or the engine is closed;
        Cancelled, before the first layer that nobody wants any more.
        """
        if run != self._num_runs:
            raise SettingsError(
                "this engine is closed"
                if self._num_runs < 0
                else "another call to this engine has taken over its one sequence"
            )
        phase = Phase.DECODE if token_ids.size == 1 else Phase.PREFILL
        positions = np.arange(first_position, first_position + token_ids.size, dtype=np.int32)
        compute = partial(self._runtime.compute, phase=phase)
        self._prefix.cut(first_position)
        moe = compute if self._is_cancelled is None else self._cancellable(compute)
        hidden = self._model.forward(token_ids, positions, self._cache, moe)
        self._prefix.add(first_position, token_ids)
        return hidden

    def head(self, hidden: AnyArray) -> F32Array:
        """Logits. Shapes: hidden [T, H]; result [T, V]."""
        return self._model.head(hidden)

    def _cancellable(self, compute: Callable[..., AnyArray]) -> Callable[..., AnyArray]:
        """The same, but the first layer that nobody wants any more raises Cancelled."""

        def moe(
            layer_id: int, hidden: AnyArray, topk_ids: AnyArray, topk_weights: AnyArray
        ) -> AnyArray:
            if self._is_cancelled is not None and self._is_cancelled():
                raise Cancelled
            return compute(layer_id, hidden, topk_ids, topk_weights)

        return moe
