"""From tokens to the text that may be shown: whole characters, and nothing of a stop string.

Knows nothing of requests or JSON.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_adapters.text.tokenizer import Tokenizer
from dflash_runtime.engine.engine import GeneratedToken


@dataclass(frozen=True, slots=True)
class Delta:
    """What became certain at once: text, and the tokens whose text is out with it.

    `offsets` are where these tokens begin, in characters of the whole text.
    """

    text: str
    tokens: tuple[GeneratedToken, ...]
    offsets: tuple[int, ...]


class TextAssembler:
    """Assembles one generation.

    A text that may turn out to be the beginning of a stop string is held back; so are the bytes of
    a character that is not whole, and those at the very end are dropped.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        self._decoder = tokenizer.stream(keep_special=False) if tokenizer is not None else None
        self._stops = tuple(stops)
        self._held = ""
        self._num_decoded = 0
        self._pending: deque[tuple[int, int, GeneratedToken]] = deque()
        self.is_stopped = False
        """A stop string was found; no more tokens are wanted."""

    def push(self, token: GeneratedToken) -> Delta | None:
        """Take a token; give what became certain, if anything did."""
        text = self._decoder.push(token.token_id) if self._decoder is not None else ""
        first, self._num_decoded = self._num_decoded, self._num_decoded + len(text)
        # Bytes without a text yet belong to the next character, and come with it.
        self._pending.append((first, max(self._num_decoded, first + 1), token))
        self._held += text
        # The one that is whole first, so that it does not matter how tokens cut the text.
        found = [
            (place + len(stop), place)
            for stop in self._stops
            if (place := self._held.find(stop)) >= 0
        ]
        if found:
            self.is_stopped = True
            return self._release(min(found)[1])
        return self._release(len(self._held) - self._num_uncertain())

    def finish(self) -> Delta | None:
        """There will be no more tokens: give what was held back."""
        return None if self.is_stopped else self._release(len(self._held), is_all=True)

    def _num_uncertain(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _release(self, length: int, *, is_all: bool = False) -> Delta | None:
        text, self._held = self._held[:length], self._held[length:]
        out_until = self._num_decoded - len(self._held)
        tokens, offsets = [], []
        while self._pending:
            first, last, token = self._pending[0]
            # Cut by a stop string, a token counts if some of it was before.
            is_cut = self.is_stopped and first < out_until
            if last > out_until and not is_cut and not is_all:
                break
            tokens.append(token)
            offsets.append(first)
            self._pending.popleft()
        return Delta(text, tuple(tokens), tuple(offsets)) if text or tokens else None
