"""The body of llama-server's ``/completion``, with its defaults."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from dflash_runtime.engine.sampling import SamplingParams
from dflash_runtime.serving.requests import (
    MOST_TOP_LOGPROBS,
    CompletionBody,
    RequestBody,
)

_RANDOM_SEEDS = (-1, (1 << 32) - 1)
_MOST_FIELDS = 64
_MISSING = object()
_UNLIMITED = -2
"""n_predict from this to -1: as many as fit."""


class LlamaCompletionBody(CompletionBody):
    """``/completion``. A field that is null has its default."""

    n_predict: Annotated[int, Field(ge=_UNLIMITED)] | None = None
    n_probs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], Field(max_length=_MOST_FIELDS, fail_fast=True)] | None = (
        None
    )
    """The only ones of the answer, if there are some; a slash leads into an object."""
    logprobs: None = None
    echo: None = None

    def check_fields(self) -> None:
        """Raises: ApiError; no tokens at all may be asked for."""
        RequestBody.check_fields(self)

    @property
    def most_tokens(self) -> int | None:
        most = self.max_tokens if self.n_predict is None else self.n_predict
        return None if most is None or most < 0 else most

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.n_probs or None

    def sampling(self) -> SamplingParams:
        """Sampling parameters, with llama.cpp's defaults. Raises: SettingsError."""
        return SamplingParams(
            temperature=0.8 if self.temperature is None else self.temperature,
            top_k=40 if self.top_k is None else max(0, self.top_k),
            top_p=0.95 if self.top_p is None else self.top_p,
            min_p=0.05 if self.min_p is None else self.min_p,
            typical_p=1.0 if self.typical_p is None else self.typical_p,
            seed=None if self.seed in _RANDOM_SEEDS else super().sampling().seed,
        )

    def wanted(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The fields of a whole answer that are asked for."""
        if not self.response_fields:
            return answer
        found = {}
        for name in self.response_fields:
            value: Any = answer
            for part in name.split("/"):
                value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
            if value is not _MISSING:
                found[name] = value
        return found

    def settings(self) -> dict[str, Any]:
        """What ``generation_settings`` says."""
        sampling, most = self.sampling(), self.most_tokens
        return {
            "n_predict": -1 if most is None else most,
            "max_tokens": -1 if most is None else most,
            "seed": -1 if sampling.seed is None else sampling.seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "typical_p": sampling.typical_p,
            "repeat_last_n": 64 if self.repeat_last_n is None else self.repeat_last_n,
            "repeat_penalty": 1.0 if self.repeat_penalty is None else self.repeat_penalty,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "dry_multiplier": self.dry_multiplier or 0.0,
            "dry_base": 1.75 if self.dry_base is None else self.dry_base,
            "dry_allowed_length": 2 if self.dry_allowed_length is None else self.dry_allowed_length,
            "dry_penalty_last_n": -1
            if self.dry_penalty_last_n is None
            else self.dry_penalty_last_n,
            "dry_sequence_breakers": list(self.breakers or ()),
            "samplers": ["penalties", "dry", "temperature", "top_k", "typ_p", "top_p", "min_p"],
            "stop": list(self.stops),
            "ignore_eos": bool(self.ignore_eos),
            "n_probs": self.n_probs or 0,
            "stream": bool(self.stream),
            "grammar": self.grammar or "",
        }


def default_settings() -> dict[str, Any]:
    """`LlamaCompletionBody.settings` of a body that asks for nothing."""
    return LlamaCompletionBody(prompt="").settings()
