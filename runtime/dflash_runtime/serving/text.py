"""From tokens to text that can be sent: whole characters, and no part of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from dflash_adapters.text.harmony import reply_stream
from dflash_adapters.text.tokenizer import StreamDecoder, Tokenizer
from dflash_runtime.engine.engine import GeneratedToken
from dflash_runtime.engine.stop_strings import StopFinder


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that became final at once, and the tokens completed with it.

    `offsets` are the starts of these tokens, in characters of the whole text.
    """

    text: str
    tokens: tuple[GeneratedToken, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextRules:
    """How the text of an answer is assembled."""

    stops: tuple[str, ...] = ()
    """The first of them ends the text, and is not part of it."""
    is_chat: bool = False
    shown: Collection[str] | None = None
    """Spellings of control tokens that are part of the text; None: those that readers are to see,
    and of a chat in harmony's channels the final one alone."""


class TextAssembler:
    """Assembles one generation.

    Text that may be the beginning of a stop string is held back, as are the bytes of an incomplete
    character; such bytes at the very end are dropped.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, rules: TextRules, *, first_offset: int = 0
    ) -> None:
        """`first_offset`: characters of the answer before the first token."""
        self._decoder: StreamDecoder | None = None
        if tokenizer is not None and rules.is_chat and rules.shown is None:
            self._decoder = reply_stream(tokenizer)
        elif tokenizer is not None:
            self._decoder = tokenizer.stream(keep_special=False, shown=rules.shown or ())
        self._finder = StopFinder(rules.stops)
        self._num_decoded = first_offset
        self._pending: deque[tuple[int, int, GeneratedToken]] = deque()

    @property
    def stop(self) -> str | None:
        """The stop string that was found: `push` needs no more tokens."""
        return self._finder.stop

    @property
    def is_stopped(self) -> bool:
        return self._finder.is_stopped

    def push(self, token: GeneratedToken) -> Delta | None:
        """Take a token; returns the text that became final, if any did."""
        text = self._decoder.push(token.token_id) if self._decoder is not None else ""
        first, self._num_decoded = self._num_decoded, self._num_decoded + len(text)
        # Bytes of an incomplete character come with the token that completes it.
        self._pending.append((first, max(self._num_decoded, first + 1), token))
        return self._delta(self._finder.push(text))

    def finish(self) -> Delta | None:
        """After the last token: returns what was held back."""
        return None if self.is_stopped else self._delta(self._finder.finish(), is_all=True)

    def _delta(self, text: str, *, is_all: bool = False) -> Delta | None:
        out_until = self._num_decoded - len(self._finder.held)
        tokens, offsets = [], []
        while self._pending:
            first, last, token = self._pending[0]
            # A token cut by a stop string counts if some of its text is before.
            is_cut = self.is_stopped and first < out_until
            if last > out_until and not is_cut and not is_all:
                break
            tokens.append(token)
            offsets.append(first)
            self._pending.popleft()
        return Delta(text, tuple(tokens), tuple(offsets)) if text or tokens else None
