"""Engine: a model opened for use. Prefill in chunks, decode, sample; logits for tests and tools.

One sequence at a time, used by one thread. `opening` makes what an engine consists of, `steps` runs
chunks through the layers, `generation` makes tokens, `verifying` verifies draft tokens.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np

from dflash_adapters.text.grammar import Grammar
from dflash_protocol.device import Device
from dflash_protocol.errors import DeviceOutOfMemory, DflashError, SettingsError
from dflash_protocol.ids import F32Array, I32Array
from dflash_protocol.placement import Placement
from dflash_protocol.settings import DaemonSetting, Settings, load_settings
from dflash_runtime.compute import MEMORY_ADVICE
from dflash_runtime.compute.kv_cache import CacheStats, KvType
from dflash_runtime.engine import first_heat
from dflash_runtime.engine.arguments import token_id_array, whole_number
from dflash_runtime.engine.daemon_memory import DaemonExpertMemory, daemon_memory_of
from dflash_runtime.engine.engine_chats import EngineChats
from dflash_runtime.engine.engine_stats import EngineStats
from dflash_runtime.engine.expert_memory import ExpertDeviceMemory, expert_memory_of, watched
from dflash_runtime.engine.generate_options import Schema
from dflash_runtime.engine.generation import (
    GeneratedToken,
    GenerationRequest,
    GenerationStats,
    OnPromptLogprobs,
    WantedLogprobs,
    generated_tokens,
    num_reusable,
)
from dflash_runtime.engine.opening import Opened, open_model, settings_with
from dflash_runtime.engine.penalties import Penalties, PenaltyTable
from dflash_runtime.engine.prompts import Prompts
from dflash_runtime.engine.replacing import ExpertMover, mover_of
from dflash_runtime.engine.run_guard import Cancelled
from dflash_runtime.engine.sampling import Sampler, SamplingParams
from dflash_runtime.engine.steps import Steps
from dflash_runtime.engine.stop_strings import checked_stops, until_stop
from dflash_runtime.engine.verifying import Verified, Verifier
from dflash_runtime.experts.daemons.supervisor import ProgressCallback
from dflash_runtime.experts.replacing import check_counts
from dflash_runtime.experts.telemetry import MoveStats, Profile
from dflash_runtime.interrupts import uninterrupted
from dflash_runtime.placement.heat import Heat
from dflash_runtime.placement.plan import Plan
from dflash_runtime.placement.split import HOST_OWNER, LOCAL_OWNER

__all__ = ["Engine", "EngineStats", "GeneratedToken", "GenerationStats", "Verified"]


class Engine(EngineChats):
    """A model with its experts placed. Made by `Engine.open`; close it, or use it in ``with``.

    Owns: the mapped file, the backend, the daemons it spawned, the processes that render chats.
    """

    def __init__(self, opened: Opened, *, is_profiled: bool = False) -> None:
        """For `open`; not to be called directly."""
        super().__init__(Prompts(opened.file, opened.model.spec.vocab_size), opened.num_positions)
        self._owners = opened.owners
        self._profile = Profile() if is_profiled else None
        self.spec = opened.model.spec
        self._names = opened.backend.name, opened.kv_type
        self.predictions = opened.predictions
        """Its plan's, beside what is measured; for the thread that uses the engine."""
        self.last_generation = GenerationStats()
        self._steps = Steps(
            opened.file,
            opened.model,
            opened.backend.new_cache(self.spec, opened.num_positions, self.kv_type),
            backend=opened.backend,
            runtime=opened.owners.runtime,
            local_banks=opened.owners.local_banks,
            num_positions=opened.num_positions,
            heat=opened.heat,
            tracer=opened.tracer,
        )
        self._verifier: Verifier | None = None
        self._mover: ExpertMover | None = None
        self._memory: ExpertDeviceMemory | None = None
        self._daemon_memory: DaemonExpertMemory | None = None
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
        learns_heat: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> Engine:
        """Open a GGUF file, and its experts in this process and in daemons.

        `path` may be a text that is a model's name, as commands take it (docs/models.md).
        An option that is None is taken from `settings`, by default those of `load_settings`; if
        they name no model either, the demo model is opened.
        `daemons` are spawned (``DEVICE[@LAUNCHER]``); `connect` are endpoints of running daemons.
        `local_experts` experts of each layer stay in this process; `placement` gives the owner of
        every expert instead.
        With `tolerates_absent`, unless daemons are required, those of `connect` may come later.
        `device` is what this process computes on: ``auto``, ``cpu``, ``cuda:N`` or ``hip:N``.
        `kv_type` is ``f32``, ``f16``, ``q8_0`` or ``auto``: f32 if all the file's matrices are F32,
        else f16. What is compiled for the engine is kept where its `settings` say.
        With `learns_heat`, a model without heat reads some text first, if that may change the plan.
        Raises: SettingsError, ModelFileError, DeviceUnavailable, DaemonUnavailable,
        HandshakeRefused.
        """
        if placement is not None and local_experts is not None:
            raise SettingsError("placement and local_experts exclude each other")
        given = {
            "connect": connect,
            "local_experts": local_experts,
            "ipc_required": require_daemons,
            "device": device,
            "backend": backend,
            "kv_type": kv_type,
            "context": context,
            "threads": threads,
        }
        settings = settings_with(settings or load_settings(), given)
        report = on_progress or (lambda owner, stage, num_done, num_total: None)
        open_once = partial(
            cls._opened,
            path,
            settings,
            daemons=settings.daemons if daemons is None else daemons,
            placement=placement,
            tolerates_absent=tolerates_absent,
            on_progress=report,
        )
        engine = open_once()
        if learns_heat and engine._is_first_heat_wanted(settings):
            with contextlib.closing(engine):
                engine._learn_first_heat(partial(report, "parent", "learn heat"))
            del engine
            gc.collect()  # what it had on the device, which the next one has there
            engine = open_once()
        report("parent", "ready", 1, 1)
        return engine

    @classmethod
    def _opened(
        cls,
        path: str | Path | None,
        settings: Settings,
        *,
        daemons: Sequence[DaemonSetting | str],
        placement: Placement | None,
        tolerates_absent: bool,
        on_progress: ProgressCallback,
    ) -> Engine:
        """See `open`, whose errors it raises."""
        with contextlib.ExitStack() as undo:
            try:
                opened = open_model(
                    undo,
                    path,
                    settings,
                    daemons=daemons,
                    placement=placement,
                    tolerates_absent=tolerates_absent,
                    on_progress=on_progress,
                )
                engine = cls(opened, is_profiled=settings.ipc_profile)
                undo.callback(engine._steps.end)
                undo.callback(engine._prompts.close)
                engine._steps.try_out(opened.owners.arena)
                engine._mover = mover_of(
                    engine._steps,
                    engine.spec.moe,
                    opened.move_prices,
                    most=settings.swap_max,
                    min_gain=settings.swap_min_gain,
                    has_to_wait=engine._is_daemon_changing,
                )
                if engine._mover is not None:
                    undo.callback(engine._mover.close)
                engine._memory = expert_memory_of(
                    engine._steps, engine.spec.moe, before_change=engine._forget_moves
                )
                engine._daemon_memory = daemon_memory_of(
                    engine._steps, engine.spec.moe, before_change=engine._forget_moves
                )
            except DeviceOutOfMemory as error:
                raise error.with_advice(MEMORY_ADVICE) from error
            # The daemons of an engine that is dropped without being closed end too.
            engine._release = weakref.finalize(engine, undo.pop_all().close)
            return engine

    def _is_first_heat_wanted(self, settings: Settings) -> bool:
        """Whether the plan was made without heat, may be another one with it, and can be made anew
        without daemons that load their experts twice."""
        if not (self._steps.heat.is_kept and first_heat.is_wanted(self.plan, settings)):
            return False
        owner_names = {*self.placement.owner_names}
        return owner_names <= {LOCAL_OWNER, HOST_OWNER} and self.tokenizer is not None

    def _learn_first_heat(self, on_progress: Callable[[int, int], None]) -> None:
        """Read a text. Raises: as `generate`."""
        first_heat.learn(
            self.encode_prompt(first_heat.first_text()),
            lambda token_ids: list(self.generate(token_ids, 1, ignore_eos=True)),
            num_positions=self.num_positions,
            on_progress=on_progress,
        )

    def __repr__(self) -> str:
        return (
            f"<Engine {self.spec.name!r}, {self.spec.architecture}, {self.backend_name}, "
            f"{self.num_positions} positions>"
        )

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
        """End the daemons that were spawned, disconnect from the others, release the file.

        May be called twice. Ctrl-C is held back meanwhile.
        """
        with uninterrupted():
            with contextlib.suppress(DflashError):  # a device that has failed
                self._steps.heat_now()
                self.predictions.learn()
            self._steps.end()
            self._verifier = None  # may hold parts of the cache
            self._release()

    @property
    def backend_name(self) -> str:
        return self._names[0]

    @property
    def kv_type(self) -> KvType:
        return self._names[1]

    @property
    def device_name(self) -> str:
        """What its maker calls the processor or GPU that computes attention."""
        return self._steps.device_name

    @property
    def plan(self) -> Plan | None:
        """What was decided when it was opened; None: nothing was to be decided, or the settings say
        it."""
        return self.predictions.plan

    @property
    def placement(self) -> Placement:
        """The owner of each expert."""
        return self._owners.runtime.placement

    def replace_experts(self, placement: Placement) -> None:
        """Have owners compute other experts, or other owners answer for experts that several have.

        Daemons first load what they miss, beside what they have; owners of this process have as
        many experts of each layer as before. Ends a run that is going on. Texts are then those of
        an engine that was opened with this placement. If it fails, the old one stays in use.
        Raises: ValueError for a placement that cannot be; SettingsError if the engine is closed, or
        experts are read from the disk; DaemonUnavailable, HandshakeRefused if a daemon is lost, or
        has no memory for both; ModelFileError; DeviceUnavailable.
        """
        if self._owners.arena is not None:
            raise SettingsError("experts that are read from the disk have no other places")
        check_counts(self.placement, placement, (LOCAL_OWNER, HOST_OWNER))
        self._forget_moves()
        self._steps.replace(self._steps.prepare(placement))

    def _forget_moves(self) -> None:
        if self._mover is not None:
            self._mover.forget()
        if self._daemon_memory is not None:
            self._daemon_memory.forget()

    def _is_daemon_changing(self) -> bool:
        return self._daemon_memory is not None and self._daemon_memory.is_changing

    def set_expert_budget(self, num_bytes: int | None) -> None:
        """Have experts take no more than so many bytes of this process's GPU, and as many as they
        can; None: as many as when it was opened, which is the most. See `EngineStats.memory`.

        The coldest leave, and the processor computes them, in layers of which both have some; the
        hottest come back. It may be called while `generate` is being read, whose text goes on,
        unless the processor's steps have other bits. Later prompts may then reuse nothing.
        Raises: ValueError for a negative number; SettingsError if the engine is closed, or no
        expert can leave; ModelFileError; DeviceUnavailable.
        """
        if self._memory is None:
            raise SettingsError("there are no experts on a GPU that its processor can take over")
        self._memory.set_budget(num_bytes)

    def move_experts(self) -> None:
        """Between two runs, move experts to where the heat says they should be, if that is worth
        its cost; some milliseconds at most. Each generation begins with it; a server also calls it
        while nobody asks.

        Experts move between a parent's GPU and its processor, if their places were planned: see
        `EngineStats.moves`.
        """
        self._between_runs(lambda: self._steps.reuse.num_cached)

    def _between_runs(self, num_lost: Callable[[], int]) -> None:
        if self._memory is not None:
            self._memory.look(is_within_run=False)
        if self._daemon_memory is not None:
            self._daemon_memory.look(is_within_run=False)
        if self._mover is not None:
            self._mover.between_runs(num_lost())

    def logits(
        self, token_ids: Sequence[int], chunk: int | Iterable[int] | None = None
    ) -> F32Array:
        """Logits after every position, from an empty state. Shapes: result [T, V] float32.

        `chunk` is the largest number of tokens in a chunk, or the sizes of successive chunks.
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
        typical_p: float = 1.0,
        seed: int | None = None,
        penalties: Penalties | None = None,
        grammar: Grammar | None = None,
        schema: Schema | None = None,
        ignore_eos: bool = False,
        stop: str | Sequence[str] = (),
        stop_ids: Collection[int] = (),
        top_logprobs: int | None = None,
        on_prompt_logprobs: OnPromptLogprobs | None = None,
        reuse_prefix: bool = False,
        prefix_scope: str = "",
        is_cancelled: Callable[[], bool] | None = None,
        on_prefill: Callable[[int, int], None] = lambda num_done, num_total: None,
    ) -> Generator[GeneratedToken]:
        """Yield up to `max_tokens` tokens after the prompt, a text or token ids.

        Ends early at a stop token, which is not yielded: one of `stop_ids`, or of the model's, with
        a `grammar` or unless `ignore_eos`; when the context is full; and when the grammar, which
        the text then follows, lets nothing come. `schema`, a JSON schema, takes a grammar's place.
        The texts of the tokens end before the first of the strings `stop`; what may be the
        beginning of one comes once it is certain. `last_generation` holds times and the reason of
        the end; `on_prefill` gets the number of prompt tokens computed, and of all. `top_logprobs`
        (0 or more): each token comes with its log-probability and those of that many most likely
        tokens, of the model, before penalties and without a grammar. `on_prompt_logprobs` gets the
        same of the prompt's tokens from the second on, in order, while the prompt is computed, all
        of it. Needs `top_logprobs`. `reuse_prefix`: the prefix that this prompt shares with the run
        before is taken from the cache, with the same bits; but only within one `prefix_scope`,
        since the time saved would tell one client about another's prompt. With either of these
        two, `max_tokens` may be 0. `is_cancelled` is called before every layer of a prompt, before
        every token, and within steps that take long; once it returns True, the generation ends.
        Raises: SettingsError before anything is computed, GrammarError for a wrong `schema`; while
        it is, DaemonUnavailable if daemons are required, GrammarError if the grammar is too complex
        or has no way on.
        """
        sampler = Sampler(
            SamplingParams(
                temperature=temperature,
                top_k=top_k,
                typical_p=typical_p,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
            )
        )
        has_prompt = on_prompt_logprobs is not None
        fewest = 0 if has_prompt or reuse_prefix else 1
        max_tokens = whole_number("max_tokens", max_tokens, smallest=fewest)
        wanted: WantedLogprobs | None = None
        if top_logprobs is not None:
            whole_number("top_logprobs", top_logprobs, smallest=0, largest=self.spec.vocab_size)
            wanted = WantedLogprobs(top_logprobs, on_prompt_logprobs)
        elif has_prompt:
            raise SettingsError("on_prompt_logprobs: needs top_logprobs")
        ids = self._checked(self.encode_prompt(prompt) if isinstance(prompt, str) else prompt)
        if ids.size == 0:
            raise SettingsError("the prompt is empty")
        if schema is not None:
            if grammar is not None:
                raise SettingsError("schema and grammar exclude each other")
            grammar = self.schema_grammar(schema)
        stops = checked_stops(stop)
        if stops and self.tokenizer is None:
            raise SettingsError("stop: this file has no tokenizer; give stop_ids")
        table: PenaltyTable | None = None
        if penalties is not None and not penalties.is_neutral:
            table = PenaltyTable(penalties, ids, vocab_size=self.spec.vocab_size)
        tokens = self._run(
            GenerationRequest(
                prompt=ids,
                max_tokens=max_tokens,
                sampler=sampler,
                matcher=None if grammar is None else grammar.matcher(),
                penalties=table,
                logprobs=wanted,
                ignore_eos=ignore_eos,
                stop_ids=stop_ids,
                reuse_prefix=reuse_prefix,
                prefix_scope=prefix_scope,
                is_cancelled=is_cancelled,
                on_prefill=on_prefill,
            )
        )
        return until_stop(tokens, stops, self._note_stop) if stops else tokens

    def prefill(
        self, token_ids: Sequence[int], *, feature_layers: Collection[int] = ()
    ) -> Verified:
        """Begin a sequence for `verify` with a prompt; any other run of this engine ends it.

        Returns the most likely token after the prompt, and the hidden states of all its tokens
        after each of the `feature_layers`.
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
        """Speculative verification: compute up to 64 draft tokens, a chain or a tree, in one pass.

        Draft token i follows the one of index ``parents[i] < i``, or if that is -1 the last token
        of the sequence, which stays as it is until `accept`. Returns the most likely token after
        each, and hidden states as `prefill` does.
        Raises: SettingsError, also if there is no sequence; ContextExceeded, DaemonUnavailable.
        """
        return self._begun().verify(self._checked(token_ids), parents, feature_layers)

    def accept(self, path: Sequence[int]) -> None:
        """Append draft tokens of the last `verify` to the sequence; once after each verify.

        `path` holds their indices, each the parent of the next, the first one's parent -1; it may
        be empty.

        Raises: SettingsError.
        """
        self._begun().accept(path)

    def stats(self) -> EngineStats:
        """A snapshot of the counters since opening, for the thread that uses the engine; it may be
        handed to others."""
        runtime = self._owners.runtime
        return EngineStats(
            runtime.stats(),
            self._owners.events.latest(),
            runtime.selections(),
            replace(runtime.hits),
            MoveStats() if self._mover is None else self._mover.stats,
            None if self._owners.arena is None else self._owners.arena.stats(),
            self._steps.slots,
            None if self._memory is None else self._memory.stats,
            {} if self._daemon_memory is None else self._daemon_memory.stats,
            CacheStats(self._steps.cache_bytes, self.num_positions, self._steps.reuse.num_cached),
        )

    def heat(self) -> Heat:
        """How often each expert was chosen, in all and lately, in this run and before (see
        docs/files.md); a copy. For the thread that uses the engine.

        Raises: DeviceUnavailable.
        """
        return self._steps.heat_now()

    def _run(self, request: GenerationRequest) -> Generator[GeneratedToken]:
        """Run a generation; log its profile at the end if the engine is profiled."""
        stats = GenerationStats(num_prompt_tokens=request.prompt.size)
        started_s = time.perf_counter()
        try:
            steps = self._steps
            run = steps.begin(request.is_cancelled, prefix_scope=request.prefix_scope)
            watchers = [each for each in (self._memory, self._daemon_memory) if each is not None]
            if watchers or self._mover is not None:
                self._between_runs(lambda: num_reusable(steps, request, self.tokenizer)[0])
                run = steps.begin(request.is_cancelled, prefix_scope=request.prefix_scope)
            self.last_generation = stats
            tokens = generated_tokens(steps, run, request, tokenizer=self.tokenizer, stats=stats)
            if watchers:
                tokens = watched(tokens, watchers)
            yield from tokens if self._mover is None else self._mover.beside(tokens)
            steps.settle()
        except Cancelled:
            self.last_generation.finish_reason = "cancelled"
            self._steps.settle()
        finally:
            elapsed_s = time.perf_counter() - started_s
            self.predictions.note(stats, elapsed_s - stats.prefill_s)
            if self._owners.arena is not None:
                self._owners.arena.warn()
            if self._profile is not None:
                owners = self._owners.runtime.stats()
                self._profile.log_generation(
                    {name: each.phases for name, each in owners.items()},
                    troubles={name: each.troubles for name, each in owners.items()},
                )

    def _note_stop(self) -> None:
        self.last_generation.finish_reason = "stop"

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
