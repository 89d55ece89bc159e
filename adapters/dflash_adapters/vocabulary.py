"""What a model file says of its tokens, read and checked: spellings, kinds, merges.

Knows nothing of how a text is cut into tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dflash_adapters.gguf_cursor import shown
from dflash_adapters.gguf_file import GgufFile
from dflash_protocol.errors import ModelFileError, UnsupportedModel

MAX_TOKENS = 1 << 20  # published: 262144
MAX_MERGES = 1 << 21  # published: 514906
MAX_TOKEN_BYTES = 4096  # published: 512, a run of spaces


class TokenType(IntEnum):
    """What ``tokenizer.ggml.token_type`` says of a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


CONTROL_TYPES = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one ``tokenizer.ggml.pre`` stands for.

    Files often call their markers user-defined, or name only one that ends a text; llama.cpp knows
    them by their spelling, and so do we: ``control_texts`` are control tokens whatever the file
    says, and ``stop_texts``, control tokens too, end a text.
    """

    word_pattern: str
    stop_texts: frozenset[str]
    control_texts: frozenset[str]


_QWEN_STOPS = frozenset(
    {"<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}
)

DIALECTS = {
    "qwen2": Dialect(
        # Contractions; letters after at most one other character; single digits; the rest after at
        # most one space; newlines with the space before them; space up to the next word; space.
        word_pattern=(
            r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
            r"|[^\r\n\p{L}\p{N}]?\p{L}+"
            r"|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+"
            r"|\s+(?!\S)"
            r"|\s+"
        ),
        stop_texts=_QWEN_STOPS,
        control_texts=_QWEN_STOPS | {"<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"},
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The tokens of one file by id, their ids by spelling, and the pairs to merge, first first."""

    texts: list[str]
    types: list[TokenType]
    ids: dict[str, int]
    merges: list[tuple[str, str]]

    @classmethod
    def read(cls, file: GgufFile, dialect: Dialect) -> Vocabulary:
        """Read a file's byte-level vocabulary.

        Raises: ModelFileError if it contradicts itself.
        """
        texts = _read_tokens(file)
        ids = _ids_by_text(file, texts)
        return cls(texts, _read_types(file, texts, ids, dialect), ids, _read_merges(file, ids))


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Source: Radford et al. 2019 (GPT-2): bytes that print in Latin-1 stand for themselves, the
    others, in order, for the characters from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


BYTE_OF = {character: byte for byte, character in enumerate(_byte_alphabet())}
# Bytes that occur in no UTF-8 text need no token.
_BYTES_OF_UTF8 = frozenset(range(0xF5)) - {0xC0, 0xC1}


def _read_tokens(file: GgufFile) -> list[str]:
    key = "tokenizer.ggml.tokens"
    if not 0 < (count := file.array_length(key)) <= MAX_TOKENS:
        raise malformed(file, key, f"{count} tokens; 1 to {MAX_TOKENS} are read")
    texts = []
    for index, data in enumerate(file.strings(key)):
        if not 0 < len(data) <= MAX_TOKEN_BYTES:
            raise malformed(file, key, f"token {index} has {len(data)} bytes")
        try:
            texts.append(data.decode())
        except UnicodeDecodeError:
            raise malformed(file, key, f"token {index} is not valid UTF-8") from None
    return texts


def _ids_by_text(file: GgufFile, texts: list[str]) -> dict[str, int]:
    key = "tokenizer.ggml.tokens"
    ids = {text: token_id for token_id, text in enumerate(texts)}
    if len(ids) != len(texts):
        first = next(i for i, text in enumerate(texts) if ids[text] != i)
        raise malformed(file, key, f"tokens {first} and {ids[texts[first]]} are the same")
    for character, byte in BYTE_OF.items():
        if character not in ids and byte in _BYTES_OF_UTF8:
            raise malformed(file, key, f"no token for the byte {byte:#04x}")
    return ids


def _read_types(
    file: GgufFile, texts: list[str], ids: dict[str, int], dialect: Dialect
) -> list[TokenType]:
    key = "tokenizer.ggml.token_type"
    types = [TokenType.NORMAL] * len(texts)
    if file.has(key):
        by_number = dict(enumerate((None, *TokenType)))
        numbers = file.get_uint_array(key, max_length=MAX_TOKENS).tolist()
        if len(numbers) != len(texts):
            raise malformed(file, key, f"{len(numbers)} types for {len(texts)} tokens")
        for index, number in enumerate(numbers):
            token_type = by_number.get(number)
            if token_type is None:
                raise unsupported(file, key, f"token {index} of type {number}")
            types[index] = token_type
    for text in dialect.control_texts:
        if text in ids:
            types[ids[text]] = TokenType.CONTROL
    return types


def _read_merges(file: GgufFile, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs in order of precedence."""
    key = "tokenizer.ggml.merges"
    if (count := file.array_length(key)) > MAX_MERGES:
        raise malformed(file, key, f"{count} merges; at most {MAX_MERGES} are read")
    # A pair that occurs again cannot outrank its first place.
    merges: dict[tuple[str, str], None] = {}
    for index, data in enumerate(file.strings(key)):
        try:
            merge = data.decode()
        except UnicodeDecodeError:
            raise malformed(file, key, f"merge {index} is not valid UTF-8") from None
        # The first character is never the separator: a token may begin with a space, not be empty.
        space = merge.find(" ", 1)
        left, right = merge[:space], merge[space + 1 :]
        if space < 0 or not right:
            raise malformed(file, key, f"merge {index} is not two tokens")
        for token in (left, right, left + right):
            if token not in ids:
                raise malformed(
                    file, key, f"merge {index} needs {shown(token[:64])}, which is no token"
                )
        merges[left, right] = None
    return list(merges)


def malformed(file: GgufFile, key: str, reason: str) -> ModelFileError:
    """The error for a key that contradicts itself or another."""
    return ModelFileError(reason, path=file.shard_paths[0], field=key)


def unsupported(file: GgufFile, key: str, what: str) -> UnsupportedModel:
    """The error for a key that asks for something we do not have."""
    return UnsupportedModel(f"{what} is not supported", path=file.shard_paths[0], field=key)
