"""Markers that are known by their spelling: the same as llama.cpp's."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_adapters.text.markers import is_answer_tag
from support import gguf_builder as raw
from support.compared_tokenizers import compared
from support.vocabularies import CONTROL, NORMAL, UNUSED, USER_DEFINED, small

ENDS = """<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT>
[EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <\uff5cend\u2581of\u2581sentence\uff5c>
"""
PARTS = """<|fim_prefix|> <fim-prefix> <fim_prefix> <PRE> \u2581<PRE> <|code_prefix|> <|prefix|>
<\uff5cfim\u2581begin\uff5c> <|fim_suffix|> <fim-suffix> <fim_suffix> <SUF> \u2581<SUF>
<|code_suffix|> <|suffix|> <\uff5cfim\u2581hole\uff5c> <|fim_middle|> <fim-middle> <fim_middle>
<MID> \u2581<MID> <|code_middle|> <|middle|> <\uff5cfim\u2581end\uff5c> <|fim_pad|> <fim-pad>
<fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"""
OTHERS = "<s> <think> </think> <tool_call> [INST] <|header_start|> <|eot|> </assistant>"


def check(folder: Path, markers: dict[str, int], **extra: bytes) -> None:
    """Types and ends of a vocabulary with these markers after its 259 tokens are llama.cpp's."""
    # llama.cpp takes token 11 for the end of a text if none is named.
    vocabulary = small(eos_token_id=raw.scalar(raw.UINT32, 258), **extra)
    assert vocabulary.types is not None
    vocabulary.tokens += markers
    vocabulary.types += markers.values()
    for both in compared(vocabulary, folder):
        both.check_all_tokens()
        both.check("a" + "b".join(markers) + "c")


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED, UNUSED])
def test_every_end_of_a_text_is_known(tmp_path: Path, kind: int) -> None:
    check(tmp_path, dict.fromkeys((t for t in ENDS.split() if t != "<|im_end|>"), kind))


@pytest.mark.parametrize("text", [*PARTS.split(), *OTHERS.split()])
def test_each_part_of_a_prompt_that_asks_for_a_middle_is_known(tmp_path: Path, text: str) -> None:
    check(tmp_path, {text: USER_DEFINED})


@pytest.mark.parametrize(
    "texts",
    [
        ["<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>"],
        ["<|end|>", "<|return|>", "<|constrain|>"],
        ["<|end|>", "<|call|>"],
        ["<|end|>", "<|calls|>", "<|flush|>"],
        ["</s>", "<|tool_response>", "<turn|>"],
        ["[e~["],
    ],
    ids=" ".join,
)
def test_some_mean_other_things_beside_each_other(tmp_path: Path, texts: list[str]) -> None:
    for kind in (NORMAL, CONTROL):
        check(tmp_path, dict.fromkeys(texts, kind))


@pytest.mark.parametrize(
    ("key", "index"),
    [
        *(("eot", 0), ("eom", 0), ("fim_pad", 0), ("fim_rep", 0), ("fim_sep", 0), ("fim_pre", 0)),
        *(("prefix", 0), ("suffix", 0), ("middle", 0), ("fim_pad", 1), ("fim_rep", 2)),
    ],
)
def test_what_the_file_names_counts_before_what_is_spelled(
    tmp_path: Path, key: str, index: int
) -> None:
    markers = dict.fromkeys(["<x>", "<|fim_pad|>", "<|repo_name|>", "<|fim_prefix|>"], USER_DEFINED)
    check(tmp_path, markers, **{f"{key}_token_id": raw.scalar(raw.UINT32, 259 + index)})


def test_tags_of_reasoning_and_calls_belong_to_the_answer() -> None:
    tags = "<think> </think> <tool_call> </tool_call> <tool_response> [TOOL_CALLS] <|python_start|>"
    assert all(map(is_answer_tag, tags.split()))
    others = "<|im_end|> </s> <s> [INST] <|eot|> </assistant> <user> think x<think> <think>x"
    assert not any(map(is_answer_tag, others.split()))
