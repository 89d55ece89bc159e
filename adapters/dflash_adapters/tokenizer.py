"""Text to token ids and back, with the vocabulary a model file brings.

Byte-level BPE: special tokens are cut out of the text, the rest is split into words by a pattern,
and the bytes of each word are merged pair by pair. Gives llama.cpp's ids, so text is not normalised
first. Knows nothing of chat templates' meaning, nor of the model that reads the ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from dflash_adapters.gguf_cursor import shown
from dflash_adapters.gguf_file import GgufFile
from dflash_protocol.errors import ModelFileError, UnsupportedModel

if TYPE_CHECKING:
    import tokenizers

MAX_TOKENS = 1 << 20  # published: 262144
MAX_MERGES = 1 << 21  # published: 514906
MAX_TOKEN_BYTES = 4096  # published: 512, a run of spaces
MAX_TEMPLATE_BYTES = 1 << 20  # published: < 64 KiB


class TokenType(IntEnum):
    """What ``tokenizer.ggml.token_type`` says of a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


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


def load_tokenizer(file: GgufFile) -> Tokenizer | None:
    """The file's tokenizer, or None if it has none.

    Raises: UnsupportedModel if it is of a kind we do not have; ModelFileError if it contradicts
    itself.
    """
    model = file.get_str("tokenizer.ggml.model", "none", max_bytes=64)
    if model == "none":
        return None
    if model != "gpt2":
        raise _unsupported(file, "tokenizer.ggml.model", f"tokenizer model {shown(model)}")
    pre = file.get_str("tokenizer.ggml.pre", "default", max_bytes=64)
    dialect = DIALECTS.get(pre)
    if dialect is None:
        raise _unsupported(file, "tokenizer.ggml.pre", f"pre-tokenizer {shown(pre)}")
    return Tokenizer(file, dialect)


class Tokenizer:
    """Encodes and decodes with one file's vocabulary. May be used from several threads.

    ``bos_id``, ``eos_id`` are None where the file names none; ``stop_ids`` end a text;
    ``chat_template`` is the file's Jinja text, if it has one.
    """

    def __init__(self, file: GgufFile, dialect: Dialect) -> None:
        """Read the vocabulary; use `load_tokenizer`."""
        self._texts = _read_tokens(file)
        ids = _ids_by_text(file, self._texts)
        self._types = _read_types(file, self._texts, ids, dialect)
        self._bpe = _build_bpe(ids, _read_merges(file, ids), dialect)
        self._special = _special_tokens(self._texts, self._types)
        self.vocab_size = len(self._texts)
        self.bos_id = _special_id(file, "bos", self.vocab_size)
        self.eos_id = _special_id(file, "eos", self.vocab_size)
        self.adds_bos = _adds(file, "bos", self.bos_id)
        self.adds_eos = _adds(file, "eos", self.eos_id)
        named = (self.eos_id, *(_special_id(file, end, self.vocab_size) for end in ("eot", "eom")))
        known = (ids.get(text) for text in dialect.stop_texts)
        self.stop_ids = frozenset(i for i in (*named, *known) if i is not None)
        self.chat_template = (
            file.get_str("tokenizer.chat_template", "", max_bytes=MAX_TEMPLATE_BYTES) or None
        )

    @property
    def bos_text(self) -> str:
        """Spelling of the token that begins a text, empty if there is none."""
        return "" if self.bos_id is None else self._texts[self.bos_id]

    @property
    def eos_text(self) -> str:
        """Spelling of the token that ends a text, empty if there is none."""
        return "" if self.eos_id is None else self._texts[self.eos_id]

    def encode(
        self, text: str, *, parse_special: bool = True, add_special: bool = False
    ) -> list[int]:
        """Token ids of a text.

        With `parse_special` the spelling of a control token becomes that token: right for a
        rendered chat, wrong for what a stranger typed. With `add_special` the ids begin and end as
        the file asks; a rendered chat already does. Lone surrogates count as U+FFFD.
        """
        ids: list[int] = []
        if add_special and self.adds_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        for piece in self._cut(_well_formed(text), parse_special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._bpe.encode(piece, add_special_tokens=False).ids
        if add_special and self.adds_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def decode(self, token_ids: Iterable[int], *, keep_special: bool = True) -> str:
        """Text of a whole sequence; bytes that are not UTF-8 become U+FFFD.

        Without `keep_special`, control and unknown tokens give nothing.
        """
        data = b"".join(self._bytes_of(i, keep_special) for i in token_ids)
        return data.decode(errors="replace")

    def stream(self, *, keep_special: bool = True) -> StreamDecoder:
        """A decoder for tokens as they come."""
        return StreamDecoder(self, keep_special)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; unused tokens stand for nothing.

        Raises: ValueError if there is no such token.
        """
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token {token_id} of {self.vocab_size}")
        text = self._texts[token_id]
        match self._types[token_id]:
            case TokenType.NORMAL:
                try:
                    return bytes([_BYTE_OF[character] for character in text])
                except KeyError:
                    # Not in the byte alphabet, so it was added as plain text.
                    return text.encode()
            case TokenType.UNUSED:
                return b""
            case _:
                return text.encode()

    def _bytes_of(self, token_id: int, keep_special: bool) -> bytes:
        data = self.token_bytes(token_id)
        hidden = not keep_special and self._types[token_id] in _CONTROL_TYPES
        return b"" if hidden else data

    def _cut(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """Cut special tokens out of a text, longest spelling first over the whole of it."""
        pieces: list[str | int] = [text]
        for spelling, token_id, is_control in self._special:
            if spelling not in text or (is_control and not parse_special):
                continue
            cut: list[str | int] = []
            for piece in pieces:
                if isinstance(piece, int):
                    cut.append(piece)
                    continue
                for index, part in enumerate(piece.split(spelling)):
                    if index:
                        cut.append(token_id)
                    cut.append(part)
            pieces = cut
        return (piece for piece in pieces if piece != "")


class StreamDecoder:
    """Decodes tokens one by one; holds back the bytes of a character until it is whole.

    The pieces joined, with `flush` last, are what `Tokenizer.decode` gives for all tokens.
    """

    def __init__(self, tokenizer: Tokenizer, keep_special: bool) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""
        return self._decoder.decode(self._tokenizer._bytes_of(token_id, self._keep_special))

    def flush(self) -> str:
        """U+FFFD if the text ended within a character, else nothing. Ready for a new text."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


_CONTROL_TYPES = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Source: Radford et al. 2019 (GPT-2): bytes that print in Latin-1 stand for themselves, the
    others, in order, for the characters from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]


_BYTE_OF = {character: byte for byte, character in enumerate(_byte_alphabet())}
# Bytes that occur in no UTF-8 text need no token.
_BYTES_OF_UTF8 = frozenset(range(0xF5)) - {0xC0, 0xC1}


def _well_formed(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _read_tokens(file: GgufFile) -> list[str]:
    key = "tokenizer.ggml.tokens"
    if not 0 < (count := file.array_length(key)) <= MAX_TOKENS:
        raise _malformed(file, key, f"{count} tokens; 1 to {MAX_TOKENS} are read")
    texts = []
    for index, data in enumerate(file.strings(key)):
        if not 0 < len(data) <= MAX_TOKEN_BYTES:
            raise _malformed(file, key, f"token {index} has {len(data)} bytes")
        try:
            texts.append(data.decode())
        except UnicodeDecodeError:
            raise _malformed(file, key, f"token {index} is not valid UTF-8") from None
    return texts


def _ids_by_text(file: GgufFile, texts: list[str]) -> dict[str, int]:
    key = "tokenizer.ggml.tokens"
    ids = {text: token_id for token_id, text in enumerate(texts)}
    if len(ids) != len(texts):
        first = next(i for i, text in enumerate(texts) if ids[text] != i)
        raise _malformed(file, key, f"tokens {first} and {ids[texts[first]]} are the same")
    for character, byte in _BYTE_OF.items():
        if character not in ids and byte in _BYTES_OF_UTF8:
            raise _malformed(file, key, f"no token for the byte {byte:#04x}")
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
            raise _malformed(file, key, f"{len(numbers)} types for {len(texts)} tokens")
        for index, number in enumerate(numbers):
            token_type = by_number.get(number)
            if token_type is None:
                raise _unsupported(file, key, f"token {index} of type {number}")
            types[index] = token_type
    for text in dialect.control_texts:
        if text in ids:
            types[ids[text]] = TokenType.CONTROL
    return types


def _read_merges(file: GgufFile, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Pairs in order of precedence."""
    key = "tokenizer.ggml.merges"
    if (count := file.array_length(key)) > MAX_MERGES:
        raise _malformed(file, key, f"{count} merges; at most {MAX_MERGES} are read")
    # A pair that occurs again cannot outrank its first place.
    merges: dict[tuple[str, str], None] = {}
    for index, data in enumerate(file.strings(key)):
        try:
            merge = data.decode()
        except UnicodeDecodeError:
            raise _malformed(file, key, f"merge {index} is not valid UTF-8") from None
        # The first character is never the separator: a token may begin with a space, not be empty.
        space = merge.find(" ", 1)
        left, right = merge[:space], merge[space + 1 :]
        if space < 0 or not right:
            raise _malformed(file, key, f"merge {index} is not two tokens")
        for token in (left, right, left + right):
            if token not in ids:
                raise _malformed(
                    file, key, f"merge {index} needs {shown(token[:64])}, which is no token"
                )
        merges[left, right] = None
    return list(merges)


def _build_bpe(
    ids: dict[str, int], merges: list[tuple[str, str]], dialect: Dialect
) -> tokenizers.Tokenizer:
    # Here, not at the top: commands that never see text do not pay for the import.
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    bpe = Tokenizer(models.BPE(vocab=ids, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(dialect.word_pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return bpe


def _special_tokens(texts: list[str], types: list[TokenType]) -> list[tuple[str, int, bool]]:
    """(spelling, id, is control) of all tokens that are cut out of a text, longest first."""
    cut_out = (*_CONTROL_TYPES, TokenType.USER_DEFINED)
    special = [
        (text, token_id, types[token_id] in _CONTROL_TYPES)
        for token_id, text in enumerate(texts)
        if types[token_id] in cut_out
    ]
    return sorted(special, key=lambda token: -len(token[0].encode()))


def _special_id(file: GgufFile, name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return file.get_uint(key, maximum=vocab_size - 1) if file.has(key) else None


def _adds(file: GgufFile, name: str, token_id: int | None) -> bool:
    key = f"tokenizer.ggml.add_{name}_token"
    adds = file.get_bool(key, False)
    if adds and token_id is None:
        raise _malformed(file, key, f"is true but there is no {name} token")
    return adds


def _malformed(file: GgufFile, key: str, reason: str) -> ModelFileError:
    return ModelFileError(reason, path=file.path, field=key)


def _unsupported(file: GgufFile, key: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"{what} is not supported", path=file.path, field=key)
