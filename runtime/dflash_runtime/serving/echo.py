"""The prompt as the beginning of its answer, with log-probabilities of its tokens if asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from pydantic import BaseModel

from dflash_adapters.text.answers import Content
from dflash_adapters.text.tokenizer import Tokenizer
from dflash_runtime.engine.answer_text import Delta
from dflash_runtime.engine.engine import GeneratedToken
from dflash_runtime.engine.sampling import TokenLogprobs

MOST_ECHOED = 1 << 18
"""Log-probabilities of a prompt: of its tokens, and of the most likely ones at their places."""

_AT_ONCE = 1024


class EchoField(BaseModel):
    """The field of a body that asks for it."""

    echo: bool | None = None


def prompt_pieces(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], *, is_text: bool
) -> Iterator[list[str]]:
    """The text that each token of a prompt adds, in parts. Of one that was a text, the tokens that
    tokenisation has added around it have none."""
    if tokenizer is None:
        yield [""] * len(token_ids)
        return
    decoder = tokenizer.stream()
    shown = range(len(token_ids))
    if is_text and token_ids[0] == tokenizer.bos_id:
        shown = shown[1:]
    if is_text and token_ids[-1] == tokenizer.eos_id:
        shown = shown[:-1]
    for first in range(0, len(token_ids), _AT_ONCE):
        some = enumerate(token_ids[first : first + _AT_ONCE], first)
        yield [
            decoder.push(token_id) if place in shown and token_id < tokenizer.vocab_size else ""
            for place, token_id in some
        ]
    if rest := decoder.flush():
        yield [rest]


class PromptEcho:
    """The prompt of one completion, repeated in its answer."""

    def __init__(
        self,
        token_ids: Sequence[int],
        pieces: Sequence[str],
        *,
        text: str | None = None,
        has_space: bool = False,
        has_logprobs: bool = False,
    ) -> None:
        """`pieces`: as of `prompt_pieces`. `text` is the prompt if it was one, else `has_space`
        says whether tokens of a text begin with a space that it has not."""
        whole = "".join(pieces)
        num_cut = 1 if has_space and whole.startswith(" ") else 0
        self.text = whole[num_cut:] if text is None else text
        self.has_logprobs = has_logprobs
        """Whether its tokens' are asked for."""
        starts = accumulate(map(len, pieces), initial=-num_cut)
        self._offsets = [min(max(0, start), len(self.text)) for start in starts]
        self._token_ids = token_ids
        self._logprobs: list[TokenLogprobs | None] = [None]  # nothing is before the first token

    def push(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Log-probabilities of the next tokens, from the second on."""
        self._logprobs += logprobs

    def delta(self) -> Delta:
        """The prompt, and its tokens if log-probabilities are asked for."""
        events = (Content(self.text),) if self.text else ()
        if not self.has_logprobs:
            return Delta(events)
        tokens = [
            GeneratedToken(token_id, "", logprobs)
            for token_id, logprobs in zip(self._token_ids, self._logprobs, strict=True)
        ]
        return Delta(events, tuple(tokens), tuple(self._offsets[: len(tokens)]))
