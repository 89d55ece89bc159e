"""Bodies of requests, validated field by field.

Unsupported fields are refused by name, unless they do not change the answer: see ``fields``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from dflash_protocol.errors import one_line
from dflash_runtime.engine.sampling import SamplingParams
from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.fields import refuse_unsupported

MOST_STOPS = 16
LONGEST_STOP = 256
MOST_TOP_LOGPROBS = 20
_MOST_MESSAGES = 4096
_OPENAI_COMPLETION_TOKENS = 16
_SEEDS = 1 << 63
FEW_VALUES = 1 << 16
_BEFORE_VALUES = (b",", b"[", b"{")

Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
# fail_fast: errors cost more than items.
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(fail_fast=True)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


class _Request(_Body):
    """A whole body; extra fields are kept until they are refused or ignored."""

    model_config = ConfigDict(extra="allow")

    def check_fields(self) -> None:
        """Raises: ApiError for the first field that is not supported."""
        refuse_unsupported(self.model_extra or {})


class StreamOptions(_Body):
    """Options of a stream; others affect the form of chunks, not their text, and are ignored."""

    include_usage: bool | None = None


class _Generation(_Request):
    """Fields of both kinds of generation."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self) -> SamplingParams:
        """Sampling parameters, with OpenAI's defaults. Raises: SettingsError."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            seed=None if self.seed is None else self.seed % _SEEDS,
        )


class CompletionBody(_Generation):
    """``/v1/completions``."""

    prompt: str | Tokens | Annotated[list[str | Tokens], Field(max_length=1, fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt, text or token ids. Raises: ApiError if it is empty."""
        match self.prompt:
            case [str() | list() as prompt]:
                return prompt
            case str() | [int(), *_]:
                return self.prompt  # type: ignore[return-value]
        raise ApiError(400, "prompt: must be a text or token ids", param="prompt")

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or _OPENAI_COMPLETION_TOKENS

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs


class TextPart(_Body):
    """A part of a message; only text is supported."""

    type: Literal["text"]
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
        return {**(self.model_extra or {}), "role": self.role, "content": content}


class ChatBody(_Generation):
    """``/v1/chat/completions``."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=_MOST_MESSAGES), Field(fail_fast=True)
    ]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None

    @property
    def most_tokens(self) -> int | None:
        """None = up to the context."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_fields(self) -> None:
        super().check_fields()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                400,
                "top_logprobs: needs logprobs",
                param="top_logprobs",
                code="unsupported_value",
            )


class TokenizeBody(_Request):
    """``/tokenize``."""

    content: str
    add_special: bool = False
    parse_special: bool = True


class DetokenizeBody(_Request):
    """``/detokenize``."""

    tokens: Tokens


B = TypeVar("B", bound=_Request)


def parse_body(kind: type[B], data: bytes, *, most_values: int = FEW_VALUES) -> B:
    """Parse a JSON body with at most `most_values` values, nested ones included.

    Raises: ApiError that names the field that is wrong or unsupported, and why.
    """
    if _has_more_values(data, most_values):
        raise ApiError(400, f"the body has more than {most_values} values")
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = [str(part) for part in first["loc"]]
        where = f"{place[0]}: " if place else ""
        message = one_line(f"{where}{first['msg']}", 300)
        raise ApiError(400, message, param=place[0] if place else None) from None
    body.check_fields()
    return body


def _has_more_values(data: bytes, most: int) -> bool:
    """Whether JSON has more values than `most`: parsing them would hold the interpreter's lock for
    long. A string is one value, however long."""
    if sum(map(data.count, _BEFORE_VALUES)) <= most:
        return False
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 4 * most + 2:  # two for a name, two for its value, or for the only one
        return True
    beside_texts = b"".join(plain.split(b'"')[::2])
    return sum(map(beside_texts.count, _BEFORE_VALUES)) > most
