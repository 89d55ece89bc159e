"""Reads and checks a model file's vocabulary: spellings, types, merges, scores."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_protocol.errors import ModelFileError, UnsupportedModel, one_line
from dflash_protocol.ids import F32Array

TOKENS = "tokenizer.ggml.tokens"
MAX_TOKENS = 1 << 20  # published: 262144
MAX_MERGES = 1 << 21  # published: 514906
MAX_TOKEN_BYTES = 4096  # published: 512, a run of spaces


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


CONTROL_TYPES = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})
BYTE_OF_TOKEN = {f"<0x{byte:02X}>": byte for byte in range(256)}
BYTES_OF_UTF8 = frozenset(range(0xF5)) - {0xC0, 0xC1}
"""Bytes that occur in UTF-8; the others need no token."""


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The tokens of one file: spellings and types by id, ids by spelling."""

    texts: list[str]
    types: list[TokenType]
    ids: dict[str, int]

    @classmethod
    def read(cls, file: GgufFile, *, has_byte_tokens: bool) -> Vocabulary:
        """Read a file's tokens. With `has_byte_tokens`, tokens of type BYTE (``<0x0A>``) are
        allowed.

        Raises: ModelFileError if the vocabulary is inconsistent.
        """
        texts = _read_tokens(file)
        ids = {text: token_id for token_id, text in enumerate(texts)}
        if len(ids) != len(texts):
            first = next(i for i, text in enumerate(texts) if ids[text] != i)
            raise malformed(file, TOKENS, f"tokens {first} and {ids[texts[first]]} are the same")
        return cls(texts, _read_types(file, texts, has_byte_tokens), ids)


def _read_tokens(file: GgufFile) -> list[str]:
    if not 0 < (count := file.array_length(TOKENS)) <= MAX_TOKENS:
        raise malformed(file, TOKENS, f"{count} tokens; 1 to {MAX_TOKENS} are read")
    texts = []
    for index, data in enumerate(file.strings(TOKENS)):
        if not 0 < len(data) <= MAX_TOKEN_BYTES:
            raise malformed(file, TOKENS, f"token {index} has {len(data)} bytes")
        try:
            texts.append(data.decode())
        except UnicodeDecodeError:
            raise malformed(file, TOKENS, f"token {index} is not valid UTF-8") from None
    return texts


def _read_types(file: GgufFile, texts: list[str], has_byte_tokens: bool) -> list[TokenType]:
    key = "tokenizer.ggml.token_type"
    if not file.has(key):
        return [TokenType.NORMAL] * len(texts)
    numbers = file.get_uint_array(key).tolist()
    if len(numbers) != len(texts):
        raise malformed(file, key, f"{len(numbers)} types for {len(texts)} tokens")
    by_number = {
        int(token_type): token_type
        for token_type in TokenType
        if has_byte_tokens or token_type is not TokenType.BYTE
    }
    types = []
    for index, number in enumerate(numbers):
        token_type = by_number.get(number)
        if token_type is None:
            raise unsupported(file, key, f"token {index} of type {number}")
        if token_type is TokenType.BYTE and texts[index] not in BYTE_OF_TOKEN:
            text = one_line(texts[index][:64])
            raise malformed(file, key, f"token {index} is of type byte, but spelled {text}")
        types.append(token_type)
    return types


def read_merges(file: GgufFile, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The merges, in order of precedence.

    Raises: ModelFileError if one is not a pair of tokens whose concatenation is a token.
    """
    key = "tokenizer.ggml.merges"
    if (count := file.array_length(key)) > MAX_MERGES:
        raise malformed(file, key, f"{count} merges; at most {MAX_MERGES} are read")
    # A repeated pair keeps its first rank.
    merges: dict[tuple[str, str], None] = {}
    for index, data in enumerate(file.strings(key)):
        try:
            merge = data.decode()
        except UnicodeDecodeError:
            raise malformed(file, key, f"merge {index} is not valid UTF-8") from None
        # Search from 1: a token may begin with a space, but is never empty.
        space = merge.find(" ", 1)
        left, right = merge[:space], merge[space + 1 :]
        if space < 0 or not right:
            raise malformed(file, key, f"merge {index} is not two tokens")
        for token in (left, right, left + right):
            if token not in ids:
                raise malformed(
                    file, key, f"merge {index} needs {one_line(token[:64])}, which is no token"
                )
        merges[left, right] = None
    return list(merges)


def read_scores(file: GgufFile, num_tokens: int) -> F32Array:
    """Scores of all tokens, 0 if the file has none. Shapes: [num_tokens] float32, finite.

    Raises: ModelFileError if their number is wrong.
    """
    key = "tokenizer.ggml.scores"
    if not file.has(key):
        return np.zeros(num_tokens, np.float32)
    scores = file.get_float_array(key)
    if scores.size != num_tokens:
        raise malformed(file, key, f"{scores.size} scores for {num_tokens} tokens")
    return scores


def named_token(file: GgufFile, name: str, vocab_size: int) -> int | None:
    """The token of the key ``tokenizer.ggml.NAME_token_id``, None if the file lacks the key.

    Raises: ModelFileError if there is no such token.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    return file.get_uint(key, maximum=vocab_size - 1) if file.has(key) else None


def malformed(file: GgufFile, key: str, reason: str) -> ModelFileError:
    """The error for a key with an inconsistent value."""
    return ModelFileError(reason, path=file.shard_paths[0], field=key)


def unsupported(file: GgufFile, key: str, what: str) -> UnsupportedModel:
    """The error for a key with an unsupported value."""
    return UnsupportedModel(f"{what} is not supported", path=file.shard_paths[0], field=key)
