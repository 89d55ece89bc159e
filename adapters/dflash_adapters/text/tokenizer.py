"""Tokenizer: text to token ids and back, with a model file's vocabulary.

Special tokens are cut out of the text; byte-level BPE or scored pieces encode the rest. The ids are
llama.cpp's, so text is not normalised first.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from itertools import chain, islice

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text.byte_level import BYTE_OF, ByteLevelBpe
from dflash_adapters.text.markers import correct_markers, is_answer_tag
from dflash_adapters.text.pieces import ScoredPieces
from dflash_adapters.text.vocabulary import (
    BYTE_OF_TOKEN,
    BYTES_OF_UTF8,
    CONTROL_TYPES,
    TOKENS,
    TokenType,
    Vocabulary,
    malformed,
    named_token,
    read_merges,
    read_scores,
    unsupported,
)
from dflash_adapters.text.words import DIALECTS
from dflash_protocol.errors import one_line

MAX_TEMPLATE_BYTES = 1 << 20  # published: < 64 KiB
MAX_SPECIAL_TOKENS = 1 << 16  # published: 2400; every text is searched for each
_DECODED_AT_ONCE = 1 << 14  # tokens
_SEARCHED_AT_ONCE = 1 << 16  # characters
_CUT_OUT = (*CONTROL_TYPES, TokenType.USER_DEFINED)


def load_tokenizer(file: GgufFile) -> Tokenizer | None:
    """The file's tokenizer, or None if it has none.

    Raises: UnsupportedModel if its kind is not supported; ModelFileError if it is inconsistent.
    """
    match file.get_str("tokenizer.ggml.model", "none", max_bytes=64):
        case "none" | "no_vocab":
            return None
        case "gpt2":
            return _load_byte_level(file)
        case "llama":
            return _load_scored_pieces(file)
        case model:
            raise unsupported(file, "tokenizer.ggml.model", f"tokenizer model {one_line(model)}")


def _load_byte_level(file: GgufFile) -> Tokenizer:
    pre = file.get_str("tokenizer.ggml.pre", "", max_bytes=64) or "default"
    dialect = DIALECTS.get(pre)
    if dialect is None:
        raise unsupported(file, "tokenizer.ggml.pre", f"pre-tokenizer {one_line(pre)}")
    vocabulary = Vocabulary.read(file, has_byte_tokens=False)
    for character, byte in BYTE_OF.items():
        if character not in vocabulary.ids and byte in BYTES_OF_UTF8:
            raise malformed(file, TOKENS, f"no token for the byte {byte:#04x}")
    model = ByteLevelBpe(vocabulary.ids, read_merges(file, vocabulary.ids), dialect)
    return Tokenizer(file, vocabulary, model, adds_bos=dialect.adds_bos)


def _load_scored_pieces(file: GgufFile) -> Tokenizer:
    vocabulary = Vocabulary.read(file, has_byte_tokens=True)
    ids = vocabulary.ids
    for text, byte in BYTE_OF_TOKEN.items():
        if text not in ids and byte in BYTES_OF_UTF8 and not (byte < 0x80 and chr(byte) in ids):
            raise malformed(file, TOKENS, f"no token for the byte {byte:#04x}")
    return Tokenizer(
        file,
        vocabulary,
        ScoredPieces(ids, read_scores(file, len(ids))),
        adds_bos=True,
        adds_space=file.get_bool("tokenizer.ggml.add_space_prefix", True),
        # The defaults of SentencePiece and llama.cpp.
        default_bos_id=1,
        default_eos_id=2,
    )


class Tokenizer:
    """Encodes and decodes with one file's vocabulary. Thread-safe.

    ``bos_id`` and ``eos_id`` are None if the file has none; ``stop_ids`` end a text;
    ``special`` has (spelling, id, is control) of each special token, longest first;
    ``chat_template`` is the file's Jinja text, if any. With ``adds_space``, a text, and text after
    a special token, is encoded with a space before it.
    """

    def __init__(
        self,
        file: GgufFile,
        vocabulary: Vocabulary,
        model: ByteLevelBpe | ScoredPieces,
        *,
        adds_bos: bool,
        adds_space: bool = False,
        default_bos_id: int | None = None,
        default_eos_id: int | None = None,
    ) -> None:
        """Takes ownership of the vocabulary; use `load_tokenizer`."""
        self._model = model
        self.adds_space = adds_space
        self.vocab_size = len(vocabulary.texts)
        self.bos_id = self._special_id(file, "bos", default_bos_id)
        self.eos_id = self._special_id(file, "eos", default_eos_id)
        self.adds_bos = _adds(file, "bos", self.bos_id, adds_bos)
        self.adds_eos = _adds(file, "eos", self.eos_id, False)
        self.stop_ids = correct_markers(file, vocabulary, self.eos_id)
        self._texts, self._types = vocabulary.texts, vocabulary.types
        self.special = _special_tokens(file, vocabulary)
        self.chat_template = (
            file.get_str("tokenizer.chat_template", "", max_bytes=MAX_TEMPLATE_BYTES) or None
        )

    @property
    def bos_text(self) -> str:
        """Spelling of the BOS token, empty if there is none."""
        return "" if self.bos_id is None else self._texts[self.bos_id]

    @property
    def eos_text(self) -> str:
        """Spelling of the EOS token, empty if there is none."""
        return "" if self.eos_id is None else self._texts[self.eos_id]

    def encode(
        self, text: str, *, parse_special: bool = True, add_special: bool = False
    ) -> list[int]:
        """Token ids of a text.

        With `parse_special` the spelling of a control token becomes that token: use it for rendered
        chats, not for untrusted text. With `add_special` BOS and EOS are added as the file asks; a
        rendered chat has them already. Lone surrogates are read as U+FFFD.
        """
        parts = self.encoded(text, parse_special=parse_special, add_special=add_special)
        return list(chain.from_iterable(parts))

    def encoded(
        self, text: str, *, parse_special: bool = True, add_special: bool = False
    ) -> Iterator[list[int]]:
        """`encode` in parts, some of them empty, computed lazily, so that a caller can do other
        work between the parts of a long text, or stop."""
        if add_special and self.adds_bos and self.bos_id is not None:
            yield [self.bos_id]
        space = " " if self.adds_space else ""
        for piece in self._cut(_well_formed(text), parse_special):
            if piece is None:
                yield []
            elif isinstance(piece, int):
                yield [piece]
                space = " " if self.adds_space else ""
            else:
                yield from self._model.encoded(space + piece)
                space = ""
        if add_special and self.adds_eos and self.eos_id is not None:
            yield [self.eos_id]

    def fewest_tokens(self, text: str) -> int:
        """Lower bound of the number of a text's tokens, without encoding it."""
        return -(-len(_well_formed(text).encode()) // self._longest_bytes)

    def decode(self, token_ids: Iterable[int], *, keep_special: bool = True) -> str:
        """Text of a whole sequence; bytes that are not UTF-8 become U+FFFD.

        The space that `encode` adds before a text is removed. Without `keep_special`, control and
        unknown tokens are dropped, except those around reasoning and tool calls.
        """
        data = b"".join(self._bytes_of(i, keep_special) for i in token_ids)
        if self.adds_space:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def decoded(self, token_ids: Iterable[int]) -> Iterator[str]:
        """`decode` in parts, computed lazily."""
        decoder, ids = self.stream(), iter(token_ids)
        is_first = True
        while some := list(islice(ids, _DECODED_AT_ONCE)):
            text = "".join(map(decoder.push, some))
            yield text.removeprefix(" ") if is_first and self.adds_space else text
            is_first = is_first and not text
        yield decoder.flush()

    def stream(self, *, keep_special: bool = True, shown: Collection[str] = ()) -> StreamDecoder:
        """A decoder for a stream of tokens that continues a text, so a leading space is kept.

        Without `keep_special`, of control tokens those with the spellings `shown` are kept, and
        those that `decode` keeps.
        """
        ids = frozenset(token_id for text, token_id, _ in self.special if text in shown)
        return StreamDecoder(self, keep_special, ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; none for unused tokens.

        Raises: ValueError if there is no such token.
        """
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token {token_id} of {self.vocab_size}")
        text = self._texts[token_id]
        match self._types[token_id]:
            case TokenType.NORMAL:
                return self._model.spelled(text)
            case TokenType.UNUSED:
                return b""
            case TokenType.BYTE:
                return bytes([BYTE_OF_TOKEN[text]])
            case _:
                return text.encode()

    @cached_property
    def _longest_bytes(self) -> int:
        """Length of the longest token's bytes; a token has at most as many as its spelling."""
        longest = 1
        for token_id, text in enumerate(self._texts):
            if len(text.encode()) > longest:
                longest = max(longest, len(self.token_bytes(token_id)))
        return longest

    def _bytes_of(self, token_id: int, keep_special: bool) -> bytes:
        data = self.token_bytes(token_id)
        if keep_special or self._types[token_id] not in CONTROL_TYPES:
            return data
        is_shown = token_id not in self.stop_ids and is_answer_tag(self._texts[token_id])
        return data if is_shown else b""

    def _special_id(self, file: GgufFile, name: str, default: int | None) -> int | None:
        token_id = named_token(file, name, self.vocab_size)
        if token_id is None and default is not None and default < self.vocab_size:
            return default
        return token_id

    def _cut(self, text: str, parse_special: bool) -> Iterator[str | int | None]:
        """Cut special tokens out of a text, longest spelling first over the whole text.

        Yields texts and ids in order, and before that None between searches of a long text.
        """
        taken = bytearray(len(text))
        found = []
        for spelling, token_id, is_control in self.special:
            if is_control and not parse_special:
                continue
            if len(text) > _SEARCHED_AT_ONCE:
                yield None
            begin = text.find(spelling)
            while begin >= 0:
                end = begin + len(spelling)
                last_taken = taken.rfind(1, begin, end)
                if last_taken < 0:
                    found.append((begin, end, token_id))
                    taken[begin:end] = bytes([1]) * len(spelling)
                    last_taken = end - 1
                begin = text.find(spelling, last_taken + 1)
        place = 0
        for begin, end, token_id in sorted(found):
            if place < begin:
                yield text[place:begin]
            yield token_id
            place = end
        if place < len(text):
            yield text[place:]


class StreamDecoder:
    """Decodes tokens one by one; holds back the bytes of a character until it is complete.

    The pieces joined, with `flush` last, equal `Tokenizer.decode` of all tokens, except that a
    leading space is kept.
    """

    def __init__(
        self, tokenizer: Tokenizer, keep_special: bool, shown: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._keep_special, self._shown = keep_special, shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""
        is_kept = self._keep_special or token_id in self._shown
        return self._decoder.decode(self._tokenizer._bytes_of(token_id, is_kept))

    def flush(self) -> str:
        """U+FFFD if the text ended within a character, else "". Resets the decoder."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _well_formed(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _special_tokens(file: GgufFile, vocabulary: Vocabulary) -> list[tuple[str, int, bool]]:
    """(spelling, id, is control) of all special tokens, longest first."""
    special = [
        (text, token_id, token_type in CONTROL_TYPES)
        for token_id, (text, token_type) in enumerate(
            zip(vocabulary.texts, vocabulary.types, strict=True)
        )
        if token_type in _CUT_OUT
    ]
    if len(special) > MAX_SPECIAL_TOKENS:
        reason = f"{len(special)} special tokens; at most {MAX_SPECIAL_TOKENS} are read"
        raise malformed(file, "tokenizer.ggml.token_type", reason)
    return sorted(special, key=lambda token: -len(token[0].encode()))


def _adds(file: GgufFile, name: str, token_id: int | None, default: bool) -> bool:
    key = f"tokenizer.ggml.add_{name}_token"
    adds = file.get_bool(key, default and token_id is not None)
    if adds and token_id is None:
        raise malformed(file, key, f"is true but there is no {name} token")
    return adds
