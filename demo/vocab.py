"""The vocabulary: byte-level BPE with the pre-tokeniser that GGUF files call ``qwen2``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import gguf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _tokenizer(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def read_vocabulary(path: Path, special: Sequence[str] = ()) -> Tokenizer:
    """The tokens of a GGUF file that `export` has written.

    The last learned tokens give their ids to the `special` ones, before the end-of-text token:
    as many, of which no other token is made.
    """
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = fields["tokenizer.ggml.merges"].contents()
    first = len(tokens) - 1 - len(special)
    given_up = {*tokens[first:-1]} if special else set()
    if given_up != {"".join(merge.split(" ")) for merge in merges[len(merges) - len(special) :]}:
        raise ValueError(f"{path}: the last tokens are not those of the last merges")
    tokens[first:-1] = special
    merges = merges[: len(merges) - len(special)]
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = _tokenizer(models.BPE(ids, pairs))
    tokenizer.add_special_tokens([*special, END_OF_TEXT])
    return tokenizer


def train_vocabulary(texts: Iterable[str], size: int) -> Tokenizer:
    """Learn `size` tokens: all 256 bytes, merges, and the end-of-text token as the last id."""
    tokenizer = _tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"the text is too short for {size} tokens")
    return tokenizer


def tokens_and_merges(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Token strings in id order, and merges as GGUF writes them ("left right")."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(vocabulary, key=lambda t: vocabulary[t]), [" ".join(m) for m in merges]


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Id of the end-of-text token."""
    token_id = tokenizer.token_to_id(END_OF_TEXT)
    if token_id is None:
        raise ValueError(f"the vocabulary has no {END_OF_TEXT}")
    return int(token_id)
