"""Prompts as token ids: plain texts, and conversations rendered with a chat template; and grammars
for what follows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text.chat_messages import ChatRequest
from dflash_adapters.text.tokenizer import Tokenizer, load_tokenizer
from dflash_protocol.errors import ContextExceeded, SettingsError
from dflash_runtime.engine.breakers import BreakerCompiler
from dflash_runtime.engine.chat_renderer import ChatRenderer
from dflash_runtime.engine.grammar_trials import GrammarTrials

if TYPE_CHECKING:
    from dflash_adapters.text.grammar_compiler import GrammarCompiler


class Prompts:
    """A file's tokenizer, of whose tokens the model has the first `vocab_size`, and the processes
    that render chats by its template and try grammars.

    Any thread may use it once `tokenizer` has been loaded. The file belongs to the caller. All
    that gives texts or their ids raises SettingsError if the file has no tokenizer.
    Owns: the processes, until `close`.
    """

    def __init__(self, file: GgufFile, vocab_size: int) -> None:
        self._file, self._vocab_size = file, vocab_size
        self._renderer = ChatRenderer()
        self.trials = GrammarTrials()
        """Of grammars that are not to be trusted."""

    @property
    def model_path(self) -> Path:
        """The file."""
        return self._file.path

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Loaded on first use; None if the file has none."""
        return load_tokenizer(self._file)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for this tokenizer."""
        # Its library takes a tenth of a second to import, and few texts follow a grammar.
        from dflash_adapters.text.grammar_compiler import GrammarCompiler

        return GrammarCompiler(self._required(), self._vocab_size)

    @cached_property
    def breakers(self) -> BreakerCompiler:
        """Compiles the sequence breakers of DRY for this tokenizer."""
        return BreakerCompiler(self._required())

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a plain text for the model to continue."""
        return self._required().encode(text, add_special=True)

    def prepare_chat(self) -> None:
        """Start the processes; otherwise the first chat does. Raises: RenderingUnavailable."""
        self._renderer.prepare()

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """See Engine.chat_text."""
        tokenizer = self._required()
        template = template or tokenizer.chat_template
        if template is None:
            raise SettingsError("this model has no chat template; give a plain prompt")
        request = ChatRequest(
            template,
            messages,
            bos_token=tokenizer.bos_text,
            eos_token=tokenizer.eos_text,
            extra=extra or {},
        )
        return self._renderer.render(request, path=self._file.path)

    def chat_ids(self, rendered: str) -> list[int]:
        """Token ids of the text that `chat_text` gave. They begin with the file's bos token if it
        asks for one, whether or not the template writes it."""
        return list(chain.from_iterable(_chat_parts(self._required(), rendered)))

    def parts(self, text: str, *, is_chat: bool, num_positions: int) -> Iterator[list[int]]:
        """See Engine.prompt_parts; the context has `num_positions`."""
        tokenizer = self._required()
        fewest = tokenizer.fewest_tokens(text)
        if fewest > num_positions:
            raise ContextExceeded(fewest, num_positions)
        if is_chat:
            return _chat_parts(tokenizer, text)
        return tokenizer.encoded(text, add_special=True)

    def close(self) -> None:
        """End the processes."""
        self._renderer.close()
        self.trials.close()

    def _required(self) -> Tokenizer:
        if self.tokenizer is None:
            raise SettingsError("this file has no tokenizer; give token ids instead of text")
        return self.tokenizer


def _chat_parts(tokenizer: Tokenizer, rendered: str) -> Iterator[list[int]]:
    begins = tokenizer.bos_id if tokenizer.adds_bos else None
    for part in tokenizer.encoded(rendered):
        if part and begins is not None:
            if part[0] != begins:
                yield [begins]
            begins = None
        yield part
    if begins is not None:
        yield [begins]
