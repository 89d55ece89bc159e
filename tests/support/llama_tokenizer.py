"""llama.cpp's tokenizer of a GGUF file, without its weights: the oracle for token ids.

Does not import the packages under test.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from support.llama_oracle import LlamaOracle

_TYPE_SPM = 1
_SPECIAL_ATTRIBUTES = 1 << 0 | 1 << 3 | 1 << 4  # unknown, control, user-defined


class LlamaTokenizer(LlamaOracle):
    """The vocabulary of one file, loaded in llama.cpp. To be closed, or used in a `with` block."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, context_length=8, vocab_only=True)
        vocab_type = self._library.llama_vocab_type
        vocab_type.argtypes = [ctypes.c_void_p]
        self.has_pieces: bool = vocab_type(self._vocab) == _TYPE_SPM
        self._is_end = self._library.llama_vocab_is_eog
        self._is_end.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        self._is_end.restype = ctypes.c_bool
        self._attributes = self._library.llama_vocab_get_attr
        self._attributes.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        self._attributes.restype = ctypes.c_int32
        self._detokenize = self._library.llama_detokenize
        self._detokenize.argtypes = [
            *(ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32, ctypes.c_char_p),
            *(ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
        ]
        self._detokenize.restype = ctypes.c_int32
        self._to_piece = self._library.llama_token_to_piece
        self._to_piece.argtypes = [
            *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p),
            *(ctypes.c_int32, ctypes.c_int32, ctypes.c_bool),
        ]
        self._to_piece.restype = ctypes.c_int32

    def detokenize(self, token_ids: list[int]) -> bytes:
        """The bytes of a whole sequence, control tokens spelled out."""
        ids = (ctypes.c_int32 * len(token_ids))(*token_ids)
        buffer = ctypes.create_string_buffer(64 * len(token_ids) + 64)
        count = self._detokenize(self._vocab, ids, len(ids), buffer, len(buffer), False, True)
        return buffer.raw[:count]

    def stop_ids(self) -> frozenset[int]:
        """Tokens that llama.cpp ends a text at."""
        return frozenset(i for i in range(self.vocab_size) if self._is_end(self._vocab, i))

    def is_special(self, token_id: int) -> bool:
        """Whether it is a control, user-defined or unknown token."""
        return bool(self._attributes(self._vocab, token_id) & _SPECIAL_ATTRIBUTES)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, control tokens spelled out."""
        buffer = ctypes.create_string_buffer(4096)
        count = self._to_piece(self._vocab, token_id, buffer, len(buffer), 0, True)
        return buffer.raw[:count]
