"""Generations with all that a sampler saw."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_runtime import Engine

Bits = list[tuple[int, object]]


def bits_of(
    engine: Engine, prompt: Sequence[int], *, reuse: bool = False, num_tokens: int = 6
) -> Bits:
    """Tokens with the log-probabilities of the whole vocabulary, which show every bit of logits."""
    tokens = engine.generate(
        prompt,
        num_tokens,
        ignore_eos=True,
        top_logprobs=engine.spec.vocab_size,
        reuse_prefix=reuse,
    )
    found: Bits = []
    for token in tokens:
        assert token.logprobs is not None
        found.append((token.token_id, token.logprobs))
    return found
