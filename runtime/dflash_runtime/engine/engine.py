"""Engine: a model opened for use. Prefill in chunks, decode, sample; logits for tests and tools.

One sequence at a time, used by one thread. Knows nothing of how experts are spread: `opening` asks
for their owners, `steps` hands them every layer's routing, `generation` makes tokens of it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from dflash_adapters.text.tokenizer import Tokenizer, load_tokenizer
from dflash_protocol.device import Device
from dflash_protocol.errors import SettingsError
from dflash_protocol.ids import F32Array, I32Array
from dflash_protocol.placement import Placement
from dflash_protocol.settings import DaemonSetting, Settings, load_settings
from dflash_runtime.engine.arguments import token_id_array, whole_number
from dflash_runtime.engine.chat_renderer import ChatRenderer
from dflash_runtime.engine.generation import GeneratedToken, GenerationRequest, generated_tokens
from dflash_runtime.engine.opening import (
    Opened,
    OpenOptions,
    advice_if_out_of_memory,
    open_model,
)
from dflash_runtime.engine.prompts import chat_ids, chat_text, prompt_parts, text_ids
from dflash_runtime.engine.sampling import Sampler, SamplingParams
from dflash_runtime.engine.stats import EngineStats, GenerationStats
from dflash_runtime.engine.steps import Cancelled, Steps
from dflash_runtime.engine.verifying import Verified, Verifier
from dflash_runtime.experts.daemons.supervisor import ProgressCallback
from dflash_runtime.experts.telemetry import Profile
from dflash_runtime.interrupts import uninterrupted

__all__ = ["Engine", "EngineStats", "GeneratedToken", "GenerationStats", "Verified"]


class Engine:
    """A model with its experts placed. Made by `Engine.open`; close it, or use it in ``with``.

    Owns: the mapped file, the backend, the daemons it spawned, the processes that render chats.
    """

    def __init__(self, opened: Opened, *, is_profiled: bool = False) -> None:
        """Not for direct use; see `open`."""
        self._file = opened.file
        self._owners = opened.owners
        self._profile = Profile() if is_profiled else None
        self._renderer = ChatRenderer()
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_is_loaded = False
        self.spec = opened.model.spec
        self.backend_name = opened.backend.name
        self.num_positions = opened.num_positions
        self.kv_type = opened.kv_type
        self.last_generation = GenerationStats()
        self._steps = Steps(
            opened.file,
            opened.model,
            opened.backend.ops.new_kv_cache(
                self.spec.kv_layers, self.num_positions, self.kv_type, self.spec.recurrent_layers
            ),
            backend=opened.backend,
            runtime=opened.owners.runtime,
            local_banks=opened.owners.local_banks,
            num_positions=self.num_positions,
        )
        self._verifier: Verifier | None = None
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
        tolerates_absent: bool = False,
        device: Device | str | None = None,
        backend: str | None = None,
        kv_type: str | None = None,
        context: int | None = None,
        threads: int | None = None,
        settings: Settings | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> Engine:
        """Open a GGUF file and make its experts ready wherever they go.

        `daemons` are spawned (``DEVICE[@LAUNCHER]``), `connect` are endpoints of running ones; what
        is None is taken from the `settings`, which are by default those of `load_settings`; if they
        name no model either, it is the demo model.
        `local_experts` a layer stay in this process; `placement` says it all and excludes it.
        With `tolerates_absent`, unless daemons are required, those of `connect` may come later.
        `device` is what this process computes on: ``auto``, ``cpu``, ``cuda:N`` or ``hip:N``.
        `kv_type` is ``f32``, ``f16``, ``q8_0`` or ``auto``: f32 if all the file's matrices are F32,
        else f16. What is compiled for the engine is kept where its `settings` say.
        Raises: SettingsError, ModelFileError, DeviceUnavailable, DaemonUnavailable,
        HandshakeRefused.
        """
        options = OpenOptions(
            daemons=daemons,
            connect=connect,
            local_experts=local_experts,
            placement=placement,
            require_daemons=require_daemons,
            tolerates_absent=tolerates_absent,
            device=device,
            backend=backend,
            kv_type=kv_type,
            context=context,
            threads=threads,
        )
        settings = settings or load_settings()
        with contextlib.ExitStack() as undo:
            opened = open_model(undo, path, options, settings=settings, on_progress=on_progress)
            with advice_if_out_of_memory():
                engine = cls(opened, is_profiled=settings.ipc_profile)
                undo.callback(engine._steps.end)
                undo.callback(engine._renderer.close)
                engine._steps.try_out()
            if on_progress is not None:
                on_progress("parent", "ready", 1, 1)
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
        """End the daemons we spawned, leave the others, release the file. May be called twice.

        Ctrl-C is held back meanwhile.
        """
        with uninterrupted():
            self._steps.end()
            self._verifier = None  # it may hold parts of the cache
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
        if chat:
            return self.encode_chat([{"role": "user", "content": text}])
        return text_ids(self.tokenizer, text)

    def prepare_chat(self) -> None:
        """Start the processes that chat templates are rendered in, else the first chat does.

        Raises: RenderingUnavailable.
        """
        self._renderer.prepare()

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
        UnsupportedModel if it fails; RenderingUnavailable.
        """
        rendered = self.chat_text(messages, template=template, extra=extra)
        return chat_ids(self.tokenizer, rendered)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The text whose tokens `encode_chat` gives. May be called as that, and raises the same."""
        return chat_text(
            self.tokenizer,
            messages,
            renderer=self._renderer,
            template=template,
            extra=extra,
            path=self._file.path,
        )

    def prompt_parts(self, text: str, *, is_chat: bool = False) -> Iterator[list[int]]:
        """The ids that `encode_prompt` gives for a text or, if it `is_chat`, `encode_chat` for what
        `chat_text` gave: in parts that are made one by one, by any thread.

        Raises: SettingsError if there is no tokenizer, or, before any is made, ContextExceeded if
        there would be more than the context holds even of the longest tokens.
        """
        return prompt_parts(self.tokenizer, text, is_chat=is_chat, num_positions=self.num_positions)

    def logits(
        self, token_ids: Sequence[int], chunk: int | Iterable[int] | None = None
    ) -> F32Array:
        """Logits after every position, from an empty state. Shapes: result [T, V] float32.

        `chunk` is the most tokens computed at once, or the sizes of successive chunks.
        Raises: SettingsError for a bad id, ContextExceeded, DaemonUnavailable.
        """
        ids = self._checked(token_ids)
        run = self._steps.begin()
        out = np.empty((ids.size, self.spec.vocab_size), np.float32)
        for first, last in self._steps.chunks(ids.size, chunk):
            hidden = self._steps.forward(run, ids[first:last], first)
            self._steps.all_logits(hidden, out[first:last])
        self._steps.check_last()
        self._steps.settle()
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
        prefix_scope: str = "",
        is_cancelled: Callable[[], bool] | None = None,
        on_prefill: Callable[[int, int], None] = lambda num_done, num_total: None,
    ) -> Iterator[GeneratedToken]:
        """Yield up to `max_tokens` tokens after the prompt, a text or token ids.

        Ends early at a stop token of the model, which is not yielded, unless `ignore_eos`; and when
        the context is full. `last_generation` holds times and the reason of the end; `on_prefill`
        is told how many prompt tokens are done. With `top_logprobs` (0 or more) a token comes with
        its log-probability and those of so many most likely ones. With `reuse_prefix` the first
        tokens that this prompt and the run before have in common are not computed again, which
        does not show in the bits; but nothing of a run of another `prefix_scope`: their number
        would tell who asks what another's prompt was. Once `is_cancelled`, asked before every
        layer, says so, the generation ends.
        Raises: SettingsError before anything is computed; DaemonUnavailable while it is, if daemons
        are required.
        """
        sampler = Sampler(SamplingParams(temperature, top_k, top_p, min_p, seed))
        max_tokens = whole_number("max_tokens", max_tokens, smallest=1)
        if top_logprobs is not None:
            whole_number("top_logprobs", top_logprobs, smallest=0, largest=self.spec.vocab_size)
        ids = self._checked(self.encode_prompt(prompt) if isinstance(prompt, str) else prompt)
        if ids.size == 0:
            raise SettingsError("the prompt is empty")

        return self._run(
            GenerationRequest(
                prompt=ids,
                max_tokens=max_tokens,
                sampler=sampler,
                top_logprobs=top_logprobs,
                ignore_eos=ignore_eos,
                reuse_prefix=reuse_prefix,
                prefix_scope=prefix_scope,
                is_cancelled=is_cancelled,
                on_prefill=on_prefill,
            )
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: str | None = None,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[GeneratedToken]:
        """Yield up to `max_tokens` tokens of the answer to a conversation, as `generate` does.

        A message is a dict of ``role`` and ``content``, and what else the model's template reads.
        `template` stands in place of the file's; it is given the `tools` that may be called, and
        `extra`, such as ``enable_thinking``. `options` are those of `generate`. Reasoning and calls
        of tools stand in the text as the model writes them, with their tags.
        Raises: as `encode_chat` and `generate`.
        """
        variables = {**(extra or {}), **({"tools": list(tools)} if tools else {})}
        prompt = self.encode_chat(messages, template=template, extra=variables)
        return self.generate(prompt, max_tokens, **options)

    def prefill(
        self, token_ids: Sequence[int], *, feature_layers: Collection[int] = ()
    ) -> Verified:
        """Begin a sequence for `verify` with a prompt; another call of this engine ends it.

        Gives the most likely token after the prompt, and the hidden states of all its tokens after
        each of the `feature_layers`.
        Raises: SettingsError, ContextExceeded, DaemonUnavailable.
        """
        self._verifier = Verifier(self._steps, self.spec, self._checked(token_ids))
        return self._verifier.prefill(feature_layers)

    def verify(
        self,
        token_ids: Sequence[int],
        parents: Sequence[int],
        *,
        feature_layers: Collection[int] = (),
    ) -> Verified:
        """Compute up to 64 tokens of a tree at once, without making them count.

        A token follows that of index ``parents[i]``, which is smaller than its own; -1 is the last
        token that counts. Gives the most likely token after each, and hidden states as `prefill`.
        Raises: SettingsError, also if there is no sequence; ContextExceeded, DaemonUnavailable.
        """
        return self._begun().verify(self._checked(token_ids), parents, feature_layers)

    def accept(self, path: Sequence[int]) -> None:
        """Have tokens of the last `verify` count: indices, each the parent of the next, the first
        one's parent -1. None may be; once after each verify.

        Raises: SettingsError.
        """
        self._begun().accept(path)

    def stats(self) -> EngineStats:
        """Counters since opening."""
        runtime = self._owners.runtime
        return EngineStats(
            runtime.stats(),
            self._owners.events.latest(),
            runtime.selections(),
            replace(runtime.hits),
        )

    def _run(self, request: GenerationRequest) -> Iterator[GeneratedToken]:
        """A generation, and a line about it in the log at its end, if that is wanted."""
        try:
            run = self._steps.begin(request.is_cancelled, prefix_scope=request.prefix_scope)
            stats = GenerationStats(num_prompt_tokens=request.prompt.size)
            self.last_generation = stats
            yield from generated_tokens(
                self._steps, run, request, tokenizer=self.tokenizer, stats=stats
            )
            self._steps.settle()
        except Cancelled:
            self.last_generation.finish_reason = "cancelled"
            self._steps.settle()
        finally:
            if self._profile is not None:
                owners = self._owners.runtime.stats()
                self._profile.log_generation(
                    {name: each.phases for name, each in owners.items()},
                    troubles={name: each.troubles for name, each in owners.items()},
                )

    def _begun(self) -> Verifier:
        if self._verifier is None:
            raise SettingsError("no sequence was begun: call prefill first")
        return self._verifier

    def _checked(self, token_ids: Sequence[int]) -> I32Array:
        return token_id_array(
            token_ids,
            vocab_size=self.spec.vocab_size,
            num_positions=self.num_positions,
            model_positions=self.spec.context_length,
        )
