r"""Pre-tokenizers of byte-level vocabularies: the dialects that ``tokenizer.ggml.pre`` names.

Each pattern matches as llama.cpp's of the same name (``llm_tokenizer_bpe`` in its
``llama-vocab.cpp``, with splitters in its ``unicode.cpp``); its origin is given at each. Patterns
avoid backtracking (``++``, ``(?>…)``): Oniguruma gives up after ten million steps back in a match,
which one long run of spaces can cause. Hence the forms of ``\s*[\r\n]+`` and ``\s+(?!\S)|\s+``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dialect:
    """A pre-tokenizer: how text is split into words, and what else its name implies.

    Each of `patterns` splits the pieces that the one before it left, into its matches and the text
    between them. With `ignores_merges` a word that is a token becomes that token without merging.
    `adds_bos` is the default if the file does not say.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


# Characters added in Unicode 16, which the library's tables have and llama.cpp's (Unicode 15) lack.
_NEWER = (
    r"\x{897}\x{1b4e}-\x{1b4f}\x{1b7f}\x{1c89}-\x{1c8a}\x{a7cb}-\x{a7cd}\x{a7da}-\x{a7dc}"
    r"\x{105c0}-\x{105f3}\x{10d40}-\x{10d85}\x{10ec2}-\x{10efc}\x{11380}-\x{113e2}"
    r"\x{116d0}-\x{116e3}\x{11bc0}-\x{11bf9}\x{11f5a}\x{13460}-\x{143fa}\x{16100}-\x{16139}"
    r"\x{16d40}-\x{16d79}\x{18cff}\x{1ccf0}-\x{1ccf9}\x{1e5d0}-\x{1e5ff}"
)

# Character classes, for use within brackets.
_LETTER = rf"[\p{{L}}&&[^{_NEWER}]]"
_NUMBER = rf"[\p{{N}}&&[^{_NEWER}]]"
_MARK = rf"[\p{{M}}&&[^{_NEWER}]]"
_PUNCTUATION = rf"[\p{{P}}&&[^{_NEWER}]]"

_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
# \s*[\r\n]+: whitespace up to its last newline.
_NEWLINES = r"(?>[^\S\r\n]*+[\r\n]++)++"
# \s+(?!\S)|\s+: trailing whitespace; else all but the last character, which may begin a word.
_SPACE = r"\s++(?!\S)|(?:\s(?=\s))++|\s"

# Radford et al. 2019 (GPT-2, encoder.py).
_GPT2 = (
    r"'(?:[stmd]|re|ve|ll)"
    rf"| ?{_LETTER}++"
    rf"| ?{_NUMBER}++"
    rf"| ?[^\s{_LETTER}{_NUMBER}]++"
    rf"|{_SPACE}"
)


def _after_cl100k(*, letters: str, letter: str, numbers: str) -> str:
    """A pattern after OpenAI's cl100k_base (tiktoken), as in tokenizer.json of Llama 3 and Qwen.

    Contractions; letters after at most one other character; numbers; other characters after at most
    one space, with the newlines that follow; whitespace.
    """
    return (
        rf"{_CONTRACTION}"
        rf"|[^\r\n{_LETTER}{_NUMBER}]?{letters}++"
        rf"|{numbers}"
        rf"| ?[^\s{letter}{_NUMBER}]++[\r\n]*+"
        rf"|{_NEWLINES}"
        rf"|{_SPACE}"
    )


# OpenAI's o200k_base (tiktoken), as llama.cpp reads it: capitals are all letters but a-z, small
# letters all but A-Z. A word is any capitals followed by small letters; without these, it goes as
# far as letters do that are both; without these, it is capitals.
_CAPITAL = rf"[\p{{L}}&&[^a-z{_NEWER}]]"
_SMALL = rf"[\p{{L}}&&[^A-Z{_NEWER}]]"
_BOTH = rf"[\p{{L}}&&[^A-Za-z{_NEWER}]]"
_O200K = (
    rf"[^\r\n{_LETTER}{_NUMBER}]?+"
    rf"(?:{_CAPITAL}*+[a-z]{_SMALL}*+|(?:[A-Z]*+{_BOTH}++)++|[A-Z]++)(?:{_CONTRACTION})?+"
    rf"|{_NUMBER}{{1,3}}"
    rf"| ?[^\s{_LETTER}{_NUMBER}]++[\r\n/]*+"
    rf"|{_NEWLINES}"
    rf"|{_SPACE}"
)


_LLAMA3 = _after_cl100k(letters=_LETTER, letter=_LETTER, numbers=rf"{_NUMBER}{{1,3}}")
_QWEN2 = _after_cl100k(letters=_LETTER, letter=_LETTER, numbers=_NUMBER)
_QWEN35 = _after_cl100k(letters=f"[{_LETTER}{_MARK}]", letter=f"{_LETTER}{_MARK}", numbers=_NUMBER)

_LLAMA_BPE = Dialect((_LLAMA3,), ignores_merges=True, adds_bos=True)

DIALECTS: Mapping[str, Dialect] = {
    "qwen2": Dialect((_QWEN2,)),
    "qwen35": Dialect((_QWEN35,)),  # combining marks are letters
    "laguna": Dialect((r"[^\n]++|\n++", _QWEN2)),  # no word reaches over the end of a line
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "glm4": Dialect((_LLAMA3,), ignores_merges=True),
    "llama4": Dialect((_O200K,)),
    "gpt-4o": Dialect((_O200K,)),
    "olmo": Dialect((_GPT2,)),
    "gpt-2": Dialect((_GPT2,)),
    # llama.cpp's default, for old files that do not name their pre-tokenizer.
    "default": Dialect(
        (rf"[{_PUNCTUATION}$+<=>\^~|]++", _GPT2, rf"{_NUMBER}++", "[0-9][0-9][0-9]")
    ),
}
