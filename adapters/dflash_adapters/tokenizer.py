"""Text to token ids and back, with the vocabulary a model file brings.

Byte-level BPE: special tokens are cut out of the text, the rest is split into words by a pattern,
and the bytes of each word are merged pair by pair. Gives llama.cpp's ids, so text is not normalised
first. Knows nothing of chat templates' meaning, nor of the model that reads the ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from dflash_adapters.gguf_cursor import shown
from dflash_adapters.gguf_file import GgufFile
from dflash_adapters.vocabulary import (
    BYTE_OF,
    CONTROL_TYPES,
    DIALECTS,
    Dialect,
    TokenType,
    Vocabulary,
    malformed,
    unsupported,
)

if TYPE_CHECKING:
    import tokenizers

MAX_TEMPLATE_BYTES = 1 << 20  # published: < 64 KiB


def load_tokenizer(file: GgufFile) -> Tokenizer | None:
    """The file's tokenizer, or None if it has none.

    Raises: UnsupportedModel if it is of a kind we do not have; ModelFileError if it contradicts
    itself.
    """
    model = file.get_str("tokenizer.ggml.model", "none", max_bytes=64)
    if model == "none":
        return None
    if model != "gpt2":
        raise unsupported(file, "tokenizer.ggml.model", f"tokenizer model {shown(model)}")
    pre = file.get_str("tokenizer.ggml.pre", "default", max_bytes=64)
    dialect = DIALECTS.get(pre)
    if dialect is None:
        raise unsupported(file, "tokenizer.ggml.pre", f"pre-tokenizer {shown(pre)}")
    return Tokenizer(file, dialect)


class Tokenizer:
    """Encodes and decodes with one file's vocabulary. May be used from several threads.

    ``bos_id``, ``eos_id`` are None where the file names none; ``stop_ids`` end a text;
    ``chat_template`` is the file's Jinja text, if it has one.
    """

    def __init__(self, file: GgufFile, dialect: Dialect) -> None:
        """Read the vocabulary; use `load_tokenizer`."""
        vocabulary = Vocabulary.read(file, dialect)
        self._texts, self._types = vocabulary.texts, vocabulary.types
        self._bpe = _build_bpe(vocabulary, dialect)
        self._special = _special_tokens(vocabulary)
        self.vocab_size = len(self._texts)
        self.bos_id = _special_id(file, "bos", self.vocab_size)
        self.eos_id = _special_id(file, "eos", self.vocab_size)
        self.adds_bos = _adds(file, "bos", self.bos_id)
        self.adds_eos = _adds(file, "eos", self.eos_id)
        named = (self.eos_id, *(_special_id(file, end, self.vocab_size) for end in ("eot", "eom")))
        known = (vocabulary.ids.get(text) for text in dialect.stop_texts)
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
                    return bytes([BYTE_OF[character] for character in text])
                except KeyError:
                    # Not in the byte alphabet, so it was added as plain text.
                    return text.encode()
            case TokenType.UNUSED:
                return b""
            case _:
                return text.encode()

    def _bytes_of(self, token_id: int, keep_special: bool) -> bytes:
        data = self.token_bytes(token_id)
        hidden = not keep_special and self._types[token_id] in CONTROL_TYPES
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


def _well_formed(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _build_bpe(vocabulary: Vocabulary, dialect: Dialect) -> tokenizers.Tokenizer:
    # Here, not at the top: commands that never see text do not pay for the import.
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    bpe = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(dialect.word_pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return bpe


def _special_tokens(vocabulary: Vocabulary) -> list[tuple[str, int, bool]]:
    """(spelling, id, is control) of all tokens that are cut out of a text, longest first."""
    cut_out = (*CONTROL_TYPES, TokenType.USER_DEFINED)
    special = [
        (text, token_id, token_type in CONTROL_TYPES)
        for token_id, (text, token_type) in enumerate(
            zip(vocabulary.texts, vocabulary.types, strict=True)
        )
        if token_type in cut_out
    ]
    return sorted(special, key=lambda token: -len(token[0].encode()))


def _special_id(file: GgufFile, name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return file.get_uint(key, maximum=vocab_size - 1) if file.has(key) else None


def _adds(file: GgufFile, name: str, token_id: int | None) -> bool:
    key = f"tokenizer.ggml.add_{name}_token"
    adds = file.get_bool(key, False)
    if adds and token_id is None:
        raise malformed(file, key, f"is true but there is no {name} token")
    return adds
