"""The options of `Engine.generate` that others pass on, and schemas as grammars."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict

from dflash_adapters.text.grammar import Grammar, GrammarKind, GrammarSource
from dflash_protocol.errors import GrammarError
from dflash_runtime.engine.generation import OnPromptLogprobs
from dflash_runtime.engine.penalties import Penalties

Schema = Mapping[str, Any] | bool | str
"""A JSON schema; a str is its JSON text."""


class TokenSampling(TypedDict, total=False):
    """How tokens are chosen, of a text or an answer; see `Engine.generate`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    seed: int | None
    penalties: Penalties | None
    ignore_eos: bool
    stop_ids: Collection[int]
    reuse_prefix: bool
    prefix_scope: str


class TokenChoice(TokenSampling, total=False):
    """How tokens are chosen, and what ends them; see `Engine.generate`."""

    grammar: Grammar | None
    schema: Schema | None
    stop: str | Sequence[str]
    top_logprobs: int | None


class GenerateOptions(TokenChoice, total=False):
    """All options of `Engine.generate`."""

    on_prompt_logprobs: OnPromptLogprobs | None
    is_cancelled: Callable[[], bool] | None
    on_prefill: Callable[[int, int], None]


class AnswerOptions(TokenSampling, total=False):
    """The options of `Engine.generate` that `Engine.answer` passes on."""

    is_cancelled: Callable[[], bool] | None
    on_prefill: Callable[[int, int], None]


def schema_source(schema: Schema) -> GrammarSource:
    """Raises: GrammarError for what JSON cannot express."""
    if isinstance(schema, str):
        return GrammarSource(GrammarKind.JSON_SCHEMA, schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, default=dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"schema: is no JSON: {error}") from error
    return GrammarSource(GrammarKind.JSON_SCHEMA, text)
