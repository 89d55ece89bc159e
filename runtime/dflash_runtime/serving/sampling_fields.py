"""The fields of a body that say how tokens are sampled: OpenAI's, vLLM's and llama.cpp's."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from dflash_runtime.engine.breakers import DEFAULT_BREAKERS, MOST_BREAKERS, Breakers
from dflash_runtime.engine.dry import Dry
from dflash_runtime.engine.penalties import MOST_BIASES, Penalties
from dflash_runtime.engine.sampling import SamplingParams
from dflash_runtime.serving.errors import ApiError

_SEEDS = 1 << 63
_LLAMA_WINDOW = 64
"""llama.cpp's default of `repeat_last_n`."""
_LEAST_BIAS = -100.0


class SamplingFields(BaseModel):
    """How a token is sampled from its probabilities."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    typical_p: float | None = None
    """llama.cpp's."""
    seed: int | None = None

    def sampling(self) -> SamplingParams:
        """Sampling parameters, with OpenAI's defaults. Raises: SettingsError."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            typical_p=1.0 if self.typical_p is None else self.typical_p,
            seed=None if self.seed is None else self.seed % _SEEDS,
        )


class PenaltyFields(BaseModel):
    """The fields of a body that make tokens more or less likely."""

    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    """vLLM's: of all tokens before."""
    repeat_penalty: float | None = None
    """llama.cpp's: of the latest `repeat_last_n` tokens."""
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    """-1: all."""
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float]
        | Annotated[list[tuple[int, float | bool]], Field(max_length=MOST_BIASES)]
        | None
    ) = None
    """By token id; llama.cpp's is a list of pairs, in which false is -100."""

    dry_multiplier: float | None = None
    """llama.cpp's, as are those below; 0: no penalty, and they mean nothing."""
    dry_base: float | None = None
    dry_allowed_length: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1)] | None = None
    """-1: all."""
    dry_sequence_breakers: (
        Annotated[list[str], Field(max_length=MOST_BREAKERS, fail_fast=True)] | None
    ) = None

    @property
    def breakers(self) -> tuple[str, ...] | None:
        """The sequence breakers of DRY; None: it is off."""
        if not self.dry_multiplier or self.dry_penalty_last_n == 0:
            return None
        given = self.dry_sequence_breakers
        return DEFAULT_BREAKERS if given is None else tuple(given)

    def penalties(self, breakers: Breakers | None = None) -> Penalties:
        """Penalties and biases; `breakers` are those of the texts asked for, compiled.

        Raises: SettingsError; ApiError if both kinds of repetition penalty are given.
        """
        repetition, window = self.repetition_penalty, None
        if self.repeat_penalty is not None:
            if repetition is not None:
                raise ApiError(
                    400, "repeat_penalty: repetition_penalty is given too", param="repeat_penalty"
                )
            latest = _LLAMA_WINDOW if self.repeat_last_n is None else self.repeat_last_n
            repetition, window = self.repeat_penalty, None if latest < 0 else latest
        given = self.logit_bias or {}
        pairs = given.items() if isinstance(given, dict) else given
        if any(bias is True for _, bias in pairs):
            raise ApiError(400, "logit_bias: true is no bias", param="logit_bias")
        return Penalties(
            presence=self.presence_penalty or 0.0,
            frequency=self.frequency_penalty or 0.0,
            repetition=1.0 if repetition is None else repetition,
            window=window,
            biases={int(each): _LEAST_BIAS if bias is False else bias for each, bias in pairs},
            dry=self._dry(breakers),
        )

    def _dry(self, breakers: Breakers | None) -> Dry | None:
        if self.breakers is None or self.dry_multiplier is None:
            return None
        last_n = -1 if self.dry_penalty_last_n is None else self.dry_penalty_last_n
        return Dry(
            multiplier=self.dry_multiplier,
            base=1.75 if self.dry_base is None else self.dry_base,
            allowed_length=2 if self.dry_allowed_length is None else self.dry_allowed_length,
            window=None if last_n < 0 else last_n,
            breakers=breakers or Breakers(),
        )
