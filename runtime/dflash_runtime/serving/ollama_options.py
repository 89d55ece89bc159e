"""Fields that all bodies of Ollama's interface have: options, formats and reasoning.

As everywhere, what is not supported is refused by its name, options among it, where Ollama itself
passes over what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from dflash_protocol.errors import one_line
from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.requests import MOST_TOP_LOGPROBS, RequestBody
from dflash_runtime.serving.tools import can_reason, reads_effort, thinking_variables

FIELD_NAMES: Mapping[str, str] = {
    "max_tokens": "num_predict",
    "response_format": "format",
    "reasoning_effort": "think",
    "reasoning_format": "think",
}
"""Fields of our bodies that have other names here."""

DEFAULTS: Mapping[str, JsonValue] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.9,
    "repeat_penalty": 1.1,
}
"""Ollama's, of options that have others here."""

_TAKEN = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n",
    "presence_penalty", "frequency_penalty", "stop",
)  # fmt: skip
_IGNORED = frozenset(
    {
        # Where and how fast the same text is computed, and parameters of what is off.
        "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat_eta", "mirostat_tau", "num_batch",
        "num_gpu", "num_keep", "num_thread", "numa", "penalize_newline", "use_mlock", "use_mmap",
    }
)  # fmt: skip
_NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "embedding_only": (False,),
    "mirostat": (0,),
    "tfs_z": (1, 1.0),
    "vocab_only": (False,),
}

Levels = Literal["low", "medium", "high"]


class OllamaBody(RequestBody):
    """Fields of both kinds of generation."""

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, JsonValue] | None = None
    options: dict[str, JsonValue] | None = None
    keep_alive: float | str | None = None
    """Passed over: the model stays where it is."""
    think: bool | Levels | None = None
    truncate: bool | None = None
    shift: bool | None = None
    """These two passed over: a text that does not fit is refused."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    @property
    def is_unload(self) -> bool:
        """Whether it asks for the end of the model, if it asks for no text."""
        return self.keep_alive in (0, "0", "0s", "0m")

    def generation(self, num_positions: int) -> dict[str, Any]:
        """The fields of our bodies that say how the text is chosen.

        Raises: ApiError that names an option which is not supported.
        """
        options = {k: v for k, v in (self.options or {}).items() if v is not None}
        _check_options(options, num_positions)
        found: dict[str, Any] = {**DEFAULTS, "stream": self.stream is not False}
        found |= {name: options[name] for name in _TAKEN if name in options}
        seed, most = options.get("seed", -1), options.get("num_predict", -1)
        if seed != -1:
            found["seed"] = seed
        if not isinstance(most, int) or isinstance(most, bool) or most > 0:
            found["max_tokens"] = most  # a wrong one is refused by its name
        if self.format == "json":
            found["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            schema = {"schema": self.format}
            found["response_format"] = {"type": "json_schema", "json_schema": schema}
        return found

    def reasoning(self, template: str) -> dict[str, Any]:
        """The fields of a chat's body about reasoning.

        Raises: ApiError if the model cannot do, or cannot leave off, what is asked for.
        """
        if self.think is None or (self.think is False and not can_reason(template)):
            return {}
        if not can_reason(template):
            raise refused("think", f"{one_line(self.model, 100)} does not support thinking")
        if not reads_effort(template):
            thinking_variables(template, thinks=self.think is not False, field="think")
            return {}
        levels: dict[object, str] = {True: "medium", False: "none"}
        return {"reasoning_effort": levels.get(self.think, self.think)}


def _check_options(options: Mapping[str, JsonValue], num_positions: int) -> None:
    num_ctx = options.get("num_ctx")
    if num_ctx is not None and (
        not isinstance(num_ctx, int) or isinstance(num_ctx, bool) or num_ctx > num_positions
    ):
        raise refused("num_ctx", f"the context has {num_positions} positions")
    known = {*_TAKEN, *_IGNORED, "num_ctx", "num_predict", "seed"}
    for name, value in options.items():
        if name in known or (name in _NEUTRAL and value in _NEUTRAL[name]):
            continue
        if name in _NEUTRAL:
            raise refused(name, "is not supported")
        shown = one_line(name, 100)
        raise ApiError(400, f"{shown}: unknown option", param=shown, code="unknown_parameter")


def refused(field: str, why: str) -> ApiError:
    """The error of a field that asks for what is not there."""
    return ApiError(400, f"{field}: {why}", param=field, code="unsupported_value")
