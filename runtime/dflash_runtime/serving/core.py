"""From a checked body to the response that generates its answer, in whatever form.

The doors map their bodies to `ChatBody` and `CompletionBody`, and give an `Answer` of theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from starlette.requests import Request

from dflash_adapters.text.answers import AnswerFormat
from dflash_adapters.text.grammar import Grammar, GrammarKind, GrammarSource
from dflash_adapters.text.tokenizer import Tokenizer
from dflash_protocol.errors import ContextExceeded, GrammarError, SettingsError
from dflash_runtime.engine.answer_rules import AnswerRules
from dflash_runtime.engine.answer_text import TextRules
from dflash_runtime.engine.arguments import token_id_array
from dflash_runtime.engine.breakers import Breakers
from dflash_runtime.engine.engine import Engine
from dflash_runtime.serving.access import CLIENT, KEY
from dflash_runtime.serving.answers import Answer
from dflash_runtime.serving.bodies import Body
from dflash_runtime.serving.constraints import constraint_of
from dflash_runtime.serving.echo import MOST_ECHOED, PromptEcho, prompt_pieces
from dflash_runtime.serving.errors import ApiError, api_error
from dflash_runtime.serving.fair_queue import Turns
from dflash_runtime.serving.generation import GenerationResponse
from dflash_runtime.serving.json_values import FEW_VALUES
from dflash_runtime.serving.requests import B, ChatBody, CompletionBody, parse_body
from dflash_runtime.serving.state import ServerState
from dflash_runtime.serving.status import chat_template
from dflash_runtime.serving.tools import Tool, parameters_of
from dflash_runtime.serving.worker import Channel, Job, TokenOptions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat as its template renders it: the text that the model reads, and its tokens."""

    text: str
    token_ids: list[int]
    template: str
    tools: list[Tool]
    """Those that may be called."""


def tokenizer_of(engine: Engine) -> Tokenizer:
    """Raises: ApiError if there is none."""
    if engine.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")
    return engine.tokenizer


class Visit:
    """One request while its body is received and made into tokens; made by `visit`."""

    def __init__(self, state: ServerState, request: Request, received: Body) -> None:
        self.state = state
        self.engine: Engine = state.ready_engine()
        self.client: str = request.scope[CLIENT]
        self.key: str = request.scope[KEY]
        """The index of its API key; empty if the server has none."""
        self._received = received

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises: ApiError if there is none."""
        return tokenizer_of(self.engine)

    @property
    def template(self) -> str:
        """The chat template; empty if there is none."""
        return chat_template(self.state, self.engine) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; none if the tokenizer does not know it."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None or token_id >= tokenizer.vocab_size:
            return b""
        return tokenizer.token_bytes(token_id)

    @property
    def most_values(self) -> int:
        """Values that JSON of a client may have: a prompt of token ids has as many as the context
        may hold."""
        return FEW_VALUES + self.engine.num_positions

    async def body(self, kind: type[B]) -> B:
        """The checked body. Raises: ApiError."""
        return parse_body(kind, await self._received.receive(), most_values=self.most_values)

    async def made(self, parts: Iterator[T], field: str, *, turns: Turns | None = None) -> list[T]:
        """The `parts` made from the body's `field`, in threads, by `turns`, or those for
        tokenising. Raises: ApiError."""
        try:
            return await self._received.made(parts, turns=turns)
        except ContextExceeded as error:
            raise _too_long(field, f"at least {error.num_tokens}", error.num_positions) from error
        except Exception as error:
            refusal = api_error(error)
            if refusal.status == 500:
                raise
            raise refusal from error

    async def completion(self, body: CompletionBody, answer: Answer) -> GenerationResponse:
        """The response that continues a text or tokens. Raises: ApiError."""
        prompt = body.one_prompt
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            prompt = await self._tokens(prompt, "prompt")
        grammar = await self._grammar(constraint_of(body))
        job = await self._job(body, prompt, grammar, text=TextRules(body.stops))
        if body.echo:
            job.echo = await self._echo(body, prompt, text)
        return GenerationResponse(self.state, job, answer, is_stream=bool(body.stream))

    async def chat(self, body: ChatBody, answer: Answer) -> GenerationResponse:
        """The response that answers a conversation. Raises: ApiError."""
        rendered = await self.rendered(body)
        rules = AnswerRules.of(
            self.engine.tokenizer,
            template=rendered.template,
            tools=parameters_of(rendered.tools),
            rendered=rendered.text,
            setting=self.state.settings.answer_format,
        )
        constraint = await self._chat_constraint(body, rendered, rules)
        grammar = rules.after_reasoning(
            self.engine.tokenizer,
            await self._grammar(constraint),
            has_channels=constraint is not None and constraint[1].kind is GrammarKind.CALLS,
        )
        text = rules.text(body.stops, has_reasoning=body.include_reasoning is not False)
        if body.reasoning_format == "none":
            text = TextRules(body.stops, is_chat=True)
        return GenerationResponse(
            self.state,
            await self._job(body, rendered.token_ids, grammar, text=text),
            answer,
            is_stream=bool(body.stream),
        )

    async def rendered(self, body: ChatBody) -> RenderedChat:
        """The prompt of a conversation. Raises: ApiError."""
        messages = [message.for_template() for message in body.messages]
        tools = body.offered_tools()
        template = self.template
        variables = {
            **body.template_variables(template, tools),
            **(body.chat_template_kwargs or {}),
        }

        def texts() -> Iterator[str]:
            yield self.engine.chat_text(
                messages, template=self.state.chat_template, extra=variables
            )

        [text] = await self.made(texts(), "messages", turns=self.state.bodies.rendering)
        tokens = await self._tokens(text, "messages", is_chat=True)
        return RenderedChat(text, tokens, template, tools)

    async def _chat_constraint(
        self, body: ChatBody, rendered: RenderedChat, rules: AnswerRules
    ) -> tuple[str, GrammarSource] | None:
        """What a chat's answer is to follow, and the field that says so. Raises: ApiError."""
        constraint = constraint_of(body)
        field, content = (None, None) if constraint is None else constraint
        is_json = content is not None and content.kind is GrammarKind.JSON_SCHEMA
        may_call = rules.kind is not AnswerFormat.PLAIN
        calls = body.call_rules(rendered.tools, beside=field if is_json and may_call else None)
        if calls is None:
            return constraint
        if constraint is not None and not is_json:
            raise ApiError(
                400,
                f"{calls.field}: an answer follows that or {field}, not both",
                param=calls.field,
            )
        await self._grammar(constraint)  # what is wrong with it alone is said of its own field

        def sources() -> Iterator[GrammarSource]:
            yield rules.call_source(
                self.engine.tokenizer,
                calls.schemas,
                content=content,
                is_required=calls.is_required,
                is_single=calls.is_single,
            )

        # Like compiling: of large schemas it takes long.
        return calls.field, await self._compiled(sources(), calls.field)

    async def _tokens(self, text: str, field: str, *, is_chat: bool = False) -> list[int]:
        """The tokens of a text. Raises: ApiError."""
        num_positions = self.engine.num_positions

        def parts() -> Iterator[list[int]]:
            num_tokens = 0
            for part in self.engine.prompt_parts(text, is_chat=is_chat):
                num_tokens += len(part)
                if num_tokens > num_positions:
                    raise ContextExceeded(num_tokens, num_positions)
                yield part

        return list(chain.from_iterable(await self.made(parts(), field)))

    async def _echo(
        self, body: CompletionBody, token_ids: list[int], text: str | None
    ) -> PromptEcho:
        """The prompt as a part of the answer. Raises: ApiError."""
        num_top = body.top_logprobs_wanted
        if num_top is not None and len(token_ids) * (1 + num_top) > MOST_ECHOED:
            raise ApiError(
                400,
                f"echo: is not supported with more than {MOST_ECHOED} log-probabilities; "
                "ask for fewer, or of a shorter prompt",
                param="echo",
                code="unsupported_value",
            )
        tokenizer = self.engine.tokenizer
        pieces = prompt_pieces(tokenizer, token_ids, is_text=text is not None)
        return PromptEcho(
            token_ids,
            list(chain.from_iterable(await self.made(pieces, "prompt"))),
            text=text,
            has_space=tokenizer is not None and tokenizer.adds_space,
            has_logprobs=num_top is not None,
        )

    async def _grammar(self, constraint: tuple[str, GrammarSource] | None) -> Grammar | None:
        """What the answer is to follow, compiled in a thread. Raises: ApiError."""
        if constraint is None:
            return None
        field, source = constraint

        def compiled() -> Iterator[Grammar]:
            yield self.engine.client_grammar(source)

        return await self._compiled(compiled(), field)

    async def _compiled(self, parts: Iterator[T], field: str) -> T:
        """The only one of `parts`, made in a thread, of what `field` asks for. Raises: ApiError."""
        try:
            [made] = await self._received.made(parts, turns=self.state.bodies.compiling)
        except GrammarError as error:
            raise ApiError(
                400, f"{field}: {error}", param=field, code="unsupported_value"
            ) from error
        return made

    async def _breakers(self, body: CompletionBody | ChatBody) -> Breakers | None:
        """The sequence breakers asked for, compiled in a thread. Raises: ApiError."""
        texts = body.breakers
        if texts is None:
            return None

        def compiled() -> Iterator[Breakers]:
            yield self.engine.breakers.compile(texts)

        [breakers] = await self.made(
            compiled(), "dry_sequence_breakers", turns=self.state.bodies.compiling
        )
        return breakers

    async def _job(
        self,
        body: CompletionBody | ChatBody,
        token_ids: list[int],
        grammar: Grammar | None,
        *,
        text: TextRules,
    ) -> Job:
        """The generation that a checked body asks for. Raises: ApiError."""
        engine = self.engine
        field = "messages" if isinstance(body, ChatBody) else "prompt"
        try:
            token_id_array(
                token_ids,
                vocab_size=engine.spec.vocab_size,
                num_positions=engine.num_positions,
                model_positions=engine.spec.context_length,
            )
        except ContextExceeded as error:
            raise _too_long(field, str(error.num_tokens), error.num_positions) from error
        except SettingsError as error:
            raise ApiError(400, str(error), param=field) from error
        if not token_ids:
            raise ApiError(400, "the prompt is empty", param=field)
        breakers = await self._breakers(body)
        try:
            options = TokenOptions(
                sampling=body.sampling(),
                penalties=body.penalties(breakers),
                grammar=grammar,
                ignore_eos=bool(body.ignore_eos) or body.is_score,
                stop_ids=tuple(body.stop_token_ids or ()),
                top_logprobs=body.top_logprobs_wanted,
            )
        except SettingsError as error:
            raise api_error(error) from error
        return Job(
            client=self.client,
            prompt=token_ids,
            max_tokens=min(
                engine.num_positions if body.most_tokens is None else body.most_tokens,
                engine.num_positions,
            ),
            options=options,
            channel=Channel(asyncio.get_running_loop()),
            text=text,
            key=self.key,
        )


@contextmanager
def visit(
    state: ServerState, request: Request, *, names: Mapping[str, str] | None = None
) -> Iterator[Visit]:
    """One request; its body counts towards the bounds of all bodies until the context is left.

    Errors call the fields of `ChatBody` and `CompletionBody` by `names`, where a door has others.
    Raises: ApiError, also if the server takes no requests.
    """
    state.ready_engine()
    with state.bodies.body_of(request, request.scope[CLIENT]) as received:
        try:
            yield Visit(state, request, received)
        except ApiError as error:
            error.rename(names or {})
            raise


def _too_long(field: str, num_tokens: str, num_positions: int) -> ApiError:
    return ApiError(
        400,
        f"a prompt of {num_tokens} tokens does not fit the context of {num_positions} positions; "
        "shorten it",
        param=field,
        code="context_length_exceeded",
    )
