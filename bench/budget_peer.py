"""llama.cpp within a budget of device memory: what it can be told to do, and the search for the
best of it.

Its users have three ways: ``--n-cpu-moe N``, which keeps the routed experts of the first N layers
in the host's memory and is tried until nothing runs out of memory; ``--fit``, which chooses by
sizes; and ``--cpu-moe`` with ``--moe-cache-mib N``, which keeps the experts that were used last in
what all else leaves of the GPU's memory. They are measured, each with two micro-batches: the usual
one, which leaves most room for experts, and the one that a long prompt is fastest with.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu_parts import say
from bench.llama_api import (
    CPU,
    SIZE,
    TensorPlace,
    default_context_params,
    default_model_params,
)
from bench.peer import PeerError, find_device, open_peer
from bench.peer_fit import USUAL_MARGIN, FitStatus, Fitted, fit
from bench.peer_model import FlashAttention, PeerContext, context_params
from bench.sides import Side, SideError

USUAL_MICRO_BATCH = 512
MICRO_BATCHES = (USUAL_MICRO_BATCH, 1024, 2048, 4096)
"""Sizes that are tried, the smallest first."""
LOAD_MODES = {"auto": -1, "none": 0}
"""llama_load_mode: as llama.cpp chooses (the mapped file), or copied into locked memory."""

_ALL_LAYERS = -1
_GPU = b"CUDA"
"""What the names of GPUs begin with."""
_EXPERTS = r"blk\.{}\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""As in llama.cpp's own ``--n-cpu-moe``."""
_OPEN_WORK = 5 << 29
"""More than a context with the largest micro-batch takes beside keys and values, so that all of
them can be tried with one placement."""
_SLACK = 64 << 20
"""What allocations may take beyond their sizes."""
_TRIED_TOKENS = 32
_MOST_TRIES = 6
_LEAST_CACHE, _LESS = 256 << 20, 0.9
"""Of experts: bytes, and what is tried of a cache that did not fit."""


@dataclass(frozen=True, slots=True)
class PeerWork:
    """What is measured: in each round tokens one by one after a prompt, and prompts by length."""

    context: int
    decode: list[tuple[Sequence[int], Sequence[int]]]
    """A prompt, and the tokens that follow it, of each round."""
    prompts: Mapping[int, Sequence[Sequence[int]]]
    """By length, a prompt of each round."""

    @property
    def longest(self) -> Sequence[int]:
        return self.prompts[max(self.prompts)][0]


@dataclass(slots=True)
class Setup:
    """One way of running llama.cpp, and what it reached."""

    choice: str
    """``--n-cpu-moe N``, ``--fit`` or ``--moe-cache-mib N``."""
    micro_batch: int
    cache_bytes: int = 0
    """Of experts."""
    tokens_per_s: dict[str, list[float]] = field(default_factory=dict)
    """By row: `decode_row`, `prompt_row`."""
    free_bytes: int = 0
    placed: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.choice}, {self.micro_batch} at once"


def decode_row(work: PeerWork) -> str:
    """Name of the row."""
    return f"decode at {len(work.decode[0][0])}"


def prompt_row(length: int) -> str:
    """Name of the row."""
    return f"prompt {length}"


class PlacedPeer:
    """llama.cpp with one model, placed anew as often as asked, and one context at a time.

    A build without CUDA computes on the CPU: for trying out what calls this.
    """

    def __init__(
        self, library: Any, path: Path, *, context: int, num_threads: int, load_mode: str = "auto"
    ) -> None:
        """`library` is a Peer, or has its functions."""
        self._library, self._path = library, path
        self._load_mode = LOAD_MODES[load_mode]
        self._context_size, self._num_threads = context, num_threads
        self._model = 0
        self._context: PeerContext | None = None
        self._kept: list[Any] = []
        """What the model's parameters refer to."""
        devices = [
            library.ggml_backend_dev_get(each) for each in range(library.ggml_backend_dev_count())
        ]
        gpus = [each for each in devices if library.ggml_backend_dev_name(each).startswith(_GPU)]
        self._devices, self._has_gpus = gpus or devices[:1], bool(gpus)

    def free_bytes(self) -> int:
        """Of all GPUs together, as their driver says."""
        free, total, found = SIZE(), SIZE(), 0
        for device in self._devices:
            self._library.ggml_backend_dev_memory(
                device, ctypes.addressof(free), ctypes.addressof(total)
            )
            found += free.value
        return found

    def drop(self) -> None:
        """Free context and model."""
        self.close_context()
        if self._model:
            self._library.llama_model_free(self._model)
        self._model = 0

    def place(self, num_layers: int) -> dict[str, Any]:
        """Load with the routed experts of the first `num_layers` layers in the host's memory.

        Raises: PeerError, if there is no room for the others among the reasons.
        """
        params = self._params()
        cpu = self._library.ggml_backend_dev_buffer_type(find_device(self._library, CPU))
        patterns = [_EXPERTS.format(layer).encode() for layer in range(num_layers)]
        places = (TensorPlace * (num_layers + 1))(*(TensorPlace(each, cpu) for each in patterns))
        params.tensor_buft_overrides = ctypes.addressof(places) if num_layers else None
        self._load(params, places, patterns)
        return {"n_cpu_moe": num_layers}

    def place_by_fit(self, micro_batch: int, margin: int = USUAL_MARGIN) -> dict[str, Any]:
        """Load as ``--fit`` chooses for a context with this micro-batch. Raises: PeerError."""
        fitted, params = self.fitted(micro_batch, margin)
        if fitted.status is not FitStatus.SUCCESS:
            raise PeerError(f"--fit: {fitted.status.name}")
        self._load(params, fitted)
        return {"n_gpu_layers": params.n_gpu_layers, "elsewhere": fitted.patterns}

    def fitted(self, micro_batch: int, margin: int = USUAL_MARGIN) -> tuple[Fitted, Any]:
        """What ``--fit`` chooses, and the model's parameters that say so."""
        self.drop()
        params = self._params()
        options = self._context_options(micro_batch)
        chosen = fit(
            self._library,
            self._path,
            params,
            context_params(self._library, **options),
            margin=margin,
        )
        return chosen, params

    def caches_experts(self) -> bool:
        """Whether this llama.cpp can keep experts on a GPU that are in the host's memory."""
        params = default_context_params(getattr(self._library, "llama", self._library))
        return self._has_gpus and hasattr(params, "expert_cache_bytes")

    def open_context(self, micro_batch: int, cache_bytes: int = 0) -> None:
        """Of the model that is loaded, in place of the one before. Raises: PeerError."""
        self.close_context()
        self._context = PeerContext(
            self._library,
            self._model,
            **self._context_options(micro_batch),
            expert_cache_bytes=cache_bytes,
        )

    def close_context(self) -> None:
        """Free it, if there is one."""
        if self._context is not None:
            self._context.close()
        self._context = None

    def use_threads(self, num_threads: int) -> None:
        """From now on, of the open context and of later ones."""
        self._num_threads = num_threads
        if self._context is not None:
            self._context.use_threads(num_threads)

    def prefill(self, prompt: Sequence[int]) -> float:
        """Tokens per second."""
        return self._opened().prefill(prompt)

    def decode_after(self, prompt: Sequence[int], token_ids: Sequence[int]) -> float:
        """Tokens per second of tokens one by one after a prompt, which is in no time."""
        return self._opened().decode_after(prompt, token_ids)

    def _opened(self) -> PeerContext:
        if self._context is None:
            raise PeerError("no context is open")
        return self._context

    def _params(self) -> Any:
        params = default_model_params(getattr(self._library, "llama", self._library))
        params.load_mode = self._load_mode
        params.n_gpu_layers = _ALL_LAYERS
        return params

    def _context_options(self, micro_batch: int) -> dict[str, Any]:
        return {
            "num_threads": self._num_threads,
            "context": self._context_size,
            "kv_type": "f16",
            "micro_batch": micro_batch,
            "flash_attention": FlashAttention.ENABLED,
            "num_outputs": 1,  # as llama.cpp's server with one client
        }

    def _load(self, params: Any, *kept: Any) -> None:
        self.drop()
        self._kept = [params, *kept]
        self._model = self._library.llama_model_load_from_file(str(self._path).encode(), params)
        if not self._model:
            raise PeerError(f"llama.cpp does not load {self._path}")


def placed_peer(folder: Path, path: Path, **options: Any) -> PlacedPeer:
    """A PlacedPeer of a build, as the object of a Side. Raises: BuildError, PeerError."""
    peer = open_peer(folder)
    if peer.has_cuda and "CUDA0" not in peer.device_names():
        raise PeerError(f"llama.cpp was built with CUDA and sees only {peer.device_names()}")
    return PlacedPeer(peer, path, **options)


class PeerSearch:
    """Finds what llama.cpp reaches within the memory that is free, and keeps it in `setups`.

    A llama.cpp that runs out of memory while it computes ends its process: `open_side` starts
    another. Owns: the side, until `close`.
    """

    def __init__(
        self,
        open_side: Callable[[], Side],
        layer_bytes: Sequence[int],
        other_bytes: int,
        work: PeerWork,
    ) -> None:
        """`layer_bytes`: of each layer's routed experts; `other_bytes`: of all else that a model
        with this context keeps on the device."""
        self._open_side, self._work = open_side, work
        self._layer_bytes, self._other_bytes = layer_bytes, other_bytes
        self._side = open_side()
        self.setups: list[Setup] = []
        self.threads: dict[int, float] = {}
        """Tokens per second of a few decoded tokens, by number of threads."""

    def close(self) -> None:
        """End the process. May be called again."""
        self._side.close()

    def run(self, num_threads: Sequence[int], margin: int = USUAL_MARGIN) -> None:
        """Measure all ways. Raises: SideError if not even all experts elsewhere leave room."""
        placed, free, speeds = self._tried(num_threads)
        if len(self.threads) > 1:
            self._ask("use_threads", max(self.threads, key=lambda each: self.threads[each]))
        fast = max(speeds, key=lambda each: speeds[each])
        for micro_batch in dict.fromkeys((USUAL_MICRO_BATCH, fast)):
            fewest = fewest_elsewhere(self._layer_bytes, placed, free[micro_batch] - _SLACK)
            self._measure_placed(fewest, micro_batch, with_decode=micro_batch == USUAL_MICRO_BATCH)
        if self.setups and all(setup.placed.get("n_cpu_moe") == 0 for setup in self.setups):
            return  # all fits: --fit chooses the same
        for micro_batch in dict.fromkeys((USUAL_MICRO_BATCH, fast)):
            setup = Setup("--fit", micro_batch)
            try:
                setup.placed = self._ask("place_by_fit", micro_batch, margin)
                self._measure(setup, with_decode=micro_batch == USUAL_MICRO_BATCH)
            except SideError as error:
                self._failed(setup, error)
        if self._ask("caches_experts"):
            for micro_batch in dict.fromkeys((USUAL_MICRO_BATCH, fast)):
                self._measure_cached(micro_batch, with_decode=micro_batch == USUAL_MICRO_BATCH)

    def _tried(self, num_threads: Sequence[int]) -> tuple[int, dict[int, int], dict[int, float]]:
        """Number of layers elsewhere that surely suffices; with it, by micro-batch, bytes that stay
        free and the speed of the longest prompt."""
        room = self._ask("free_bytes") - self._other_bytes - _OPEN_WORK - _SLACK
        placed = fewest_elsewhere(self._layer_bytes, len(self._layer_bytes), room)
        while True:
            free: dict[int, int] = {}
            speeds: dict[int, float] = {}
            try:
                self._ask("place", placed)
                for micro_batch in MICRO_BATCHES:
                    self._ask("open_context", micro_batch)
                    self._ask("prefill", self._work.longest[:_TRIED_TOKENS])
                    speeds[micro_batch] = self._ask("prefill", self._work.longest)
                    if micro_batch == USUAL_MICRO_BATCH:
                        self._try_threads(num_threads)
                    free[micro_batch] = self._ask("free_bytes")
            except SideError as error:
                if USUAL_MICRO_BATCH not in free:
                    if placed == len(self._layer_bytes):
                        raise
                    placed = min(placed + 2, len(self._layer_bytes))
                    self._revive()
                    continue
                self._failed(Setup(f"--n-cpu-moe {placed}", micro_batch), error)
            shown = ", ".join(f"{size}: {speed:.0f}" for size, speed in speeds.items())
            say(f"llama.cpp, tried --n-cpu-moe {placed}: prompts by micro-batch {shown}")
            return placed, free, {size: speeds[size] for size in free}

    def _try_threads(self, num_threads: Sequence[int]) -> None:
        if len(num_threads) < 2:
            return
        prompt, following = self._work.decode[0]
        for count in num_threads:
            self._ask("use_threads", count)
            self._ask("decode_after", prompt[:_TRIED_TOKENS], following[:_TRIED_TOKENS])
            self.threads[count] = self._ask(
                "decode_after", prompt[:_TRIED_TOKENS], following[:_TRIED_TOKENS]
            )

    def _measure_placed(self, fewest: int, micro_batch: int, *, with_decode: bool) -> None:
        """Measure with the fewest layers elsewhere that do fit, from `fewest` on."""
        most = min(fewest + _MOST_TRIES, len(self._layer_bytes))
        for num_layers in range(fewest, most + 1):
            setup = Setup(f"--n-cpu-moe {num_layers}", micro_batch)
            try:
                setup.placed = self._ask("place", num_layers)
                self._measure(setup, with_decode=with_decode)
                return
            except SideError as error:
                self._failed(setup, error)

    def _measure_cached(self, micro_batch: int, *, with_decode: bool) -> None:
        """Measure with all layers elsewhere, and the largest cache that does fit."""
        free = self._left_by_layers_elsewhere(micro_batch)
        for _ in range(_MOST_TRIES):
            size = free >> 20
            setup = Setup(f"--moe-cache-mib {size}", micro_batch, size << 20)
            if setup.cache_bytes < _LEAST_CACHE:
                return
            try:
                setup.placed = self._ask("place", len(self._layer_bytes))
                self._measure(setup, with_decode=with_decode)
                return
            except SideError as error:
                self._failed(setup, error)
                free = int(_LESS * free)

    def _left_by_layers_elsewhere(self, micro_batch: int) -> int:
        """Bytes that stay free with all experts elsewhere."""
        try:
            self._ask("place", len(self._layer_bytes))
            self._ask("open_context", micro_batch)
            self._ask("prefill", self._work.longest)
            return int(self._ask("free_bytes")) - _SLACK
        except SideError as error:
            self._failed(Setup("--cpu-moe", micro_batch), error)
            return 0

    def _measure(self, setup: Setup, *, with_decode: bool) -> None:
        self._ask("open_context", setup.micro_batch, setup.cache_bytes)
        work = self._work
        for length, prompts in sorted(work.prompts.items(), reverse=True):
            self._ask("prefill", prompts[0])
            setup.tokens_per_s[prompt_row(length)] = [
                self._ask("prefill", each) for each in prompts
            ]
        if with_decode:
            setup.tokens_per_s[decode_row(work)] = [
                self._ask("decode_after", *each) for each in work.decode
            ]
        setup.free_bytes = self._ask("free_bytes")
        self.setups.append(setup)
        shown = "; ".join(
            f"{row} {statistics.median(values):.1f}" for row, values in setup.tokens_per_s.items()
        )
        say(f"llama.cpp, {setup}: {shown}; {setup.free_bytes / 2**20:.0f} MiB free")

    def _failed(self, setup: Setup, error: SideError) -> None:
        say(f"llama.cpp, {setup}: {str(error).strip().splitlines()[-1]}")
        self._revive()

    def _revive(self) -> None:
        """Start another process if the side's has ended."""
        try:
            self._ask("drop")
        except SideError:
            self._side.close()
            self._side = self._open_side()
            if self.threads:
                self._ask("use_threads", max(self.threads, key=lambda each: self.threads[each]))

    def _ask(self, method: str, *args: Any) -> Any:
        return self._side.call(method, *args)


def fewest_elsewhere(layer_bytes: Sequence[int], elsewhere: int, free: int) -> int:
    """The smallest number of layers whose experts must be elsewhere.

    `free` bytes are free with the first `elsewhere` layers' elsewhere; each layer that comes back
    takes its `layer_bytes`.
    """
    while elsewhere and layer_bytes[elsewhere - 1] <= free:
        elsewhere -= 1
        free -= layer_bytes[elsewhere]
    return elsewhere
