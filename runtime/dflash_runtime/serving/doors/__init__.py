"""The interfaces that other programs speak. Each maps its bodies to the same generations, and has
its own form of answers and errors."""

from __future__ import annotations

from dflash_runtime.serving.doors.anthropic import ANTHROPIC
from dflash_runtime.serving.doors.door import Door
from dflash_runtime.serving.doors.llama import LLAMA
from dflash_runtime.serving.doors.ollama import OLLAMA
from dflash_runtime.serving.doors.openai import OPENAI
from dflash_runtime.serving.doors.responses import RESPONSES
from dflash_runtime.serving.doors.tokens import TOKENS

DOORS: tuple[Door, ...] = (OPENAI, RESPONSES, ANTHROPIC, TOKENS, LLAMA, OLLAMA)
"""All of them."""
