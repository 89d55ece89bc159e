"""llama.cpp beside us on a GPU: one model, a context for each size of its micro-batches.

Flash attention is on, keys and values are f16. Its times contain the copy of logits to the host and
no choice of a token. Knows nothing of what it is compared with.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bench.build_peer import VARIANTS, WITH_CUDA
from bench.machine import cpu_flags
from bench.peer import PeerError, open_peer
from bench.peer_model import FlashAttention, PeerContext, Placement, load_model
from bench.peer_rpc import add_server
from bench.peer_source import PEER, BuildError

from dflash_protocol.ids import F32Array

KV_TYPE = "f16"
MICRO_BATCHES = (512, 2048)
"""Sizes that are tried: llama.cpp's default, and as many tokens as a batch has."""


class GpuPeer:
    """One side of a comparison. Owns: model and contexts, as long as the process lives.

    A build without CUDA computes on the CPU: for trying out what calls this.
    """

    def __init__(
        self,
        folder: Path,
        path: Path,
        *,
        context: int,
        micro_batches: Sequence[int] = MICRO_BATCHES,
        layers_on: tuple[str, ...] = ("CUDA0",),
        experts_on: str = "",
        rpc_server: str = "",
    ) -> None:
        """Devices as llama.cpp calls them: each of `layers_on` has some layers, and `experts_on`
        the routed experts, which are where their layers are if it is empty. If `rpc_server` says
        where one listens, its device has them.

        Raises: BuildError, PeerError.
        """
        peer = open_peer(folder)
        if rpc_server:
            experts_on = add_server(peer, rpc_server)
        self._devices = peer.device_names()
        if peer.has_cuda and "CUDA0" not in self._devices:
            raise PeerError(f"llama.cpp was built with CUDA and sees only {self._devices}")
        placement = Placement(layers_on if peer.has_cuda else (), experts_on)
        model = load_model(peer, path, placement)
        self._contexts = {
            micro_batch: PeerContext(
                peer,
                model,
                num_threads=os.cpu_count() or 1,
                context=context,
                kv_type=KV_TYPE,
                micro_batch=micro_batch,
                flash_attention=FlashAttention.ENABLED,
            )
            for micro_batch in micro_batches
        }
        self._first = self._contexts[micro_batches[0]]
        self._held: Sequence[int] = ()
        """The prompt that the first context begins with."""

    def opened(self) -> dict[str, object]:
        """What a result says of it."""
        return {"devices": self._devices, "kv_type": KV_TYPE, "flash_attention": True}

    def logits(self, token_ids: Sequence[int], vocab_size: int) -> F32Array:
        """Logits after the last token, from an empty state. Shapes: result [V] float32."""
        self._held = ()
        return self._first.logits(token_ids, vocab_size)

    def prefill(self, micro_batch: int, token_ids: Sequence[int]) -> float:
        """Tokens per second of one prompt from an empty state, with logits after its last token."""
        self._held = ()
        return self._contexts[micro_batch].prefill(token_ids)

    def decode(self, prompt: Sequence[int], token_ids: Sequence[int]) -> float:
        """Tokens per second of tokens one by one after a prompt, which is in no time."""
        if list(self._held) != list(prompt) or not self._first.drop(len(prompt)):
            self._first.fill(prompt)
            self._held = list(prompt)
        return self._first.decode(len(prompt), token_ids)


def built_peer(variant: str) -> Path:
    """The folder of a variant that has been built; ``auto``: of the first one with CUDA.

    Raises: BuildError if there is none that runs on this machine.
    """
    names = sorted(WITH_CUDA) if variant == "auto" else [variant]
    for name in names:
        needs_amx = "AMX_INT8" in (VARIANTS[name] or ())
        if (PEER / name / "build.json").is_file() and not (needs_amx and not has_amx()):
            return PEER / name
    raise BuildError(f"llama.cpp is not built: python -m bench.build_peer {names[0]}")


def has_amx() -> bool:
    """Whether this machine runs builds for AMX."""
    return "amx_int8" in cpu_flags()
