"""Replies in OpenAI's harmony format, as gpt-oss writes them: messages in channels.

A message is ``<|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>``; of the first, the prompt
has what comes before ``<|channel|>``. Only the channel ``final`` is meant for readers: the others
hold reasoning (``analysis``) and calls of tools (``commentary``).

Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

from collections.abc import Mapping

from dflash_adapters.text.tokenizer import StreamDecoder, Tokenizer

_MARKERS = (
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
    *("<|return|>", "<|call|>", "<|constrain|>"),
)


def reply_stream(tokenizer: Tokenizer) -> StreamDecoder:
    """A decoder for the reply of a chat, without control tokens; of harmony the final text."""
    markers = {token_id: text for text, token_id, _ in tokenizer.special if text in _MARKERS}
    is_harmony = {*_MARKERS[:3]} <= {*markers.values()}
    return (
        HarmonyDecoder(tokenizer, markers) if is_harmony else tokenizer.stream(keep_special=False)
    )


class HarmonyDecoder(StreamDecoder):
    """Decodes the texts of a reply's messages that are in the final channel, or in none.

    `markers` are spellings by token id. One object for each reply.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Mapping[int, str]) -> None:
        super().__init__(tokenizer, keep_special=False)
        self._markers = markers
        self._header: str | None = None
        """What has come of a message's header; None within its text."""
        self._is_shown = True

    def push(self, token_id: int) -> str:
        """Text that became certain with this token, if readers are to see it."""
        marker = self._markers.get(token_id)
        if marker == "<|message|>":
            self.flush()  # of a character that the header ended in
            channel = (self._header or "").partition("<|channel|>")[2].split()
            self._header, self._is_shown = None, channel[:1] in ([], ["final"])
        elif marker in ("<|start|>", "<|channel|>") and self._header is None:
            self._header = marker
        elif self._header is not None:
            self._header += super().push(token_id)
        elif marker is None and self._is_shown:
            return super().push(token_id)
        return ""
