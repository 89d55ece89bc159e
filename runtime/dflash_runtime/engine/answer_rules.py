"""How the text of a chat's answer is divided into reasoning, content and calls of tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

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
from dflash_adapters.text.tokenizer import Tokenizer
from dflash_protocol.errors import GrammarError, SettingsError
from dflash_runtime.engine.answer_text import TextRules


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """The format of a model's answers, and what one of them may call."""

    kind: AnswerFormat
    tools: Tools
    closes: str | None
    """Ends the reasoning that the prompt has begun; None: it has not."""

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer | None,
        *,
        template: str,
        rendered: str,
        tools: Tools,
        setting: str = "auto",
    ) -> Self:
        """For an answer to the prompt `rendered`, by `template`; `setting` may name the format.

        Raises: SettingsError for a format that is unknown.
        """
        spellings = [] if tokenizer is None else [text for text, _, _ in tokenizer.special]
        if setting != "auto" and setting not in {*AnswerFormat}:
            raise SettingsError(f"answer_format: there is no format {setting!r}")
        kind = answer_format(template, spellings, setting=setting)
        return cls(kind, tools, closing_marker(rendered))

    def text(self, stops: tuple[str, ...] = (), *, has_reasoning: bool = True) -> TextRules:
        """How the answer is assembled; see `TextRules`."""
        return TextRules(
            stops,
            is_chat=True,
            shown=shown_markers(self.kind),
            parser=self._parser,
            has_reasoning=has_reasoning,
        )

    def call_source(
        self,
        tokenizer: Tokenizer | None,
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        content: GrammarSource | None = None,
        is_required: bool = False,
        is_single: bool = False,
    ) -> GrammarSource:
        """The grammar of an answer whose calls follow the `schemas`, by names of tools, and that
        follows the JSON schema `content` where it has no calls; see `call_grammar`.

        Raises: GrammarError if that is not known of this format, or a schema would take too long.
        """
        if self.kind not in ENFORCED_FORMATS:
            raise GrammarError(f"is not supported with this model's format of calls ({self.kind})")
        special = [] if tokenizer is None else tokenizer.special
        text = call_grammar(
            self.kind,
            schemas,
            is_required=is_required,
            is_single=is_single,
            control_ids={each: token_id for each, token_id, is_control in special if is_control},
            content=None if content is None else json_rule(content),
        )
        return GrammarSource(GrammarKind.CALLS, text)

    def after_reasoning(
        self, tokenizer: Tokenizer | None, grammar: Grammar | None, *, has_channels: bool
    ) -> Grammar | None:
        """A grammar of the answer behind the reasoning, which the prompt has begun, or which is in
        channels that the grammar does not know unless it `has_channels`."""
        ends = None if self.closes is None else re.escape(self.closes)
        if self.kind is AnswerFormat.HARMONY and not has_channels:
            ends = FINAL_MESSAGE
        if grammar is None or ends is None or tokenizer is None:
            return grammar
        return grammar.after(ends, tokenizer)

    def _parser(self) -> AnswerParser:
        return answer_parser(
            self.kind, tools=self.tools, starts_in_reasoning=self.closes is not None
        )


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schemas of the parameters of tools as templates read them, by name.

    Raises: SettingsError for one without a name, or with the name of another.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for function in map(_function, tools):
        name, parameters = function.get("name"), function.get("parameters") or {}
        if not isinstance(name, str) or not isinstance(parameters, Mapping) or name in found:
            raise SettingsError("tools: each is a function with a name of its own")
        found[name] = parameters
    return found


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}
