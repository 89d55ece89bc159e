"""Generations with all that a sampler saw."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_runtime import Engine


def bits_of(
    engine: Engine, prompt: Sequence[int], *, reuse: bool, num_tokens: int = 6
) -> list[tuple[int, object]]:
    """Tokens with the log-probabilities of the whole vocabulary, which show every bit of logits."""
    tokens = engine.generate(
        prompt,
        num_tokens,
        ignore_eos=True,
        top_logprobs=engine.spec.vocab_size,
        reuse_prefix=reuse,
    )
    return [(token.token_id, token.logprobs) for token in tokens]
