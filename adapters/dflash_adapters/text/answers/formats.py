"""The formats of answers, one for each family of models."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from dflash_adapters.text.answers.channels import CHANNEL_MARKERS, ChannelParser
from dflash_adapters.text.answers.events import AnswerParser, Tools
from dflash_adapters.text.answers.json_formats import (
    COHERE,
    DEEPSEEK_V3_1,
    HERMES,
    KIMI_K2,
    LLAMA3,
    MISTRAL,
)
from dflash_adapters.text.answers.literal_formats import GEMMA4, LFM2, LLAMA4
from dflash_adapters.text.answers.marked import MarkedFormat, MarkedParser
from dflash_adapters.text.answers.open_close import KIMI_K3, MINIMAX_M3
from dflash_adapters.text.answers.tagged_formats import (
    DEEPSEEK_V4,
    GLM,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
)


class AnswerFormat(StrEnum):
    """How a model writes reasoning and calls of tools."""

    PLAIN = "plain"
    """No calls. Reasoning between <think> and </think>, as in all formats that say nothing else."""
    HERMES = "hermes"
    """<tool_call> around JSON: Qwen 2.5 and 3, Granite 4, Hermes."""
    QWEN3_CODER = "qwen3-coder"
    """<function=NAME> with <parameter=KEY>: Qwen3-Coder, Qwen 3.5 and 3.6, Nemotron 3."""
    GLM = "glm"
    """<tool_call>NAME with <arg_key> and <arg_value>: GLM from 4.5 on, Laguna."""
    LLAMA4 = "llama4"
    """[NAME(KEY=VALUE)], or JSON, instead of an answer. No reasoning."""
    MISTRAL = "mistral"
    """[TOOL_CALLS] before JSON, or before NAME[ARGS] and JSON; reasoning in [THINK]."""
    HARMONY = "harmony"
    """Messages in channels: gpt-oss."""
    DEEPSEEK_V3_1 = "deepseek-v3.1"
    """NAME and JSON between markers; also as R1 writes it."""
    DEEPSEEK_V4 = "deepseek-v4"
    """DSML tags: also V3.2."""
    KIMI_K2 = "kimi-k2"
    """functions.NAME:INDEX and JSON between markers."""
    MINIMAX_M2 = "minimax-m2"
    """<invoke name="NAME"> with <parameter name="KEY">."""
    LFM2 = "lfm2"
    """[NAME(KEY=VALUE)] between markers."""
    GEMMA4 = "gemma4"
    """call:NAME{KEY:VALUE} between markers; reasoning in the channel `thought`."""
    LLAMA3 = "llama3"
    """JSON with `name` and `parameters` instead of an answer: Llama 3.1 to 3.3. No reasoning."""
    COHERE = "cohere"
    """<|START_ACTION|> around JSON with `tool_name`: Command R7B and A, Cohere2 MoE."""
    SEED_OSS = "seed-oss"
    """As Qwen3-Coder, with <seed:tool_call> and <seed:think>."""
    KIMI_K3 = "kimi-k3"
    """<|open|>call tool="NAME"<|sep|> with arguments that have types."""
    MINIMAX_M3 = "minimax-m3"
    """<invoke name="NAME"> with an element for each argument, behind a marker each."""


def answer_parser(
    kind: AnswerFormat, *, tools: Tools, starts_in_reasoning: bool = False
) -> AnswerParser:
    """A parser of one answer.

    `tools` are the schemas of the parameters by the names of the offered tools; without any,
    nothing is a call. With `starts_in_reasoning` the prompt ended within reasoning.
    """
    if kind == AnswerFormat.HARMONY:
        return ChannelParser(tools, starts_in_reasoning)
    return MarkedParser(MARKED_FORMATS[kind], tools, starts_in_reasoning)


def shown_markers(kind: AnswerFormat) -> frozenset[str]:
    """Spellings of the special tokens that the text given to a parser has to contain."""
    return CHANNEL_MARKERS if kind == AnswerFormat.HARMONY else MARKED_FORMATS[kind].markers()


MARKED_FORMATS: Mapping[AnswerFormat, MarkedFormat] = {
    AnswerFormat.PLAIN: MarkedFormat(drops_start=False),
    AnswerFormat.HERMES: HERMES,
    AnswerFormat.QWEN3_CODER: QWEN3_CODER,
    AnswerFormat.GLM: GLM,
    AnswerFormat.LLAMA4: LLAMA4,
    AnswerFormat.MISTRAL: MISTRAL,
    AnswerFormat.DEEPSEEK_V3_1: DEEPSEEK_V3_1,
    AnswerFormat.DEEPSEEK_V4: DEEPSEEK_V4,
    AnswerFormat.KIMI_K2: KIMI_K2,
    AnswerFormat.MINIMAX_M2: MINIMAX_M2,
    AnswerFormat.LFM2: LFM2,
    AnswerFormat.GEMMA4: GEMMA4,
    AnswerFormat.LLAMA3: LLAMA3,
    AnswerFormat.COHERE: COHERE,
    AnswerFormat.SEED_OSS: SEED_OSS,
    AnswerFormat.KIMI_K3: KIMI_K3,
    AnswerFormat.MINIMAX_M3: MINIMAX_M3,
}
