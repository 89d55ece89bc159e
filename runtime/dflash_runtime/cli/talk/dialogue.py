"""A dialogue with one engine: what was said, and answers divided into reasoning and content."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from dflash_adapters.text.answers import Content, Reasoning, ToolCall
from dflash_protocol.errors import ContextExceeded
from dflash_runtime.engine.answer_rules import AnswerRules
from dflash_runtime.engine.answer_text import TextAssembler, divided
from dflash_runtime.engine.engine import Engine, GenerationStats

_SCOPE = "chat"

Message: TypeAlias = dict[str, str]
"""``role`` and ``content``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkOptions:
    """How answers are written."""

    max_tokens: int | None
    """Most tokens of an answer; None: as many as the context has room for."""
    sampling: Mapping[str, Any]
    """Options of `Engine.generate`."""
    stops: tuple[str, ...] = ()
    template: str | None = None
    """In place of the file's."""


@dataclass(slots=True)
class TalkTotals:
    """What the dialogue took so far."""

    num_answers: int = 0
    num_written: int = 0
    """Tokens of all answers."""
    num_held: int = 0
    """Tokens of the dialogue, its last answer included; 0: nothing was said."""
    last: GenerationStats = field(default_factory=GenerationStats)


class Dialogue:
    """Keeps the messages, and asks the engine for answers.

    The engine belongs to the caller. Used by one thread.
    """

    def __init__(self, engine: Engine, options: TalkOptions, *, system: str | None = None) -> None:
        self._engine = engine
        self._options = options
        self.system = system
        self.turns: list[Message] = []
        """Questions and answers, without the system prompt."""
        self.totals = TalkTotals()
        self.end = ""
        """Why the last answer ended: see `GenerationStats.finish_reason`."""

    @property
    def num_positions(self) -> int:
        """The context: the most tokens of a dialogue."""
        return self._engine.num_positions

    @property
    def messages(self) -> list[Message]:
        """All that was said, the system prompt first."""
        told = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*told, *self.turns]

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self.turns.clear()
        self.totals.num_held = 0

    def ask(
        self,
        question: str,
        *,
        is_cancelled: Callable[[], bool],
        on_prefill: Callable[[int, int], None],
    ) -> Iterator[Content | Reasoning]:
        """Yield the answer as it is written; then it is kept, with the question.

        Once `is_cancelled` returns True the answer ends, and what there is of it is kept. If it has
        no content, or an error is raised, neither answer nor question is. `on_prefill` as of
        `Engine.generate`.
        Raises: ContextExceeded if there is no room for an answer; as `Engine.encode_chat` and
        `Engine.generate`.
        """
        said = [*self.messages, {"role": "user", "content": question}]
        rendered = self._engine.chat_text(said, template=self._options.template)
        prompt = self._encoded(rendered)
        assembler = self._assembler(rendered)
        tokens = self._engine.generate(
            prompt,
            self._options.max_tokens or self._engine.num_positions,
            **self._options.sampling,
            reuse_prefix=True,
            prefix_scope=_SCOPE,
            is_cancelled=is_cancelled,
            on_prefill=on_prefill,
        )
        content: list[str] = []
        for event in divided(tokens, assembler):
            if isinstance(event, Content):
                content.append(event.text)
            if not isinstance(event, ToolCall):  # no tool is offered, so none is called
                yield event
        last = self._engine.last_generation
        self.end = "stop" if assembler.is_stopped else last.finish_reason
        self._keep(question, "".join(content), last)

    def _encoded(self, rendered: str) -> list[int]:
        """Raises: ContextExceeded if there is no room for a token after it."""
        parts = self._engine.prompt_parts(rendered, is_chat=True)
        prompt = list(chain.from_iterable(parts))
        if len(prompt) >= self.num_positions:
            raise ContextExceeded(len(prompt), self.num_positions)
        return prompt

    def _assembler(self, rendered: str) -> TextAssembler:
        """What makes events of tokens."""
        tokenizer = self._engine.tokenizer
        own = None if tokenizer is None else tokenizer.chat_template
        template = self._options.template or own or ""
        rules = AnswerRules.of(tokenizer, template=template, rendered=rendered, tools={})
        return TextAssembler(tokenizer, rules.text(self._options.stops))

    def _keep(self, question: str, answer: str, last: GenerationStats) -> None:
        totals = self.totals
        totals.last = last
        totals.num_written += last.num_generated_tokens
        if not answer.strip():
            return
        self.turns += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        totals.num_answers += 1
        totals.num_held = last.num_prompt_tokens + last.num_generated_tokens
