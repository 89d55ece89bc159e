"""Bodies of requests, validated field by field.

Fields without meaning here are in the tables at the end. They have the names of OpenAI's interface,
and of vLLM's and llama.cpp's servers, and are refused by name unless they do not change the answer.
Unknown fields are refused too, as OpenAI does: a client must not take an answer without an option
for one with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import PydanticCustomError

from dflash_protocol.errors import one_line
from dflash_runtime.serving.constraints import ConstraintFields
from dflash_runtime.serving.echo import EchoField
from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.json_values import FEW_VALUES, has_more_values
from dflash_runtime.serving.sampling_fields import PenaltyFields, SamplingFields
from dflash_runtime.serving.tools import ToolFields, message_calls

MOST_STOPS = 16
LONGEST_STOP = 256
MOST_TOP_LOGPROBS = 20
MOST_MESSAGES = 4096
_OPENAI_COMPLETION_TOKENS = 16
_LONGEST_NAME = 100

Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
# fail_fast: errors cost more than items.
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(fail_fast=True)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class RequestBody(_Body):
    """A whole body; extra fields are kept until they are refused or ignored."""

    model_config = ConfigDict(extra="allow")
    neutral: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {}
    """Fields like those of `NEUTRAL`, of a door of its own."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields like those of `IGNORED`, likewise."""

    def check_fields(self) -> None:
        """Raises: ApiError for the first field that is not supported."""
        fields = {**(self.model_extra or {})}
        for name in self.ignored:
            fields.pop(name, None)
        refuse_unsupported(fields, self.neutral)


class StreamOptions(_Body):
    """Options of a stream; others affect the form of chunks, not their text, and are ignored."""

    include_usage: bool | None = None


class OptionFields(ConstraintFields, SamplingFields, PenaltyFields):
    """Options of any generation, at whatever door."""

    ignore_eos: bool | None = None
    stop_token_ids: Annotated[Tokens, Field(max_length=MOST_STOPS)] | None = None

    def options(self) -> dict[str, Any]:
        """Those that are given, by name."""
        found = {name: getattr(self, name) for name in OptionFields.model_fields}
        return {name: value for name, value in found.items() if value is not None}


class _Generation(RequestBody, OptionFields, EchoField):
    """Fields of both kinds of generation."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(_Generation):
    """``/v1/completions``."""

    prompt: str | Tokens | Annotated[list[str | Tokens], Field(fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    def check_fields(self) -> None:
        super().check_fields()
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens: must be 1 or more without echo", param="max_tokens")

    @property
    def is_score(self) -> bool:
        """Whether a prompt's log-probabilities are asked for, and one token because it had to be
        one: programs that score texts drop the last token, so that there has to be one even if it
        ends the text."""
        return bool(self.echo) and self.logprobs is not None and self.max_tokens == 1

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt, text or token ids. Raises: ApiError if it is empty, or if there are more."""
        match self.prompt:
            case [str() | list(), _, *_]:
                raise ApiError(
                    400,
                    "prompt: several in one request are not supported; ask for each by itself",
                    param="prompt",
                    code="unsupported_value",
                )
            case [str() | list() as prompt]:
                return prompt
            case str() | [int(), *_]:
                return self.prompt  # type: ignore[return-value]
        raise ApiError(400, "prompt: must be a text or token ids", param="prompt")

    @property
    def most_tokens(self) -> int | None:
        """None = up to the context."""
        return _OPENAI_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs


def _only_text(kind: str) -> str:
    if kind != "text":
        raise PydanticCustomError("part", "a part of type {kind}: only text is supported",
                                  {"kind": one_line(kind)[:_LONGEST_NAME]})  # fmt: skip
    return kind


class TextPart(_Body):
    """A part of a message; only text is supported."""

    type: Annotated[str, AfterValidator(_only_text)]
    text: str


class ChatMessage(_Body):
    """One message; extra fields go to the chat template."""

    model_config = ConfigDict(extra="allow")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    def for_template(self) -> dict[str, Any]:
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content or ())
        message = {**(self.model_extra or {}), "role": self.role, "content": content}
        if "tool_calls" in message:
            message["tool_calls"] = message_calls(message["tool_calls"])
        return message


class ChatBody(_Generation, ToolFields):
    """``/v1/chat/completions``."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES), Field(fail_fast=True)
    ]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    is_score: ClassVar[bool] = False

    @property
    def most_tokens(self) -> int | None:
        """None = up to the context."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_fields(self) -> None:
        super().check_fields()
        self.offered_tools()
        if self.echo:
            raise ApiError(400, "echo: not of a chat", param="echo", code="unsupported_value")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                400,
                "top_logprobs: needs logprobs",
                param="top_logprobs",
                code="unsupported_value",
            )


class TokenizeBody(RequestBody):
    """``/tokenize``: llama-server's fields, or vLLM's, whose text is its `prompt`."""

    ignored: ClassVar[frozenset[str]] = frozenset({"model"})
    neutral: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {"return_token_strs": (False,)}
    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    prompt: str | None = None
    add_special_tokens: bool = True

    @property
    def text(self) -> str:
        """Raises: ApiError if there is none, or if there are two."""
        if (self.content is None) == (self.prompt is None):
            raise ApiError(400, "content: either content or prompt has the text", param="content")
        return self.content if self.prompt is None else self.prompt  # type: ignore[return-value]

    @property
    def adds_special(self) -> bool:
        """Each of the two servers has a field and a default of its own."""
        return self.add_special if self.prompt is None else self.add_special_tokens


class DetokenizeBody(RequestBody):
    """``/detokenize``."""

    ignored: ClassVar[frozenset[str]] = frozenset({"model"})
    tokens: Tokens


B = TypeVar("B", bound=RequestBody)


def parse_body(kind: type[B], data: bytes, *, most_values: int = FEW_VALUES) -> B:
    """Parse a JSON body with at most `most_values` values, nested ones included.

    Raises: ApiError that names the field that is wrong or unsupported, and why.
    """
    if has_more_values(data, most_values):
        raise ApiError(400, f"the body has more than {most_values} values")
    return _checked(lambda: kind.model_validate_json(data))


def body_of(kind: type[B], fields: Mapping[str, Any]) -> B:
    """A body made of a door's own, by field. Raises: ApiError, as `parse_body`."""
    return _checked(lambda: kind.model_validate(dict(fields)))


def _checked(make: Callable[[], B]) -> B:
    try:
        body = make()
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        # Of a value that may have several forms, the form that it was most like.
        first = max(found, key=lambda each: len(each["loc"]))
        place = [str(part) for part in first["loc"]]
        where = f"{place[0]}: " if place else ""
        message = one_line(f"{where}{first['msg']}", 300)
        raise ApiError(400, message, param=place[0] if place else None) from None
    body.check_fields()
    return body


IGNORED = frozenset(
    {
        # The client, its purpose, storage of the answer.
        "metadata", "priority", "request_id", "safety_identifier", "service_tier", "store", "user",
        # Caching, scheduling and speed of the same answer.
        "backend_sampling", "cache_prompt", "id_slot", "n_cache_reuse", "prediction",
        "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "slot_id",
        "speculative", "sse_ping_interval",
        # Further output beside the text.
        "return_progress", "timings_per_token", "verbose",
        # Parameters of features that are off: the field that turns them on is refused.
        "adaptive_decay", "dynatemp_exponent", "grammar_triggers", "grammar_type",
        "guided_decoding_backend", "mirostat_eta", "mirostat_tau", "n_discard", "n_keep",
        "penalize_nl", "preserved_tokens", "xtc_threshold",
    }
)  # fmt: skip
"""Fields that do not change the text, whatever their values."""

_REFUSED = (
    "add_special_tokens", "allowed_token_ids", "audio", "cache_salt", "chat_format",
    "chat_template", "kv_transfer_params", "moderation", "n_predict", "prompt_logprobs",
    "reasoning_effort", "samplers", "structural_tag", "thinking_token_budget",
    "truncate_prompt_tokens", "web_search_options",
)  # fmt: skip
"""Fields that may change the answer, whatever their values."""

NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    **dict.fromkeys(_REFUSED, ()),
    # OpenAI
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "n": (1,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    # vLLM
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    # llama.cpp
    "adaptive_target": (-1,),
    "dynatemp_range": (0,),
    "grammar_lazy": (False,),
    "image_data": ([],),
    "input_extra": ([],),
    "input_prefix": ("",),
    "input_suffix": ("",),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "n_cmpl": (1,),
    "n_indent": (0,),
    "n_probs": (0,),
    "parse_tool_calls": (False,),
    "post_sampling_probs": (False,),
    "reasoning_format": ("none",),
    "reasoning_in_content": (True,),
    "response_fields": ([],),
    "return_tokens": (False,),
    "system_prompt": ("",),
    "t_max_predict_ms": (0, -1),
    "tfs_z": (1,),
    "thinking_forced_open": (False,),
    "top_n_sigma": (0, -1),
    "xtc_probability": (0,),
}
"""Fields that may change the answer, each with the values, besides null, that do not."""


def refuse_unsupported(
    fields: Mapping[str, JsonValue], own: Mapping[str, tuple[JsonValue, ...]]
) -> None:
    """Check the fields of a body that have no meaning here, by `NEUTRAL` and a door's `own`.

    Raises: ApiError naming the first that changes the answer, or may.
    """
    neutral = {**NEUTRAL, **own}
    for name, value in fields.items():
        if value is None or name in IGNORED:
            continue
        if name not in neutral:
            shown = one_line(name)[:_LONGEST_NAME]
            raise ApiError(
                400,
                f"{shown}: unknown field",
                param=shown,
                code="unknown_parameter",
            )
        allowed = neutral[name]
        if not any(_is_same(value, each) for each in allowed):
            but = f"; only {allowed[0]!r} is" if allowed else ""
            raise ApiError(
                400, f"{name}: is not supported{but}", param=name, code="unsupported_value"
            )


def _is_same(value: JsonValue, other: JsonValue) -> bool:
    """Equality in which 1 is 1.0, but not true."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
