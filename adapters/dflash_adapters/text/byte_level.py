"""Byte-level BPE vocabularies, as ``tokenizer.ggml.model`` ``gpt2`` names them.

A text is split into words, and the bytes of each are merged pair by pair in order of the list of
merges, by the `tokenizers` library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dflash_adapters.text.words import Dialect

if TYPE_CHECKING:
    import tokenizers

# Texts go to the library in pieces, to bound its memory (60 bytes and more a character) and the
# backtracking within a word.
_PIECE = 1 << 16  # characters
_MAX_PIECE = 1 << 20
# Every dialect ends a word before a space after a non-space, and before a punctuation mark after a
# letter, in any context.
_WORD_END = re.compile(r"(?<=\S)(?= )|(?<=[^\W\d_])(?=[.,:;!?\u3001\u3002\uff0c\uff01\uff1f])")


class ByteLevelBpe:
    """Encodes with one vocabulary. Thread-safe."""

    def __init__(
        self, ids: dict[str, int], merges: list[tuple[str, str]], dialect: Dialect
    ) -> None:
        """`ids` are by spelling in the byte alphabet, `merges` in order of precedence."""
        # Imported late, so that commands without text do not pay for it.
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        self._bpe: tokenizers.Tokenizer = Tokenizer(
            models.BPE(vocab=ids, merges=merges, ignore_merges=dialect.ignores_merges)
        )
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(
                    pre_tokenizers.Split(Regex(pattern), behavior="isolated")
                    for pattern in dialect.patterns
                ),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def encoded(self, text: str) -> Iterator[list[int]]:
        """Token ids of a text without special tokens, in parts computed lazily.

        Words longer than a million characters are cut.
        """
        return map(self._encode, _pieces(text))

    def spelled(self, text: str) -> bytes:
        """The bytes of a token."""
        try:
            return bytes([BYTE_OF[character] for character in text])
        except KeyError:
            # Not in the byte alphabet: the token was added as plain text.
            return text.encode()

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids


def _byte_alphabet() -> list[str]:
    """The printable character that represents each byte in a byte-level vocabulary.

    Source: Radford et al. 2019 (GPT-2): bytes that are printable in Latin-1 represent themselves,
    the others, in order, are the characters from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


BYTE_OF = {character: byte for byte, character in enumerate(_byte_alphabet())}


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE:
        end = _WORD_END.search(text, start + _PIECE, start + _MAX_PIECE)
        place = end.start() if end else min(start + _MAX_PIECE, len(text))
        yield text[start:place]
        start = place
    if start < len(text):
        yield text[start:]
