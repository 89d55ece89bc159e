"""What an engine knows of texts: its tokenizer, its chat template, grammars for its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_adapters.text.grammar import Grammar, GrammarSource
from dflash_adapters.text.tokenizer import Tokenizer
from dflash_runtime.engine.breakers import BreakerCompiler
from dflash_runtime.engine.generate_options import Schema, schema_source
from dflash_runtime.engine.prompts import Prompts

if TYPE_CHECKING:  # what compiles grammars is imported with the first one
    from dflash_adapters.text.grammar_compiler import GrammarCompiler


class EngineTexts:
    """The part of `Engine` that computes nothing of the model."""

    def __init__(self, prompts: Prompts, num_positions: int) -> None:
        self._prompts, self._num_positions = prompts, num_positions

    @property
    def model_path(self) -> Path:
        """The file that is open."""
        return self._prompts.model_path

    @property
    def num_positions(self) -> int:
        """The context: the longest sequence, in tokens."""
        return self._num_positions

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, loaded on first use; None if the file has none."""
        return self._prompts.tokenizer

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles the grammars that `generate` takes; any thread may use it.

        Raises: SettingsError if the file has no tokenizer.
        """
        return self._prompts.grammars

    def prepare_grammars(self) -> None:
        """Make what grammars share; otherwise the first of them does.

        Raises: SettingsError if the file has no tokenizer; GrammarError if no token ends a text.
        """
        self.grammars.prepare()

    def start_trials(self) -> None:
        """Start the process that tries the grammars of `client_grammar`; otherwise the first of
        them does. Raises: RenderingUnavailable."""
        self._prompts.trials.start()

    def client_grammar(self, source: GrammarSource) -> Grammar:
        """The grammar of a text that is not to be trusted: one that takes seconds to compile is
        refused, as a process that can be killed compiles it first. Any thread may call it.

        Raises: GrammarError; SettingsError if the file has no tokenizer; RenderingUnavailable.
        """
        self._prompts.trials.check(source)
        return self.grammars.compile(source)

    @property
    def breakers(self) -> BreakerCompiler:
        """Compiles the sequence breakers of `Dry`; any thread may use it.

        Raises: SettingsError if the file has no tokenizer.
        """
        return self._prompts.breakers

    def schema_grammar(self, schema: Schema) -> Grammar:
        """The grammar of texts that a JSON schema allows, for `generate`; any thread may call it.

        Raises: GrammarError; SettingsError if the file has no tokenizer.
        """
        return self.grammars.compile(schema_source(schema))

    def encode_prompt(self, text: str, *, chat: bool = False) -> list[int]:
        """Token ids of a text, or with `chat` of a conversation whose first message it is.

        Raises: SettingsError if the file has no tokenizer, or no chat template.
        """
        if chat:
            return self.encode_chat([{"role": "user", "content": text}])
        return self._prompts.text_ids(text)

    def prepare_chat(self) -> None:
        """Start the processes that render chat templates; otherwise the first chat does.

        Raises: RenderingUnavailable.
        """
        self._prompts.prepare_chat()

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. `template` replaces the file's; `tools`, which may be
        called, and `extra` are its variables.

        Any thread may call it once `tokenizer` has been loaded.
        Raises: SettingsError if there is no tokenizer, or no template, or it refuses the messages;
        UnsupportedModel if it fails; RenderingUnavailable.
        """
        variables = {**(extra or {}), **({"tools": list(tools)} if tools else {})}
        rendered = self.chat_text(messages, template=template, extra=variables)
        return self._prompts.chat_ids(rendered)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The text whose token ids `encode_chat` returns; threads and errors as there."""
        return self._prompts.chat_text(messages, template=template, extra=extra)

    def prompt_parts(self, text: str, *, is_chat: bool = False) -> Iterator[list[int]]:
        """The token ids of a text, or of what `chat_text` returned, tokenised part by part.

        Any thread may call it. The same ids as of `encode_prompt` and `encode_chat`.
        Raises: SettingsError if there is no tokenizer; ContextExceeded, before the first part, if
        the text exceeds the context even if all its tokens were the longest ones.
        """
        return self._prompts.parts(text, is_chat=is_chat, num_positions=self.num_positions)
