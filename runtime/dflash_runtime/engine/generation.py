"""A generation: the prompt through the model, then token after token until something ends it.

Tokens are decoded by the fastest way the backend has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dflash_adapters.text.grammar import TokenMatcher
from dflash_adapters.text.tokenizer import Tokenizer
from dflash_protocol.ids import AnyArray, BoolArray, F32Array, I32Array
from dflash_runtime.compute.backend import NOT_FINITE, CapturedStep
from dflash_runtime.compute.step_order import MOST_TOKENS
from dflash_runtime.engine.penalties import PenaltyTable, changed
from dflash_runtime.engine.sampling import Sampler, TokenLogprobs, token_logprobs
from dflash_runtime.engine.steps import Steps

_ALONE = 16
"""Tokens without launching ahead, after one that the device has left to the host."""

_NUMBERS = 1024
"""Random numbers, one a sampled token, that are copied to the device at once."""

OnPromptLogprobs: TypeAlias = Callable[[Sequence[TokenLogprobs]], None]
"""Gets the log-probabilities of the next tokens of a prompt."""

_Chosen: TypeAlias = tuple[int, TokenLogprobs | None]
"""A token, with its log-probabilities if asked for."""


@dataclass(slots=True)
class GenerationStats:
    """One generation. Prefill ends with the first token; decode is all tokens after it."""

    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    """Tokens of the prompt whose keys and values were in the cache already."""
    num_generated_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    finish_reason: str = ""
    """``stop`` (the model ended, or a grammar is complete), ``length`` (enough tokens), ``context``
    (no position left), ``cancelled``."""

    @property
    def prefill_tokens_per_s(self) -> float:
        num_computed = self.num_prompt_tokens - self.num_reused_tokens
        return num_computed / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        num_steps = max(0, self.num_generated_tokens - 1)
        return num_steps / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One generated token. `text` is empty while a character lacks bytes of further tokens."""

    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """Log-probabilities that come with tokens: those of the `num_top` most likely besides their
    own."""

    num_top: int
    on_prompt: OnPromptLogprobs | None = None
    """Also of the prompt's tokens, from the second on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """The checked arguments of `Engine.generate`; `matcher` is its grammar's, `penalties` has the
    changes of logits.

    Shapes: prompt [T], at least one token.
    """

    prompt: I32Array
    max_tokens: int
    sampler: Sampler
    matcher: TokenMatcher | None
    penalties: PenaltyTable | None
    logprobs: WantedLogprobs | None
    ignore_eos: bool
    stop_ids: Collection[int]
    reuse_prefix: bool
    prefix_scope: str
    is_cancelled: Callable[[], bool] | None
    on_prefill: Callable[[int, int], None]

    def choose(self, logits: F32Array) -> _Chosen:
        """The next token, with its log-probabilities if asked for. Shapes: logits [V].

        Raises: GrammarError.
        """
        token_id = self.sampler(self.changed(logits), self.allowed())
        self.accept(token_id)
        if self.logprobs is None:
            return token_id, None
        return token_id, token_logprobs(logits, token_id, self.logprobs.num_top)

    @property
    def on_prompt_logprobs(self) -> OnPromptLogprobs | None:
        """What gets log-probabilities of the prompt; None: nobody asks for them."""
        return None if self.logprobs is None else self.logprobs.on_prompt

    @property
    def is_ruled(self) -> bool:
        """Whether what may come next, or how likely it is, depends on the tokens before."""
        return self.matcher is not None or self.penalties is not None

    def rule(self, step: CapturedStep) -> None:
        """Tell a step that samples on its device what may come. Raises: GrammarError."""
        if self.is_ruled:
            mask = None if self.matcher is None else self.matcher.mask()
            step.rule(mask, None if self.penalties is None else self.penalties.changes)

    def changed(self, logits: F32Array) -> F32Array:
        """Logits that a token is chosen from. Shapes: both [V]."""
        return logits if self.penalties is None else changed(logits, self.penalties.changes)

    def accept(self, token_id: int) -> None:
        """Go on after a token. Raises: GrammarError."""
        if self.matcher is not None:
            self.matcher.accept(token_id)
        if self.penalties is not None:
            self.penalties.accept(token_id)

    def allowed(self) -> BoolArray | None:
        """The tokens that may come next; None: all. Raises: GrammarError."""
        return None if self.matcher is None else self.matcher.allowed()

    @property
    def forced(self) -> Sequence[int]:
        """The next tokens, where a grammar allows no others."""
        return () if self.matcher is None else self.matcher.forced

    @property
    def is_complete(self) -> bool:
        """Whether a grammar lets nothing follow."""
        return self.matcher is not None and self.matcher.is_complete


def num_reusable(
    steps: Steps, request: GenerationRequest, tokenizer: Tokenizer | None
) -> tuple[int, int]:
    """How many tokens of the prompt are taken from the cache, and where its last turn begins."""
    stop_ids = tokenizer.stop_ids if tokenizer is not None else ()
    boundary = steps.reuse.boundary(request.prompt, stop_ids)
    if not request.reuse_prefix or request.on_prompt_logprobs is not None:
        return 0, boundary
    return steps.num_reusable(request.prompt, boundary), boundary


def generated_tokens(
    steps: Steps,
    run: int,
    request: GenerationRequest,
    *,
    tokenizer: Tokenizer | None,
    stats: GenerationStats,
) -> Iterator[GeneratedToken]:
    """Yield the tokens of one run of `steps`; keeps `stats` up to date at every token.

    Raises: as `Steps.forward`; NotFinite; GrammarError.
    """
    prompt = request.prompt
    decoder = tokenizer.stream() if tokenizer is not None else None
    stop_ids = frozenset(request.stop_ids)
    if tokenizer is not None and (request.matcher is not None or not request.ignore_eos):
        stop_ids |= tokenizer.stop_ids
    started_s = time.perf_counter()
    reused, boundary = num_reusable(steps, request, tokenizer)
    stats.num_reused_tokens = reused
    on_prompt = request.on_prompt_logprobs
    # Of a group only the last chunk's rows are known.
    for first, last in steps.prompt_chunks(
        prompt.size, boundary=boundary, first=reused, grouped=on_prompt is None
    ):
        request.on_prefill(first, prompt.size)
        hidden = steps.forward(run, prompt[first:last], first)
        if on_prompt is not None:
            _prompt_logprobs(steps, request, hidden, first, last)
        if request.reuse_prefix and last in (boundary, prompt.size):
            steps.reuse.save_state(last)
    if not request.max_tokens:  # the prompt alone was asked for
        stats.prefill_s = time.perf_counter() - started_s
        stats.finish_reason = "length"
        steps.check_last()
        return
    token_id, logprobs = request.choose(steps.head(hidden[-1:])[0])
    del hidden  # may be large, on a device
    num_positions = prompt.size
    stats.prefill_s = time.perf_counter() - started_s
    decoding: Iterator[_Chosen] | None = None
    while token_id not in stop_ids:
        stats.num_generated_tokens += 1
        if request.is_complete:
            stats.finish_reason = "stop"
        elif stats.num_generated_tokens == request.max_tokens:
            stats.finish_reason = "length"
        elif num_positions == steps.num_positions:
            stats.finish_reason = "context"
        if stats.finish_reason:
            steps.check_last()
        text = decoder.push(token_id) if decoder is not None else ""
        if decoder is not None and stats.finish_reason:
            text += decoder.flush()
        yield GeneratedToken(token_id, text, logprobs)
        if stats.finish_reason:
            return
        started_s = time.perf_counter()
        if decoding is None:
            captured = steps.captured(run)
            if captured is None or request.logprobs is not None or request.sampler.needs_host:
                decoding = _chosen_by_host(steps, run, request, token_id, num_positions, captured)
            else:
                decoding = _sampled_on_device(
                    steps,
                    run,
                    request,
                    token_id,
                    num_positions,
                    captured,
                    end_position=min(num_positions + request.max_tokens - 1, steps.num_positions),
                )
        token_id, logprobs = next(decoding)
        num_positions += 1
        stats.decode_s += time.perf_counter() - started_s
    steps.check_last()
    stats.finish_reason = "stop"


def _prompt_logprobs(
    steps: Steps, request: GenerationRequest, hidden: AnyArray, first: int, last: int
) -> None:
    """Give the log-probabilities of the tokens after those from `first` to `last`, as far as the
    prompt has them. Shapes: hidden [last - first, H]. Raises: NotFinite."""
    wanted = request.logprobs
    assert wanted is not None
    assert wanted.on_prompt is not None
    for row, logits in steps.row_logits(hidden, last - first):
        begin = first + row + 1
        token_ids = request.prompt[begin : begin + logits.shape[0]].tolist()
        wanted.on_prompt(
            [
                token_logprobs(each, token_id, wanted.num_top)
                for each, token_id in zip(logits, token_ids, strict=False)
            ]
        )


def _chosen_by_host(
    steps: Steps,
    run: int,
    request: GenerationRequest,
    token_id: int,
    position: int,
    captured: CapturedStep | None,
) -> Iterator[_Chosen]:
    """The tokens after `token_id`, which is at `position`; the host chooses each from the logits of
    a step. Steps are `captured`, or if that is None passes that the host drives layer by layer.

    Raises: as Steps.forward; NotFinite; GrammarError.
    """
    if captured is not None:
        captured.choose_by(None)
    while True:
        if captured is None:
            hidden = steps.forward(run, np.array([token_id], np.int32), position)
            chosen = request.choose(steps.head(hidden)[0])
            del hidden
        else:
            steps.check(run)
            captured.begin(token_id, position)
            captured.start()
            if request.matcher is not None:
                request.matcher.mask()  # found while a device computes the step
            steps.note_captured(token_id, position)
            chosen = request.choose(steps.finite(captured.logits()))
        yield chosen
        token_id, position = chosen[0], position + 1


def _sampled_on_device(
    steps: Steps,
    run: int,
    request: GenerationRequest,
    token_id: int,
    position: int,
    captured: CapturedStep,
    *,
    end_position: int,
) -> Iterator[_Chosen]:
    """The tokens after `token_id`, which is at `position`, sampled on the device by captured steps.
    They are launched ahead while the host reads tokens; where these decide what may come next, a
    step waits for that before it samples, and only its layers are launched before the token of the
    one before is handed on. Tokens that a grammar forces are computed together. The last step
    computes position ``end_position - 1``.

    Where the device cannot decide a token exactly, the host samples it from the logits. More such
    tokens may follow: for the next ones no step is launched ahead.
    Raises: as Steps.forward; NotFinite; GrammarError.
    """
    sampler = request.sampler
    captured.choose_by(sampler.device_sampling, is_ruled=request.is_ruled)
    started: int | None = None  # the position that the steps started so far lead to
    num_alone, num_interrupted = 0, steps.num_interrupted
    numbers: list[float] = []  # of the positions from `first_numbered` on
    first_numbered = position + 1

    def start_to(end: int) -> None:
        nonlocal started
        assert started is not None
        while started < min(end, end_position):
            started += 1
            while not sampler.is_greedy and started >= first_numbered + len(numbers):
                first = first_numbered + len(numbers)
                new = sampler.numbers(min(_NUMBERS, end_position + 1 - first))
                captured.expect(first, new)
                numbers.extend(new.tolist())
            captured.start()

    while True:
        steps.check(run)
        forced = [token_id, *request.forced][: min(MOST_TOKENS, end_position - position) + 1]
        if len(forced) > 2 and steps.appended(run, np.array(forced[:-1], np.int32), position):
            for token_id in forced[1:]:
                request.accept(token_id)
                yield token_id, None
            position += len(forced) - 1
            started = None
            continue
        if num_interrupted != steps.num_interrupted:
            num_interrupted, started = steps.num_interrupted, None
        if started is None:
            captured.begin(token_id, position)
            started = position
        ahead = 0 if num_alone or request.is_ruled else captured.most_ahead
        start_to(position + 1 + ahead)
        request.rule(captured)
        next_id = captured.token(position + 1)
        if next_id == NOT_FINITE:
            steps.refuse_run()
        num_alone = max(0, num_alone - 1)
        if next_id is None:
            if started != position + 1:  # the logits at hand are of another step
                captured.begin(token_id, position)
                captured.start()
            started, num_alone = None, _ALONE  # the next step starts from the host's token
            number = 0.0 if sampler.is_greedy else numbers[position + 1 - first_numbered]
            logits = steps.finite(captured.logits())
            if not captured.samples_by_rules:
                logits = request.changed(logits)
            next_id = sampler.sample(logits, number, request.allowed())
        request.accept(next_id)
        steps.note_captured(token_id, position)
        if request.is_ruled and started is not None and not (request.is_complete or request.forced):
            start_to(position + 2)
        yield next_id, None
        token_id, position = next_id, position + 1
