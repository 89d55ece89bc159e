"""What the daemon holds: its model's metadata and the experts of the placements in use.

Knows nothing of sockets.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dflash_adapters.gguf_file import FileChange, GgufFile
from dflash_adapters.registry import adapter_for
from dflash_protocol.errors import DaemonUnavailable
from dflash_protocol.placement import OwnedExperts, read_owned_experts
from dflash_runtime.compute import ComputeBackend
from dflash_runtime.experts.held_placements import ExpertStore, HeldPlacement
from dflash_runtime.experts.store import expert_tensor_types

_LOG = logging.getLogger(__name__)


class ExpertHost:
    """One model, opened by its metadata; experts are loaded when a placement asks for them.

    Owns: the file and the backend.
    """

    def __init__(self, model_path: Path, backend: ComputeBackend) -> None:
        self._file = GgufFile.open(model_path)
        try:
            self.spec = adapter_for(self._file).read_spec(self._file)
            self.identity = self._file.identity()
        except BaseException:
            self._file.close()
            raise
        self.backend = backend
        self.store = ExpertStore(backend, self._file, self.spec.moe)
        self._is_warm = False
        self._load_lock = threading.Lock()
        self._is_cancelled = False

    @property
    def experts_per_layer(self) -> dict[int, int]:
        return {layer.layer_id: layer.num_experts for layer in self.spec.moe.layers}

    @property
    def max_experts_used(self) -> int:
        return max(layer.num_experts_used for layer in self.spec.moe.layers)

    @property
    def model_path(self) -> Path:
        return self._file.path

    def file_change(self) -> FileChange | None:
        """What happened to the model's file since it was opened. Looks at it anew each time."""
        return self._file.change()

    def require_unwritten(self) -> None:
        """Raises: ModelFileError if the file's bytes may no longer be those of the identity."""
        self._file.require_unwritten()

    def read_placement(self, path: Path) -> OwnedExperts:
        """Raises: SettingsError if the file is not a placement of this model."""
        return read_owned_experts(path, self.experts_per_layer)

    def load(
        self,
        owned: OwnedExperts,
        on_progress: Callable[[str, int, int], None] = lambda stage, num_done, num_total: None,
    ) -> HeldPlacement:
        """Have these experts loaded, to be given back with `release`; returns when every kernel
        they need has run once.

        Only what no other placement has loaded is, and what is used by none any more is dropped.
        Safe to call from several threads.
        Raises: DaemonUnavailable if cancelled.
        """

        def on_layer(num_done: int, num_total: int) -> None:
            if self._is_cancelled:
                raise DaemonUnavailable("told to stop while loading")
            on_progress("load", num_done, num_total)

        with self._load_lock:
            if not self._is_warm:
                on_progress("compile", 0, 1)
                self.backend.warm_up(
                    expert_tensor_types(self.spec.moe), on_progress=partial(on_progress, "compile")
                )
                self._is_warm = True
            is_there = self.store.holds(owned)
            held = self.store.hold(owned, on_layer)
        if not is_there:
            _LOG.info(
                "placement %s: %d experts kept, %d loaded, %d dropped",
                *(owned.fingerprint[:16], held.num_kept, held.num_loaded, held.num_dropped),
            )
        return held

    def release(self, held: HeldPlacement) -> None:
        """A link less that uses it; what it needed is kept until another placement is loaded."""
        self.store.release(held)

    def cancel_loading(self) -> None:
        """Let a `load` that is under way, or comes yet, raise DaemonUnavailable."""
        self._is_cancelled = True

    def close(self) -> None:
        self.backend.close()
        self._file.close()
