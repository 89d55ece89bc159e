"""Engine: a model opened for use. Prefill in chunks, decode, sample; logits for tests and tools.

One sequence at a time, used by one thread. Knows nothing of how experts are spread; it hands every
layer's routing to the MoeExpertComputeRuntime.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil

from dflash_adapters.chat import render_chat
from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.moe_spec import ModelSpec
from dflash_adapters.ops import KvType, Model
from dflash_adapters.registry import adapter_for
from dflash_adapters.tokenizer import Tokenizer, load_tokenizer
from dflash_protocol.endpoint import parse_endpoint
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import AnyArray, F32Array, I32Array, Phase
from dflash_protocol.placement import Placement
from dflash_protocol.settings import MAX_THREADS, DaemonSetting, Settings, cache_of, load_settings
from dflash_runtime.compute import BackendName, ComputeBackend, make_backend
from dflash_runtime.engine.arguments import choice, chunk_bounds, token_id_array, whole_number
from dflash_runtime.engine.demo_model import demo_model_path
from dflash_runtime.engine.launching import choose_daemons, daemon_names
from dflash_runtime.engine.owners import Event, Owners
from dflash_runtime.engine.prefix import CachedPrefix
from dflash_runtime.engine.sampling import Sampler, SamplingOptions, TokenLogprobs, token_logprobs
from dflash_runtime.experts.compute import OwnerStats
from dflash_runtime.experts.supervisor import ProgressCallback
from dflash_runtime.experts.telemetry import Profile
from dflash_runtime.placement.split import even_split

_PREFILL_CHUNK = 512
_DEFAULT_CONTEXT_LIMIT = 32768
"""Context if none is asked for and the model has more: a cache larger than this is a choice."""

_BYTES_PER_VALUE = {KvType.F32: 4, KvType.F16: 2, KvType.Q8_0: 34 / 32}


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One generated token. `text` is what became readable with it: a character may need several."""

    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class GenerationStats:
    """The last generation. Prefill ends with the first token; decode counts the ones after it."""

    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    """Tokens of the prompt whose keys and values were in the cache already."""
    num_generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    finish_reason: str = ""
    """``stop`` (the model ended), ``length`` (enough tokens), ``context`` (no position left),
    ``cancelled``."""

    @property
    def prefill_tokens_per_s(self) -> float:
        num_computed = self.num_prompt_tokens - self.num_reused_tokens
        return num_computed / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        num_steps = max(0, self.num_generated_tokens - 1)
        return num_steps / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine was opened: owners by name, events in order."""

    owners: dict[str, OwnerStats]
    events: list[Event]


class _Cancelled(Exception):
    """Nobody wants the rest of this generation."""


class Engine:
    """A model with its experts placed. Made by `Engine.open`; close it, or use it in ``with``.

    Owns: the mapped file, the backend, the daemons it spawned.
    """

    def __init__(
        self,
        file: GgufFile,
        model: Model[AnyArray],
        backend: ComputeBackend,
        *,
        owners: Owners,
        context: int,
        kv_type: KvType,
        is_profiled: bool = False,
    ) -> None:
        """Not for direct use; see `open`."""
        self._file = file
        self._model = model
        self._owners = owners
        self._num_runs = 0
        self._profile = Profile() if is_profiled else None
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_is_loaded = False
        self.spec = model.spec
        self.backend_name = backend.name
        self.num_positions = context
        self.kv_type = kv_type
        self.last_generation = GenerationStats()
        self._cache = backend.ops.new_kv_cache(self.spec.kv_layers, context, kv_type)
        # BLAS, which the reference backend calls, sums in an order that depends on the shapes.
        is_chunk_invariant = backend.name != BackendName.REFERENCE
        self._prefix = CachedPrefix(context, is_chunk_invariant=is_chunk_invariant)
        self._is_cancelled: Callable[[], bool] | None = None
        self._release: Callable[[], object] = lambda: None

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        *,
        daemons: Sequence[DaemonSetting | str] | None = None,
        connect: Sequence[str] | None = None,
        local_experts: int | None = None,
        placement: Placement | None = None,
        require_daemons: bool | None = None,
        backend: str = "auto",
        kv_type: str = "auto",
        context: int | None = None,
        threads: int | None = None,
        settings: Settings | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> Engine:
        """Open a GGUF file (None = the demo model) and make its experts ready wherever they go.

        `daemons` are spawned (``DEVICE[@LAUNCHER]``), `connect` are endpoints of running ones; what
        is None is taken from the `settings`, which are by default those of `load_settings`.
        `local_experts` a layer stay in this process; `placement` says it all and excludes it.
        `kv_type` is ``f32``, ``f16``, ``q8_0`` or ``auto``: f32 if all the file's matrices are F32,
        else f16. While the engine is open, its `settings` say where the process keeps what it
        compiles; of several engines, those of the one opened last.
        Raises: SettingsError, ModelFileError, DaemonUnavailable, HandshakeRefused.
        """
        backend_name = choice(BackendName, "backend", backend)
        chosen_kv = None if kv_type == "auto" else choice(KvType, "kv_type", kv_type)
        settings = settings or load_settings()
        choices = choose_daemons(settings.daemons if daemons is None else daemons, settings)
        connect = settings.connect if connect is None else connect
        endpoints = [parse_endpoint(each) for each in connect]
        if placement is not None and local_experts is not None:
            raise SettingsError("placement and local_experts exclude each other")
        if threads is not None:
            threads = whole_number("threads", threads, smallest=1, largest=MAX_THREADS)
        if context is not None:
            context = whole_number("context", context, smallest=1)
        if local_experts is not None:
            local_experts = whole_number("local_experts", local_experts, smallest=0)
        if require_daemons is None:
            require_daemons = settings.ipc_required
        with contextlib.ExitStack() as undo:
            undo.enter_context(cache_of(settings))
            file = undo.enter_context(GgufFile.open(demo_model_path() if path is None else path))
            adapter = adapter_for(file)
            spec = adapter.read_spec(file)
            if context is not None and context > spec.context_length:
                raise SettingsError(
                    f"context={context}: the model was made for up to {spec.context_length}"
                )
            if placement is None:
                names = daemon_names(choices, endpoints)
                placement = even_split(spec.moe, names, local_experts)
            if chosen_kv is None:
                chosen_kv = KvType.F32 if spec.all_matrices_f32 else KvType.F16
            num_positions = context or min(spec.context_length, _DEFAULT_CONTEXT_LIMIT)
            _check_cache_fits(spec, num_positions, chosen_kv)
            compute = make_backend(
                backend_name,
                num_threads=threads or settings.threads or None,
                cpu_tier=settings.cpu_tier,
            )
            undo.callback(compute.close)
            report = on_progress or _nobody_watches
            report("parent", "compile", 0, 1)
            types = {tensor.tensor_type for tensor in file.tensors.values()}
            compute.warm_up(
                (each for each in types if not each.is_integer),
                kv_type=chosen_kv,
                on_progress=partial(report, "parent", "compile"),
            )
            owners = Owners(
                file,
                spec,
                compute,
                placement=placement,
                choices=choices,
                endpoints=endpoints,
                settings=settings,
                require_daemons=require_daemons,
                on_progress=on_progress,
            )
            undo.callback(owners.close)
            model = adapter.load(file, compute.ops)
            engine = cls(
                file,
                model,
                compute,
                owners=owners,
                context=num_positions,
                kv_type=chosen_kv,
                is_profiled=settings.ipc_profile,
            )
            # An engine that is dropped without being closed must not leave its daemons running.
            engine._release = weakref.finalize(engine, undo.pop_all().close)
            return engine

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the daemons we spawned, leave the others, release the file. May be called twice."""
        self._num_runs = -1
        self._release()

    @property
    def model_path(self) -> Path:
        """The file that is open."""
        return self._file.path

    @property
    def placement(self) -> Placement:
        """Which owner holds which experts."""
        return self._owners.placement

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, loaded when first asked for; None if the file has none."""
        if not self._tokenizer_is_loaded:
            self._tokenizer = load_tokenizer(self._file)
            self._tokenizer_is_loaded = True
        return self._tokenizer

    def encode_prompt(self, text: str, *, chat: bool = False) -> list[int]:
        """Token ids of a text, or with `chat` of the conversation that it opens.

        Raises: SettingsError if the file has no tokenizer, or no chat template.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise SettingsError("this file has no tokenizer; give token ids instead of text")
        if not chat:
            return tokenizer.encode(text, add_special=True)
        return self.encode_chat([{"role": "user", "content": text}])

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation; `template` in place of the file's, `extra` for it to read.

        May be called from any thread once `tokenizer` has been loaded.
        Raises: SettingsError if there is no tokenizer, or no template, or it refuses the messages;
        UnsupportedModel if it fails.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise SettingsError("this file has no tokenizer; give token ids instead of text")
        template = template or tokenizer.chat_template
        if template is None:
            raise SettingsError("this model has no chat template; give a plain prompt")
        rendered = render_chat(
            template,
            messages,
            bos_token=tokenizer.bos_text,
            eos_token=tokenizer.eos_text,
            extra=extra,
            path=self._file.path,
        )
        return tokenizer.encode(rendered)

    def logits(
        self, token_ids: Sequence[int], chunk: int | Iterable[int] | None = None
    ) -> F32Array:
        """Logits after every position, from an empty state. Shapes: result [T, V] float32.

        `chunk` is the most tokens computed at once, or the sizes of successive chunks.
        Raises: SettingsError for a bad id, ContextExceeded, DaemonUnavailable.
        """
        ids = self._checked(token_ids)
        run = self._begin_run()
        out = np.empty((ids.size, self.spec.vocab_size), np.float32)
        for first, last in chunk_bounds(ids.size, chunk, _PREFILL_CHUNK):
            out[first:last] = self._model.head(self._forward(run, ids[first:last], first))
        return out

    def generate(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        ignore_eos: bool = False,
        top_logprobs: int | None = None,
        reuse_prefix: bool = False,
        is_cancelled: Callable[[], bool] | None = None,
        on_prefill: Callable[[int, int], None] = lambda num_done, num_total: None,
    ) -> Iterator[GeneratedToken]:
        """Yield up to `max_tokens` tokens after the prompt, a text or token ids.

        Ends early at a stop token of the model, which is not yielded, unless `ignore_eos`; and when
        the context is full. `last_generation` holds times and the reason of the end; `on_prefill`
        is told how many prompt tokens are done. With `top_logprobs` (0 or more) a token comes with
        its log-probability and those of so many most likely ones. With `reuse_prefix` the first
        tokens that this prompt and the run before have in common are not computed again, which
        does not show in the bits. Once `is_cancelled`, asked before every layer, says so, the
        generation ends.
        Raises: SettingsError before anything is computed; DaemonUnavailable while it is, if daemons
        are required.
        """
        sampler = Sampler(SamplingOptions(temperature, top_k, top_p, min_p, seed))
        max_tokens = whole_number("max_tokens", max_tokens, smallest=1)
        if top_logprobs is not None:
            whole_number("top_logprobs", top_logprobs, smallest=0, largest=self.spec.vocab_size)
        ids = self._checked(self.encode_prompt(prompt) if isinstance(prompt, str) else prompt)
        if ids.size == 0:
            raise SettingsError("the prompt is empty")

        def choose(logits: F32Array) -> tuple[int, TokenLogprobs | None]:
            token_id = sampler(logits)
            if top_logprobs is None:
                return token_id, None
            return token_id, token_logprobs(logits, token_id, top_logprobs)

        run = self._generate(
            ids, max_tokens, choose, ignore_eos, reuse_prefix, is_cancelled, on_prefill
        )
        return self._profiled(run)

    def stats(self) -> EngineStats:
        """Counters since opening."""
        return EngineStats(self._owners.runtime.stats(), self._owners.events())

    def _profiled(self, run: Iterator[GeneratedToken]) -> Iterator[GeneratedToken]:
        """The same, and a line about it in the log at its end, if that is wanted."""
        try:
            yield from run
        except _Cancelled:
            self.last_generation.finish_reason = "cancelled"
        finally:
            if self._profile is not None:
                owners = self._owners.runtime.stats()
                self._profile.log_generation(
                    {name: each.phases for name, each in owners.items()},
                    troubles={name: each.troubles for name, each in owners.items()},
                )

    def _generate(
        self,
        prompt: I32Array,
        max_tokens: int,
        choose: Callable[[F32Array], tuple[int, TokenLogprobs | None]],
        ignore_eos: bool,
        reuse_prefix: bool,
        is_cancelled: Callable[[], bool] | None,
        on_prefill: Callable[[int, int], None],
    ) -> Iterator[GeneratedToken]:
        run = self._begin_run(is_cancelled)
        stats = self.last_generation = GenerationStats(num_prompt_tokens=prompt.size)
        tokenizer = self.tokenizer
        decoder = tokenizer.stream() if tokenizer is not None else None
        stop_ids = tokenizer.stop_ids if tokenizer is not None and not ignore_eos else frozenset()
        started_s = time.perf_counter()
        reused = 0
        if reuse_prefix:
            wanted = chunk_bounds(prompt.size, None, _PREFILL_CHUNK)
            stats.num_reused_tokens = reused = self._prefix.num_reusable(prompt, wanted)
        for first, last in chunk_bounds(prompt.size - reused, None, _PREFILL_CHUNK):
            on_prefill(reused + first, prompt.size)
            hidden = self._forward(run, prompt[reused + first : reused + last], reused + first)
        token_id, logprobs = choose(self._model.head(hidden[-1:])[0])
        num_positions = prompt.size
        stats.prefill_s = time.perf_counter() - started_s
        while token_id not in stop_ids:
            stats.num_generated_tokens += 1
            if stats.num_generated_tokens == max_tokens:
                stats.finish_reason = "length"
            elif num_positions == self.num_positions:
                stats.finish_reason = "context"
            text = decoder.push(token_id) if decoder is not None else ""
            if decoder is not None and stats.finish_reason:
                text += decoder.flush()
            yield GeneratedToken(token_id, text, logprobs)
            if stats.finish_reason:
                return
            started_s = time.perf_counter()
            hidden = self._forward(run, np.array([token_id], np.int32), num_positions)
            token_id, logprobs = choose(self._model.head(hidden)[0])
            num_positions += 1
            stats.decode_s += time.perf_counter() - started_s
        stats.finish_reason = "stop"

    def _begin_run(self, is_cancelled: Callable[[], bool] | None = None) -> int:
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

    def _forward(self, run: int, token_ids: I32Array, first_position: int) -> AnyArray:
        """One chunk of a run through all layers. Shapes: token_ids [T]; result [T, H].

        Raises: SettingsError if another run has taken over the sequence, or the engine is closed.
        """
        if run != self._num_runs:
            raise SettingsError(
                "this engine is closed"
                if self._num_runs < 0
                else "another call to this engine has taken over its one sequence"
            )
        phase = Phase.DECODE if token_ids.size == 1 else Phase.PREFILL
        positions = np.arange(first_position, first_position + token_ids.size, dtype=np.int32)
        compute = partial(self._owners.runtime.compute, phase=phase)
        self._prefix.cut(first_position)
        moe = compute if self._is_cancelled is None else self._cancellable(compute)
        hidden = self._model.forward(token_ids, positions, self._cache, moe)
        self._prefix.add(first_position, token_ids)
        return hidden

    def _cancellable(self, compute: Callable[..., AnyArray]) -> Callable[..., AnyArray]:
        """The same, but the first layer that nobody wants any more raises _Cancelled."""

        def moe(
            layer_id: int, hidden: AnyArray, topk_ids: AnyArray, topk_weights: AnyArray
        ) -> AnyArray:
            if self._is_cancelled is not None and self._is_cancelled():
                raise _Cancelled
            return compute(layer_id, hidden, topk_ids, topk_weights)

        return moe

    def _checked(self, token_ids: Sequence[int]) -> I32Array:
        return token_id_array(
            token_ids, vocab_size=self.spec.vocab_size, num_positions=self.num_positions
        )


def _check_cache_fits(spec: ModelSpec, num_positions: int, kv_type: KvType) -> None:
    """Raises: SettingsError if the key/value cache would be larger than this machine's memory."""
    values = sum(kv.num_heads * (kv.key_dim + kv.value_dim) for kv in spec.kv_layers)
    num_bytes = num_positions * values * _BYTES_PER_VALUE[kv_type]
    if num_bytes > psutil.virtual_memory().total:
        raise SettingsError(
            f"a context of {num_positions} needs {num_bytes / 2**30:.1f} GiB for keys and values, "
            "more than this machine has; ask for a smaller one"
        )


def _nobody_watches(owner: str, stage: str, num_done: int, num_total: int) -> None:
    """Where no progress is wanted."""
