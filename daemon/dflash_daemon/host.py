"""What the daemon holds: its model's metadata and, once a placement is known, its experts.

Knows nothing of sockets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.registry import adapter_for
from dflash_protocol.errors import DaemonUnavailable, HandshakeRefused
from dflash_protocol.placement import OwnedExperts, read_owned_experts
from dflash_runtime.compute import ComputeBackend, ExpertBank
from dflash_runtime.experts.store import (
    expert_tensor_types,
    load_banks,
    measure_pairs_per_second,
)


class ExpertHost:
    """One model, opened by its metadata; experts are loaded once, when a placement is given.

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
        self.owned: OwnedExperts | None = None
        self.banks: dict[int, ExpertBank] = {}
        self.pairs_per_second = 0.0
        self._load_lock = threading.Lock()
        self._is_cancelled = False

    @property
    def experts_per_layer(self) -> dict[int, int]:
        return {layer.layer_id: layer.num_experts for layer in self.spec.moe.layers}

    @property
    def max_experts_used(self) -> int:
        return max(layer.num_experts_used for layer in self.spec.moe.layers)

    def read_placement(self, path: Path) -> OwnedExperts:
        """Raises: SettingsError if the file is not a placement of this model."""
        return read_owned_experts(path, self.experts_per_layer)

    def load(self, owned: OwnedExperts, on_progress: Callable[[str, int, int], None]) -> None:
        """Load these experts; returns when every kernel they need has run once.

        Loading what is loaded already is free. Safe to call from several threads.
        Raises: HandshakeRefused if another placement is loaded; DaemonUnavailable if cancelled.
        """
        with self._load_lock:
            if self.owned is not None:
                if self.owned.fingerprint != owned.fingerprint:
                    raise HandshakeRefused(
                        f"this daemon holds placement {self.owned.fingerprint[:16]} "
                        f"({self.owned.num_experts} experts), asked for is "
                        f"{owned.fingerprint[:16]} ({owned.num_experts} experts)",
                        code="placement",
                    )
                return
            on_progress("compile", 0, 1)
            self.backend.warm_up(
                expert_tensor_types(self.spec.moe), on_progress=partial(on_progress, "compile")
            )

            def on_layer(num_done: int, num_total: int) -> None:
                if self._is_cancelled:
                    raise DaemonUnavailable("told to stop while loading")
                on_progress("load", num_done, num_total)

            banks = load_banks(
                self.backend, self._file, self.spec.moe, owned, read_now=True, on_progress=on_layer
            )
            self.pairs_per_second = measure_pairs_per_second(banks.values())
            self.banks = banks
            self.owned = owned

    def cancel_loading(self) -> None:
        """Let a `load` that is under way, or comes yet, raise DaemonUnavailable."""
        self._is_cancelled = True

    def close(self) -> None:
        self.banks = {}
        self.backend.close()
        self._file.close()
