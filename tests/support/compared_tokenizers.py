"""Compares our tokenizer with llama.cpp's on the same vocabulary and texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text.tokenizer import Tokenizer, load_tokenizer
from support.llama_tokenizer import LlamaTokenizer
from support.vocabularies import RawVocabulary


def load(vocabulary: RawVocabulary, folder: Path) -> Tokenizer:
    """Our tokenizer of a vocabulary, via a file."""
    return load_file(vocabulary.write(folder / "m.gguf"))


def load_file(path: Path) -> Tokenizer:
    """Our tokenizer of a model file."""
    with GgufFile.open(path) as file:
        tokenizer = load_tokenizer(file)
    assert tokenizer is not None
    return tokenizer


@dataclass
class Compared:
    """One file in our tokenizer and in llama.cpp's."""

    ours: Tokenizer
    theirs: LlamaTokenizer

    def check(self, text: str) -> None:
        """Both give the same ids, and the ids give the text again, where that is possible."""
        for parse_special in (True, False):
            expected = self.theirs.tokenize(text, parse_special=parse_special)
            assert self.ours.encode(text, parse_special=parse_special) == expected
            # Spaces before special tokens and characters that stand for a space are lost.
            if not self.theirs.has_pieces:
                assert self.ours.decode(expected) == text
            else:
                said = self.theirs.detokenize(expected).decode(errors="replace")
                assert self.ours.decode(expected) == said
                if "\u2581" not in text and not any(map(self.theirs.is_special, expected)):
                    assert said == text

    def check_all_tokens(self) -> None:
        """Every token has the same bytes and kind, and ends a text in both or in neither."""
        assert self.ours.vocab_size == self.theirs.vocab_size
        for token_id in range(self.ours.vocab_size):
            assert self.ours.token_bytes(token_id) == self.theirs.token_bytes(token_id)
        assert self.ours.stop_ids == self.theirs.stop_ids()


def compared(vocabulary: RawVocabulary, folder: Path) -> Iterator[Compared]:
    """Both tokenizers of a vocabulary, for a fixture to yield from."""
    ours = load(vocabulary, folder)
    with LlamaTokenizer(folder / "m.gguf") as theirs:
        yield Compared(ours, theirs)
