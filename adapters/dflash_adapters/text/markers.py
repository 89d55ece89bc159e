"""Corrects the types of marker tokens, and finds those that end a text.

Files often declare markers user-defined, or name only one end token. As in llama.cpp
(``llama_vocab::impl::load`` in its ``llama-vocab.cpp``), they are recognised by spelling, from the
same lists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.text.vocabulary import TokenType, Vocabulary, named_token

# End-of-generation tokens.
_ENDS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>
    <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos>
    <turn|> <|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c> [e~["""


@dataclass(frozen=True, slots=True)
class _Part:
    """A marker of fill-in-the-middle prompts.

    The last of the `keys` that the file has names it; without any, it is the token with one of the
    spellings `texts`.
    """

    keys: tuple[str, ...]
    texts: str
    is_end: bool = False


_PARTS = (
    _Part(
        ("fim_pre", "prefix"),
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> "
        "<|code_prefix|> <|prefix|>",
    ),
    _Part(
        ("fim_suf", "suffix"),
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> "
        "<|code_suffix|> <|suffix|>",
    ),
    _Part(
        ("fim_mid", "middle"),
        "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> "
        "<|code_middle|> <|middle|>",
    ),
    _Part(("fim_pad",), "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]", is_end=True),
    _Part(("fim_rep",), "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>", is_end=True),
    _Part(("fim_sep",), "<|file_sep|>", is_end=True),
)

# Markers of the harmony format, which are part of the text.
_HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")

# Tags around reasoning and tool calls: part of the answer, even if they are control tokens.
_ANSWER_TAG = re.compile(
    r"</?(?:think|thinking|seed:think|tool_calls?|tool_response|arg_key|arg_value)>"
    r"|\[/?(?:THINK|TOOL_CALLS)\]|\[(?:ARGS|CALL_ID)\]|<\|python_(?:tag|start|end)\|>"
)


def is_answer_tag(text: str) -> bool:
    """Whether a marker is part of the answer: it begins or ends reasoning or a tool call."""
    return _ANSWER_TAG.fullmatch(text) is not None


def correct_markers(file: GgufFile, vocabulary: Vocabulary, eos_id: int | None) -> frozenset[int]:
    """Correct the types of markers, in place. Returns the tokens that end a text.

    Raises: ModelFileError if the file names a marker that is not a token.
    """
    ids, types = vocabulary.ids, vocabulary.types
    named = (eos_id, *(named_token(file, key, len(types)) for key in ("eot", "eom")))
    ends = {token_id for token_id in named if token_id is not None}
    for part in _PARTS:
        keyed = [named_token(file, key, len(types)) for key in part.keys]
        token_id = next((i for i in reversed(keyed) if i is not None), None)
        if token_id is None:
            token_id = min((ids[text] for text in part.texts.split() if text in ids), default=None)
            if token_id is None:
                continue
            types[token_id] = TokenType.CONTROL
        if part.is_end:
            ends.add(token_id)
    for text in _ENDS.split():
        if text in ids:
            types[ids[text]] = TokenType.CONTROL
            ends.add(ids[text])
    for text in _HARMONY:
        if text in ids:
            types[ids[text]] = TokenType.USER_DEFINED
    _take_back(vocabulary, ends)
    return frozenset(ends)


def _take_back(vocabulary: Vocabulary, ends: set[int]) -> None:
    """Remove end tokens that do not end a text in vocabularies with certain other markers."""
    texts = {vocabulary.texts[token_id] for token_id in ends}
    calls = texts & {"<|call|>", "<|calls|>"}
    if calls and texts & {"<|return|>", "<|flush|>"} and "<|end|>" in texts:
        ends.remove(vocabulary.ids["<|end|>"])
        vocabulary.types[vocabulary.ids["<|end|>"]] = TokenType.USER_DEFINED
    if texts & {"<|tool_response>", "<|plamo:eos|>"} and "</s>" in texts:
        ends.remove(vocabulary.ids["</s>"])
        vocabulary.types[vocabulary.ids["</s>"]] = TokenType.NORMAL
