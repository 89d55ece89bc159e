"""A generation: the prompt through the model, then token after token until something ends it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dflash_adapters.text.tokenizer import Tokenizer
from dflash_protocol.ids import F32Array, I32Array
from dflash_runtime.engine.decoding import Decoding, decoding_of
from dflash_runtime.engine.sampling import Sampler, TokenLogprobs, token_logprobs
from dflash_runtime.engine.stats import GenerationStats
from dflash_runtime.engine.steps import Steps


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One generated token. `text` is empty while a character lacks bytes of further tokens."""

    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """The checked arguments of `Engine.generate`. Shapes: prompt [T], at least one token."""

    prompt: I32Array
    max_tokens: int
    sampler: Sampler
    top_logprobs: int | None
    ignore_eos: bool
    reuse_prefix: bool
    prefix_scope: str
    is_cancelled: Callable[[], bool] | None
    on_prefill: Callable[[int, int], None]

    def choose(self, logits: F32Array) -> tuple[int, TokenLogprobs | None]:
        """The next token, with its log-probabilities if asked for. Shapes: logits [V]."""
        token_id = self.sampler(logits)
        if self.top_logprobs is None:
            return token_id, None
        return token_id, token_logprobs(logits, token_id, self.top_logprobs)


def generated_tokens(
    steps: Steps,
    run: int,
    request: GenerationRequest,
    *,
    tokenizer: Tokenizer | None,
    stats: GenerationStats,
) -> Iterator[GeneratedToken]:
    """Yield the tokens of one run of `steps`; keeps `stats` up to date at every token.

    Raises: as `Steps.forward`; NotFinite.
    """
    prompt = request.prompt
    decoder = tokenizer.stream() if tokenizer is not None else None
    stop_ids: frozenset[int] = frozenset()
    if tokenizer is not None and not request.ignore_eos:
        stop_ids = tokenizer.stop_ids
    started_s = time.perf_counter()
    boundary = steps.boundary(prompt, tokenizer.stop_ids if tokenizer is not None else ())
    reused = 0
    if request.reuse_prefix:
        stats.num_reused_tokens = reused = steps.num_reusable(prompt, boundary)
    for first, last in steps.prompt_chunks(prompt.size, boundary=boundary, first=reused):
        request.on_prefill(first, prompt.size)
        hidden = steps.forward(run, prompt[first:last], first)
        if request.reuse_prefix and last in (boundary, prompt.size):
            steps.save_state(last)
    token_id, logprobs = request.choose(steps.head(hidden[-1:])[0])
    del hidden  # may be large, on a device
    num_positions = prompt.size
    stats.prefill_s = time.perf_counter() - started_s
    decoding: Decoding | None = None
    while token_id not in stop_ids:
        stats.num_generated_tokens += 1
        if stats.num_generated_tokens == request.max_tokens:
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
            decoding = decoding_of(
                steps,
                run,
                request.choose,
                sampler=request.sampler if request.top_logprobs is None else None,
                end_position=min(prompt.size + request.max_tokens - 1, steps.num_positions),
            )
        token_id, logprobs = decoding.next(token_id, num_positions)
        num_positions += 1
        stats.decode_s += time.perf_counter() - started_s
    steps.check_last()
    stats.finish_reason = "stop"
