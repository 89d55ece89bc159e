"""How the text of one chat's answer is divided into reasoning, content and calls of tools."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from dflash_adapters.text.answers import (
    AnswerFormat,
    AnswerParser,
    Tools,
    answer_format,
    answer_parser,
    closing_marker,
    shown_markers,
)
from dflash_adapters.text.answers.channels import FINAL_MESSAGE
from dflash_adapters.text.answers.enforced import ENFORCED_FORMATS, call_grammar
from dflash_adapters.text.grammar import Grammar, GrammarKind, GrammarSource
from dflash_adapters.text.json_grammar import json_rule
from dflash_protocol.errors import GrammarError
from dflash_runtime.engine.engine import Engine
from dflash_runtime.serving.errors import ApiError
from dflash_runtime.serving.tools import CallRules


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """The format of a model's answers, and what one of them may call."""

    kind: AnswerFormat
    tools: Tools
    closes: str | None
    """Ends the reasoning that the prompt has begun; None: it has not."""

    @classmethod
    def of(
        cls, engine: Engine, *, template: str, tools: Tools, rendered: str, setting: str = "auto"
    ) -> Self:
        """For an answer to the prompt `rendered`, by `template`; `setting` may name the format."""
        tokenizer = engine.tokenizer
        spellings = [] if tokenizer is None else [text for text, _, _ in tokenizer.special]
        kind = answer_format(template, spellings, setting=setting)
        return cls(kind, tools, closing_marker(rendered))

    @property
    def shown(self) -> frozenset[str]:
        """Spellings of control tokens that the parser needs."""
        return shown_markers(self.kind)

    def parser(self) -> AnswerParser:
        """A parser of the answer."""
        return answer_parser(
            self.kind, tools=self.tools, starts_in_reasoning=self.closes is not None
        )

    def call_source(
        self, engine: Engine, rules: CallRules, content: GrammarSource | None
    ) -> GrammarSource:
        """The grammar of an answer whose calls follow `rules`, and that follows the JSON schema
        `content` where it has none. Raises: ApiError if that is not known of this format, or a
        schema would take too long."""
        if self.kind not in ENFORCED_FORMATS:
            raise ApiError(
                400,
                f"{rules.field}: is not supported with this model's format of calls ({self.kind})",
                param=rules.field,
                code="unsupported_value",
            )
        special = [] if engine.tokenizer is None else engine.tokenizer.special
        try:
            text = call_grammar(
                self.kind,
                rules.schemas,
                is_required=rules.is_required,
                is_single=rules.is_single,
                control_ids={
                    each: token_id for each, token_id, is_control in special if is_control
                },
                content=None if content is None else json_rule(content),
            )
        except GrammarError as error:
            raise ApiError(400, f"{rules.field}: {error}", param=rules.field) from error
        return GrammarSource(GrammarKind.CALLS, text)

    def after_reasoning(
        self, engine: Engine, grammar: Grammar | None, *, has_channels: bool
    ) -> Grammar | None:
        """A grammar of the answer behind the reasoning, which the prompt has begun, or which is in
        channels that the grammar does not know unless it `has_channels`."""
        tokenizer = engine.tokenizer
        ends = None if self.closes is None else re.escape(self.closes)
        if self.kind is AnswerFormat.HARMONY and not has_channels:
            ends = FINAL_MESSAGE
        if grammar is None or ends is None or tokenizer is None:
            return grammar
        return grammar.after(ends, tokenizer)
