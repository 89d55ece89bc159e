"""Answers to conversations: their tokens, or divided into reasoning, content and calls of tools."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from dflash_adapters.text.answers import AnswerEvent, AnswerFormat
from dflash_adapters.text.grammar import Grammar
from dflash_protocol.errors import SettingsError
from dflash_runtime.engine.answer_rules import AnswerRules, schemas_of
from dflash_runtime.engine.answer_text import TextAssembler, TextRules, divided
from dflash_runtime.engine.engine_texts import EngineTexts
from dflash_runtime.engine.generate_options import (
    AnswerOptions,
    GenerateOptions,
    Schema,
    schema_source,
)
from dflash_runtime.engine.generation import GeneratedToken, GenerationStats
from dflash_runtime.engine.stop_strings import checked_stops


@dataclass(frozen=True, slots=True)
class AskedAnswer:
    """An answer to a conversation that is to be generated."""

    prompt: list[int]
    text: TextRules
    grammar: Grammar | None


class EngineChats(EngineTexts):
    """The part of `Engine` that answers conversations."""

    last_generation: GenerationStats
    """Of the latest `generate`."""

    @abstractmethod
    def generate(
        self, prompt: str | Sequence[int], max_tokens: int, **options: Unpack[GenerateOptions]
    ) -> Generator[GeneratedToken]:
        """See `Engine`."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: str | None = None,
        extra: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generator[GeneratedToken]:
        """Yield up to `max_tokens` tokens of the answer to a conversation, as `generate` does.

        A message is a dict of ``role``, ``content``, and whatever else the model's template reads.
        `template` replaces the file's; its variables are `tools`, the tools that may be called, and
        `extra`, such as ``enable_thinking``. `options` are those of `generate`. Reasoning and tool
        calls stay in the text as the model writes them, with their tags: `answer` divides them.
        Raises: as `encode_chat` and `generate`.
        """
        prompt = self.encode_chat(messages, tools=tools, template=template, extra=extra)
        return self.generate(prompt, max_tokens, **options)

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: str | None = None,
        extra: Mapping[str, Any] | None = None,
        answer_format: str = "auto",
        stop: str | Sequence[str] = (),
        grammar: Grammar | None = None,
        schema: Schema | None = None,
        **options: Unpack[AnswerOptions],
    ) -> Iterator[AnswerEvent]:
        """Yield the answer to a conversation of up to `max_tokens` tokens, divided as the server
        divides it: pieces of `Content` and `Reasoning` as they are written, and each `ToolCall`
        once it is complete.

        Arguments are those of `chat` and options of `generate`. Each of the `tools` is a function
        with a ``name``, as OpenAI's API has them. `answer_format` names how the model writes
        calls, where its template does not tell. `stop` is searched in the content. `schema` is
        followed by the content, behind the reasoning that the prompt has begun.
        Raises: as `prepare_answer` and `generate`.
        """
        asked = self.prepare_answer(
            messages,
            tools=tools,
            template=template,
            extra=extra,
            answer_format=answer_format,
            stop=stop,
            grammar=grammar,
            schema=schema,
        )
        return self.answer_asked(asked, max_tokens, **options)

    def prepare_answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: str | None = None,
        extra: Mapping[str, Any] | None = None,
        answer_format: str = "auto",
        stop: str | Sequence[str] = (),
        grammar: Grammar | None = None,
        schema: Schema | None = None,
    ) -> AskedAnswer:
        """All of `Engine.answer` but the generation itself. Any thread may call it once `tokenizer`
        has been loaded.

        Raises: as `encode_chat`; SettingsError for tools without names, or an unknown format;
        GrammarError for a schema, also beside tools whose calls the format cannot enforce.
        """
        schemas, stops = schemas_of(tools), checked_stops(stop)
        variables = {**(extra or {}), **({"tools": list(tools)} if tools else {})}
        rendered = self.chat_text(messages, template=template, extra=variables)
        own = None if self.tokenizer is None else self.tokenizer.chat_template
        rules = AnswerRules.of(
            self.tokenizer,
            template=template or own or "",
            rendered=rendered,
            tools=schemas,
            setting=answer_format,
        )
        has_calls = bool(tools) and rules.kind is not AnswerFormat.PLAIN
        if schema is not None:
            if grammar is not None:
                raise SettingsError("schema and grammar exclude each other")
            source = schema_source(schema)
            if has_calls:
                calls = {name: {"type": "object"} for name in schemas}
                source = rules.call_source(self.tokenizer, calls, content=source)
            grammar = self.grammars.compile(source)
        has_channels = schema is not None and has_calls
        return AskedAnswer(
            self._prompts.chat_ids(rendered),
            rules.text(stops),
            rules.after_reasoning(self.tokenizer, grammar, has_channels=has_channels),
        )

    def answer_asked(
        self, asked: AskedAnswer, max_tokens: int, **options: Unpack[AnswerOptions]
    ) -> Iterator[AnswerEvent]:
        """Yield the answer that `prepare_answer` has prepared. Raises: as `generate`."""
        tokens = self.generate(asked.prompt, max_tokens, grammar=asked.grammar, **options)
        return self._answered(tokens, TextAssembler(self.tokenizer, asked.text))

    def _answered(
        self, tokens: Generator[GeneratedToken], assembler: TextAssembler
    ) -> Iterator[AnswerEvent]:
        yield from divided(tokens, assembler)
        if assembler.is_stopped:
            self.last_generation.finish_reason = "stop"
